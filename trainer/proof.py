"""Proves that a run which is interrupted goes on exactly: trains it twice, once with an interruption, and compares.

Each part runs in processes of its own: the whole run, its first half up to a checkpoint, and the rest from there. All
along a witness on each rank writes down digests of what should be the same; the first that is not is named.
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
from functools import partial
from pathlib import Path
from typing import Any

from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.profiler import Profiler
from ..callbacks.progress import Progress
from ..callbacks.rescue import Rescue
from ..callbacks.summary import ModelSummary
from ..callbacks.tracking import Tracking
from .loop_witness import LoopWitness
from .run_folder import RunFolder
from .trainer import Trainer
from .witness import Seen, Witness

_OUTPUTS = (ModelCheckpoint, Profiler, Progress, Rescue, ModelSummary, Tracking)  # nothing trains on what these write
Make = Callable[[], tuple[Trainer, dict[str, Any]]]
Batches = list[dict[str, Any]]  # what a rank's witness saw, one dict a batch


@dataclass(frozen=True)
class Proof:
    """What came of a comparison: true where both runs were the same, bit for bit; as text what differed first."""

    steps: int
    interrupted_at: int
    compared: int  # digests
    difference: str = ""
    processes: int = 1

    def __bool__(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        where = f"interrupted after step {self.interrupted_at} of {self.steps}"
        if self.difference:
            return f"The run that was {where} differs from the one that was not.\n{self.difference}"
        ranks = f" on {self.processes} processes" if self.processes > 1 else ""
        return (
            f"The run that was {where} is the same as the one that was not: {self.compared:,} digests of samples, "
            f"random states, outputs, weights and optimizer states are equal{ranks}."
        )


def prove_resume(make: Make, *, steps: int = 20, interrupt_at: int | None = None) -> Proof:
    """Train ``steps`` optimizer steps, again with an interruption (after half of them), and compare bit for bit.

    ``make`` builds everything anew: it returns a Trainer and the arguments of its ``fit`` as a dict. It is called in
    forked processes, as many as the Trainer's ``devices``, which leave no files: checkpoints, trackers, profilers and
    displays of the run are left out. A GPU must not have been used before by this process. Raises ValueError for a run
    that ends too early, RuntimeError, with its traceback, for one that raises.
    """
    return _proved(partial(_fit, make), steps, interrupt_at, processes=1)


def prove_loop(
    loop: Callable[[LoopWitness], Any], *, steps: int = 20, interrupt_at: int | None = None, processes: int = 1
) -> Proof:
    """The same for a training loop of one's own, with an ``Accelerator``, on ``processes`` forked processes.

    ``loop(proof)`` makes its Accelerator and trains. When all is prepared it calls ``proof.resume(accelerator)``,
    which loads the checkpoint in the part that goes on, and returns the place that was given when it was saved (None
    elsewhere); and after each optimizer step ``proof.step(accelerator, batch, loss, place={...})``. Raises as
    ``prove_resume`` does.
    """
    return _proved(partial(_loop, loop), steps, interrupt_at, processes=processes)


def _proved(run: Callable[..., Any], steps: int, interrupt_at: int | None, *, processes: int) -> Proof:
    if steps < 2:
        raise ValueError(f"Expected at least 2 steps, one before and one after the interruption. Received: {steps=}.")
    importlib.import_module("torch._dynamo")  # which optimizers import: a second here rather than one in every part
    with tempfile.TemporaryDirectory(prefix="prove-resume-") as folder:
        parts = _Parts(run, Path(folder), processes)
        whole = parts.seen("whole", until=steps)
        done = whole[0][-1]["step"] if whole[0] else 0
        at = min(steps, done) // 2 if interrupt_at is None else interrupt_at
        if not 0 < at < done:
            raise ValueError(
                f"Expected a run of more than {max(at, 1)} steps to interrupt. Received: one that ends after {done}. "
                "Let it run for longer, or interrupt it earlier."
            )
        parts.seen("first", until=at, save=True)
        rest = parts.seen("rest", until=steps, resume=True)
        return _compared(whole, rest, steps=done, at=at)


class _Parts:
    """Runs the parts of a proof, each in processes of its own."""

    def __init__(self, run: Callable[..., Any], root: Path, processes: int) -> None:
        self.run, self.root, self.processes = run, root, processes

    def seen(self, name: str, **options: Any) -> list[Batches]:
        """Run a part; return what each rank's witness saw."""
        shutil.rmtree(self.root / "files", ignore_errors=True)  # one place for all, since paths may be part of a state
        if self.processes == 1:
            self._alone(name, options)
        if self.processes > 1:  # as the run itself may have said
            self._together(name, options)
        return [self._read(name, rank) for rank in range(self.processes)]

    def _alone(self, name: str, options: dict[str, Any]) -> None:
        arguments = self.run, self.root, name, options
        process = multiprocessing.get_context("fork").Process(target=_be_part, args=arguments)
        process.start()
        process.join()
        failure, wanted = self.root / f"{name}.failure", self.root / "processes"
        if process.exitcode or failure.exists():
            told = failure.read_text() if failure.exists() else f"Its process ended with exit code {process.exitcode}."
            raise RuntimeError(f"Expected the run to train. Received, in the {name} part: {told}")
        if wanted.exists():
            self.processes = int(wanted.read_text())

    def _together(self, name: str, options: dict[str, Any]) -> None:
        from ..strategies import launch  # here, since most proofs need no launcher

        try:
            launch.call(_be_rank, self.run, self.root, name, options, processes=self.processes, start_method="fork")
        except launch.LaunchError as error:
            raise RuntimeError(f"Expected the run to train. Received, in the {name} part: {error}") from error

    def _read(self, name: str, rank: int) -> Batches:
        path = self.root / f"{name}-{rank}.seen"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _be_part(run: Callable[..., Any], root: Path, name: str, options: dict[str, Any]) -> None:
    """Be the process of a part; it ends at a step's edge, where the witness has seen enough."""
    try:
        _be_rank(run, root, name, options, alone=True)
    except BaseException:
        (root / f"{name}.failure").write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _be_rank(run: Callable[..., Any], root: Path, name: str, options: dict[str, Any], *, alone: bool = False) -> None:
    try:
        run(root, name, alone=alone, **options)
    except Seen:
        pass


