"""Replaying, after a run, what its trackers did not take while it ran."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import journal as journals
from .base import GeneralTracker, tracker_class
from .delivery import Delivery
from .journal import Journal, take_over

_KINDS = (".sent", ".pending", ".waiting")


class Replayed(NamedTuple):
    """What came of a journal: the tracker's name, how many entries it took, and how many are left."""

    name: str
    taken: int
    left: int
    problem: str = ""


def journals_of(folder: Path) -> list[Path]:
    """Return the journals of a run's folder, those too of which only parts are there yet."""
    found = {path.with_name(_stem(path.name) + ".jsonl") for path in folder.glob("journal-*.jsonl")}
    return sorted(found)


def replay(path: Path, tracker: GeneralTracker | None = None) -> Replayed:
    """Hand a journal's entries to its tracker again, in order, each once where the tracker can tell.

    Without `tracker` one is made as the run made it. The tracker's run is then ended as `status.json` beside the
    journal says. What is not taken stays. Raises ValueError where the journal does not tell how to make its tracker.
    """
    said = _said(path)
    tracker = tracker or made(path, said)
    tracker.run_id = tracker.run_id or said.get("run_id")
    tracker.run_title, tracker.run_folder = said.get("title"), path.parent
    tracker.resume_step = None
    journal = Journal(path, header=lambda: {**said, "run_id": tracker.run_id})
    others = [path.with_name(f"{path.stem}{kind}.jsonl") for kind in _KINDS]
    take_over(journal, others, goes_on=True, resume_step=None, without=["finish"])
    before = sum(1 for _ in journals.lines(path)) if path.exists() else 0
    problems: list[str] = []
    delivery = Delivery(tracker, journal, lock=threading.RLock(), tell=problems.append)
    delivery.open()
    _end(tracker, path.parent, delivery)
    left = sum(1 for _ in journals.lines(path)) if path.exists() else 0
    return Replayed(tracker.name, before - left, left, problems[0] if problems else "")


def made(path: Path, said: dict[str, Any]) -> GeneralTracker:
    """Return the tracker that a journal names, not started."""
    if "place" not in said:
        name = said.get("name", path.stem.removeprefix("journal-"))
        raise ValueError(
            f"Expected a tracker that is made by its name. Received: {path} of an object of the program, {name!r}. "
            "Make it, and call drivetrain.callbacks.tracking.replay.replay(path, tracker)."
        )
    build: Any = tracker_class(said["name"])
    return build(*said["place"], **said["options"])


def _said(path: Path) -> dict[str, Any]:
    files = [path, *(path.with_name(f"{path.stem}{kind}.jsonl") for kind in _KINDS)]
    return next((said for file in files if file.exists() and (said := journals.header(file))), {})


def _end(tracker: GeneralTracker, folder: Path, delivery: Delivery) -> None:
    """End the tracker's run as the run ended; one that was killed without a word counts as pre-empted."""
    if not delivery.is_open:
        return
    status = next(_status(folder), {})
    word, error = status.get("status", "finished"), status.get("error") or "the process ended without a word"
    if word == "failed":
        tracker.fail(error)
    elif word != "finished":
        tracker.preempt(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        delivery.close()


def _status(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        yield json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return


def _stem(name: str) -> str:
    stem = name.removesuffix(".jsonl")
    return next((stem.removesuffix(kind) for kind in _KINDS if stem.endswith(kind)), stem)
