"""From the Trainer's arguments to what they stand for: an Accelerator, callbacks, limits. Nothing is started here."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..callbacks.accumulation import GradientAccumulation
from ..callbacks.base import Callback
from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.clipping import GradientClipping
from ..callbacks.durations import Duration
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.profiler import Profiler
from ..callbacks.progress import Progress
from ..callbacks.summary import ModelSummary
from ..callbacks.timer import Timer
from ..callbacks.tracking import Tracking
from ..callbacks.tracking.base import filter_trackers
from ..strategies import create
from ..strategies.environment import Placement
from .schedule import Schedule

_PRECISIONS = {
    "32": "32-true", "32-true": "32-true", "64": "64-true", "64-true": "64-true", "16": "16-mixed", "16-mixed": "16-mixed",
    "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed", "16-true": "16-true", "bf16-true": "bf16-true",
    "no": "32-true", "fp16": "16-mixed", "fp8": "fp8",
}  # fmt: skip
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


@dataclass
class Plan:
    """What a Trainer's arguments come to."""

    accelerator: Any = None  # a ready Accelerator, or None: make one of `options`
    options: dict[str, Any] = field(default_factory=dict)
    shards: bool = True  # loaders are shared out among the ranks
    processes: int = 1
    nodes: int = 1
    devices: list[int] | None = None  # indices of the devices to use, None for the first ones
    start_method: str | None = None
    asked: bool = False  # somebody named a number of devices
    callbacks: list[Callback] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    limits: dict[str, int | float | None] = field(default_factory=dict)
    sanity_batches: int = 2
    log_every_n_steps: int = 50


def resolve(given: dict[str, Any], placement: Placement) -> Plan:
    """Return the plan that a Trainer's arguments mean where ``placement`` is this process's.

    Raises ValueError or TypeError for arguments that make no sense.
    """
    given = _with_fast_run(_with_barebones(given))
    plan = Plan(shards=given["use_distributed_sampler"])
    _resolve_devices(plan, given, placement)
    plan.callbacks = _callbacks(given)
    plan.schedule = _schedule(given)
    plan.limits = {stage: _limit(given, stage) for stage in ("train", "validate", "test", "predict")}
    plan.sanity_batches = _whole(given, "num_sanity_val_steps", least=-1)
    plan.log_every_n_steps = _whole(given, "log_every_n_steps", least=0)
    return plan


# Where it runs


def _resolve_devices(plan: Plan, given: dict[str, Any], placement: Placement) -> None:
    accelerator, strategy, devices = given["accelerator"], given["strategy"], given["devices"]
    if accelerator is not None and not isinstance(accelerator, str):
        _refuse_beside_accelerator(given)
        plan.accelerator = accelerator
        return
    kind = _device_type(accelerator or "auto")
    plan.nodes = _whole(given, "num_nodes", least=1)
    plan.asked = devices != "auto"
    plan.processes, plan.devices = _count(devices, kind)
    size = plan.processes * plan.nodes
    if placement.launched:
        _check_launched(plan, size, placement)
        size = placement.size
    strategy = create(None if strategy == "auto" else strategy, size=size)
    if size > 1 and not strategy.launches:
        raise ValueError(
            f"Expected a strategy for several processes. Received: strategy={strategy.name!r} for {size} of them. "
            'Use strategy="ddp", or one device.'
        )
    if given["sync_batchnorm"] and hasattr(strategy, "sync_batchnorm"):
        strategy.sync_batchnorm = True
    plan.start_method = strategy.start_method
    plan.options = {
        "strategy": strategy,
        "device": "cpu" if kind == "cpu" else None,
        "mixed_precision": _precision(given["precision"]),
        "seed": given["seed"],
    }


def _check_launched(plan: Plan, size: int, placement: Placement) -> None:
    if plan.asked and size != placement.size:
        raise ValueError(
            f"Expected as many processes as asked for. Received: devices × num_nodes = {size}, and {placement.size} "
            f'processes started by {placement.launcher}. Make them equal, or leave devices at "auto".'
        )


def _refuse_beside_accelerator(given: dict[str, Any]) -> None:
    defaults = {
        "strategy": "auto",
        "devices": "auto",
        "num_nodes": 1,
        "precision": "32",
        "seed": None,
        "sync_batchnorm": False,
    }
    both = {name: given[name] for name, default in defaults.items() if given[name] != default}
    if both:
        raise ValueError(
            f"Expected an Accelerator to decide where and how to run. Received beside it: {both}. Pass these to Accelerator."
        )


