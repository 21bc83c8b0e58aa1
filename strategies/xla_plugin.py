"""XLAPlugin: how a run uses XLA devices."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .base import Strategy
    from .mesh import ParallelismConfig


@dataclass
class XLAPlugin:
    """The options of XLA.

    Args:
        spmd: this process uses all devices of its machine as one (SPMD); False: one device for each process. None:
            as a ParallelismConfig asks for, which shares batches and weights out over the devices.
        fsdp: under SPMD weights are shared out over all devices, where no ParallelismConfig says how.

    Raises:
        ValueError: weights cannot be shared out over one device.
    """

    slot: ClassVar[str] = "xla_plugin"

    spmd: bool | None = None
    fsdp: bool = False

    def __post_init__(self) -> None:
        if self.fsdp and self.spmd is False:
            raise ValueError("Expected spmd=True for fsdp=True. Received: spmd=False, fsdp=True. Leave spmd out.")
        if self.fsdp:
            self.spmd = True

    def strategy(self, parallelism: ParallelismConfig | None = None) -> Strategy:
        """Returns the engine of these options."""
        engine: Strategy = import_module(".xla", __package__).XLAStrategy(plugin=self, parallelism=parallelism)
        return engine
