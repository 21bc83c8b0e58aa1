"""From what ``configure_optimizers`` returns to optimizers and schedulers; optimizers with counted manual steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any, Callable, Mapping

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


@dataclass
class LRSchedulerConfig:
    """When a scheduler steps: every ``frequency``-th "step" or "epoch"; with the metric ``monitor`` if it needs one."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


class ManualOptimizer:
    """What ``self.optimizers()`` returns in manual optimization: an optimizer whose steps are counted and announced."""

    def __init__(self, optimizer: Any, step: Callable[..., Any]) -> None:
        self.optimizer = optimizer
        self._step = step

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while a copy is made, it is not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step; the hooks ``on_before_optimizer_step`` run first, so clipping applies."""
        return self._step(self.optimizer, closure, **kwargs)


def configured(module: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and scheduler configurations of a module; errors are those of ``parse``."""
    try:
        returned = module.configure_optimizers()
    except ValueError as error:
        if "empty parameter list" not in str(error):  # torch's word, which does not say whose or what to do
            raise
        raise ValueError(
            f"Expected an optimizer over parameters. Received: none, in {type(module).__name__}.configure_optimizers. "
            "Make the layers in __init__ or configure_model, and pass self.parameters()."
        ) from error
    optimizers, schedulers = parse(returned)
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            warnings.warn(
                f"Expected an optimizer over parameters of {type(module).__name__}. "
                f"Received: {type(optimizer).__name__} over none of them, so that training changes nothing in it. "
                "Pass self.parameters(), of the module that is trained.",
                stacklevel=2,
            )
    return optimizers, schedulers


def parse(returned: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and scheduler configurations in what ``configure_optimizers`` returned.

    Accepts None, an optimizer, a list of optimizers, a pair of lists, a dict with "optimizer" and "lr_scheduler", or a
    list of such dicts. Raises TypeError or ValueError saying what it found.
    """
    if returned is None:
        return [], []
    if isinstance(returned, Mapping):
        returned = [returned]
    if isinstance(returned, (list, tuple)) and returned and all(isinstance(entry, Mapping) for entry in returned):
        optimizers, schedulers = [], []
        for entry in returned:
            _check_keys(entry)
            optimizers.append(entry["optimizer"])
            if entry.get("lr_scheduler") is not None:
                schedulers.append({"monitor": entry.get("monitor"), **_as_dict(entry["lr_scheduler"])})
    elif isinstance(returned, (list, tuple)) and len(returned) == 2 and isinstance(returned[0], (list, tuple)):
        optimizers, schedulers = list(returned[0]), list(returned[1])
    elif isinstance(returned, (list, tuple)):
        optimizers, schedulers = list(returned), []
    else:
        optimizers, schedulers = [returned], []
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    return optimizers, [_config(scheduler) for scheduler in schedulers]


def _as_dict(scheduler: Any) -> Mapping[str, Any]:
    return scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


def _config(given: Any) -> LRSchedulerConfig:
    if isinstance(given, LRSchedulerConfig):
        return given
    given = {key: value for key, value in _as_dict(given).items() if value is not None}
    known = [field.name for field in fields(LRSchedulerConfig)]
    unknown = sorted(set(given) - set(known))
    if unknown or "scheduler" not in given:
        raise ValueError(
            f"Expected a scheduler's dict to hold {known}. Received: {sorted(given)}. Put the object under 'scheduler'."
        )
    config = LRSchedulerConfig(**given)
    if not (isinstance(config.scheduler, (LRScheduler, ReduceLROnPlateau)) or hasattr(config.scheduler, "step")):
        raise TypeError(
            f"Expected a learning-rate scheduler. Received: {config.scheduler!r}. Use torch.optim.lr_scheduler."
        )
    if config.interval not in ("step", "epoch"):
        raise ValueError(
            f"Expected a scheduler's interval to be step or epoch. Received: interval={config.interval!r}. Use one."
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ValueError(
            f"Expected a scheduler's frequency ≥ 1. Received: frequency={config.frequency!r}. Use a whole number."
        )
    config.reduce_on_plateau = config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau)
    if config.reduce_on_plateau and config.monitor is None:
        raise ValueError(
            "Expected a ReduceLROnPlateau scheduler to come with the metric it watches. Received: monitor=None. "
            'Return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}.'
        )
    return config


def _check_keys(entry: Mapping[str, Any]) -> None:
    unknown = sorted(set(entry) - {"optimizer", "lr_scheduler", "monitor"})
    if unknown or "optimizer" not in entry:
        raise ValueError(
            "Expected configure_optimizers to return the keys optimizer, lr_scheduler, monitor. "
            f"Received: {sorted(entry)}. Put the optimizer under 'optimizer'."
        )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Expected configure_optimizers to return torch optimizers. Received: {type(optimizer).__name__}. "
            "Return an optimizer, a list of them, or a dict with 'optimizer'."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(
            "Expected an optimizer over parameters. Received: an optimizer with none. Pass self.parameters() to it."
        )
