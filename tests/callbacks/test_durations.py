"""Lengths of time, and deadlines that ranks meet together."""

from __future__ import annotations

from datetime import timedelta

import pytest

from drivetrain.callbacks.durations import Deadline, Duration, seconds
from drivetrain.strategies import world as worlds
from drivetrain.strategies.world import World
from drivetrain.tests import distributed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, 90), (1.5, 1.5), ("90", 90), ("90s", 90), ("90sec", 90), ("30min", 1800), ("30m", 1800), ("2h", 7200), ("1.5h", 5400),
        ("1d", 86400), ("00:01:02:03", 3723), (timedelta(minutes=2), 120), ({"minutes": 3}, 180), (Duration(5, "s"), 5),
    ],
)  # fmt: skip
def test_seconds(value, expected):
    assert seconds(value, name="duration") == expected


@pytest.mark.parametrize("value", [0, -1, "10ep", "5ba", "soon", "", float("nan"), float("inf"), timedelta(0)])
def test_no_length_of_time(value):
    with pytest.raises(ValueError, match="Received: duration="):
        seconds(value, name="duration")


@pytest.mark.parametrize("value", [True, [], object()])
def test_no_duration_at_all(value):
    with pytest.raises(TypeError, match="Received: duration="):
        seconds(value, name="duration")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("10ep", "ba", Duration(10, "ep")), ("500ba", "ep", Duration(500, "ba")), (7, "ep", Duration(7, "ep")),
        ("1_000_000sa", "ba", Duration(1_000_000, "sa")), ("1_000", "ba", Duration(1000, "ba")), (" 5 ep ", "ba", Duration(5, "ep")),
    ],
)  # fmt: skip
def test_durations(value, unit, expected):
    assert Duration.parse(value, name="max_steps", unit=unit) == expected


@pytest.mark.parametrize("value", ["1.5ep", 1.5, -1, "x", "ep"])
def test_no_duration(value):
    with pytest.raises(ValueError, match="Received: max_steps="):
        Duration.parse(value, name="max_steps")


def test_deadline_of_one_process():
    deadline, clock = Deadline(), iter([1.0, 4.9, 5.0])
    assert [deadline.passed(5.0, now=lambda: next(clock), world=World()) for _ in range(3)] == [False, False, True]


def test_ranks_meet_a_deadline_at_the_same_step_by_rank_0s_clock():
    def steps(rank):
        """Rank 0's clock says 0, 1, 2, …; rank 1's is far ahead."""
        deadline, world, ticks = Deadline(), worlds.current(), []

        def now():
            return len(ticks) + 100.0 * rank

        while True:
            ticks.append(None)
            if deadline.passed(500.0, now=now, world=world):
                return len(ticks)

    first, second = distributed.run(steps, 2)
    assert first == second
    assert first >= 500


def test_looks_at_the_clock_are_seldom_when_the_moment_is_far():
    class Counting(World):
        size, looks = 2, 0

        def broadcast_object(self, value, src=0):
            self.looks += 1
            return value

    deadline, world = Deadline(), Counting()
    for _ in range(10_000):
        assert not deadline.passed(3600.0, now=lambda: 0.0, world=world)
    assert world.looks < 100
