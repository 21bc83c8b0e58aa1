"""The whole parity matrix, and checkpoints from every strategy to every other; writes docs/parity.md.

    python -m drivetrain.tests.conformance.matrix            what docs/parity.json does not have yet
    python -m drivetrain.tests.conformance.matrix tp cp      only these strategies, anew; the others' results stay

Results go into docs/parity.json as they come, so that it can be stopped and gone on with; delete that file to begin anew.
All that is done under one strategy is done on the same ranks, one after the other. The test suite runs parts of it, and
compares the page with the strategies that there are.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.tests.conformance import megatron_cells, parallel_cells
from drivetrain.tests.conformance.parallel_cells import (
    CELLS,
    Language,
    Mixed,
    MixedSequence,
    compare,
    reference,
    train,
)
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies.deepspeed_runs import preload

DOCS = Path(__file__).resolve().parents[2] / "docs"
WAYS = {"32, ×1": {}, "32, ×4": {"accumulate": 4}, "bf16, ×1": {"precision": "bf16-mixed"},
        "bf16, ×4": {"precision": "bf16-mixed", "accumulate": 4}}  # fmt: skip
TOLERANCES = {"32": 1e-5, "bf16": 3e-2, "routed": 1e-1}
STEPS = 50


def _word(word: str) -> Callable[[], Any]:
    return lambda: word


ALL: dict[str, tuple[int, Callable[[], Any], Any, dict[str, Any]]] = {
    "single": CELLS["single"],
    "ddp": (2, _word("ddp"), Language, {}),
    **{name: CELLS[name] for name in ("fsdp", "fsdp1", "hsdp")},
    **{name: (2, _word(name), Language, {}) for name in ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")},
    **CELLS,
}
"""Name → ranks, what makes the strategy, the module, further arguments: as in parallel_cells."""
RANKS = {**{name: entry[0] for name, entry in ALL.items()},
         **{name: entry[0] for name, entry in megatron_cells.CELLS.items()}}  # fmt: skip
BETWEEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "": (Language, ("single", "ddp", "fsdp", "hsdp", "deepspeed_stage_3", "tp", "fsdp+tp", "cp")),
    "megatron: ": (None, ("torch", "megatron-tp", "megatron-pp-interleaved", "megatron-dp", "megatron-tp+pp")),
}  # fmt: skip
"""What a way's name begins with → the module, and the strategies of it between which checkpoints go."""
TIMEOUT = 1800


def many(name: str, options: list[dict[str, Any]], kind: Any = None) -> list[dict[str, Any]]:
    """Train under a strategy once for each of these options, on the same ranks; return what they agree on."""
    if name in megatron_cells.CELLS:  # whose library has one arrangement a process
        return [megatron_cells.cell(name, timeout=TIMEOUT, **one) for one in options]
    if name == "torch":
        return [megatron_cells.plain(**one) for one in options]
    ranks, make, module, more = ALL[name]
    kind = kind or module

    def work(rank: int) -> list[dict[str, Any]]:
        return [train(make(), module=kind(), **more, **one) for one in options]

    found = run(work, ranks, group=ranks > 1, timeout=TIMEOUT)
    assert all([one["losses"] for one in other] == [one["losses"] for one in found[0]] for other in found)
    return found[0]


def parity(name: str, ways: list[str], *, steps: int = STEPS) -> dict[str, dict[str, float]]:
    """Return for each way the largest relative differences from one process after so many steps."""
    options = [{**WAYS[way], "steps": steps} for way in ways]
    differences: dict[str, dict[str, float]] = {}
    for way, one, found in zip(ways, options, many(name, options)):
        if name in megatron_cells.CELLS:
            expected = megatron_cells.reference(**one)
        else:
            parallel_cells.CELLS.setdefault(name, ALL[name])
            expected = reference(name, **one)
        differences[way] = compare(found, expected, tolerance=math.inf)
    return differences


def bound(name: str, way: str) -> float:
    """Return how large a difference may be: with bfloat16 a token between two experts may go to the other one."""
    routed = name in ALL and issubclass(ALL[name][2], (Mixed, MixedSequence))
    return TOLERANCES["routed" if routed and way.startswith("bf16") else way.split(",")[0]]


