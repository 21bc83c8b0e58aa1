"""Gradient accumulation: how many micro-batches make one optimizer step, fixed or by epoch."""

from __future__ import annotations

from typing import Any, Mapping

from .base import Callback


class GradientAccumulation(Callback):
    """Let an optimizer step follow every ``scheduling`` micro-batches: a number, or ``{epoch: number}``.

    In ``{0: 1, 5: 4}`` an entry holds from its epoch (counted from 0) on; before the first entry the number is 1.
    Raises TypeError or ValueError for numbers below 1 and epochs below 0, and at the start of a fit with manual
    optimization.
    """

    def __init__(self, scheduling: int | Mapping[int, int]) -> None:
        schedule = {0: scheduling} if not isinstance(scheduling, Mapping) else dict(scheduling)
        valid = all(_whole(epoch, 0) and _whole(steps, 1) for epoch, steps in schedule.items())
        if not schedule or not valid:
            raise (ValueError if isinstance(scheduling, (int, float, Mapping)) else TypeError)(
                f"Expected a whole number ≥ 1, or a dict of such by epoch (≥ 0). Received: scheduling={scheduling!r}. "
                "Write GradientAccumulation(4) or GradientAccumulation({0: 1, 5: 4})."
            )
        self.scheduling: dict[int, int] = dict(sorted(schedule.items()))

    def steps(self, epoch: int) -> int:
        """Return the number of micro-batches per optimizer step in ``epoch``."""
        return next((steps for start, steps in reversed(self.scheduling.items()) if start <= epoch), 1)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if not getattr(module, "automatic_optimization", True) and max(self.scheduling.values()) > 1:
            raise ValueError(
                f"Expected no gradient accumulation with manual optimization. Received: scheduling={self.scheduling}. "
                "Step the optimizer every few batches in training_step instead."
            )
        self._set(trainer)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._set(trainer)  # a resumed run may be in the middle of a later epoch

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._set(trainer)

    def _set(self, trainer: Any) -> None:
        trainer.accelerator.gradient_accumulation_steps = self.steps(trainer.current_epoch)


GradientAccumulationScheduler = GradientAccumulation


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
