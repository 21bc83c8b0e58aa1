"""Saving when a run fails: without hiding why, and without waiting for ranks that do not come."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..strategies.checkpoint.folders import sweep
from ..strategies.checkpoint.snapshot import Saves
from ..strategies.survivors import Survivors
from .base import AFTER_MODULE, Callback
from .retention import discard
from .siblings import PeerFailed, siblings
from .watchdog import WAITING, Stalled

logger = logging.getLogger(__name__)

_MEETING = 2.0  # seconds in which those that can save find each other; some hang in a collective until these end
_SAVING = 30.0  # seconds that they wait for each other while they write
_NOTICED = 1.0  # seconds from a connection that breaks until the process behind it is known to be gone
FOLDER = "rescue"


class Rescue(Callback):
    """When another rank has failed, save what the healthy ones hold; part of every fit that saves checkpoints.

    Those that are at the newest step save together, as ``<log_dir>/rescue/step-000123``, where each of them holds the
    whole state (not where an engine shards it). The weights are those of that step, but the batch that failed may have
    drawn random numbers and moved running statistics: the run that goes on from it (``resume=<path>``) is not bit for
    bit that without the failure, so ``resume="last"`` keeps to the checkpoints before. With
    ``ModelCheckpoint(save_on_exception=True)`` that callback saves in its own place instead. The folder goes when a run
    has come to its end.
    """

    priority = AFTER_MODULE + 200  # after the ModelCheckpoints

    def __init__(self) -> None:
        self._fitting, self._start = False, 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._fitting = False
        if stage == "fit":
            siblings(trainer)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._fitting, self._start = True, trainer.global_step

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._fitting = False
        folder = trainer.log_dir / FOLDER
        if trainer.is_global_zero and folder.is_dir():
            _clear(folder)
            with suppress(OSError):
                folder.rmdir()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if not self._fitting or trainer.world_size == 1 or trainer.global_step == self._start:
            return
        savers = [callback for callback in trainer.session.callbacks if hasattr(callback, "save_on_exception")]
        if any(callback.save_on_exception for callback in savers) or not consequence(trainer, exception):
            return
        folder = trainer.log_dir / FOLDER
        path = folder / f"step-{trainer.global_step:06d}"

        def save() -> None:
            trainer.save_checkpoint(path)
            if trainer.metrics.world.rank == 0:
                _clear(folder, but=path)
                logger.warning("Step %d is saved in %s; resume=<that path> takes it.", trainer.global_step, path)

        rescue(trainer, exception, save, saved=saved_steps(trainer))


def rescue(
    trainer: Any, exception: BaseException, save: Callable[[], Any], *, saved: Iterable[int] = ()
) -> None:
    """Call ``save`` after an exception, on all ranks that can; what stands in its way is a warning.

    On several ranks those at the newest step save, found within seconds, unless it is among the steps in ``saved``.
    """
    try:
        if not trainer.session.loop.between_steps(exception):
            raise RuntimeError("it came in the midst of an optimizer's step, with weights that are half changed")
        if trainer.world_size == 1:
            save()
            return
        if not trainer.strategy.replicates:
            raise RuntimeError(f"the strategy {trainer.strategy.name!r} keeps a part of the state on each rank")
        with _together(trainer, saved) as found:
            if found:
                save()
    except Exception as error:
        warnings.warn(f"Expected to save a checkpoint after the exception. Received: {error}.", stacklevel=3)


@contextmanager
def _together(trainer: Any, saved: Iterable[int]) -> Iterator[bool]:
    """Let those ranks that are there, and at the newest step, take the place of all; false on the others."""
    world, mine = trainer.accelerator.world, siblings(trainer)
    survivors = Survivors.meet(
        world, "rescue", {"step": trainer.global_step, "saved": sorted(saved)}, seconds=_MEETING,
        gone=lambda rank: rank in mine.gone(), choose=_newest,
    )  # fmt: skip
    if survivors is None:
        yield False
        return
    accelerator, metrics = trainer.accelerator, trainer.metrics
    before = accelerator.saves, metrics.world
    accelerator.saves, metrics.world = Saves(survivors), survivors
    try:
        yield True
    finally:
        accelerator.saves, metrics.world = before


def _newest(found: dict[int, Any]) -> list[int]:
    step = max(one["step"] for one in found.values())
    if any(step in one["saved"] for one in found.values()):
        return []
    return [rank for rank, one in found.items() if one["step"] == step]


def saved_steps(trainer: Any) -> set[int]:
    """Return the step at which each ModelCheckpoint has saved last."""
    return {step for callback in trainer.session.callbacks for step in getattr(callback, "last_steps", ())}


def consequence(trainer: Any, exception: BaseException) -> bool:
    """Tell whether an exception only followed from the end of another rank, or from a run that stood still."""
    if isinstance(exception, (PeerFailed, Stalled)):
        return True
    frames = traceback.extract_tb(exception.__traceback__)[-4:]
    waited = any(part in frame.filename.replace("\\", "/") for part in WAITING for frame in frames)
    if not isinstance(exception, RuntimeError) or not waited:
        return False
    deadline = time.monotonic() + _NOTICED
    while siblings(trainer).failure() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return siblings(trainer).failure() is not None


def _clear(folder: Path, *, but: Path | None = None) -> None:
    """Remove the checkpoints in a folder, those that were never finished too."""
    sweep(folder)
    discard(str(path) for path in folder.iterdir() if path != but)
