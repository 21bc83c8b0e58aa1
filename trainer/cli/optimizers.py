"""The optimizer and scheduler of a config file, for a module that has no ``configure_optimizers`` of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from jsonargparse import Namespace

from ..hooks import overrides
from ..module import TrainModule
from .classes import import_class
from .sources import UsageError


def provide_optimizer(module: TrainModule, optimizer: Any, scheduler: Any, schedule: Any, *, required: bool) -> None:
    """Let ``module.configure_optimizers`` build what the config says.

    ``optimizer`` and ``scheduler`` have class_path and init_args, ``schedule`` the keys of lr_scheduler_config. Raises
    UsageError where both the config and the module say which optimizer to use, and where ``required`` and neither does.
    """
    name = type(module).__name__
    own = overrides(module, "configure_optimizers", TrainModule)
    if own and (optimizer or scheduler):
        key, path = ("optimizer", optimizer.class_path) if optimizer else ("lr_scheduler", scheduler.class_path)
        raise UsageError(
            f"Expected one place that makes the optimizer. Received: {key}={path} and {name}.configure_optimizers. "
            "Remove one of them."
        )
    if scheduler and not optimizer:
        raise UsageError(
            f"Expected an optimizer to schedule. Received: lr_scheduler={scheduler.class_path} and no optimizer. "
            "Add optimizer, for example --optimizer torch.optim.AdamW."
        )
    if own or not (optimizer or required):
        return
    if not optimizer:
        raise UsageError(
            f"Expected an optimizer. Received: {name} without configure_optimizers, and no optimizer in the config. "
            "Write one, or add for example --optimizer torch.optim.AdamW."
        )
    configure = partial(_configure, module, optimizer, scheduler, dict(vars(schedule)))
    module.configure_optimizers = configure  # type: ignore[method-assign]


def _configure(module: TrainModule, optimizer: Any, scheduler: Any, schedule: dict[str, Any]) -> Any:
    built = _build(optimizer, module.parameters())
    if not scheduler:
        return built
    settings = {key: value for key, value in schedule.items() if value is not None}
    return {"optimizer": built, "lr_scheduler": {"scheduler": _build(scheduler, built), **settings}}


def _build(config: Any, first: Any) -> Any:
    return import_class(config.class_path, "config")(first, **vars(config.get("init_args") or Namespace()))
