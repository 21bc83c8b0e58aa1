"""Arguments of the Trainer that stand for callbacks: ``accumulate_grad_batches=4`` *is* ``GradientAccumulation(4)``."""

from __future__ import annotations

import warnings
from typing import Any, Callable

from ..callbacks.accumulation import GradientAccumulation
from ..callbacks.base import Callback
from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.clipping import GradientClipping
from ..callbacks.out_of_memory import OutOfMemory
from ..callbacks.preemption import Preemption
from ..callbacks.profiler import Profiler
from ..callbacks.progress import Progress
from ..callbacks.rescue import Rescue
from ..callbacks.report.record import Report
from ..callbacks.summary import ModelSummary
from ..callbacks.timer import Timer
from ..callbacks.tracking import Tracking
from ..callbacks.tracking.base import filter_trackers
from ..strategies import environment
from .limits import time_of

_SWITCHES = {
    "enable_progress_bar": Progress,
    "enable_model_summary": ModelSummary,
    "enable_checkpointing": ModelCheckpoint,
}


def listed(callbacks: Any) -> list[Callback]:
    """Return the argument ``callbacks`` (None, one, or several) as a list of its own."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def callbacks_of(given: dict[str, Any]) -> list[Callback]:
    """Return the user's callbacks and those that other arguments stand for.

    Raises TypeError for what is no callback, ValueError where an argument and a callback say different things.
    """
    callbacks = listed(given["callbacks"])
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"Expected callbacks to be Callback objects. Received: {callback!r}. "
                "Subclass drivetrain.Callback, and pass objects."
            )
    _add_settings(callbacks, given)
    callbacks += _tracking(given["logger"], callbacks)
    if any(isinstance(c, Tracking) for c in callbacks) and not any(isinstance(c, Report) for c in callbacks):
        callbacks.append(Report())
    for name, kind in _SWITCHES.items():
        present = any(isinstance(c, kind) for c in callbacks)
        if given[name] is False and present:
            raise ValueError(
                f"Expected {name} to agree with the callbacks. Received: {name}=False and a {kind.__name__}. "
                "Drop one of them."
            )
        if given[name] is not False and not present:
            callbacks.append(kind())
    if not given["barebones"]:
        saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
        always = (Preemption, OutOfMemory, Rescue) if saves else (Preemption, OutOfMemory)
        callbacks += [kind() for kind in always if not any(isinstance(c, kind) for c in callbacks)]
    return callbacks


def _add_settings(callbacks: list[Callback], given: dict[str, Any]) -> None:
    algorithm, time, profiler = given["gradient_clip_algorithm"] or "norm", given["max_time"], given["profiler"]
    name, accumulate = _agreed(given, "accumulate_grad_batches", 1, variable="GRADIENT_ACCUMULATION_STEPS")
    if accumulate != 1:
        _add(callbacks, GradientAccumulation(accumulate), name, accumulate, lambda c: c.scheduling)
    name, clip = _agreed(given, "gradient_clip_val", None, variable="GRADIENT_CLIPPING")
    if given["gradient_clip_algorithm"] is not None and not clip:
        warnings.warn(
            "Expected gradient_clip_val beside gradient_clip_algorithm. Received: none. Nothing is clipped.",
            stacklevel=2,
        )
    if clip is not None and clip != 0:
        _add(callbacks, GradientClipping(clip, algorithm), name, clip, lambda c: (c.value, c.algorithm))
    if time is not None:
        _add(callbacks, Timer(time_of(time)), "max_time", time, lambda c: c.duration)
    if profiler is not None:
        made = profiler if isinstance(profiler, Callback) else Profiler(profiler)
        _add(callbacks, made, "profiler", profiler, lambda c: vars(c).get("kind"))


def _agreed(given: dict[str, Any], name: str, default: Any, *, variable: str) -> tuple[str, Any]:
    """Return who says it and what: the argument, or a launch; both with different values are an error."""
    word, value = environment.text(variable), given[name]
    if word is None:
        return name, value
    from .resolution import launched  # here, since most runs need none of it

    said = float(word) if "." in word else int(word)
    if value != default and value != said:
        raise ValueError(
            f"Expected one value. Received: {name}={value!r}, {launched(variable)}={said!r}. Set it in one place."
        )
    return launched(variable), said


def _add(callbacks: list[Callback], made: Callback, name: str, value: Any, setting: Callable[[Any], Any]) -> None:
    """Add the callback that an argument stands for; one of the user's own must have the same ``setting``."""
    present = [c for c in callbacks if isinstance(c, type(made))]
    for callback in present:
        if setting(callback) != setting(made):
            raise ValueError(
                f"Expected one setting. Received: {name}={value!r} and a {type(made).__name__} with "
                f"{setting(callback)!r}. Keep one of them."
            )
    if not present:
        callbacks.append(made)


def _tracking(logger: Any, callbacks: list[Callback]) -> list[Callback]:
    present = any(isinstance(c, Tracking) for c in callbacks)
    if logger is None or logger is True:
        return [] if present else [Tracking()]
    if logger is False or logger == []:
        return []
    if present:
        raise ValueError(
            f"Expected trackers once. Received: logger={logger!r} and a Tracking callback. Keep one of them."
        )
    if isinstance(logger, Tracking):
        return [logger]
    filter_trackers(logger, logging_dir="")  # unknown words and missing packages are told now
    return [Tracking(logger)]
