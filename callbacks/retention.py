"""Which checkpoints to keep: a plan is made before one is written, and carried out once it is on the disk."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterable

from ..strategies.checkpoint import Checkpoint, CheckpointError, complete, remove


@dataclass(frozen=True)
class Kept:
    """The checkpoints of one callback that are on the disk, by path."""

    scores: dict[str, float] = field(default_factory=dict)  # oldest first
    last: str | None = None  # kept beside them: what the link "last" points to, or what a crash left
    best: str | None = None
    best_score: float | None = None
    new: str = ""  # the checkpoint whose coming ...
    doomed: dict[str, float] = field(default_factory=dict)  # ... lets these go

    def admit(self, score: float, *, limit: int, rank: Callable[[float], float] | None, last: bool) -> Kept | None:
        """Return what is kept once a new one (named "" until ``named``) is on the disk; None if it would not be kept.

        At most ``limit`` (-1: any number) are kept: those whose score ``rank`` makes smallest, of equals the earlier,
        or without ``rank`` the newest; and the ``last``.
        """
        scores = dict(self.scores)
        if limit:
            scores[""] = score
        if 0 < limit < len(scores):
            del scores[worst(scores, rank)]
        if "" not in scores and not last:
            return None
        new = replace(self, scores=scores, last="" if last else None, new="")
        better = rank is None or rank(score) < rank(math.nan if self.best_score is None else self.best_score)
        if "" in scores and better:
            new = replace(new, best="", best_score=None if rank is None else score)
        gone = {**({} if self.last is None else {self.last: math.nan}), **self.scores}
        return replace(new, doomed={path: value for path, value in gone.items() if path not in scores})

    def named(self, path: str) -> Kept:
        """Return the same with the new one called ``path``; one of that name is replaced."""

        scores = {old or path: score for old, score in self.scores.items()}
        doomed = {old: score for old, score in self.doomed.items() if old != path}
        last, best = (path if old == "" else old for old in (self.last, self.best))
        return replace(self, scores=scores, last=last, best=best, new=path, doomed=doomed)

    def settled(self) -> Kept:
        """Return the same when the new one is on the disk and the others are gone."""
        return replace(self, new="", doomed={})

    def found(self, folder: str, here: str) -> Kept:
        """Return what of this is on the disk and ours, for a run that saved into ``folder`` and goes on in ``here``.

        A folder that was moved is followed; in another folder nothing is ours to remove. Where a crash came before
        ``new`` was complete, those that it was to replace stay.
        """
        if folder != here and os.path.isdir(folder):
            return Kept(best=self.best, best_score=self.best_score)

        def moved(path: str) -> str:
            return os.path.join(here, os.path.basename(path))

        def there(scores: dict[str, float]) -> dict[str, float]:
            return {moved(path): score for path, score in scores.items() if complete(moved(path))}

        scores, doomed = there(self.scores), there(self.doomed)
        if self.new and not complete(moved(self.new)):
            scores, doomed = {**doomed, **scores}, {}
        last = moved(self.last) if self.last and complete(moved(self.last)) else None
        best = moved(self.best) if self.best else None
        return Kept(scores, last, best, self.best_score, "", doomed)


def worst(scores: dict[str, float], rank: Callable[[float], float] | None) -> str:
    """Return the path that goes first: of the largest rank, of equals the latest; without ``rank`` the oldest."""
    return next(iter(scores)) if rank is None else max(reversed(scores), key=lambda path: rank(scores[path]))


def written_by(path: str, run_id: str | None, step: int) -> bool:
    """Tell whether a complete checkpoint lies at ``path`` that this run wrote at this step."""
    if not complete(path):
        return False
    manifest = Checkpoint.open(path, verify=False).manifest
    return run_id is not None and (manifest.get("run_id"), manifest.get("step")) == (run_id, step)


def discard(paths: Iterable[str]) -> None:
    """Remove checkpoints; one that cannot be removed is warned about."""
    for path in paths:
        try:
            remove(path)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"Expected to remove an old checkpoint. Received: {error}. Remove {path} by hand.", stacklevel=2
            )


def point(link: Path, target: Path) -> None:
    """Let ``link`` point to ``target`` by a relative path, without a moment in which it points nowhere."""
    unfinished = link.with_name(f".{link.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    try:
        unfinished.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        os.replace(unfinished, link)
    except OSError as error:
        warnings.warn(
            f"Expected a folder that can hold links. Received: {error}. The newest checkpoint is {target}.",
            stacklevel=2,
        )
