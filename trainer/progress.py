"""Where a run stands: counters that mean the same at every world size."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from ..callbacks.durations import Duration, Unit


@dataclass
class Progress:
    """Counters of a run; all of them are saved with it and mean the same at every world size.

    ``epoch`` counts finished epochs, ``batch`` the micro-batches done in the running one (per rank), ``batches`` those
    of the whole run, ``step`` optimizer steps, ``samples`` samples over all ranks in the whole run, ``elapsed`` seconds
    trained.
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    step: int = 0
    samples: int = 0
    elapsed: float = 0.0
    # Of the running epoch: "train", "full" (all its batches are done), "scheduled" (its schedulers have stepped too),
    # "ended", or "left" (before its end).
    phase: str = "train"
    validations: int = 0  # begun so far: the epoch of the validation loaders
    validated: int = -1  # value of `batches` at the last validation
    mark: int = 0  # how many intervals of validation had passed then, where the interval is a duration
    _since: float | None = field(default=None, repr=False)

    def start(self) -> None:
        """Let the clock run."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop the clock."""
        self.elapsed, self._since = self.seconds(), None

    def seconds(self) -> float:
        """Return the seconds trained so far, those before an interruption included."""
        return self.elapsed + (time.monotonic() - self._since if self._since is not None else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        state = {key: value for key, value in asdict(self).items() if not key.startswith("_")}
        return state | {"elapsed": self.seconds()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counters and let the clock go on from them."""
        for key in self.state_dict():
            setattr(self, key, state[key])
        if self._since is not None:
            self._since = time.monotonic()

    def value(self, unit: Unit) -> float:
        """Return how long the run has gone on, in a unit."""
        if unit == "s":
            return self.seconds()
        return {"ep": self.epoch, "ba": self.step, "sa": self.samples}[unit]

    def reached(self, duration: Duration) -> bool:
        """Tell whether the run is at least as long as ``duration``."""
        return self.value(duration.unit) >= duration.value
