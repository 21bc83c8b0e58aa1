"""Feeding a tracker from a thread of its own, so that it can neither slow, stop nor lose a run.

    log() -> queue in memory -> thread -> tracker.log()
               | full                | raised
               v                     v
             overflow on disk      journal on disk

The caller only ever enqueues. While the queue is full, entries go to a file from which the thread takes them in order
once it has caught up. What the tracker refuses, and what it has not taken when the time to finish is over, is kept in
the journal.
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
from pathlib import Path
from typing import Any

from .base import GeneralTracker
from .journal import Entry, Journal, Overflow
from .values import settle, snapshot

GIVE_UP_AFTER = 3
"""Calls that raise one after another until a tracker gets nothing more in this run."""

_WAKE = Entry("", None, None, {}, 0.0)


class QueuedTracker(GeneralTracker):
    """A tracker behind a bounded queue: the same interface, every call returns at once.

    `wrapped` is the tracker itself; `tracker` its native object, for which it waits if the run is still being opened.
    Methods of the tracker called `log_...` are enqueued like `log`; other attributes are the tracker's own.
    `timeout` is how many seconds `finish` waits. Problems are warned about once, and never raised.
    """

    def __init__(
        self, tracker: GeneralTracker, *, journal_dir: str | os.PathLike[str], capacity: int = 1024,
        timeout: float = 15.0, suffix: str = "",
    ) -> None:
        self.wrapped = tracker
        self.name = tracker.name
        self.requires_logging_directory = tracker.requires_logging_directory
        self.main_process_only = tracker.main_process_only
        self.capacity = capacity
        self.timeout = timeout
        stem = f"journal-{re.sub(r'[^A-Za-z0-9_.-]', '_', tracker.name)}{suffix}"
        self._journal = Journal(Path(journal_dir) / f"{stem}.jsonl")
        self._overflow = Overflow(Path(journal_dir) / f"{stem}.waiting.jsonl")
        self._overflowing = False
        self._queue: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of the overflow, the journal and what is said of entries below
        self._current: Entry | None = None  # handed to the tracker, which has not returned yet
        self._abandoned = False
        self._flushes: deque[threading.Event] = deque()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False
        self._refusals = 0  # one after another
        self._dead = False
        self._slow = False
        self._told = False

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
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()
        atexit.register(self.finish)  # when a program ends, or raises, without having finished

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Enqueue hyperparameters."""
        self._put(Entry("store_init_configuration", snapshot(values), None, {}, time.time()))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Enqueue values; costs microseconds and does not wait for accelerators."""
        self._put(Entry("log", snapshot(values), step, kwargs, time.time()))

    def fail(self, error: str) -> None:
        """Enqueue that the run failed."""
        self._put(Entry("fail", error, None, {}, time.time()))

    def flush(self, timeout: float = 2.0) -> None:
        """Wait until everything logged so far is written out, `timeout` seconds at most.

        A tracker that once was too slow for that is not waited for again.
        """
        if self._thread is None or self._closed or self._slow or os.getpid() != self._process:
            return
        done = threading.Event()
        self._flushes.append(done)
        self._queue.put(_WAKE)
        self._slow = not done.wait(timeout)

    def finish(self) -> None:
        """Hand over what waits, close the tracker; after `timeout` seconds keep the rest in the journal."""
        self.close()
        self.wait(time.monotonic() + self.timeout)

    def close(self) -> None:
        """Take nothing more, and let the thread finish when it has handed over the rest."""
        if not self._closed:
            self._closed = True
            self._queue.put(_WAKE)

    def wait(self, deadline: float) -> None:
        """Wait for the thread until a time of `time.monotonic()`, then go on without it."""
        atexit.unregister(self.finish)
        if self._thread is None or os.getpid() != self._process:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._abandoned:
            self._abandon()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "wrapped" not in self.__dict__:
            raise AttributeError(name)
        self._wait_for_start()
        value = getattr(self.wrapped, name)
        return functools.partial(self._put_call, name) if name.startswith("log_") and callable(value) else value

    # The caller's side

    def _put(self, entry: Entry) -> None:
        if self._closed or os.getpid() != self._process:
            self._refuse(entry)
        elif not self._overflowing and self._queue.qsize() < self.capacity:
            self._queue.put(entry)
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
                self._queue.put(_WAKE)  # the thread may have emptied the queue meanwhile, and wait for it

    def _put_call(self, method: str, *args: Any, **kwargs: Any) -> None:
        options = snapshot(kwargs)
        given = snapshot({str(place): value for place, value in enumerate(args)})
        entry = Entry(method, tuple(given.values()), None, options, time.time())
        if self._overflowing or self._queue.qsize() >= self.capacity:
            self._keep(entry)  # as text: an image has no place in the overflow
            self._tell(f"Its queue is full: {method} is only noted in {self.journal}.")
        else:
            self._put(entry)

    def _refuse(self, entry: Entry) -> None:
        if os.getpid() != self._process:
            self._tell("Values were logged in a forked process, which has no tracker: log where it was started.")
            return
        self._keep(entry)
        self._tell(f"Values were logged after it was finished: they are in {self.journal}.")

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
            self._abandoned = True
            doubtful = [self._current] if self._current is not None else []
            waiting = [*doubtful, *self._waiting()]
            for entry in waiting:
                self._keep(entry)
            self._journal.close()
        self._tell(
            f"It did not finish within {self.timeout:g} s: {len(waiting)} calls are kept in {self.journal}."
        )

    def _waiting(self) -> list[Entry]:
        entries = []
        while (entry := self._take()) is not None:
            entries.append(entry)
        return [entry for entry in entries if entry is not _WAKE]

    # The thread's side

    def _run(self) -> None:
        try:
            self.wrapped.start()
        except BaseException as error:
            self._dead = True
            self._failed("start", error)
        self._started.set()
        try:
            while (entry := self._next()) is not None:
                self._deliver(entry)
        except BaseException as error:
            self._tell(f"Its queue stopped: {_named(error)}.")
        if not self._abandoned:
            self._attempt("finish")
            self._journal.close()

    def _next(self) -> Entry | None:
        """Return the oldest entry, waiting for one; None when all is handed over and no more will come."""
        while True:
            entry = self._take()
            if entry is None:
                self._flush_if_asked()
                if self._closed and self._queue.empty():
                    return None
                entry = self._queue.get()
            if entry is not _WAKE:
                return entry

    def _take(self) -> Entry | None:
        try:
            return self._queue.get_nowait()  # always older than what lies in the overflow
        except queue.Empty:
            pass
        with self._lock:
            if not self._overflowing:
                return None
            try:
                entry = Entry.parse(self._overflow.take())
            except (OSError, ValueError) as error:
                self._tell(f"{len(self._overflow)} entries that waited on disk cannot be read: {_named(error)}.")
                self._overflow.clear()
                entry = None
            self._overflowing = len(self._overflow) > 0
            return entry

    def _deliver(self, entry: Entry) -> None:
        with self._lock:
            if self._abandoned or self._dead:
                self._keep(entry)
                return
            self._current = entry
        try:
            self._call(entry)
            self._refusals = 0
        except BaseException as error:
            if not self._abandoned:
                self._keep(entry)
            self._refusals += 1
            self._dead = self._refusals >= GIVE_UP_AFTER
            self._failed(entry.call, error)
        self._current = None

    def _call(self, entry: Entry) -> None:
        self.wrapped.logged_at = entry.time
        method = getattr(self.wrapped, entry.call)
        if entry.call == "log":
            method(settle(entry.values), step=entry.step, **settle(entry.options))
        elif entry.call in ("store_init_configuration", "fail"):
            method(settle(entry.values))
        else:
            method(*settle(entry.values), **settle(entry.options))

    def _flush_if_asked(self) -> None:
        while self._flushes:
            done = self._flushes.popleft()
            self._attempt("flush")
            done.set()

    def _attempt(self, method: str) -> None:
        if not self._dead:
            try:
                getattr(self.wrapped, method)()
            except BaseException as error:
                self._failed(method, error)

    def _keep(self, entry: Entry) -> None:
        with self._lock:
            try:
                self._journal.append(entry.line())
            except OSError as error:
                self._tell(f"An entry that it did not take could not be kept in {self.journal}: {error}.")

    def _failed(self, method: str, error: BaseException) -> None:
        self._tell(f"It raised in {method}: {_named(error)}. What it does not take is kept in {self.journal}.")

    def _tell(self, what: str) -> None:
        if self._told:
            return
        self._told = True
        message = f"Tracker {self.name!r}: {what} The run goes on."
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here, but a tracker ends no run
            print(message, file=sys.stderr)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
