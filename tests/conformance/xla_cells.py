"""The parity matrix on XLA devices of the CPU: prints the table of docs/xla.md, in the environment of tests/xla.

    python -m drivetrain.tests.conformance.xla_cells             all of it (some minutes)
    python -m drivetrain.tests.conformance.xla_cells xla_spmd    one row
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from drivetrain.tests.conformance.matrix import STEPS, TOLERANCES, WAYS
from drivetrain.tests.conformance.parallel_cells import PLAN, Language, compare, reference, train
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
    "fsdp+tp": (4, _degrees(dp_shard_size=2, tp_size=2)),
}


def cell(name: str, *, timeout: float = 1800, **options: Any) -> dict[str, Any]:
    """Train under a strategy, in a process of its own."""
    devices, make = CELLS[name]
    return run(lambda: train(make(), accelerator="auto", module=Language(), **options), devices=devices, timeout=timeout)


def row(name: str, *, steps: int = STEPS) -> str:
    """Return a strategy's row: for each way the largest relative difference from one process of plain torch."""
    far = []
    for way, options in WAYS.items():
        expected = reference("single", steps=steps, **options)
        found = compare(cell(name, steps=steps, **options), expected, tolerance=TOLERANCES[way.split(",")[0]])
        far.append(f"{max(found.values()):.0e}")
    return f"| `{name}` | {CELLS[name][0]} | {' | '.join(far)} |"


if __name__ == "__main__":
    print(f"| strategy | devices | {' | '.join(WAYS)} |")
    for one in sys.argv[1:] or CELLS:
        print(row(one), flush=True)
