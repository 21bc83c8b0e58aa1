"""From arguments that say how long and how much to a schedule and to limits of loaders."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..callbacks.durations import Duration, Unit
from .schedule import Schedule

DEFAULT_EPOCHS = 1000  # where nobody said how long


def schedule_of(given: dict[str, Any], *, timed: bool) -> Schedule:
    """Return the schedule that a Trainer's arguments mean; ``timed``: a clock ends the run anyway."""
    epochs, steps = given["max_epochs"], given["max_steps"]
    unlimited = epochs is None and steps in (-1, None) and not timed
    epochs = DEFAULT_EPOCHS if unlimited else epochs
    limits = _durations(max_epochs=_bounded(epochs), max_steps=_bounded(steps))
    minimums = _durations(min_epochs=given["min_epochs"], min_steps=given["min_steps"])
    _check_room(limits, minimums)
    every = given["check_val_every_n_epoch"]
    if every is not None and (not isinstance(every, int) or every < 1):
        raise ValueError(f"Expected a whole number ≥ 1 or None. Received: check_val_every_n_epoch={every!r}. Use 1.")
    interval = _interval(given["val_check_interval"], every)
    return Schedule(limits, minimums, val_interval=interval, every_n_epochs=every, unlimited=unlimited)


def limit_of(given: dict[str, Any], stage: str) -> int | float | None:
    """Return how many batches (int), or which fraction (float), of a stage's loaders to use; None for all."""
    name = f"limit_{'val' if stage == 'validate' else stage}_batches"
    overfit, value = given["overfit_batches"], given[name]
    if overfit and stage in ("train", "validate"):
        name, value = "overfit_batches", overfit
    if value is None:
        return None
    if not (_is_whole(value) and value >= 0) and not (isinstance(value, float) and 0.0 <= value <= 1.0):
        raise ValueError(
            f"Expected a number of batches or a fraction from 0.0 to 1.0. Received: {name}={value!r}. "
            "Use e.g. 10 or 0.1."
        )
    return value


def time_of(value: Any) -> Duration:
    """Return ``max_time`` as a duration; raises ValueError for one that is not a time."""
    duration = Duration.parse(value, name="max_time", unit="s")
    if duration.unit != "s":
        raise ValueError(
            f'Expected a time. Received: max_time={value!r}. Use e.g. "2h", or max_epochs and max_steps '
            "for other units."
        )
    return duration


def whole(given: dict[str, Any], name: str, *, least: int) -> int:
    """Return an argument that has to be a whole number of at least ``least``; raises ValueError otherwise."""
    value = given[name]
    if not _is_whole(value) or value < least:
        raise ValueError(f"Expected a whole number ≥ {least}. Received: {name}={value!r}. Change it.")
    return value


def _durations(**given: Any) -> list[Duration]:
    """Return the durations that were given; plain numbers are epochs or steps, as the argument's name says."""
    units: dict[str, Unit] = {"epochs": "ep", "steps": "ba"}
    return [
        Duration.parse(value, name=name, unit=units[name.partition("_")[2]])
        for name, value in given.items()
        if value is not None
    ]


def _check_room(limits: list[Duration], minimums: list[Duration]) -> None:
    for least in minimums:
        for most in limits:
            if least.unit == most.unit and least.value > most.value:
                unit = "epochs" if least.unit == "ep" else "steps"
                raise ValueError(
                    f"Expected min_{unit} within max_{unit}. Received: {least} and {most}. Change one of them."
                )


def _bounded(value: Any) -> Any:
    return None if value == -1 else value  # the word for "no limit"


def _interval(value: Any, every_n_epochs: int | None) -> float | int | Duration:
    if value is None:
        if every_n_epochs is None:
            raise ValueError(
                "Expected a number of batches. Received: check_val_every_n_epoch=None, val_check_interval=None. "
                "Set the latter."
            )
        return 1.0
    if isinstance(value, float) and every_n_epochs is None:
        raise ValueError(
            "Expected a number of batches or a duration to count over epochs. "
            f"Received: check_val_every_n_epoch=None, val_check_interval={value!r}. Use e.g. val_check_interval=1000."
        )
    if isinstance(value, float) and 0.0 < value <= 1.0 or _is_whole(value) and value > 0:
        return value
    if isinstance(value, (str, timedelta, dict, Duration)):
        return Duration.parse(value, name="val_check_interval")
    raise ValueError(
        "Expected a fraction of an epoch (0 to 1.0), a number of batches or a duration. "
        f'Received: val_check_interval={value!r}. Use e.g. 0.25, 1000 or "500ba".'
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
