"""What a tracker is, and which ones there are.

A tracker's file is imported when the tracker is asked for, so that a package that is not used costs nothing; and then
with all that it needs, by the calling thread: an import that runs in another thread while workers are forked would
never end in them.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from ...strategies import world

Function = TypeVar("Function", bound=Callable[..., Any])


def on_main_process(function: Function) -> Function:
    """Make a tracker's method do nothing on other ranks than 0, unless the tracker's `main_process_only` is False."""

    @functools.wraps(function)
    def only_there(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not on_main():
            return None
        return function(self, *args, **kwargs)

    return cast(Function, only_there)


def on_main() -> bool:
    """Tell whether this process is rank 0."""
    return world.current().rank == 0


class Row(Protocol):
    """A row of values as `log` gets them; `time` is when they were logged, in seconds since 1970."""

    @property
    def values(self) -> Any: ...

    @property
    def step(self) -> int | None: ...

    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def time(self) -> float: ...


class GeneralTracker:
    """Base class of a tracker; a subclass names its `name`, `requires_logging_directory` and a property `tracker`.

    `tracker` is the native object (a `SummaryWriter`, a run). `main_process_only` says whether only rank 0 tracks.
    While an entry is handed over, `logged_at` is the time at which it was logged, in seconds since 1970. All calls come
    from one thread. Beside these methods a tracker may have any of `MEDIA`.

    Before `start`, a run that goes on sets `resume_step`: what was logged after that step will come again; and
    `run_id`, the id that the tracker's own run had. `start` sets `run_id` where the tracker has such a thing.
    `run_folder` is where the run's files lie, `run_title` what the run is called.

    `takes_batches`: rows come through `log_rows`, many at once. `survives_kill = False`: what was logged may be lost
    when the process is killed; it is noted, and logged again if `logged_steps` does not find it.
    Raises NotImplementedError when something is missing in a subclass.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    takes_batches: bool = False
    survives_kill: bool = True
    resume_step: int | None = None
    run_id: str | None = None
    run_folder: Path | None = None
    run_title: str | None = None
    logged_at: float | None = None

    def __init__(self, _blank: bool = False) -> None:
        missing = [word for word in ("name", "requires_logging_directory", "tracker") if word not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                "Expected a tracker with a name, requires_logging_directory and a property tracker. "
                f"Received: {type(self).__name__} without {', '.join(missing)}. Define them in the class."
            )

    def start(self) -> None:
        """Open the run; called once, before anything is logged, and again later if it raised."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters: a dict, nested if they are."""

    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Store what the run was made from: command line, git commit, versions of packages (see provenance.py)."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values (numbers, strings, dicts of numbers) at a step."""

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log several rows, all of them or, raising, none."""
        for row in rows:
            self.logged_at = row.time
            self.log(row.values, step=row.step, **row.options)

    def logged_steps(self, name: str) -> Collection[int] | None:
        """Return the steps at which the run has values of this name; None where the tracker cannot tell."""
        return None

    def flush(self) -> None:
        """Write out what is buffered; called before a checkpoint is written."""

    def fail(self, error: str) -> None:
        """Mark the run as failed; called before `finish` when it raised."""

    def preempt(self, reason: str) -> None:
        """Mark the run as stopped from outside, as by a signal; called before `finish`."""
        self.fail(reason)

    def finish(self) -> None:
        """Close the run; called once, last."""


MEDIA = {
    "log_images": "images",
    "log_figures": "figures",
    "log_audio": "sound",
    "log_videos": "video",
    "log_histograms": "histograms",
    "log_table": "tables",
    "log_graph": "model graphs",
    "log_artifact": "files",
    "log_artifacts": "folders of files",
    "log_checkpoint": "checkpoints",
}
"""Methods that a tracker may have beside those of its base class, and what they are for; the docs list arguments."""


class BlankTracker(GeneralTracker):
    """Stands in on ranks that do not track: every method exists and does nothing."""

    name = "blank"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__(_blank=True)

    @property
    def tracker(self) -> BlankTracker:
        """The blank native object."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Known(NamedTuple):
    module: str
    class_name: str
    package: str | None = None  # what has to be installed
    extra: str | None = None


