"""The trackers of a run: started, found by name and finished together."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...strategies import world
from .base import BlankTracker, GeneralTracker, filter_trackers, tracker_class, tracker_names
from .feed import QueuedTracker
from .termination import release, watch


def start_trackers(
    log_with: Any,
    project_name: str = "",
    config: Mapping[str, Any] | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    resume_step: int | None = None,
    timeout: float = 15.0,
    run_dir: str | os.PathLike[str] | None = None,
    run_ids: Mapping[str, str] | None = None,
    goes_on: bool = False,
    title: str | None = None,
) -> list[QueuedTracker]:
    """Start the trackers that `log_with` names (see `filter_trackers`), each behind a queue of its own.

    Files go to `logging_dir/project_name`, or right into `run_dir` where that is given. `config` is stored as the run's
    hyperparameters, nested as it is; `init_kwargs` are further arguments by tracker name. `resume_step`: the run goes
    on after this step, and what was logged after it is dropped. `goes_on`: the folder holds this run's files; `run_ids`
    are the ids that its trackers' runs had, by tracker name. `title` is what the run is called. On other ranks than 0
    only trackers with `main_process_only = False` are started. Raises what `filter_trackers` raises, ValueError for
    unknown names in `init_kwargs`, and what a tracker's constructor raises.
    """
    chosen = filter_trackers(log_with, run_dir if logging_dir is None else logging_dir)
    options = {str(getattr(name, "value", name)): dict(given) for name, given in (init_kwargs or {}).items()}
    _check_names(chosen, options)
    started = []
    rank = world.current().rank
    for item in chosen:
        if rank and (item if isinstance(item, GeneralTracker) else tracker_class(item)).main_process_only:
            continue
        where = (project_name, logging_dir) if run_dir is None else ("", run_dir)
        tracker = _built(item, project_name, where, options.get(_name(item), {}))
        if resume_step is not None:
            tracker.resume_step = resume_step
        tracker.run_folder, tracker.run_title = Path(where[1] or ".") / where[0], title
        if tracker.run_id is None and tracker.name in (run_ids or {}):
            tracker.run_id = (run_ids or {})[tracker.name]
        suffix = f"-rank-{rank}" if rank else ""
        origin: dict[str, Any] = {}
        if not isinstance(item, GeneralTracker):
            place = [str(part) for part in where] if tracker.requires_logging_directory else [project_name]
            origin = {"place": place, "options": _open(options, item)}
        feed = QueuedTracker(
            tracker, journal_dir=tracker.run_folder, timeout=timeout, suffix=suffix, origin=origin,
            goes_on=goes_on or resume_step is not None,
        )
        started.append(feed)
    for tracker in started:
        tracker.start()
        if config:
            tracker.store_init_configuration(dict(config))
    watch(started)
    return started


def get_tracker(trackers: Sequence[GeneralTracker], name: str, unwrap: bool = False) -> Any:
    """Return the tracker called `name`, or its native object if `unwrap`.

    Where nothing is tracked, on ranks other than 0, it is a blank tracker whose methods do nothing. Raises ValueError
    when there are trackers and none has this name.
    """
    word = str(getattr(name, "value", name))
    for tracker in trackers:
        if tracker.name == word:
            return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
    if not trackers:
        return BlankTracker()
    names = [tracker.name for tracker in trackers]
    near = difflib.get_close_matches(word, names, n=1)
    raise ValueError(
        f"Expected the name of a tracker of this run: {', '.join(map(repr, names))}. Received: name={word!r}. "
        + (f"Did you mean {near[0]!r}?" if near else "Add it to log_with.")
    )


def finish_trackers(trackers: Sequence[QueuedTracker]) -> None:
    """Finish all trackers at once, within the longest of their time limits."""
    for tracker in trackers:
        tracker.close()
    deadline = time.monotonic() + max((tracker.timeout for tracker in trackers), default=0.0)
    for tracker in trackers:
        tracker.wait(deadline)
    release(trackers)


def _built(
    item: str | GeneralTracker, project_name: str, where: tuple[str, Any], options: dict[str, Any]
) -> GeneralTracker:
    if isinstance(item, GeneralTracker):
        return item
    build: Any = tracker_class(item)
    return build(*where, **options) if build.requires_logging_directory else build(project_name, **options)


def _open(options: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return a tracker's options without those that a file must not hold."""
    secrets = ("api_key", "token", "password", "secret")
    return {key: value for key, value in options.get(name, {}).items() if not any(word in key for word in secrets)}


def _name(item: str | GeneralTracker) -> str:
    return item.name if isinstance(item, GeneralTracker) else item


def _check_names(chosen: Sequence[str | GeneralTracker], options: Mapping[str, Any]) -> None:
    known = [*tracker_names(), *(_name(item) for item in chosen)]
    for name in options:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"Expected names of trackers in init_kwargs. Received: {name!r}. "
            + (f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(map(repr, known))}.")
        )