def _device_type(accelerator: str) -> str:
    word = {"gpu": "cuda", "tpu": "xla"}.get(accelerator, accelerator)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = found.type if found is not None else "cpu"
    if word == "auto" or accelerator == "gpu" and present in ("cuda", "mps", "xpu"):
        return present
    if word not in ("cpu", present):
        raise ValueError(
            f"Expected a device that is here: cpu{'' if present == 'cpu' else f', {present}'}. Received: accelerator={accelerator!r}. "
            'Use accelerator="auto".'
        )
    return word


def _count(devices: Any, kind: str) -> tuple[int, list[int] | None]:
    """Return how many processes to run on a machine, and on which devices."""
    present = 1 if kind == "cpu" else torch.accelerator.device_count()
    if devices == "auto" or devices is None:
        return (1 if kind == "cpu" else present), None
    if isinstance(devices, str):
        text = devices.strip()
        devices = [int(part) for part in text.split(",") if part.strip()] if "," in text else _number(text, "devices")
    if isinstance(devices, (list, tuple)) and devices and all(isinstance(d, int) for d in devices):
        return len(devices), list(devices)
    if not isinstance(devices, int) or isinstance(devices, bool) or devices == 0 or devices < -1:
        raise ValueError(
            f'Expected a number of devices, a list of indices, or "auto". Received: devices={devices!r}. Use e.g. devices=2.'
        )
    devices = present if devices == -1 else devices
    if kind != "cpu" and devices > present:
        raise ValueError(
            f"Expected at most {present} devices, those that are here. Received: devices={devices}. Use fewer."
        )
    return devices, None


def _precision(precision: Any) -> str:
    word = str(precision if precision is not None else "32-true")
    if word not in _PRECISIONS:
        raise ValueError(
            f"Expected one of {sorted(set(_PRECISIONS.values()))}. Received: precision={precision!r}. Use one of them."
        )
    return _PRECISIONS[word]


# Callbacks and the arguments that stand for them


def _callbacks(given: dict[str, Any]) -> list[Callback]:
    callbacks = _listed(given["callbacks"])
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"Expected callbacks to be Callback objects. Received: {callback!r}. Subclass drivetrain.Callback, and pass objects."
            )
    accumulate, clip = given["accumulate_grad_batches"], given["gradient_clip_val"]
    algorithm, time = given["gradient_clip_algorithm"] or "norm", given["max_time"]
    if accumulate != 1:
        _add(callbacks, GradientAccumulation(accumulate), "accumulate_grad_batches", accumulate, lambda c: c.scheduling)
    if clip is not None and clip != 0:
        _add(callbacks, GradientClipping(clip, algorithm), "gradient_clip_val", clip, lambda c: (c.value, c.algorithm))
    if time is not None:
        _add(callbacks, Timer(_time(time)), "max_time", time, lambda c: c.duration)
    if given["profiler"] is not None:
        profiler = given["profiler"]
        _add(
            callbacks,
            profiler if isinstance(profiler, Callback) else Profiler(profiler),
            "profiler",
            profiler,
            lambda c: vars(c).get("kind"),
        )
    callbacks += _tracking(given["logger"], callbacks)
    for name, kind in (
        ("enable_progress_bar", Progress),
        ("enable_model_summary", ModelSummary),
        ("enable_checkpointing", ModelCheckpoint),
    ):
        present = any(isinstance(c, kind) for c in callbacks)
        if given[name] is False and present:
            raise ValueError(
                f"Expected {name} to agree with the callbacks. Received: {name}=False and a {kind.__name__}. Drop one of them."
            )
        if given[name] is not False and not present:
            callbacks.append(kind())
    return callbacks


def _add(callbacks: list[Callback], made: Callback, name: str, value: Any, key: Any) -> None:
    """Add the callback that an argument stands for; one of the user's own must say the same."""
    present = [c for c in callbacks if isinstance(c, type(made))]
    for callback in present:
        if key(callback) != key(made):
            raise ValueError(
                f"Expected one setting. Received: {name}={value!r} and a {type(made).__name__} with {key(callback)!r}. Keep one of them."
            )
    if not present:
        callbacks.append(made)


def _tracking(logger: Any, callbacks: list[Callback]) -> list[Callback]:
    if isinstance(logger, Tracking):
        return [logger]
    present = any(isinstance(c, Tracking) for c in callbacks)
    if logger is None or logger is True:
        return [] if present else [Tracking()]
    if logger is False or logger == []:
        return []
    if present:
        raise ValueError(
            f"Expected trackers once. Received: logger={logger!r} and a Tracking callback. Keep one of them."
        )
    filter_trackers(logger, logging_dir="")  # unknown words and missing packages are told now
    return [Tracking(logger)]


