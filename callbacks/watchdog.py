"""A look at a run that stands still: where each rank is, and an end to it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType
from typing import Any

from ..strategies.notices import Notices
from .base import Callback
from .durations import DurationLike, seconds

_ANSWER = 2.0  # seconds in which every rank that can still speak tells the others where it is
_GRACE = 5.0  # seconds for the main thread to end the run in good order
WAITING = ("torch/distributed/", "torch/autograd/graph.py", "drivetrain/strategies/world.py")  # where ranks meet


class Stalled(RuntimeError):
    """No step has ended for too long; the message names the rank that holds the others up, its place and its stack."""


class Watchdog(Callback):
    """Tell where each rank stands when none of its batches has ended for ``timeout``, and end the run.

    ``timeout`` is a number of seconds, "30min", a timedelta; it has to be longer than the longest step, save or setup
    of data workers. Each rank prints its step, its place and the Python stack of its main thread, and one line says
    which rank the others wait for. With ``stop`` the run then ends by ``Stalled`` (and where the main thread hangs in
    native code, by exit code 1), so that nothing is paid for a run that stands still; without, it only tells, once
    for each halt. Works with every backend: a thread watches, nothing is asked of the network library.
    """

    def __init__(self, timeout: DurationLike = "30min", *, stop: bool = True) -> None:
        self.timeout, self.stop = seconds(timeout, name="timeout"), stop
        self._beats = 0
        self._thread: threading.Thread | None = None
        self._previous: Any = None

    # Signs of life

    def _beat(self, *arguments: Any) -> None:
        self._beats += 1

    _sign: Any = _beat
    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = on_train_end = _sign
    on_validation_start = on_validation_batch_end = on_validation_end = _sign
    on_test_start = on_test_batch_end = on_predict_start = on_predict_batch_end = _sign

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._over, self._trainer = threading.Event(), trainer
        self._error: Stalled | None = None
        self._main = threading.get_ident()
        self._notices = Notices(trainer.accelerator.world)
        in_main = threading.current_thread() is threading.main_thread()
        if self.stop and in_main and hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            self._previous = signal.signal(signal.SIGUSR2, self._raise)
        self._thread = threading.Thread(target=self._watch, name="drivetrain-watchdog", daemon=True)
        self._thread.start()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join(_GRACE)
        self._thread = self._trainer = None
        if self._previous is not None:
            signal.signal(signal.SIGUSR2, self._previous)
            self._previous = None

    # In the watching thread

    def _watch(self) -> None:
        seen, since, told = self._beats, time.monotonic(), False
        tick = min(self.timeout / 4, 1.0)
        while not self._over.wait(tick):
            if self._beats != seen:
                if told:
                    self._notices.withdraw("stall")
                seen, since, told = self._beats, time.monotonic(), False
            # A main thread that hangs in native code and keeps the interpreter's lock stops this thread too: then
            # faulthandler's own, which needs no lock, writes the stacks.
            faulthandler.dump_traceback_later(self.timeout + 4 * tick + _ANSWER, file=sys.__stderr__ or 2)
            if not told and time.monotonic() - since > self.timeout:
                told = True
                self._tell(seen)
        faulthandler.cancel_dump_traceback_later()

    def _tell(self, beats: int) -> None:
        frame = sys._current_frames().get(self._main)
        own = self._place(frame)
        _say(f"{own['text']}\n{own['stack']}")
        found = self._notices.exchange("stall", json.dumps(own), _ANSWER)
        places = {rank: json.loads(text) for rank, text in found.items()}
        suspects = _suspects(places, self._notices.size)
        message = _verdict(places, suspects, self.timeout)
        if self._notices.rank == min(places):
            _say(message)
        if self.stop and self._beats == beats:
            # The others come back when the rank that they wait for is gone, so they have to outlive it.
            self._end(Stalled(message), _GRACE if self._notices.rank in suspects else 2 * _GRACE)

    def _place(self, frame: FrameType | None) -> dict[str, Any]:
        trainer, rank, size = self._trainer, self._notices.rank, self._notices.size
        stack = traceback.extract_stack(frame) if frame is not None else []
        files = [entry.filename.replace(os.sep, "/") for entry in stack[-4:]]
        waits = any(part in file for part in WAITING for file in files)
        where = f"{stack[-1].name} ({stack[-1].filename}:{stack[-1].lineno})" if stack else "no Python code"
        text = (
            f"Rank {rank} of {size} has ended no step for {self.timeout:g} s: stage {trainer.stage}, epoch "
            f"{trainer.current_epoch}, batch {trainer.batch_idx}, step {trainer.global_step}, in {where}."
        )
        lines = "".join(traceback.format_list(stack)).rstrip()
        return {"text": text, "stack": lines, "waits": waits, "batches": trainer.progress.batches, "where": where}

    def _end(self, error: Stalled, grace: float) -> None:
        self._error = error
        self._trainer.accelerator.world.report_failure(error)
        if self._previous is not None:
            signal.pthread_kill(self._main, signal.SIGUSR2)  # also wakes a main thread that sleeps
        if not self._over.wait(grace):
            _say(f"Rank {self._notices.rank} does not come back from where it is: its process is ended.")
            os._exit(1)

    def _raise(self, number: int, frame: Any) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _suspects(places: dict[int, dict[str, Any]], size: int) -> list[int]:
    """Return those that the others may wait for: who does not answer, else who waits for nobody, else who is behind."""
    silent = [rank for rank in range(size) if rank not in places]
    fewest = min(place["batches"] for place in places.values())
    busy = [rank for rank, place in places.items() if not place["waits"]]
    return silent or busy or [rank for rank, place in places.items() if place["batches"] == fewest]


def _verdict(places: dict[int, dict[str, Any]], suspects: list[int], timeout: float) -> str:
    rank = suspects[0]
    where = {other: f"it is in {place['where']}" for other, place in places.items()}
    holds = "holds" if len(suspects) == 1 else "may hold"
    head = f"Expected a step to end within {timeout:g} s. Received: none; rank {rank} {holds} up the run: "
    head += where.get(rank, "it does not answer") + "."
    rest = [f"Rank {other}: {text}." for other, text in where.items() if other != rank]
    return " ".join([head, *rest]) + (f"\n{places[rank]['stack']}" if rank in places else "")


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        os.write(2, f"\n{text}\n".encode())
