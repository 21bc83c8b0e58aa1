"""A clock that ticks at every place of a run where it can be killed, and kills its process there.

Places are the hooks of callbacks (before and after the module's own), the module's steps, samples that are fetched,
optimizer steps, and every system call that changes the disk. It is wound up in a forked child.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from drivetrain import Callback
from drivetrain.tests.strategies.checkpoint.killing import Trace


class Clock:
    """Counts ticks; at the ``deadline``-th (from 0) of the process that wound it up the process is killed."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.deadline: int | None = None
        self.torn = False
        self._owner = 0

    def wind_up(self, deadline: int | None, *, torn: bool = False) -> None:
        """Start; ``torn``: a write at which the process is killed has written a part."""
        self.places, self.deadline, self.torn, self._owner = [], deadline, torn, os.getpid()
        _Calls(self)

    def tick(self, place: str, last: Callable[[], Any] = lambda: None) -> None:
        """A place is reached; ``last`` is done before the process is killed there."""
        if os.getpid() != self._owner:  # a loader's worker, or nothing to be killed
            return
        if self.deadline == len(self.places):
            last()
            os.kill(os.getpid(), signal.SIGKILL)
        self.places.append(place)


CLOCK = Clock()


class _Calls(Trace):
    """Lets the clock tick at system calls."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        super().__init__()

    def before(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        def half() -> None:
            if self.clock.torn and name == "writev":
                function(args[0], [buffer[: len(buffer) // 2 + 1] for buffer in args[1][:1]])

        self.clock.tick(f"os.{name}", half)


def _hook(name: str) -> Callable[..., None]:
    return lambda self, trainer, *rest: CLOCK.tick(name)


_HOOKS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
Ticking = type("Ticking", (Callback,), {name: _hook(name) for name in _HOOKS})
"""A callback at whose every hook the clock ticks."""


class Early(Ticking):  # type: ignore[misc, valid-type]
    """Before all other callbacks."""

    priority = -100


class Late(Ticking):  # type: ignore[misc, valid-type]
    """After all other callbacks."""

    priority = 10_000
