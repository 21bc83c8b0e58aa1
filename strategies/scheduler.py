"""The prepared learning-rate scheduler: it steps when its optimizer did."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from . import subgroup
from . import world as worlds
from .gradients import GradientState

logger = logging.getLogger(__name__)


class AcceleratedScheduler:
    """A scheduler in step with its optimizers.

    With `step_with_optimizer` (Accelerate's way) a call steps it only at the end of an accumulation window and only
    when no optimizer step was skipped, and then once per process, because a schedule counted in one process's batches
    runs through them so many times as fast (processes that share the work on the same samples count as one); with
    `split_batches` once, as the global batch is then the loader's own. Without, it steps exactly when called.
    Attributes that are not found here are the wrapped scheduler's.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        self._told = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler where it is due (see the class)."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            self._count_without_step()
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self._repeats()):
                self._step_within_total(*args, **kwargs)

    def _count_without_step(self) -> None:
        # torch compares its counter with the optimizer's to warn of a wrong order.
        if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
            self.scheduler._step_count += 1

    def _repeats(self) -> int:
        size = 1 if self.split_batches else subgroup.data().size
        if size > 1 and not self._told:
            self._told = True
            if worlds.current().rank == 0:
                logger.warning(
                    "A prepared scheduler steps %d times per optimizer step, once for each process, as in Accelerate: "
                    "a schedule counted in the batches of one process then ends with the data. "
                    "Accelerator(step_scheduler_with_optimizer=False) steps it exactly when it is called.",
                    size,
                )
        return size

    def _step_within_total(self, *args: Any, **kwargs: Any) -> None:
        total = getattr(self.scheduler, "total_steps", None)
        if total is None or self.scheduler._step_count <= total:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """Returns the rates set last, one for each parameter group."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        """Returns the rates that the schedule gives now."""
        return list(self.scheduler.get_lr())

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Prints the rates, where the scheduler can."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: while the object is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def unwrap_scheduler(scheduler: Any) -> Any:
    """Returns the user's scheduler inside a prepared one."""
    while isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    return scheduler
