"""Log the learning rates of all optimizers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Iterator

from .base import Callback
from .checks import check_choice


class LearningRateMonitor(Callback):
    """Log learning rates under names like "lr-AdamW", "lr-AdamW/pg1" (parameter groups), "lr-AdamW-1" (a second one).

    A scheduler's ``name`` replaces "lr-AdamW", a group's "name" its "pg1". ``logging_interval`` "step" logs what each
    row's step is done with, "epoch" what each epoch begins with; None goes by each scheduler's own interval (without
    one: by step). ``log_momentum`` and ``log_weight_decay`` add "…-momentum" and "…-weight_decay". ``lrs`` maps names
    to all values logged.
    """

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        *,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        check_choice("logging_interval", logging_interval, (None, "step", "epoch"))
        self.logging_interval, self.log_momentum = logging_interval, log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.lrs: dict[str, list[float]] = {}
        self._by_step: list[tuple[str, dict[str, Any]]] = []
        self._by_epoch: list[tuple[str, dict[str, Any]]] = []
        self._sampled = -1  # the optimizer step whose values were taken last
        self._batches = math.inf  # in this epoch

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.lrs, named = {}, list(self._named_groups(trainer))
        self._by_step = [(name, group) for name, group, interval in named if interval == "step"]
        self._by_epoch = [(name, group) for name, group, interval in named if interval == "epoch"]
        self._sampled, self._batches = trainer.global_step, trainer.num_training_batches

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._batches = trainer.num_training_batches
        self._log(trainer, self._by_epoch)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step + 1, trainer.log_every_n_steps
        row_follows = every and (step % every == 0 or batch_idx + 1 >= self._batches)
        if row_follows and step != self._sampled:
            self._sampled = step  # the rate that this step is done with: a scheduler changes it afterwards
            self._log(trainer, self._by_step)

    def _log(self, trainer: Any, groups: list[tuple[str, dict[str, Any]]]) -> None:
        values: dict[str, float] = {}
        for name, group in groups:
            values[name] = float(group["lr"])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                values[f"{name}-momentum"] = float(momentum)
            if self.log_weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        for name, value in values.items():
            self.lrs.setdefault(name, []).append(value)
        if values:
            trainer.log_dict(values)

    def _named_groups(self, trainer: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield (name, group, "step" or "epoch") for every parameter group."""
        configs = {id(_optimizer_of(config.scheduler)): config for config in trainer.lr_scheduler_configs}
        seen: Counter[str] = Counter()
        for optimizer in map(_inner, trainer.optimizers):
            config = configs.get(id(optimizer))
            base = (config and config.name) or f"lr-{type(optimizer).__name__}"
            name = self.log_key_prefix + base + (f"-{seen[base]}" if seen[base] else "")
            seen[base] += 1
            interval = self.logging_interval or (config.interval if config else "step")
            for index, group in enumerate(optimizer.param_groups):
                several = len(optimizer.param_groups) > 1
                suffix = f"/{group.get('name', f'pg{index + 1}')}" if several or "name" in group else ""
                yield name + suffix, group, interval


def _inner(optimizer: Any) -> Any:
    """Return the torch optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _optimizer_of(scheduler: Any) -> Any:
    return _inner(getattr(getattr(scheduler, "scheduler", scheduler), "optimizer", None))
