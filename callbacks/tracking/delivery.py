"""Handing entries to a tracker: in batches where it takes them, again where it did not, each once.

What a tracker refuses goes to the journal. After `GIVE_UP_AFTER` refusals one after another it counts as down: what
comes is kept in the journal at once, until a retry, now and then, finds it back and replays the journal in order. What
an earlier process of the same run could not hand over, or cannot be sure of, is replayed when the run goes on.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from . import journal as journals
from .base import GeneralTracker
from .journal import Entry, Journal
from .values import flatten, settle

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Calls that raise one after another until a tracker counts as down."""
FIRST_RETRY, LAST_RETRY = 1.0, 30.0
"""Seconds until the first retry, and between later ones; each waits twice as long as the one before."""
_CALLS = ("store_init_configuration", "store_provenance", *journals.ENDS)  # beside those that begin with "log"
BATCH = 500
"""Rows that a tracker gets at once, at most."""


class Delivery:
    """A tracker as the one thread sees it that calls its methods; none of its own methods raises.

    `lock` guards `in_hand`, `abandoned` and the journal, at which another thread looks when it gives the tracker up.
    """

    def __init__(
        self, tracker: GeneralTracker, journal: Journal, *, lock: Any, tell: Callable[[str], None],
        ledger: Path | None = None,
    ) -> None:
        self.tracker = tracker
        self.in_hand: deque[Entry] = deque()
        self.abandoned = False
        self._journal, self._lock, self._tell = journal, lock, tell
        self._ledger = None if ledger is None or tracker.survives_kill else Journal(ledger, header=journal.header)
        self.is_open = self._down = False
        self._refusals = 0  # one after another
        self._seen: dict[str, Collection[int]] = {}  # by name, the steps that the run had before
        self._checks = tracker.resume_step is not None
        self._pause = FIRST_RETRY
        self._retry_at: float | None = None  # by time.monotonic()

    def open(self) -> None:
        """Open the run, and hand over what the journal holds of it."""
        try:
            self.tracker.start()
            self.is_open = True
        except BaseException as error:
            self._down = True
            self._failed("start", error)
            self._retry_later()
            return
        if self._journal.path.exists():
            self._replay()

    def give(self) -> None:
        """Hand over what is in hand, or keep it."""
        while self.in_hand:
            with self._lock:
                if self.abandoned:
                    return  # somebody else has kept them
                batch = self._batch(self.in_hand)
                if self._down:
                    self._keep(batch)
                    self._done(batch)
                    continue
            refused = self._attempt(batch)
            with self._lock:
                if self.abandoned:
                    return
                if refused:
                    self._keep(batch)
                self._done(batch)

    def pause(self) -> float | None:
        """Return how many seconds from now a retry is due; None while there is nothing to retry."""
        return None if self._retry_at is None else max(0.0, self._retry_at - time.monotonic())

    def retry(self) -> None:
        """Try again what the journal holds, if it is time."""
        if self._retry_at is None or time.monotonic() < self._retry_at or self.abandoned:
            return
        self._replay()

    def flush(self) -> None:
        """Have the tracker write out what it buffers."""
        if not self._down:
            self._quietly("flush")

    def close(self) -> None:
        """Try once more what is left, and finish the run."""
        if self._retry_at is not None:
            self._replay()
        if self.abandoned:
            return
        finished = not self._down and self._quietly("finish")
        with self._lock:
            if finished and self._ledger is not None:
                self._ledger.close()
                self._ledger.path.unlink(missing_ok=True)
            elif not finished and self.is_open and not self._journal.path.exists():
                self._keep([Entry("finish", (), None, {}, time.time())])
            self._journal.close()

    # One call

    def _batch(self, entries: deque[Entry]) -> list[Entry]:
        """Return the oldest entries that go together: one, or several rows for a tracker that takes batches."""
        first = entries[0]
        if first.call != "log" or not self.tracker.takes_batches:
            return [first]
        batch: list[Entry] = []
        for entry in entries:
            if entry.call != "log" or len(batch) == BATCH:
                break
            batch.append(entry)
        return batch

    def _done(self, batch: list[Entry]) -> None:
        for _ in batch:
            self.in_hand.popleft()

    def _attempt(self, batch: list[Entry]) -> bool:
        """Hand a batch over; tell whether the tracker refused it."""
        try:
            self._call(batch)
        except BaseException as error:
            self._failed(batch[0].call, error)
            self._refusals += 1
            matters = batch[0].call == "log" or isinstance(error, OSError)  # not: it cannot take a file or a picture
            self._down = self._down or (self._refusals >= GIVE_UP_AFTER and matters)
            self._retry_later()
            return True
        self._refusals = 0
        if self._ledger is not None:
            self._note(batch)
        return False

    def _call(self, batch: list[Entry]) -> None:
        tracker, first = self.tracker, batch[0]
        tracker.logged_at = first.time
        if first.call == "log":
            rows = [row for row in map(self._settled, batch) if row.values]
            if tracker.takes_batches:
                tracker.log_rows(rows)
            else:
                for row in rows:
                    tracker.log(row.values, step=row.step, **row.options)
            return
        if first.call not in _CALLS and not first.call.startswith("log_"):
            raise ValueError(f"Expected a call of a tracker. Received: {first.call!r}, as a journal says.")
        method = getattr(tracker, first.call)
        if isinstance(first.values, (list, tuple)):
            method(*settle(first.values), **settle(first.options))
        else:
            method(settle(first.values))

    def _settled(self, entry: Entry) -> Entry:
        """Return a row with plain numbers, without values that the run has at this step already."""
        values = settle(entry.values)
        if self._checks and entry.step is not None:
            values = {name: value for name, value in values.items() if not self._has(name, value, entry.step)}
        return entry._replace(values=values, options=settle(entry.options))

    def _has(self, name: str, value: Any, step: int) -> bool:
        key = next(iter(flatten({name: value})))  # parts of a value come and go together
        if key not in self._seen:
            self._seen[key] = self.tracker.logged_steps(key) or ()
        return step in self._seen[key]

    def _quietly(self, method: str) -> bool:
        try:
            getattr(self.tracker, method)()
        except BaseException as error:
            self._failed(method, error)
            return False
        return True

    # What was not taken

    def _replay(self) -> None:
        """Hand over the journal's entries, and leave there what is refused again."""
        self._retry_at = None
        if not self.is_open:
            self.open()
            return
        was_down, checked = self._down, self._checks
        self._refusals, self._down, self._seen, self._checks = 0, False, {}, True
        taken, left = 0, 0

        def remaining() -> Iterator[bytes]:
            nonlocal taken, left
            for batch in self._journalled():
                refused = self._refused_again(batch)
                taken, left = taken + len(batch) - len(refused), left + len(refused)
                yield from (entry.line() for entry in refused)

        try:
            written = self._journal.beside(remaining())
            with self._lock:
                if not self.abandoned:  # else others have added to the journal: it stays as it is
                    self._journal.replace_by(written, empty=not left)
        except (OSError, ValueError) as error:
            self._tell(f"Its journal {self._journal.path} cannot be replayed: {type(error).__name__}: {error}.")
        self._checks = checked
        self._down = self._down or (was_down and left > 0 and not taken)
        if taken:
            self._pause = FIRST_RETRY
            logger.info("Tracker %r took %d entries of its journal; %d are left.", self.tracker.name, taken, left)

    def _refused_again(self, batch: list[Entry]) -> list[Entry]:
        """Try a batch, then each entry of it, and return what is refused."""
        if self._down or self.abandoned:
            return batch
        if not self._attempt(batch):
            return []
        if len(batch) == 1:
            return batch
        return [entry for entry in batch if self._down or self._attempt([entry])]

    def _journalled(self) -> Iterator[list[Entry]]:
        """Yield the journal's entries in batches."""
        waiting: deque[Entry] = deque()
        entries = journals.read(self._journal.path) if self._journal.path.exists() else iter(())
        while True:
            waiting.extend(itertools.islice(entries, BATCH - len(waiting)))
            if not waiting:
                return
            batch = self._batch(waiting)
            yield batch
            for _ in batch:
                waiting.popleft()

    def _retry_later(self) -> None:
        if self._retry_at is not None:
            return
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LAST_RETRY)

    def _keep(self, entries: list[Entry]) -> None:
        for entry in entries:
            try:
                self._journal.append(entry.line())
            except OSError as error:
                self._tell(f"An entry that it did not take could not be kept in {self._journal.path}: {error}.")

    def _note(self, batch: list[Entry]) -> None:
        """Note what was taken by a tracker that loses it when the process is killed."""
        assert self._ledger is not None
        try:
            for entry in batch:
                self._ledger.append(entry.line())
        except OSError as error:
            self._tell(f"What it took could not be noted in {self._ledger.path}: {error}.")

    def _failed(self, method: str, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        self._tell(f"It raised in {method}: {what}. What it does not take is kept in {self._journal.path}.")
