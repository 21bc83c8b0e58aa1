"""Some of the ranks of a run as a world of their own: those along one or more dimensions of a mesh."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

from .world import TorchWorld, World, current


class SubWorld(TorchWorld):
    """The ranks of one process group, numbered as they come in it; `local_*` and `node_*` stay those of the process.

    Args:
        whole: the world that they are taken from, which also closes them.
        group: a process group that this process is in, with a backend for its device (and one for the CPU).
    """

    def __init__(self, whole: TorchWorld, group: dist.ProcessGroup) -> None:
        self.__dict__.update(vars(whole))
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._owned, self._closed = group, False, True
        self._cpu_group = group if "cpu" in dist.get_backend_config(group) else self._on_cpu()

    def _on_cpu(self) -> Any:
        ranks = dist.get_process_group_ranks(self._group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of these ranks."""
        return self._group

    def private(self) -> World:
        other = copy.copy(self)
        other._cpu_group, other._devices = self._on_cpu(), set()
        return other

    def close(self) -> None:
        """Nothing: the whole world leaves all groups at once."""


def set_data(whole: World, data: World) -> None:
    """Tell which ranks of the present world see different data."""
    global _data
    _data = (whole, data)


def data() -> World:
    """The ranks of the present world that see different data: all of them, unless some share one replica's work."""
    whole, ranks = _data
    return ranks if whole is current() else current()


def subworld(whole: World, group: dist.ProcessGroup | None) -> World:
    """Returns the world of a group; where that holds one rank or is None, the null world on the same device.

    All of its ranks have to call this.
    """
    if group is None or dist.get_world_size(group) == 1 or not isinstance(whole, TorchWorld):
        return World(whole.device)
    if dist.get_world_size(group) == whole.size:
        return whole
    return SubWorld(whole, group)


_data: tuple[World, World] = (World(), World())
