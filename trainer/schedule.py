"""When a run ends and when it validates: a pure reading of its counters."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Callable

from ..callbacks.durations import Duration
from .progress import Progress


@dataclass
class Schedule:
    """Limits of a fit and its validation interval; ``num_batches`` is known once the loader is (math.inf if never).

    ``val_interval`` is a fraction of an epoch (float), a number of batches (int) or a duration; ``every_n_epochs=None``
    counts the batches of ``val_interval`` over epochs.
    """

    limits: list[Duration] = field(default_factory=list)
    minimums: list[Duration] = field(default_factory=list)
    val_interval: float | int | Duration = 1.0
    every_n_epochs: int | None = 1
    unlimited: bool = False  # nobody set a limit
    num_batches: float = math.inf
    validates: bool = False
    _every: int | None = field(default=None, init=False, repr=False)  # batches between validations, None: at the end

    def finished(self, progress: Progress, *, wish: bool = False) -> bool:
        """Tell whether a limit is reached, or ``wish`` (to stop early) can be granted."""
        for limit in self.limits:
            if progress.reached(limit):
                return True
        return wish and all(progress.reached(minimum) for minimum in self.minimums)

    def reached(self, progress: Progress) -> str:
        """Say which limits are reached."""
        return ", ".join(f"the limit {limit}" for limit in self.limits if progress.reached(limit)) or "its end"

    def validation_due(self, progress: Progress, *, last: bool) -> bool:
        """Tell whether a validation follows the batch just done; ``last``: it ended the epoch."""
        if not self.validates:
            return False
        if isinstance(self.val_interval, Duration) and self.val_interval.unit != "ep":
            return self.intervals(progress) > progress.mark
        if self.every_n_epochs is None:
            return self._every is not None and progress.batches % self._every == 0
        if (progress.epoch + 1) % self.every_n_epochs:
            return False
        return last if self._every is None else progress.batch % self._every == 0

    @property
    def by_clock(self) -> bool:
        """Whether time decides when to validate, which differs between ranks."""
        return isinstance(self.val_interval, Duration) and self.val_interval.unit == "s"

    def intervals(self, progress: Progress) -> int:
        """Return how many validation intervals have passed, where the interval is a duration."""
        if not isinstance(self.val_interval, Duration) or self.val_interval.unit == "ep":
            return 0
        return int(progress.value(self.val_interval.unit) // self.val_interval.value)

    def set_batches(self, number: float) -> None:
        """Take the number of batches of an epoch and check the validation interval against it."""
        self.num_batches = number
        self._every = None
        interval = self.val_interval
        if isinstance(interval, Duration):
            self.every_n_epochs = int(interval.value) if interval.unit == "ep" else self.every_n_epochs
        elif isinstance(interval, float):
            if interval < 1.0 and math.isinf(number):
                raise ValueError(
                    f"Expected a number of batches or a duration between validations of a loader without a length. "
                    f'Received: val_check_interval={interval}. Use e.g. val_check_interval=1000 or "30min".'
                )
            self._every = max(1, int(number * interval)) if interval < 1.0 else None
        else:
            self._every = interval
            if self.every_n_epochs is not None and interval > number and self.validates:
                raise ValueError(
                    f"Expected at most {number} batches between validations, the length of an epoch. "
                    f"Received: val_check_interval={interval}. Use less, or check_val_every_n_epoch=None to count over "
                    "epochs."
                )

    def warn_without_limit(self) -> None:
        """Say how long the run takes where nobody said it."""
        if self.unlimited:
            warnings.warn(
                "Expected max_epochs, max_steps or max_time. Received: none. Training goes on for 1000 epochs; "
                "max_epochs=-1 trains until something stops it.",
                stacklevel=2,
            )

    def total_steps(
        self, accumulation: Callable[[int], int], *, global_batch: int | None = None, samples: int | None = None
    ) -> float:
        """Return how many optimizer steps the run takes; math.inf where nothing limits it.

        ``accumulation`` gives the micro-batches per step in an epoch; ``global_batch`` and ``samples``, where they are
        known, are the samples in a batch of all ranks and in an epoch. A limit in time says nothing of steps.
        """
        totals = [math.inf]
        for limit in self.limits:
            if limit.unit == "ba":
                totals.append(limit.value)
            elif limit.unit == "ep" and not math.isinf(self.num_batches):
                epochs = range(math.ceil(limit.value))
                totals.append(sum(math.ceil(self.num_batches / accumulation(epoch)) for epoch in epochs))
            elif limit.unit == "sa" and global_batch:
                totals.append(self._steps_of_samples(limit.value, accumulation, global_batch, samples))
        return min(totals)

    def _steps_of_samples(
        self, wanted: float, accumulation: Callable[[int], int], global_batch: int, samples: int | None
    ) -> int:
        """Count steps until so many samples are seen; a run ends where a window does."""
        steps, epoch = 0, 0
        in_epoch = math.inf if math.isinf(self.num_batches) else self.num_batches * global_batch
        in_epoch = in_epoch if samples is None else min(in_epoch, samples)
        while wanted > in_epoch:
            steps += math.ceil(self.num_batches / accumulation(epoch))
            wanted, epoch = wanted - in_epoch, epoch + 1
        return steps + math.ceil(min(math.ceil(wanted / global_batch), self.num_batches) / accumulation(epoch))
