"""Proves that a run which is interrupted goes on exactly: trains it twice, once with an interruption, and compares.

Each part runs in a process of its own: the whole run, its first half up to a checkpoint, and the rest from there. All
along a witness writes down digests of what should be the same; the first that is not is named.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.profiler import Profiler
from ..callbacks.progress import Progress
from ..callbacks.summary import ModelSummary
from ..callbacks.tracking import Tracking
from .run_folder import RunFolder
from .trainer import Trainer
from .witness import Witness

_OUTPUTS = (ModelCheckpoint, Profiler, Progress, ModelSummary, Tracking)  # write for people; nothing trains on them
Make = Callable[[], tuple[Trainer, dict[str, Any]]]


@dataclass(frozen=True)
class Proof:
    """What came of a comparison: true where both runs were the same, bit for bit; as text what differed first."""

    steps: int
    interrupted_at: int
    compared: int  # digests
    difference: str = ""

    def __bool__(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        where = f"interrupted after step {self.interrupted_at} of {self.steps}"
        if self.difference:
            return f"The run that was {where} differs from the one that was not.\n{self.difference}"
        return (
            f"The run that was {where} is the same as the one that was not: {self.compared:,} digests of samples, "
            "random states, outputs, weights and optimizer states are equal."
        )


def prove_resume(make: Make, *, steps: int = 20, interrupt_at: int | None = None) -> Proof:
    """Train ``steps`` optimizer steps, again with an interruption (after half of them), and compare bit for bit.

    ``make`` builds everything anew: it returns a Trainer and the arguments of its ``fit`` as a dict. It is called in
    forked processes, which leave no files: checkpoints, trackers, profilers and displays of the run are left out. Runs
    of one process; a GPU must not have been used before by this one. Raises ValueError for a run that ends too early,
    RuntimeError, with its traceback, for one that raises.
    """
    if steps < 2:
        raise ValueError(f"Expected at least 2 steps, one before and one after the interruption. Received: {steps=}.")
    importlib.import_module("torch._dynamo")  # which optimizers import: a second here rather than one in every part
    with tempfile.TemporaryDirectory(prefix="prove-resume-") as folder:
        root = Path(folder)
        whole = _part(make, root, "whole", until=steps)
        done = whole[-1]["step"] if whole else 0
        at = min(steps, done) // 2 if interrupt_at is None else interrupt_at
        if not 0 < at < done:
            raise ValueError(
                f"Expected a run of more than {max(at, 1)} steps to interrupt. Received: one that ends after {done}. "
                "Let it run for longer, or interrupt it earlier."
            )
        _part(make, root, "first", until=at, save=True)
        rest = _part(make, root, "rest", until=steps, resume=True)
        return _compared(whole, rest, steps=done, at=at)


def _part(make: Make, root: Path, name: str, **options: Any) -> list[dict[str, Any]]:
    """Run a part in a process of its own; return what its witness saw, one dict a batch."""
    shutil.rmtree(root / "files", ignore_errors=True)  # one place for all, since paths may be part of a state
    process = multiprocessing.get_context("fork").Process(target=_run, args=(make, root, name), kwargs=options)
    process.start()
    process.join()
    failure = root / f"{name}.failure"
    if process.exitcode or failure.exists():
        told = failure.read_text() if failure.exists() else f"Its process ended with exit code {process.exitcode}."
        raise RuntimeError(f"Expected the run to train. Received, in the {name} part: {told}")
    seen = root / f"{name}.seen"
    return [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []


def _run(make: Make, root: Path, name: str, *, until: int, save: bool = False, resume: bool = False) -> None:
    """Be the process of a part; it ends at a step's edge, where the witness has seen enough."""
    try:
        trainer, arguments = make()
        if trainer.launcher.later or trainer.world_size > 1:
            raise ValueError("Expected a run of one process. Received: several. Pass devices=1 for the proof.")
        witness = Witness(root / f"{name}.seen", until=until, checkpoint=root / "checkpoint" if save else None)
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, _OUTPUTS)] + witness.parts()
        trainer.default_root_dir = str(root / "files")
        trainer.run_folder = RunFolder(trainer.default_root_dir)
        trainer.fit(**{**arguments, "ckpt_path": str(root / "checkpoint") if resume else None, "resume": None})
        witness.close()
    except BaseException:
        (root / f"{name}.failure").write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _compared(whole: list[dict[str, Any]], rest: list[dict[str, Any]], *, steps: int, at: int) -> Proof:
    expected = [batch for batch in whole if batch["step before"] >= at]
    count = 0
    for one, other in zip(expected, rest):
        for place in ("epoch", "batch"):
            if one[place] != other[place]:
                text = f"First it differs in its place: expected {_place(one)}. Received: {_place(other)}."
                return Proof(steps, at, count, text)
        for name in dict.fromkeys([*one["seen"], *other["seen"]]):
            if one["seen"].get(name) != other["seen"].get(name):
                return Proof(steps, at, count, _difference(one, other, name))
            count += 1
    if len(expected) != len(rest):
        text = f"First it differs in its length: {len(expected)} batches after the interruption, {len(rest)} resumed."
        return Proof(steps, at, count, text)
    return Proof(steps, at, count)


def _difference(one: dict[str, Any], other: dict[str, Any], name: str) -> str:
    """Say what differed first, and what may be its cause: attributes that no state_dict holds."""
    text = f"First it differs at {_place(one)}: {name}."
    mine, theirs = one["attributes"], other["attributes"]
    hidden = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
    told = [f"  {key}: {mine.get(key, 'absent')} → {theirs.get(key, 'absent')}" for key in hidden]
    if told and not name.startswith("the samples"):
        advice = "Keep them in buffers, or in on_save_checkpoint and on_load_checkpoint of the module."
        text += "\n".join(["\nAttributes that differ before that batch and are in no state_dict:", *told, advice])
    return text


def _place(batch: dict[str, Any]) -> str:
    return f"epoch {batch['epoch']}, batch {batch['batch']} (after step {batch['step before']})"
