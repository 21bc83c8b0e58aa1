"""Entries on disk: what a tracker did not take, and what waits while its queue is full.

Both files are JSON lines. One entry is {"call": "log", "values": {...}, "step": 5, "options": {}, "time": seconds since
1970}; `call` is the tracker's method. A last line without an end was being written when the process was killed.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .values import plain


class Entry(NamedTuple):
    """One call of a tracker's method, with the time at which it was handed over (seconds since 1970)."""

    call: str
    values: Any
    step: int | None
    options: dict[str, Any]
    time: float

    def line(self) -> bytes:
        """Return the entry as a line of JSON; values that JSON does not hold as their text."""
        return json.dumps(plain(self._asdict())).encode() + b"\n"

    @staticmethod
    def parse(line: bytes | str) -> Entry:
        """Return the entry of a line that `line` wrote."""
        return Entry(**json.loads(line))


class Journal:
    """The file of entries that a tracker did not take; it is made with its first entry and only ever grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None

    def append(self, line: bytes) -> None:
        """Write what `Entry.line` returned out to the operating system."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(self.path, "a")
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(end)  # half a line would spoil the next one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file; a later entry opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal, without a last one that was torn."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield Entry.parse(line)


class Overflow:
    """First in, first out on disk, for entries that came while a queue was full. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)
        self._reader: BinaryIO | None = None
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def append(self, entry: Entry) -> None:
        """Put an entry at the end."""
        self._journal.append(entry.line())
        if self._reader is None:
            self._reader = open(self._journal.path, "rb")
        self._waiting += 1

    def take(self) -> bytes:
        """Return the oldest entry's line; the file goes with its last entry. Raises IndexError when there is none."""
        if self._reader is None:
            raise IndexError("Expected an entry. Received: an empty overflow.")
        line = self._reader.readline()
        self._waiting -= 1
        if not self._waiting:
            self.clear()
        return line

    def clear(self) -> None:
        """Forget what waits, and remove the file."""
        self._waiting = 0
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._journal.close()
        self._journal.path.unlink(missing_ok=True)