def transfer(kind: str, sources: list[str], target: str, folder: Path) -> dict[str, float]:
    """Save under strategies after 4 steps, go on under another to step 8; return the distances from one process."""
    (module, names), options = BETWEEN[kind], {"steps": 8, "validate": False}
    for source in sources:
        place = folder / kind.strip(": ") / source
        if not place.exists():
            saving = {"steps": 4, "validate": False, "enable_checkpointing": True, "default_root_dir": str(place)}
            many(source, [saving], module)
    places = [folder / kind.strip(": ") / source for source in sources]
    checkpoints = [next(place.glob("runs/*/checkpoints/*/manifest.json")).parent for place in places]
    (whole,) = many(names[0], [options], module)
    rest = {**whole, "losses": whole["losses"][4:], "norms": whole["norms"][4:]}
    found = many(target, [{**options, "ckpt": str(checkpoint)} for checkpoint in checkpoints], module)
    return {source: max(compare(one, rest, tolerance=math.inf).values()) for source, one in zip(sources, found)}


def main(names: list[str]) -> None:
    """Fill what is missing, or do the named strategies anew, and write the page after each strategy."""
    preload()
    for name in names or RANKS:
        ways = [way for way in WAYS if names or way not in kept()["parity"].get(name, {})]
        if ways:
            keep(parity={name: parity(name, ways)})
    with tempfile.TemporaryDirectory() as folder:
        for kind, (_, strategies) in BETWEEN.items():
            for target in strategies:
                missing = [source for source in strategies if (names and {source, target} & set(names))
                           or not names and f"{kind}{source} → {target}" not in kept()["transfer"]]  # fmt: skip
                if missing:
                    done = transfer(kind, missing, target, Path(folder))
                    keep(transfer={f"{kind}{source} → {target}": value for source, value in done.items()})


def kept() -> dict[str, Any]:
    """Return the results so far."""
    file = DOCS / "parity.json"
    return json.loads(file.read_text()) if file.exists() else {"parity": {}, "transfer": {}}


def keep(**found: Any) -> None:
    """Add results to those that are kept, without what there is no more, and write the page."""
    print(found, flush=True)
    results = kept()
    for name, ways in found.get("parity", {}).items():
        results["parity"].setdefault(name, {}).update(ways)
    results["transfer"].update(found.get("transfer", {}))
    wanted = set(ways_between())
    results = {
        "parity": {name: ways for name, ways in results["parity"].items() if name in RANKS},
        "transfer": {way: value for way, value in results["transfer"].items() if way in wanted},
    }
    (DOCS / "parity.json").write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    (DOCS / "parity.md").write_text(page(results))


def ways_between() -> list[str]:
    """Return the names of all ways from checkpoint to checkpoint."""
    return [f"{kind}{one} → {other}" for kind, (_, names) in BETWEEN.items() for one in names for other in names]


def page(results: dict[str, Any]) -> str:
    """Return docs/parity.md."""
    rows = []
    for name, ranks in RANKS.items():
        found = results["parity"].get(name, {})
        rows.append([name, str(ranks), *(_shown(found.get(way)) for way in WAYS)])
    tables = {kind: _between(kind, results["transfer"]) for kind in BETWEEN}
    return f"""# Parity

Made by `python -m drivetrain.tests.conformance.matrix`; the numbers are what that run found.

## With one process

A small transformer (the module with experts for ep, cut into stages for pp, a GPT of megatron-core for megatron, of which
the one process computes the same by torch alone), the same seed and global batches of 8, AdamW with
a schedule, clipping, gloo on the CPU, {STEPS} optimizer steps, by the Trainer. A cell is the largest relative difference from one
process over the losses of all steps, the gradient norms of all steps, the final weights (each against its largest value) and
the metrics of a validation. "×4" accumulates four micro-batches. The law is ≤ 1e-5 in float32; bfloat16 rounds to three
digits, so that sums in another order differ by up to a few per cent, most where a token is sent to another expert by it.

{_table(["strategy", "processes", *WAYS], rows)}

## From checkpoint to checkpoint

Saved after 4 steps under the strategy of the row, gone on with to step 8 under that of the column: weights, Adam's moments,
schedule, position and random states go over. The largest relative difference from one process that was not interrupted.

{tables[""]}

The same with the GPT of Megatron, which is under the names of the whole model in every checkpoint ("torch": one process,
without Megatron):

{tables["megatron: "]}

"""


def _between(kind: str, found: dict[str, float]) -> str:
    names = BETWEEN[kind][1]
    rows = [[source, *(_number(found.get(f"{kind}{source} → {target}")) for target in names)] for source in names]
    return _table(["saved under", *names], rows)


def _shown(differences: dict[str, float] | None) -> str:
    return "" if differences is None else _number(max(differences.values()))


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    main(sys.argv[1:])
