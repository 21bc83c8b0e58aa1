"""From the Trainer's arguments to what they stand for: an Accelerator, callbacks, limits. Nothing is started here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..callbacks.base import Callback
from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.timer import Timer
from ..callbacks.tracking import Tracking
from ..strategies import create, environment
from ..strategies.choice import engine_of
from ..strategies.environment import Placement
from ..strategies.precision import canonical_name
from .limits import limit_of, schedule_of, whole
from .schedule import Schedule
from .shorthands import callbacks_of, listed
from .switches import check_switches


@dataclass
class Plan:
    """What a Trainer's arguments come to."""

    accelerator: Any = None  # a ready Accelerator, or None: make one of `options`
    options: dict[str, Any] = field(default_factory=dict)
    shards: bool = True  # loaders are shared out among the ranks
    processes: int = 1
    nodes: int = 1
    devices: list[str] | None = None  # those to use, by local rank ("cuda:1"); None for the first ones
    start_method: str | None = None
    asked: bool = False  # somebody named a number of devices
    unnamed: bool = False  # nobody named a strategy
    callbacks: list[Callback] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    limits: dict[str, int | float | None] = field(default_factory=dict)
    sanity_batches: int = 2
    log_every_n_steps: int = 50


def resolve(given: dict[str, Any], placement: Placement) -> Plan:
    """Return the plan that a Trainer's arguments mean where ``placement`` is this process's.

    Raises ValueError or TypeError for arguments that make no sense.
    """
    check_switches(given)
    given = _with_fast_run(_with_barebones(given))
    plan = Plan(shards=given["use_distributed_sampler"])
    _resolve_devices(plan, given, placement)
    plan.callbacks = callbacks_of(given)
    plan.schedule = schedule_of(given, timed=_timed(plan.callbacks))
    plan.limits = {stage: limit_of(given, stage) for stage in ("train", "validate", "test", "predict")}
    plan.sanity_batches = whole(given, "num_sanity_val_steps", least=-1)
    plan.log_every_n_steps = whole(given, "log_every_n_steps", least=0)
    return plan


def _timed(callbacks: list[Callback]) -> bool:
    return any(isinstance(callback, Timer) and callback.duration is not None for callback in callbacks)


# Where it runs


def _resolve_devices(plan: Plan, given: dict[str, Any], placement: Placement) -> None:
    accelerator, strategy, devices = given["accelerator"], given["strategy"], given["devices"]
    if accelerator is not None and not isinstance(accelerator, str):
        _refuse_beside_accelerator(given)
        plan.accelerator = accelerator
        return
    own = engine_of(accelerator)
    kind = "cpu" if own else _device_type(accelerator or "auto")
    plan.nodes = whole(given, "num_nodes", least=1)
    plan.asked = devices not in ("auto", None)
    plan.processes, indices = _count(devices, kind)
    plan.devices = [f"{kind}:{index}" for index in indices] if indices and kind != "cpu" else None
    size = plan.processes * plan.nodes
    if placement.launched:
        _check_launched(plan, size, placement)
        size = placement.size
    elif plan.asked and size > 1 and environment.integer("NUM_PROCESSES") == 1:
        raise ValueError(
            f"Expected as many processes as were launched. Received: devices × num_nodes = {size}, and num_processes=1 "
            "of the launch. Make them equal, or leave the number to one of both."
        )
    strategy = create(own if own and strategy in (None, "auto") else strategy, size=size, plugins=[_deepspeed(given)])
    if size > 1 and not strategy.launches:
        raise ValueError(
            f"Expected a strategy for several processes. Received: strategy={strategy.name!r} for {size} of them. "
            'Use strategy="ddp", or one device.'
        )
    if given["sync_batchnorm"]:
        _sync_batchnorm(strategy, size)
    plan.start_method = strategy.start_method
    plan.unnamed = given["strategy"] in (None, "auto") and given["deepspeed"] is None
    plan.options = {
        "strategy": strategy,
        "device": _device(accelerator, kind, strategy),
        # the default leaves the word to a launch
        "mixed_precision": None if given["precision"] in ("32", None) else canonical_name(given["precision"]),
        "seed": given["seed"],
    }


def _sync_batchnorm(strategy: Any, size: int) -> None:
    """Have batches normalized over all ranks; one alone has nothing to do for that."""
    if hasattr(strategy, "sync_batchnorm"):
        strategy.sync_batchnorm = True
    elif size > 1:
        raise ValueError(
            f"Expected a strategy that normalizes over the batches of all ranks. Received: sync_batchnorm=True, "
            f'strategy={strategy.name!r}. Use strategy="ddp", or SyncBatchNorm in the model.'
        )


