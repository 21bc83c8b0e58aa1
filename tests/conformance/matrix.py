"""The whole parity matrix, and checkpoints from every strategy to every other; writes docs/parity.md.

    python -m drivetrain.tests.conformance.matrix            all of it (about half an hour on two cores)
    python -m drivetrain.tests.conformance.matrix tp cp      only these strategies; the others' results stay

Results are kept in docs/parity.json as they come, so that it can be stopped and gone on with. The test suite runs
parts of it, and compares the page with the strategies that there are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.tests.conformance import megatron_cells, parallel_cells
from drivetrain.tests.conformance.parallel_cells import CELLS, Language, compare, reference, train
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies.deepspeed_runs import preload

DOCS = Path(__file__).resolve().parents[2] / "docs"
WAYS = {"32, ×1": {}, "32, ×4": {"accumulate": 4}, "bf16, ×1": {"precision": "bf16-mixed"},
        "bf16, ×4": {"precision": "bf16-mixed", "accumulate": 4}}  # fmt: skip
TOLERANCES = {"32": 1e-5, "bf16": 3e-2}
STEPS = 50


def _word(word: str) -> Callable[[], Any]:
    return lambda: word


ALL: dict[str, tuple[int, Callable[[], Any], Any, dict[str, Any]]] = {
    "single": CELLS["single"],
    "ddp": (2, _word("ddp"), Language, {}),
    "fsdp": (2, _word("fsdp"), Language, {}),
    "fsdp1": (2, _word("fsdp1"), Language, {}),
    "hsdp": (4, _word("hsdp"), Language, {}),
    **{name: (2, _word(name), Language, {}) for name in ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")},
    **{name: entry for name, entry in CELLS.items() if name != "single"},
}
"""Name → ranks, what makes the strategy, the module, further arguments: as in parallel_cells."""
RANKS = {**{name: entry[0] for name, entry in ALL.items()},
         **{name: entry[0] for name, entry in megatron_cells.CELLS.items()}}  # fmt: skip
BETWEEN = ("single", "ddp", "fsdp", "hsdp", "deepspeed_stage_3", "tp", "fsdp+tp", "cp")
"""Strategies of one module, between which checkpoints go."""
OF_MEGATRON = ("torch", "megatron-tp", "megatron-pp-interleaved", "megatron-dp", "megatron-tp+pp")
"""The same for the GPT of Megatron."""
TIMEOUT = 900


def cell(name: str, **options: Any) -> dict[str, Any]:
    """Train under a strategy; return what all ranks agree on."""
    if name in megatron_cells.CELLS:
        return megatron_cells.cell(name, timeout=TIMEOUT, **options)
    if name == "torch":
        return megatron_cells.plain(**options)
    ranks, make, module, more = ALL[name]
    found = run(lambda rank: train(make(), module=module(), **more, **options), ranks, group=ranks > 1, timeout=TIMEOUT)
    assert all(other["losses"] == found[0]["losses"] for other in found)
    return found[0]


def parity(name: str, way: str, *, steps: int = STEPS) -> dict[str, float]:
    """Return the largest relative differences from one process after so many steps."""
    options = {**WAYS[way], "steps": steps}
    if name in megatron_cells.CELLS:
        expected = megatron_cells.reference(**options)
    else:
        parallel_cells.CELLS.setdefault(name, ALL[name])
        expected = reference(name, **options)
    return compare(cell(name, **options), expected, tolerance=TOLERANCES[way.split(",")[0]])


def transfer(source: str, target: str, folder: Path) -> float:
    """Save under one strategy after 4 steps, go on under another to step 8; return the distance from one process."""
    options = {"steps": 8, "validate": False}
    place = folder / source
    if not place.exists():
        cell(source, steps=4, validate=False, enable_checkpointing=True, default_root_dir=str(place))
    (manifest,) = place.glob("runs/*/checkpoints/*/manifest.json")
    of_megatron = source in OF_MEGATRON
    whole = megatron_cells.reference(**options) if of_megatron else reference("single", **options)
    rest = {**whole, "losses": whole["losses"][4:], "norms": whole["norms"][4:]}
    return max(compare(cell(target, **options, ckpt=str(manifest.parent)), rest).values())


def main(names: list[str]) -> None:
    """Fill what is missing, or do the named strategies anew, and write the page after each cell."""
    preload()
    kept = DOCS / "parity.json"
    results = json.loads(kept.read_text()) if kept.exists() else {"parity": {}, "transfer": {}}

    def keep() -> None:
        kept.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        (DOCS / "parity.md").write_text(page(results))

    for name in names or RANKS:
        for way in WAYS:
            if names or way not in results["parity"].get(name, {}):
                results["parity"].setdefault(name, {})[way] = parity(name, way)
                print(name, way, results["parity"][name][way], flush=True)
                keep()
    with tempfile.TemporaryDirectory() as folder:
        for source, target in ways_between():
            way = f"{source} → {target}"
            chosen = not names or source in names or target in names
            if chosen and (names or way not in results["transfer"]):
                results["transfer"][way] = transfer(source, target, Path(folder))
                print(way, results["transfer"][way], flush=True)
                keep()
    keep()


def ways_between() -> list[tuple[str, str]]:
    """Return from where to where checkpoints go."""
    return [(source, target) for group in (BETWEEN, OF_MEGATRON) for source in group for target in group]


def page(results: dict[str, Any]) -> str:
    """Return docs/parity.md."""
    rows = []
    for name, ranks in RANKS.items():
        found = results["parity"].get(name, {})
        rows.append([name, str(ranks), *(_shown(found.get(way)) for way in WAYS)])
    between, of_megatron = (
        [[source, *(_number(results["transfer"].get(f"{source} → {target}")) for target in group)] for source in group]
        for group in (BETWEEN, OF_MEGATRON)
    )
    return f"""# Parity

Made by `python -m drivetrain.tests.conformance.matrix`; the numbers are what that run found.

## With one process

A small transformer (the module with experts for ep, cut into stages for pp, a GPT of megatron-core for megatron, of which
the one process computes the same by torch alone), the same seed and global batches of 8, AdamW with
a schedule, clipping, gloo on the CPU, {STEPS} optimizer steps, by the Trainer. A cell is the largest relative difference from one
process over the losses of all steps, the gradient norms of all steps, the final weights (each against its largest value) and
the metrics of a validation. "×4" accumulates four micro-batches. The law is ≤ 1e-5 in float32; bfloat16 rounds to three
digits, so that sums in another order differ by up to a few per cent.

{_table(["strategy", "processes", *WAYS], rows)}

## From checkpoint to checkpoint

Saved after 4 steps under the strategy of the row, gone on with to step 8 under that of the column: weights, Adam's moments,
schedule, position and random states go over. The largest relative difference from one process that was not interrupted.

{_table(["saved under", *BETWEEN], between)}

The same with the GPT of Megatron, which is under the names of the whole model in every checkpoint ("torch": one process,
without Megatron):

{_table(["saved under", *OF_MEGATRON], of_megatron)}

"""


def _shown(differences: dict[str, float] | None) -> str:
    return "" if differences is None else _number(max(differences.values()))


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    main(sys.argv[1:])
