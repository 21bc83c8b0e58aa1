"""Handing checkpoints to trackers: the best and the last one at the end, or each as it is saved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import check_choice
from .feed import QueuedTracker

FOLDER = "uploads"


class Uploads:
    """Gives a run's checkpoints to the trackers that take them, each once under each alias.

    `which` is False (none), True (at the end the "best" and the "last" one) or "all" (also each as it is saved, under
    "step-<n>"). Until it is uploaded, one of "all" is kept by links in `uploads/` in the run's folder: its own callback
    may remove it before.
    """

    def __init__(self, which: bool | str) -> None:
        check_choice("log_checkpoints", which, (False, True, "all"))
        self.which = which
        self._given: set[tuple[str, str]] = set()  # path and alias
        self._links: Path | None = None

    def saved(self, trainer: Any, trackers: Sequence[QueuedTracker]) -> None:
        """Give what has been saved since the last call, where each is wanted."""
        if self.which != "all":
            return
        for callback in trainer.checkpoint_callbacks:
            for path in dict.fromkeys([*callback.best_k_models, callback.best_model_path, callback.last_model_path]):
                step = _step(path)
                if step is not None and (path, "") not in self._given:
                    self._given.add((path, ""))
                    _give(self._linked(trainer, path), [f"step-{step}"], step, trackers)

    def end(self, trainer: Any, trackers: Sequence[QueuedTracker]) -> None:
        """Give the best and the last checkpoint, once all are on the disk."""
        self.saved(trainer, trackers)
        if not self.which:
            return
        aliases: dict[str, list[str]] = {}
        for callback in trainer.checkpoint_callbacks:
            newest = callback.last_model_path or ("" if callback.monitor else callback.best_model_path)
            for alias, path in (("best", callback.best_model_path), ("last", newest)):
                if path and _step(path) is not None and (path, alias) not in self._given:
                    self._given.add((path, alias))
                    aliases.setdefault(path, []).append(alias)
        for path, words in aliases.items():
            _give(path, words, _step(path), trackers)

    def clear(self, trackers: Sequence[QueuedTracker]) -> None:
        """Remove the links when nobody needs them any more."""
        if self._links is not None and not any(tracker.journal.exists() for tracker in trackers):
            shutil.rmtree(self._links, ignore_errors=True)

    def _linked(self, trainer: Any, path: str) -> str:
        self._links = Path(trainer.log_dir) / FOLDER
        place = self._links / Path(path).name
        if not place.exists():
            try:
                shutil.copytree(path, place, copy_function=os.link)
            except OSError:  # a file system without links
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(path, place)
        return str(place)


def _give(path: str, aliases: list[str], step: int | None, trackers: Sequence[QueuedTracker]) -> None:
    for tracker in trackers:
        if hasattr(tracker.wrapped, "log_checkpoint"):
            tracker.log_checkpoint(path, aliases=aliases, step=step)


def _step(path: str) -> int | None:
    """Return the step of a complete checkpoint, None where there is none."""
    from ...strategies.checkpoint import Checkpoint, complete  # here: most runs hand over none

    if not path or not complete(path):
        return None
    step = Checkpoint.open(path, verify=False).manifest.get("step")
    return -1 if step is None else int(step)