def _fit(
    make: Make, root: Path, name: str, *, alone: bool, until: int, save: bool = False, resume: bool = False
) -> None:
    trainer, arguments = make()
    if trainer.launcher.later and alone:
        (root / "processes").write_text(str(trainer.plan.processes))
        raise Seen
    if alone and trainer.accelerator.num_processes > 1:
        raise ValueError("Expected a process that was not launched with others. Received: one of several. Start one.")
    place = root / f"{name}-{trainer.global_rank}.seen"
    witness = Witness(place, until=until, checkpoint=root / "checkpoint" if save else None)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, _OUTPUTS)] + witness.parts()
    trainer.default_root_dir = str(root / "files")
    trainer.run_folder = RunFolder(trainer.default_root_dir)
    try:
        trainer.fit(**{**arguments, "ckpt_path": str(root / "checkpoint") if resume else None, "resume": None})
    finally:
        witness.close()


def _loop(
    loop: Callable[[LoopWitness], Any], root: Path, name: str, *, alone: bool, until: int, save: bool = False,
    resume: bool = False,
) -> None:  # fmt: skip
    witness = LoopWitness(root, name, until=until, save=save, resume=resume)
    try:
        loop(witness)
    finally:
        witness.close()


def _compared(whole: list[Batches], rest: list[Batches], *, steps: int, at: int) -> Proof:
    count, number = 0, len(whole)
    expected = [[batch for batch in batches if batch["step before"] >= at] for batches in whole]
    for batches in zip(*[zip(mine, theirs) for mine, theirs in zip(expected, rest)]):  # of all ranks
        found = [(equal, who, text) for who, (text, equal) in enumerate(_difference(*pair) for pair in batches)]
        count += sum(equal for equal, _, _ in found)
        different = [one for one in found if one[2]]
        if different:
            _, who, text = min(different)  # the rank where it was seen first; the others follow in the same batch
            return Proof(steps, at, count, f"On rank {who}: {text}" if number > 1 else text, number)
    for who, (mine, theirs) in enumerate(zip(expected, rest)):
        if len(mine) != len(theirs):
            text = f"First it differs in its length: {len(mine)} batches after the interruption, {len(theirs)} resumed."
            return Proof(steps, at, count, f"On rank {who}: {text}" if number > 1 else text, number)
    return Proof(steps, at, count, processes=number)


def _difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, int]:
    """Return what differs first between two batches ("" if nothing), and how much was equal before."""
    for place in ("epoch", "batch"):
        if one[place] != other[place]:
            return f"First it differs in its place: expected {_place(one)}. Received: {_place(other)}.", 0
    names = list(dict.fromkeys([*one["seen"], *other["seen"]]))
    for count, name in enumerate(names):
        if one["seen"].get(name) != other["seen"].get(name):
            return _described(one, other, name), count
    return "", len(names)


def _described(one: dict[str, Any], other: dict[str, Any], name: str) -> str:
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
    if batch["epoch"] is None:
        return f"the batch after step {batch['step before']}"
    return f"epoch {batch['epoch']}, batch {batch['batch']} (after step {batch['step before']})"