# How long, how much


def _schedule(given: dict[str, Any]) -> Schedule:
    limits, minimums = [], []
    epochs, steps = given["max_epochs"], given["max_steps"]
    timed = given["max_time"] is not None or any(isinstance(c, Timer) for c in _listed(given["callbacks"]))
    unlimited = epochs is None and steps in (-1, None) and not timed
    epochs = 1000 if unlimited else epochs
    if epochs is not None and epochs != -1:
        limits.append(Duration.parse(epochs, name="max_epochs", unit="ep"))
    if steps is not None and steps != -1:
        limits.append(Duration.parse(steps, name="max_steps", unit="ba"))
    if given["min_epochs"] is not None:
        minimums.append(Duration.parse(given["min_epochs"], name="min_epochs", unit="ep"))
    if given["min_steps"] is not None:
        minimums.append(Duration.parse(given["min_steps"], name="min_steps", unit="ba"))
    every = given["check_val_every_n_epoch"]
    if every is not None and (not isinstance(every, int) or every < 1):
        raise ValueError(f"Expected a whole number ≥ 1 or None. Received: check_val_every_n_epoch={every!r}. Use 1.")
    interval = _interval(given["val_check_interval"], every)
    return Schedule(limits, minimums, val_interval=interval, every_n_epochs=every, unlimited=unlimited)


def _interval(value: Any, every_n_epochs: int | None) -> float | int | Duration:
    if value is None:
        if every_n_epochs is None:
            raise ValueError(
                "Expected a number of batches. Received: check_val_every_n_epoch=None, val_check_interval=None. Set the latter."
            )
        return 1.0
    if (
        isinstance(value, float)
        and 0.0 < value <= 1.0
        or isinstance(value, int)
        and not isinstance(value, bool)
        and value > 0
    ):
        return value
    if isinstance(value, (str, timedelta, dict, Duration)):
        return Duration.parse(value, name="val_check_interval")
    raise ValueError(
        "Expected a fraction of an epoch (0 to 1.0), a number of batches or a duration. "
        f'Received: val_check_interval={value!r}. Use e.g. 0.25, 1000 or "500ba".'
    )


def _limit(given: dict[str, Any], stage: str) -> int | float | None:
    name = f"limit_{'val' if stage == 'validate' else stage}_batches"
    overfit, value = given["overfit_batches"], given[name]
    if overfit and stage in ("train", "validate"):
        name, value = "overfit_batches", overfit
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not whole and not (isinstance(value, float) and 0.0 <= value <= 1.0):
        raise ValueError(
            f"Expected a number of batches or a fraction from 0.0 to 1.0. Received: {name}={value!r}. Use e.g. 10 or 0.1."
        )
    return value


def _with_fast_run(given: dict[str, Any]) -> dict[str, Any]:
    fast = given["fast_dev_run"]
    if not fast:
        return given
    count = 1 if fast is True else _whole(given, "fast_dev_run", least=1)
    return given | {
        "max_epochs": 1, "max_steps": count, "num_sanity_val_steps": 0, "val_check_interval": None, "check_val_every_n_epoch": 1,
        "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1,
        "callbacks": [c for c in _listed(given["callbacks"]) if not isinstance(c, (ModelCheckpoint, EarlyStopping, Tracking))],
        **{f"limit_{stage}_batches": count for stage in ("train", "val", "test", "predict")},
    }  # fmt: skip


def _with_barebones(given: dict[str, Any]) -> dict[str, Any]:
    if not given["barebones"]:
        return given
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    asked = {
        name: given[name]
        for name in (*names, "profiler")
        if given[name] not in (None, False) and not (name == "logger" and given[name] is True)
    }
    if asked:
        raise ValueError(f"Expected nothing optional with barebones=True. Received: {asked}. Drop them, or barebones.")
    return given | dict.fromkeys(names, False) | {"num_sanity_val_steps": 0, "log_every_n_steps": 0}


def _listed(callbacks: Any) -> list[Callback]:
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])


def _time(value: Any) -> Any:
    duration = Duration.parse(value, name="max_time", unit="s")
    if duration.unit != "s":
        raise ValueError(
            f'Expected a time. Received: max_time={value!r}. Use e.g. "2h", or max_epochs and max_steps for other units.'
        )
    return duration


def _whole(given: dict[str, Any], name: str, *, least: int) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"Expected a whole number ≥ {least}. Received: {name}={value!r}. Change it.")
    return value


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f'Expected a number, a list of indices or "auto". Received: {name}={text!r}. Use e.g. 2.'
        ) from None