_BUILT_IN = {
    "tensorboard": _Known("tensorboard", "TensorBoardTracker", "tensorboard"),
    "csv": _Known("csv", "CSVTracker"),
    "jsonl": _Known("jsonl", "JSONLinesTracker"),
    "mlflow": _Known("mlflow", "MLflowTracker", "mlflow", "mlflow"),
    "comet_ml": _Known("comet", "CometMLTracker", "comet_ml", "comet"),
    "wandb": _Known("wandb", "WandBTracker", "wandb", "wandb"),
    "trackio": _Known("trackio", "TrackioTracker", "trackio", "trackio"),
    "aim": _Known("aim", "AimTracker", "aim", "aim"),
    "dvclive": _Known("dvclive", "DVCLiveTracker", "dvclive", "dvclive"),
    "swanlab": _Known("swanlab", "SwanLabTracker", "swanlab", "swanlab"),
}
NO_CLEARML = (
    "Expected a tracker that drivetrain has. Received: ClearML, for which it has none. Derive a class from "
    "GeneralTracker that calls clearml.Task, or let `clearml.Task.init` take what TensorBoardTracker writes."
)
_REGISTERED: dict[str, type[GeneralTracker]] = {}


def needed(package: str) -> Any:
    """Return a tracker's package, imported now; raises ModuleNotFoundError naming what to install."""
    for name, known in _BUILT_IN.items():
        if known.package == package and not _installed(known):
            raise ModuleNotFoundError(_missing(name, known), name=package)
    return importlib.import_module(package)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Make a tracker class known under its `name`; usable as a decorator. A later class replaces an earlier one."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TypeError(f"Expected a subclass of GeneralTracker. Received: {tracker_class!r}. Derive one.")
    if not isinstance(getattr(tracker_class, "name", None), str):
        raise TypeError(f"Expected a class with a name. Received: {tracker_class.__name__} without one. Set `name`.")
    _REGISTERED[tracker_class.name] = tracker_class
    return tracker_class


def tracker_names() -> list[str]:
    """Return the words that `log_with` takes, besides "all"."""
    return [*_BUILT_IN, *(name for name in _REGISTERED if name not in _BUILT_IN)]


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in tracker_names() if name in _REGISTERED or _installed(_BUILT_IN[name])]


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class of a tracker's name; its file is imported now.

    Raises ValueError for an unknown name and ModuleNotFoundError when its package is missing, naming what to install.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = _BUILT_IN.get(name)
    if name == "clearml":
        raise NotImplementedError(NO_CLEARML)
    if known is None:
        raise ValueError(_unknown(name))
    if not _installed(known):
        raise ModuleNotFoundError(_missing(name, known), name=known.package)
    return getattr(importlib.import_module(f".{known.module}", __package__), known.class_name)


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | GeneralTracker]:
    """Return what `log_with` asks for as a list of known names and trackers, each once.

    `log_with` is None, a name, a LoggerType, a tracker or a list of these; "all" means every installed one. Raises
    ValueError for an unknown name (with the nearest known one) or a folder that is needed and missing, TypeError for
    other objects, ModuleNotFoundError for a package that is missing.
    """
    chosen: list[str | GeneralTracker] = []
    for item in _listed(log_with):
        names = get_available_trackers() if item == "all" else [item]
        chosen.extend(name for name in names if name not in chosen)
    for item in chosen:
        found = item if isinstance(item, GeneralTracker) else tracker_class(item)
        if logging_dir is None and found.requires_logging_directory and not isinstance(item, GeneralTracker):
            raise ValueError(
                f"Expected a folder for log_with={item!r}, which writes files. Received: logging_dir=None. "
                "Set project_dir, or logging_dir in ProjectConfiguration."
            )
    return chosen


def _listed(log_with: Any) -> list[str | GeneralTracker]:
    if log_with is None:
        return []
    if isinstance(log_with, (str, enum.Enum, GeneralTracker)) or not isinstance(log_with, Iterable):
        log_with = [log_with]
    return [_one(item) for item in log_with]


def _one(item: Any) -> str | GeneralTracker:
    if isinstance(item, GeneralTracker):
        return item
    word = item.value if isinstance(item, enum.Enum) else item
    if not isinstance(word, str):
        raise TypeError(
            f"Expected names of trackers or GeneralTracker objects. Received: log_with={item!r}. "
            f"Use \"all\", {', '.join(map(repr, tracker_names()))}, or an object of a subclass."
        )
    return word.lower()


def _installed(known: _Known) -> bool:
    if known.package is None:
        return True
    found = importlib.util.find_spec(known.package)
    return found is not None and found.origin is not None  # a folder "wandb" of runs is no package


def _missing(name: str, known: _Known) -> str:
    what = f"drivetrain[{known.extra}]" if known.extra else str(known.package)
    return (
        f"Expected the package {known.package} for log_with={name!r}. Received: it is not installed. "
        f"Do: pip install '{what}'"
    )


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*tracker_names(), "all"], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"Expected one of {', '.join(map(repr, [*tracker_names(), 'all']))} or a GeneralTracker object. "
        f"Received: log_with={name!r}.{hint} Derive a class from GeneralTracker for another service."
    )
