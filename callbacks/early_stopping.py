"""Stop training when a metric has stopped to improve."""

from __future__ import annotations

import math
from typing import Any

from .base import AFTER_MODULE, Callback
from .checks import check_number, check_whole
from .monitored import Monitored, epoch_over, validates


class EarlyStopping(Callback):
    """Stop when ``monitor`` has not improved by more than ``min_delta`` in ``patience`` checks in a row.

    Checked once for every new value: after each validation, or at the end of an epoch where the metric comes from
    training or the validation from the epoch's end; ``check_on_train_epoch_end`` True or False allows only the one or
    the other. Training also stops when the metric is no finite number (``check_finite``), is better than
    ``stopping_threshold`` or worse than ``divergence_threshold``. ``mode`` "min" or "max" says what is better.

    ``best_score``, ``wait_count`` and ``stopped_epoch`` (-1: not stopped) tell where it stands, and go on after an
    interruption: a run that it stopped stays stopped, unless it goes on with another ``patience``. Raises ValueError
    naming the logged metrics where ``monitor`` is none of them (``strict=False``:
    warns).
    """

    priority = AFTER_MODULE  # an epoch's means are known only then

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        *,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        self._monitored = Monitored(monitor, mode, owner=type(self).__name__)
        check_whole("patience", patience, least=0)
        check_number("min_delta", min_delta)
        check_number("stopping_threshold", stopping_threshold)
        check_number("divergence_threshold", divergence_threshold)
        self.monitor, self.mode, self.min_delta, self.patience = monitor, mode, abs(min_delta), patience
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._begin()

    def _begin(self) -> None:
        self.best_score = self._monitored.worst
        self.wait_count, self.stopped_epoch, self._monitored.used = 0, -1, -1
        self._reason = ""  # why to stop; kept with the rest: a run that is over stays over
        self._fitting = self._validated = False

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}({self.monitor},{self.mode})"

    def state_dict(self) -> dict[str, Any]:
        names = ("best_score", "wait_count", "stopped_epoch", "patience")
        own = {"used": self._monitored.used, "reason": self._reason}
        return {name: getattr(self, name) for name in names} | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.wait_count = state_dict["best_score"], state_dict["wait_count"]
        self.stopped_epoch, self._monitored.used = state_dict["stopped_epoch"], state_dict["used"]
        self._reason = state_dict["reason"] if state_dict["patience"] == self.patience else ""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._begin()  # a second fit is another run; one that goes on gets its state after this

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._fitting, self._validated = True, False
        if self._reason:
            trainer.should_stop, trainer.stop_reason = True, self._reason

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not self._fitting:
            return
        self._validated = True
        only_here = self.check_on_train_epoch_end is False
        if only_here or (self.check_on_train_epoch_end is None and not epoch_over(trainer)):
            self._check(trainer, complete=only_here)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.check_on_train_epoch_end is not False:
            self._check(trainer, complete=self._validated or not validates(trainer))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._fitting = False

    def _check(self, trainer: Any, *, complete: bool) -> None:
        """Look at a new value; ``complete``: all that an epoch logs has been logged, what is missing stays missing."""
        if self._monitored.missing(trainer):
            if complete and self.strict:
                raise ValueError(self._monitored.absent(trainer))
            if complete:
                self._monitored.warn_once(self._monitored.absent(trainer))
        elif self._monitored.fresh(trainer):
            reason = self._judge(self._monitored.take(trainer))
            if reason:
                self.stopped_epoch, self._reason = trainer.current_epoch, reason
                trainer.should_stop, trainer.stop_reason = True, reason
            if self.verbose:
                trainer.print(reason or f"{self.monitor}: best {self.best_score:.6g}, {self.wait_count} checks ago.")

    def _judge(self, value: float) -> str:
        """Count a value and return why to stop, "" to go on."""
        better, name = self._monitored.better, f"{self.monitor}={value:.6g}"
        if self.check_finite and not math.isfinite(value):
            return f"{name} is not a finite number (best: {self.best_score:.6g})"
        if self.stopping_threshold is not None and better(value, self.stopping_threshold):
            return f"{name} is better than the stopping threshold {self.stopping_threshold:g}"
        if self.divergence_threshold is not None and better(self.divergence_threshold, value):
            return f"{name} is worse than the divergence threshold {self.divergence_threshold:g}"
        if better(value + self.min_delta if self.mode == "min" else value - self.min_delta, self.best_score):
            self.best_score, self.wait_count = value, 0
            return ""
        self.wait_count += 1
        if self.wait_count < self.patience:
            return ""
        return f"{self.monitor} did not improve in {self.wait_count} checks (best: {self.best_score:.6g})"
