"""How long something goes on: durations as values, and deadlines that all ranks meet at the same step."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Literal, Union

if TYPE_CHECKING:
    from ..strategies.world import World

Unit = Literal["ep", "ba", "sa", "s"]

_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*(ep|ba|sa|sec|s|min|m|h|d)")
_CLOCK = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_LONGEST_LOOKAHEAD = 10.0  # seconds between two agreements of ranks, so that steps that become slow are noticed


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
            return _checked(value.total_seconds(), "s", name, value)
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
        return f"{self.value}{self.unit}"


DurationLike = Union[Duration, int, float, str, timedelta, dict]  # in this order a parser of config files tries them


def seconds(value: DurationLike, *, name: str) -> float:
    """Return how many seconds ``value`` is: a number of them, a timedelta, or text as ``Duration.parse`` takes it.

    Raises ValueError for a length that is none of time ("10ep") or not above zero.
    """
    duration = Duration.parse(value, name=name, unit="s")
    if duration.unit != "s" or not 0 < duration.value < float("inf"):
        raise ValueError(
            f'Expected a length of time above zero. Received: {name}={value!r}. Write it like 90, "30min" or "2h".'
        )
    return duration.value


class Deadline:
    """Tells all ranks at the same step that a moment has come, with few messages.

    One process asks its clock each time. Several follow rank 0's clock, which also says after how many steps to look
    again: when half of the way may be done, so that a look, which costs a collective, is seldom.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._look_at = 0
        self._seen = (0, -math.inf)  # calls and clock at the last look

    def passed(self, moment: float, *, now: Callable[[], float], world: World) -> bool:
        """Tell whether ``now()`` is at or past ``moment`` (seconds); every rank has to call it equally often."""
        if world.size == 1:
            return now() >= moment
        self._calls += 1
        if self._calls < self._look_at:
            return False
        left = moment - now()
        over, steps = world.broadcast_object((left <= 0, self._steps_until(left)))
        self._look_at = self._calls + steps
        return over

    def _steps_until(self, left: float) -> int:
        clock = time.monotonic()
        rate = (self._calls - self._seen[0]) / max(clock - self._seen[1], 1e-9)
        self._seen = (self._calls, clock)
        return max(1, int(rate * min(left / 2, _LONGEST_LOOKAHEAD)))


def _checked(number: float, unit: Unit, name: str, value: Any) -> Duration:
    if number < 0 or (unit != "s" and number != int(number)):
        raise ValueError(_expected(name, value))
    return Duration(number if unit == "s" else int(number), unit)


def _expected(name: str, value: Any) -> str:
    return (
        f'Expected a whole number ≥ 0 or a duration like "10ep", "500ba", "1_000_000sa", "2h", "30min". '
        f"Received: {name}={value!r}. Write the number with one of the units ep, ba, sa, s, min, h, d."
    )
