"""A logged metric that a decision rests on: which way is better, whether it is new, what to say when it is missing."""

from __future__ import annotations

import difflib
import math
import operator
import warnings
from typing import Any, Callable

from .checks import check_choice


class Monitored:
    """The metric ``name`` as one callback (``owner``, for messages) follows it; every value is acted on once.

    ``used`` is the ``global_step`` of the value that was taken last (-1: none yet) and belongs into the owner's
    state. Values are reduced over ranks before they are seen here, so decisions are the same on every rank.
    """

    def __init__(self, name: str, mode: str, *, owner: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Expected the name of a logged metric. Received: {owner}(monitor={name!r}). "
                'Name what self.log is given, e.g. monitor="val_loss".'
            )
        check_choice("mode", mode, ("min", "max"))
        self.name, self.mode, self.owner = name, mode, owner
        self.better: Callable[[float, float], bool] = operator.lt if mode == "min" else operator.gt
        self.worst = math.inf if mode == "min" else -math.inf
        self.used = -1
        self._warned: set[str] = set()

    def rank(self, value: float) -> float:
        """Return a number that is smaller for better values; "not a number" is the worst of all."""
        return math.inf if math.isnan(value) else value if self.mode == "min" else -value

    def missing(self, trainer: Any) -> bool:
        """Tell whether the metric has never been logged in this run."""
        return self.name not in trainer.callback_metrics

    def fresh(self, trainer: Any) -> bool:
        """Tell whether the metric was logged since its value was taken last."""
        return trainer.metric_steps.get(self.name, -1) > self.used

    def take(self, trainer: Any) -> float:
        """Return the value and count it as used."""
        self.used = trainer.metric_steps.get(self.name, self.used)
        return float(trainer.callback_metrics[self.name])

    def absent(self, trainer: Any) -> str:
        """Return the message for a metric that was not logged: what was, and the nearest name."""
        logged = sorted(trainer.callback_metrics)
        nearest = difflib.get_close_matches(self.name, logged, n=1, cutoff=0.5)
        advice = f"Did you mean {nearest[0]!r}?" if nearest else f"Log it: self.log({self.name!r}, value)."
        return (
            f"Expected a logged metric. Received: {self.owner}(monitor={self.name!r}); logged so far: "
            f"{', '.join(map(repr, logged)) or 'nothing'}. {advice}"
        )

    def warn_once(self, message: str) -> None:
        """Warn, unless the same was said already."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)


def epoch_over(trainer: Any) -> bool:
    """Tell whether the batch that was trained last is known to be the last of its epoch."""
    return trainer.batch_idx >= trainer.num_training_batches


def validates(trainer: Any) -> bool:
    """Tell whether the fit has data to validate on."""
    return any(trainer.num_val_batches)
