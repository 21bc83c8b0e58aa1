"""What all engines of several processes share: how their processes come together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from .base import Settings, Strategy
from .environment import Placement
from .settings import InitProcessGroupKwargs
from .world import TorchWorld, World


class ProcessGroupStrategy(Strategy):
    """A strategy whose processes are joined by torch.distributed.

    Args:
        process_group_backend: e.g. "gloo" or "nccl"; None for the device's own.
        timeout: how long a collective may wait; None for torch's default.
        start_method: how a launcher starts the processes; None for what the environment allows.
    """

    launches = True

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
    ) -> None:
        super().__init__()
        self.process_group_backend, self.timeout, self.start_method = process_group_backend, timeout, start_method

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        group = settings.get(InitProcessGroupKwargs, InitProcessGroupKwargs()).to_kwargs()
        backend = _one("backend", self.process_group_backend, group.get("backend"))
        timeout = _one("timeout", self.timeout, group.get("timeout"))
        method = group.get("init_method")
        if not placement.launched and placement.size == 1 and method is None:
            method = "tcp://127.0.0.1:0"  # one process by itself: any free port
        return TorchWorld.create(placement, device, backend=backend, timeout=timeout, init_method=method)


def _one(name: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ValueError(f"Expected {name} once. Received: {first!r} and {second!r}. Give it in one place.")
    return second if first is None else first