def _deepspeed(given: dict[str, Any]) -> Any:
    """Return the options for which ``deepspeed=`` stands, once all that is said besides agrees with them."""
    if given["deepspeed"] is None:
        return None
    from .resolution import deepspeed_options  # here, since most runs need none of it

    steps, clip = given["accumulate_grad_batches"], given["gradient_clip_val"]
    return deepspeed_options(
        given["deepspeed"], {},
        accumulate_grad_batches=None if steps == 1 else steps,
        gradient_clip_val=clip if clip and given["gradient_clip_algorithm"] != "value" else None,
        precision=None if given["precision"] in ("32", None) else given["precision"],
    )  # fmt: skip


def _device(accelerator: str | None, kind: str, strategy: Any) -> str | None:
    """Return the device that the Accelerator is told, where it does not choose it."""
    if engine_of(accelerator) and strategy.device_type is None:
        raise ValueError(
            f"Expected strategy={engine_of(accelerator)!r} for accelerator={accelerator!r}. Received: "
            f"strategy={strategy.name!r}. Leave it out."
        )
    theirs = strategy.device_type is not None and accelerator != "cpu"
    return "cpu" if kind == "cpu" and not theirs else None


def _check_launched(plan: Plan, size: int, placement: Placement) -> None:
    if plan.asked and size != placement.size:
        raise ValueError(
            f"Expected as many processes as asked for. Received: devices × num_nodes = {size}, and {placement.size} "
            f'processes started by {placement.launcher}. Make them equal, or leave devices at "auto".'
        )


def _refuse_beside_accelerator(given: dict[str, Any]) -> None:
    defaults = {
        "strategy": "auto",
        "deepspeed": None,
        "devices": "auto",
        "num_nodes": 1,
        "precision": "32",
        "seed": None,
        "sync_batchnorm": False,
    }
    both = {name: given[name] for name, default in defaults.items() if given[name] != default}
    if both:
        raise ValueError(
            f"Expected an Accelerator to decide where and how to run. Received beside it: {both}. "
            "Pass these to Accelerator."
        )


def _device_type(accelerator: str) -> str:
    word = {"gpu": "cuda", "tpu": "xla"}.get(accelerator, accelerator)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = found.type if found is not None else "cpu"
    if word == "auto" or accelerator == "gpu" and present in ("cuda", "mps", "xpu"):
        return present
    if word not in ("cpu", present):
        raise ValueError(
            f"Expected a device that is here: cpu{'' if present == 'cpu' else f', {present}'}. "
            f'Received: accelerator={accelerator!r}. Use accelerator="auto".'
        )
    return word


def _count(devices: Any, kind: str) -> tuple[int, list[int] | None]:
    """Return how many processes to run on a machine, and on which devices."""
    present = 1 if kind == "cpu" else torch.accelerator.device_count()
    if devices == "auto" or devices is None:
        return (1 if kind == "cpu" else present), None
    if isinstance(devices, str):
        text = devices.strip()
        devices = [int(part) for part in text.split(",") if part.strip()] if "," in text else _number(text)
    if isinstance(devices, (list, tuple)) and devices and all(isinstance(d, int) for d in devices):
        devices = list(devices)
        _check_indices(devices, kind, present)
        return len(devices), devices
    if not isinstance(devices, int) or isinstance(devices, bool) or devices == 0 or devices < -1:
        raise ValueError(
            f'Expected a number of devices, a list of indices, or "auto". Received: devices={devices!r}. '
            "Use e.g. devices=2."
        )
    devices = present if devices == -1 else devices
    if kind != "cpu" and devices > present:
        raise ValueError(
            f"Expected at most {present} devices, those that are here. Received: devices={devices}. Use fewer."
        )
    return devices, None


def _check_indices(devices: list[int], kind: str, present: int) -> None:
    if kind != "cpu" and (len(set(devices)) < len(devices) or not all(0 <= index < present for index in devices)):
        raise ValueError(
            f"Expected different devices that are here, of 0 to {present - 1}. Received: devices={devices}. "
            "Name each once."
        )


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f'Expected a number, a list of indices or "auto". Received: devices={text!r}. Use e.g. 2.'
        ) from None


# Arguments that set others


def _with_fast_run(given: dict[str, Any]) -> dict[str, Any]:
    fast = given["fast_dev_run"]
    if not fast:
        return given
    count = 1 if fast is True else whole(given, "fast_dev_run", least=1)
    left_out = (ModelCheckpoint, EarlyStopping, Tracking)
    return given | {
        "max_epochs": 1, "max_steps": count, "min_epochs": None, "min_steps": None, "num_sanity_val_steps": 0,
        "val_check_interval": None, "check_val_every_n_epoch": 1,
        "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1,
        "callbacks": [c for c in listed(given["callbacks"]) if not isinstance(c, left_out)],
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
