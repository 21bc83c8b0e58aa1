"""Where a run stands (counters) and how long it should go on (durations)."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal, Union

Unit = Literal["ep", "ba", "sa", "s"]

_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(ep|ba|sa|s|sec|min|m|h|d)")
_CLOCK = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")


@dataclass(frozen=True)
class Duration:
    """A length of training: so many epochs ("ep"), optimizer steps ("ba"), samples ("sa") or seconds ("s")."""

    value: float
    unit: Unit

    @staticmethod
    def parse(value: DurationLike, *, name: str, unit: Unit = "ba") -> Duration:
        """Return the duration that ``value`` means.

        ``value`` is a plain number (of ``unit``), "10ep", "500ba", "1_000_000sa", "90s", "30min", "2h", "1d",
        "DD:HH:MM:SS", a timedelta or a dict of timedelta's arguments. Raises ValueError or TypeError naming ``name``.
        """
        if isinstance(value, Duration):
            return value
        if isinstance(value, dict):
            value = timedelta(**value)
        if isinstance(value, timedelta):
            return Duration(value.total_seconds(), "s")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _checked(value, unit, name, value)
        if not isinstance(value, str):
            raise TypeError(_expected(name, value))
        if clock := _CLOCK.fullmatch(value.strip()):
            days, hours, minutes, seconds = map(int, clock.groups())
            return Duration(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds(), "s")
        if value.strip().replace("_", "").isdigit():
            return _checked(int(value.replace("_", "")), unit, name, value)
        match = _PATTERN.fullmatch(value.strip())
        if match is None:
            raise ValueError(_expected(name, value))
        number, word = float(match[1].replace("_", "")), match[2]
        if word in _SECONDS:
            return Duration(number * _SECONDS[word], "s")
        return _checked(number, word, name, value)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"


DurationLike = Union[int, float, str, timedelta, dict, Duration]


@dataclass
class Progress:
    """Counters of a run; all of them are saved with it and mean the same at every world size.

    ``epoch`` counts finished epochs, ``batch`` the micro-batches done in the running one (per rank), ``batches`` those of the
    whole run, ``step`` optimizer steps, ``samples`` samples over all ranks in the whole run, ``elapsed`` seconds trained.
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    step: int = 0
    samples: int = 0
    elapsed: float = 0.0
    validated: int = -1  # value of `batches` at the last validation
    plateaued: int = -1  # value of `batches` when the plateau schedulers last took an epoch's metric
    ended: bool = False  # the running epoch's end hooks have run
    _since: float | None = field(default=None, repr=False)

    def start(self) -> None:
        """Let the clock run."""
        self._since = time.monotonic()

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

    def reached(self, duration: Duration) -> bool:
        """Tell whether the run is at least as long as ``duration``."""
        done = {"ep": self.epoch, "ba": self.step, "sa": self.samples}
        return (self.seconds() if duration.unit == "s" else done[duration.unit]) >= duration.value


def _checked(number: float, unit: Unit, name: str, value: Any) -> Duration:
    if number < 0 or (unit != "s" and number != int(number)):
        raise ValueError(_expected(name, value))
    return Duration(number if unit == "s" else int(number), unit)


def _expected(name: str, value: Any) -> str:
    return (
        f'Expected a whole number ≥ 0 or a duration like "10ep", "500ba", "1_000_000sa", "2h", "30min". '
        f"Received: {name}={value!r}. Write the number with one of the units ep, ba, sa, s, min, h, d."
    )
