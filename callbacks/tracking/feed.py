"""Feeding a tracker from a thread of its own, so that it can neither slow, stop nor lose a run.

    log() -> queue in memory -> thread -> tracker.log()
               | full                | raised
               v                     v
             overflow on disk      journal on disk, replayed when the tracker is back

The caller only ever enqueues. While the queue is full, entries go to a file from which the thread takes them in order
once it has caught up. What the tracker refuses (see delivery.py), and what it has not taken when the time to finish is
over, is kept in the journal. At a checkpoint, what a slow tracker has not got yet is on disk, too.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import MEDIA, GeneralTracker
from .delivery import BATCH, Delivery
from .files import replace
from .journal import Entry, Journal, Overflow, take_over
from .values import snapshot


class QueuedTracker(GeneralTracker):
    """A tracker behind a bounded queue: the same interface, every call returns at once.

    `wrapped` is the tracker itself; `tracker` its native object, for which it waits if the run is still being opened.
    Methods of the tracker called `log_...` are enqueued like `log`; other attributes are the tracker's
    own. `timeout` is how many seconds `finish` waits. `goes_on`: what an earlier process has left belongs to this run.
    `origin` tells a later process how to make the tracker again. Problems are warned about once, and never raised.
    """

    def __init__(
        self, tracker: GeneralTracker, *, journal_dir: str | os.PathLike[str], capacity: int = 1024,
        timeout: float = 15.0, suffix: str = "", goes_on: bool = False, origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.wrapped = tracker
        self.name = tracker.name
        self.requires_logging_directory = tracker.requires_logging_directory
        self.main_process_only = tracker.main_process_only
        self.capacity = capacity
        self.timeout = timeout
        self._goes_on, self._origin = goes_on, dict(origin or {})
        self._stem = Path(journal_dir) / f"journal-{re.sub(r'[^A-Za-z0-9_.-]', '_', tracker.name)}{suffix}"
        self._journal = Journal(self._file(""), header=self._header)
        self._overflow = Overflow(self._file(".waiting"), header=self._header)
        self._overflowing = False
        self._entries: deque[Entry] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of the files and of who keeps what
        self._delivery = Delivery(
            tracker, self._journal, lock=self._lock, tell=self._tell, ledger=self._file(".sent")
        )
        self._flushes: deque[threading.Event] = deque()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self.process = os.getpid()
        self._closed = False
        self._slow = False
        self._told = False
        self._left_out: set[str] = set()

    @property
    def tracker(self) -> Any:
        """The native object. Raises RuntimeError when the tracker could not be started."""
        self._wait_for_start()
        return self.wrapped.tracker  # type: ignore[attr-defined]

    @property
    def journal(self) -> Path:
        """The file of entries that the tracker did not take; it exists when there are any."""
        return self._journal.path

    def start(self) -> None:
        """Start the thread, which starts the tracker."""
        if self._thread is not None:
            return
        self._take_over()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()
        atexit.register(self.finish)  # when a program ends, or raises, without having finished

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Enqueue hyperparameters."""
        self._put(Entry("store_init_configuration", snapshot(values), None, {}, time.time()))

    def store_provenance(self, values: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Enqueue what the run was made from."""
        self._put(Entry("store_provenance", (values, list(files)), None, {}, time.time()))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Enqueue values; costs microseconds and does not wait for accelerators."""
        self._put(Entry("log", snapshot(values), step, kwargs, time.time()))

    def fail(self, error: str) -> None:
        """Enqueue that the run failed."""
        self._put(Entry("fail", error, None, {}, time.time()))

    def preempt(self, reason: str) -> None:
        """Enqueue that the run was stopped from outside."""
        self._put(Entry("preempt", reason, None, {}, time.time()))

    def flush(self, timeout: float = 2.0) -> None:
        """Wait until everything logged so far is written out, `timeout` seconds at most.

        A tracker that was too slow for that is not waited for until it has caught up: what it has not got yet is
        written to a file meanwhile.
        """
        if self._thread is None or self._closed or os.getpid() != self.process:
            return
        done = threading.Event()
        self._flushes.append(done)
        self._wake.put(None)
        if self._slow or not done.wait(timeout):
            self._slow = True
            self._save_pending()

    def finish(self) -> None:
        """Hand over what waits, close the tracker; after `timeout` seconds keep the rest in the journal."""
        self.close()
        self.wait(time.monotonic() + self.timeout)

    def close(self) -> None:
        """Take nothing more, and let the thread finish when it has handed over the rest."""
        if not self._closed:
            self._closed = True
            self._wake.put(None)

    def wait(self, deadline: float) -> None:
        """Wait for the thread until a time of `time.monotonic()`, then go on without it."""
        atexit.unregister(self.finish)
        if self._thread is None or os.getpid() != self.process:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._delivery.abandoned:
            self._abandon()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "wrapped" not in self.__dict__:
            raise AttributeError(name)
        if name.startswith("log_"):  # without waiting for the start
            known = callable(getattr(self.wrapped, name, None))
            if known or name in MEDIA:
                return functools.partial(self._put_call if known else self._leave_out, name)
        self._wait_for_start()
        return getattr(self.wrapped, name)

    # The caller's side

    def _put(self, entry: Entry) -> None:
        if self._closed or os.getpid() != self.process:
            self._refuse(entry)
        elif not self._overflowing and len(self._entries) + len(self._delivery.in_hand) < self.capacity:
            self._entries.append(entry)
            self._wake.put(None)
        else:
            self._put_on_disk(entry)

    def _put_on_disk(self, entry: Entry) -> None:
        with self._lock:
            try:
                self._overflow.append(entry)
            except OSError as error:
                self._tell(f"Its queue is full and an entry could not be kept on disk: {error}.")
                return
            if not self._overflowing:
                self._overflowing = True
                self._wake.put(None)  # the thread may have emptied the queue meanwhile, and wait for it

    def _put_call(self, method: str, *args: Any, **kwargs: Any) -> None:
        given = snapshot({str(place): value for place, value in enumerate(args)})
        self._put(Entry(method, tuple(given.values()), None, snapshot(kwargs), time.time()))

    def _leave_out(self, method: str, *args: Any, **kwargs: Any) -> None:
        if method not in self._left_out:
            self._left_out.add(method)
            self._say(f"It has nothing for {MEDIA[method]}: what is given to {method} is left out.")

    def _refuse(self, entry: Entry) -> None:
        if os.getpid() != self.process:
            self._tell("Values were logged in a forked process, which has no tracker: log where it was started.")
            return
        self._keep(entry)
        self._tell(f"Values were logged after it was finished: they are in {self.journal}.")

    def _save_pending(self) -> None:
        """Write what the tracker has not got yet to a file, in case that this process is killed."""
        with self._lock:
            waiting = [*self._delivery.in_hand, *self._entries.copy()]
            try:
                lines = [self._journal.first_line(), *(entry.line().decode() for entry in waiting)]
                replace(self._file(".pending"), lines)
            except OSError as error:
                self._tell(f"What it has not taken could not be kept on disk: {error}.")

    def _wait_for_start(self) -> None:
        if self._thread is None or threading.current_thread() is self._thread:
            return
        if not self._started.wait(self.timeout):
            raise RuntimeError(
                f"Expected tracker {self.name!r} to start within {self.timeout:g} s. Received: nothing yet. "
                "Do without its native object, or look at what it connects to."
            )

    def _abandon(self) -> None:
        with self._lock:
            self._delivery.abandoned = True
            waiting = list(self._delivery.in_hand)  # it may have taken the first of them
            while entries := self._take():
                waiting += entries
            for entry in waiting:
                self._keep(entry)
            self._journal.close()
            self._file(".pending").unlink(missing_ok=True)
        self._tell(
            f"It did not finish within {self.timeout:g} s: {len(waiting)} calls are kept in {self.journal}."
        )

    # The thread's side

    def _run(self) -> None:
        delivery = self._delivery
        delivery.open()
        self._started.set()
        try:
            while self._next():
                delivery.give()
        except BaseException as error:
            self._tell(f"Its queue stopped: {_named(error)}.")
        if not delivery.abandoned:
            delivery.close()
            self._forget_pending()

    def _next(self) -> bool:
        """Put the oldest entries into the delivery's hands; False when all is handed over and no more will come."""
        while True:
            self._delivery.retry()
            with self._lock:
                self._delivery.in_hand.extend(self._take())
            if self._delivery.in_hand:
                return not self._delivery.abandoned
            self._flush_if_asked()
            if self._delivery.abandoned or (self._closed and not self._entries and not self._overflowing):
                return False
            try:
                self._wake.get(timeout=self._delivery.pause())
            except queue.Empty:
                continue

    def _take(self) -> list[Entry]:
        """Return some of the oldest entries (lock held); those in memory are older than those in the overflow."""
        entries: list[Entry] = []
        most = min(BATCH, self.capacity)
        while self._entries and len(entries) < most:
            entries.append(self._entries.popleft())
        while self._overflowing and len(entries) < most:
            try:
                entries.append(Entry.parse(self._overflow.take()))
            except (OSError, ValueError) as error:
                self._tell(f"{len(self._overflow)} entries that waited on disk cannot be read: {_named(error)}.")
                self._overflow.clear()
            self._overflowing = len(self._overflow) > 0
        return entries

    def _flush_if_asked(self) -> None:
        while self._flushes:
            done = self._flushes.popleft()
            self._delivery.flush()
            self._slow = False
            done.set()
        self._forget_pending()

    def _forget_pending(self) -> None:
        path = self._file(".pending")
        with self._lock:
            if not self._entries and not self._overflowing and path.exists():
                path.unlink(missing_ok=True)

    # Files

    def _file(self, kind: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}{kind}.jsonl")

    def _header(self) -> dict[str, Any]:
        run_id, title = self.wrapped.run_id, self.wrapped.run_title
        return {**self._origin, "name": self.name, "run_id": run_id, "title": title}

    def _take_over(self) -> None:
        others = [self._file(kind) for kind in (".sent", ".pending", ".waiting")]
        try:
            take_over(self._journal, others, goes_on=self._goes_on, resume_step=self.wrapped.resume_step)
        except OSError as error:
            self._tell(f"What an earlier process left in {self.journal.parent} cannot be read: {error}.")

    def _keep(self, entry: Entry) -> None:
        with self._lock:
            try:
                self._journal.append(entry.line())
            except OSError as error:
                self._tell(f"An entry that it did not take could not be kept in {self._journal.path}: {error}.")

    def _tell(self, what: str) -> None:
        if self._told:
            return
        self._told = True
        self._say(what)

    def _say(self, what: str) -> None:
        message = f"Tracker {self.name!r}: {what} The run goes on."
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here, but a tracker ends no run
            print(message, file=sys.stderr)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
