"""Entries on disk: what a tracker did not take, and what waits while its queue is full.

The files are JSON lines. One entry is {"call": "log", "values": {...}, "step": 5, "options": {}, "time": seconds since
1970}; `call` is the tracker's method. Arrays are {"__array__": [dtype, shape, base64 of their bytes]}, bytes are
{"__bytes__": base64}. A journal begins with a line {"tracker": {...}} that says what it is for. A last line without an
end was being written when the process was killed.
"""

from __future__ import annotations

import base64
import errno
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .files import replace
from .values import array_of, plain


ENDS = ("fail", "preempt", "finish")
"""Calls that tell how a run ended."""


class Entry(NamedTuple):
    """One call of a tracker's method, with the time at which it was handed over (seconds since 1970)."""

    call: str
    values: Any
    step: int | None
    options: dict[str, Any]
    time: float

    def line(self) -> bytes:
        """Return the entry as a line of JSON; values that JSON does not hold as their text."""
        return json.dumps(_packed(self._asdict())).encode() + b"\n"

    @staticmethod
    def parse(line: bytes | str) -> Entry:
        """Return the entry of a line that `line` wrote."""
        return Entry(**json.loads(line, object_hook=_unpacked))


class Journal:
    """The file of entries that a tracker did not take; it is made with its first entry and goes with its last.

    `header` tells, when the file is made, what it is for.
    """

    def __init__(self, path: Path, *, header: Callable[[], dict[str, Any]] | None = None) -> None:
        self.path = path
        self.header = header
        self._file: io.FileIO | None = None

    def append(self, line: bytes) -> None:
        """Write what `Entry.line` returned out to the operating system."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(self.path, "a")
        end = os.fstat(self._file.fileno()).st_size
        if not end and self.header is not None:
            line = self.first_line().encode() + line
        if self._file.write(line) != len(line):
            self._file.truncate(end)  # half a line would spoil the next one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def beside(self, lines: Iterable[bytes]) -> Path:
        """Write what the journal shall hold into a file beside it; `lines` may read the journal meanwhile."""
        written = self.path.with_name(self.path.name + ".new")
        replace(written, itertools.chain([self.first_line()], (line.decode() for line in lines)))
        return written

    def replace_by(self, written: Path, *, empty: bool = False) -> None:
        """Put what `beside` wrote in the journal's place; `empty`: there is nothing in it, and the file goes."""
        self.close()
        if empty:
            written.unlink()
            self.path.unlink(missing_ok=True)
        else:
            os.replace(written, self.path)

    def close(self) -> None:
        """Close the file; a later entry opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def first_line(self) -> str:
        """Return the line that says what the journal is for, "" where it has none."""
        return json.dumps({"tracker": plain(self.header())}) + "\n" if self.header is not None else ""


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a journal's entries, without a last one that was torn."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and not line.startswith(b'{"tracker"'):
                yield line


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal, without a last one that was torn."""
    return map(Entry.parse, lines(path))


def header(path: Path) -> dict[str, Any]:
    """Return what a journal says of its tracker; empty where it says nothing."""
    with open(path, "rb") as file:
        first = file.readline()
    return json.loads(first)["tracker"] if first.startswith(b'{"tracker"') and first.endswith(b"\n") else {}


class Overflow:
    """First in, first out on disk, for entries that came while a queue was full. Not thread-safe."""

    def __init__(self, path: Path, *, header: Callable[[], dict[str, Any]] | None = None) -> None:
        self._journal = Journal(path, header=header)
        self._reader: BinaryIO | None = None
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def append(self, entry: Entry) -> None:
        """Put an entry at the end."""
        self._journal.append(entry.line())
        if self._reader is None:
            self._reader = open(self._journal.path, "rb")
            if self._journal.header is not None:
                self._reader.readline()
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


def _packed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _packed(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": base64.b64encode(value).decode()}
    array = array_of(value)
    if array is None or not array.ndim or array.dtype.hasobject:
        return plain(value)
    return {"__array__": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}


def _unpacked(value: dict[str, Any]) -> Any:
    if len(value) == 1 and "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if len(value) == 1 and "__array__" in value:
        kind, shape, data = value["__array__"]
        return np.frombuffer(base64.b64decode(data), dtype=np.dtype(kind)).reshape(shape).copy()
    return value


def take_over(
    journal: Journal, others: Sequence[Path], *, goes_on: bool, resume_step: int | None, without: Sequence[str] = ENDS
) -> None:
    """Make a journal of what an earlier process has left in `journal` and in `others`.

    Where its run does not go on, the journal is put aside under a numbered name. Else entries after `resume_step`,
    which come again, and calls of `without`, those about the end of the run, are left out.
    """
    left = [path for path in (journal.path, *others) if path.exists()]
    if not left:
        return
    entries = sorted((entry for path in left for entry in _readable(path)), key=lambda entry: entry.time)
    if goes_on:
        entries = [entry for entry in entries if entry.call not in without and not _comes_again(entry, resume_step)]
    said = header(journal.path) if journal.path.exists() else {}
    kept = journal if goes_on or not said else Journal(journal.path, header=lambda: said)
    kept.replace_by(kept.beside(entry.line() for entry in entries), empty=not entries)
    for path in others:
        path.unlink(missing_ok=True)
    if entries and not goes_on:
        os.replace(journal.path, _numbered(journal.path))


def _readable(path: Path) -> Iterator[Entry]:
    for line in lines(path):
        try:
            yield Entry.parse(line)
        except (TypeError, ValueError):  # not one of ours
            continue


def _comes_again(entry: Entry, resume_step: int | None) -> bool:
    return resume_step is not None and entry.step is not None and entry.step > resume_step


def _numbered(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
