"""The processes of an XLA run: one alone, or those that `torch_xla.launch` started, one for each device.

What is on the device travels by collectives of XLA, as a part of the graph; objects and CPU tensors by a gloo group.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import rendezvous, xla_runtime
from .environment import Placement
from .world import TorchWorld, World

_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "product": "mul"}


class XLAWorld(TorchWorld):
    """Processes with a device each: tensors on it are reduced and gathered there."""

    @classmethod
    def of(cls, placement: Placement, device: torch.device, *, spmd: bool) -> World:
        """Returns the world of this process, which is alone unless its devices are a world of several.

        Raises:
            ValueError: other processes were launched than the devices know of.
        """
        runtime = xla_runtime.part("runtime")
        size = 1 if spmd else int(runtime.world_size())
        if size != placement.size:
            alone = "Start them by torch_xla.launch on a TPU: as they are, each process would train alone"
            several = "A process with several devices needs SPMD: strategy='xla_spmd'"
            raise ValueError(
                f"Expected the devices of {placement.size} processes, started by {placement.launcher or 'nobody'}, to "
                f"form one world. Received: a world of {size}. {alone if size < placement.size else several}."
            )
        if size == 1:
            return World(device)
        seat = dataclasses.replace(placement, rank=int(runtime.global_ordinal()), size=size)
        rendezvous.join(seat, torch.device("cpu"), backend="gloo")
        return cls(seat, device, owned=True)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        if tensor.device.type != "xla" or op not in _OPS:
            return super().all_reduce(tensor, op)
        kind, wire = _OPS[op], tensor.detach()
        if tensor.dtype is torch.bool:
            kind, wire = "max" if op in ("sum", "max") else "min", wire.to(torch.int32)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
            wire = wire.float()  # two halves whose sum overflows still have a mean
        (reduced,) = [self._collectives.all_reduce(kind, wire, scale=1.0, pin_layout=False)]
        tensor.detach().copy_(reduced / self.size if op == "mean" else reduced)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if tensor.device.type != "xla":
            return super().all_gather(tensor)
        wire = tensor.detach().to(torch.int32) if tensor.dtype is torch.bool else tensor.detach()
        gathered = self._collectives.all_gather(wire.unsqueeze(0), dim=0, pin_layout=False)
        return [part.to(tensor.dtype) for part in gathered.unbind(0)]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        if tensor.device.type != "xla":
            return super().broadcast(tensor, src)
        tensor.detach().copy_(self.all_gather(tensor)[src])
        return tensor

    @property
    def _collectives(self) -> Any:
        return xla_runtime.part("core.xla_model")


def check_processes(placement: Placement, *, spmd: bool) -> None:
    """Raises ValueError for processes that would not see each other, before the runtime starts in vain."""
    if placement.size == 1:
        return
    started = f"{placement.size} processes, started by {placement.launcher or 'nobody'}"
    if spmd:
        raise ValueError(
            f"Expected one process for all devices of a machine (SPMD). Received: {started}. Start one process; a "
            "ParallelismConfig shares batches and weights out over its devices."
        )
    if xla_runtime.kind() == "CPU":
        raise ValueError(
            f"Expected one process for XLA on the CPU. Received: {started}. torch_xla gives each of them a world of "
            "its own there, so that each would train alone. Start one process: with CPU_NUM_DEVICES=n and "
            "strategy='xla_spmd' it has n devices. Or use strategy='ddp'."
        )
