"""Keep the time of each stage, and stop training when its time is over."""

from __future__ import annotations

import time
from typing import Any

from .base import AFTER_MODULE, Callback
from .checks import check_choice
from .durations import Deadline, DurationLike, seconds

_STAGES = ("train", "validate", "test", "predict")


class Timer(Callback):
    """Stop training after ``duration``, and keep the time of each stage.

    A duration is a number of seconds, "2h", "DD:HH:MM:SS", a timedelta or a dict of its arguments; None never stops.
    The time is that of the whole run, before and after an interruption, with the validations in it. ``interval`` says
    where it is looked at: after each optimizer step ("step") or at the end of each epoch ("epoch"). All ranks stop at
    the same step, by rank 0's clock. Raises TypeError or ValueError for what is no length of time.
    """

    priority = AFTER_MODULE

    def __init__(self, duration: DurationLike | None = None, interval: str = "step", *, verbose: bool = True) -> None:
        check_choice("interval", interval, ("step", "epoch"))
        self.duration = None if duration is None else seconds(duration, name="duration")
        self.interval, self.verbose = interval, verbose
        self._deadline = Deadline()
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._over = False
        self._clock: Any = None  # seconds of the run: those before an interruption count

    def start_time(self, stage: str = "train") -> float | None:
        """Return the clock (``time.monotonic``) at the start of a stage in this process, None before it."""
        return self._begun.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the clock (``time.monotonic``) at the end of a stage in this process, None before it."""
        return self._ended.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that a stage has taken: "train" over all interruptions, the others in this process."""
        if _known(stage) == "train" and self._clock is not None:
            return self._clock()
        if stage not in self._begun:
            return 0.0
        return self._ended.get(stage, time.monotonic()) - self._begun[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds until training is stopped, None without a duration."""
        return None if self.duration is None else self.duration - self.time_elapsed(stage)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._clock, self._over, self._deadline = trainer.progress.seconds, False, Deadline()
        self._begin("train")
        self._stop_if_over(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.duration is not None and self.interval == "step":
            self._stop_if_over(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._stop_if_over(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        elapsed = self._clock()
        self._clock = lambda: elapsed
        self._ended["train"] = time.monotonic()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._ended["validate"] = time.monotonic()

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._ended["test"] = time.monotonic()

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self._ended["predict"] = time.monotonic()

    def _begin(self, stage: str) -> None:
        self._begun[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _stop_if_over(self, trainer: Any) -> None:
        if self.duration is None or self._over:
            return
        self._over = self._deadline.passed(self.duration, now=self._clock, world=trainer.accelerator.world)
        if self._over:
            trainer.should_stop = True
            trainer.stop_reason = f"the time of {self.duration:g} s is over"
            if self.verbose:
                trainer.print(f"Training stops at step {trainer.global_step}: {trainer.stop_reason}.")


def _known(stage: str) -> str:
    check_choice("stage", stage, _STAGES)
    return stage
