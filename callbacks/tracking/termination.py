"""Finishing trackers when SIGTERM comes to a program that does nothing about it itself.

A fit has `Preemption` for that; this is for loops of one's own, and for evaluations.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from .feed import QueuedTracker

def watch(trackers: Sequence[QueuedTracker]) -> None:
    """Finish these trackers, within the longest of their time limits, when SIGTERM would end this process."""
    if not trackers or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGTERM) is _end:
        _watched.extend(trackers)


def release(trackers: Sequence[QueuedTracker]) -> None:
    """Leave the signal alone again once none is watched."""
    given = {id(tracker) for tracker in trackers}
    _watched[:] = [tracker for tracker in _watched if id(tracker) not in given]
    in_main = threading.current_thread() is threading.main_thread()
    if not _watched and in_main and signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _End:
    """The handler; others who care for the signal may put their own in its place."""

    steps_aside = True

    def __call__(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
        mine = [tracker for tracker in _watched if tracker.process == os.getpid()]  # not in a forked worker
        for tracker in mine:
            tracker.preempt("stopped by SIGTERM")
            tracker.close()
        deadline = time.monotonic() + max((tracker.timeout for tracker in mine), default=0.0)
        for tracker in mine:
            tracker.wait(deadline)
        os.kill(os.getpid(), signal.SIGTERM)


_end = _End()
_watched: list[QueuedTracker] = []
