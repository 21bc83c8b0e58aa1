"""Cells of the parity matrix on XLA devices of the CPU; they need the environment of tests/xla.

    python -m drivetrain.tests.conformance.matrix xla xla_spmd …     in that environment
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from drivetrain.tests.conformance.parallel_cells import PLAN, Language, train
from drivetrain.tests.xla.running import run


def _degrees(**sizes: int) -> Callable[[], Any]:
    def make() -> Any:
        from drivetrain import ParallelismConfig, TorchTensorParallelConfig, XLAStrategy

        handler = {"tp_handler": TorchTensorParallelConfig(plan=PLAN)} if "tp_size" in sizes else {}
        return XLAStrategy(parallelism=ParallelismConfig(**sizes, **handler))

    return make


# name -> devices of the one process, and what makes the strategy.
CELLS: dict[str, tuple[int, Callable[[], Any]]] = {
    "xla": (1, lambda: "xla"),
    "xla_spmd": (2, lambda: "xla_spmd"),
    "xla_fsdp": (2, lambda: "xla_fsdp"),
    "xla-fsdp+tp": (4, _degrees(dp_shard_size=2, tp_size=2)),
}


def possible() -> bool:
    """Whether this environment has torch_xla."""
    return find_spec("torch_xla") is not None


def cell(name: str, *, timeout: float, **options: Any) -> dict[str, Any]:
    """Train under a strategy, in a process of its own."""
    devices, make = CELLS[name]
    return run(lambda: train(make(), accelerator="auto", module=Language(), **options), devices=devices, timeout=timeout)
