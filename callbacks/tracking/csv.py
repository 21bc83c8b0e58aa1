"""Tracking into one CSV file, `metrics.csv`: a row per step, columns in the order of their appearance.

Hyperparameters go to `hparams.yaml` beside it. Rows reach the operating system as they come, so that a killed run keeps
them. The file is only ever replaced as a whole or written at its end. Numbers are written so that reading them gives
the same number again.
"""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from .base import GeneralTracker, on_main_process
from .files import replace
from .values import flatten, plain

Row = dict[str, str]


class CSVTracker(GeneralTracker):
    """Tracks into `logging_dir/run_name/metrics.csv`; the native object is the file's path.

    Values logged for the last row's step are added to it, unless they would change it. With `resume_step`, rows after
    that step are dropped at the start. An existing file is continued.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], *, file_name: str = "metrics.csv",
        resume_step: int | None = None,
    ) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / file_name
        self.resume_step = resume_step
        self._file: io.FileIO | None = None
        self._columns: list[str] = []
        self._last: Row = {}  # the last row, which begins at `_offset`
        self._offset = 0
        self._repeated: str | None = None  # the step at which a run goes on, when the file has a row of it

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Make the folder, or continue the file that is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._rewrite([], keep=self._survives)
            if self.resume_step is not None and self._last.get("step") == str(self.resume_step):
                self._repeated = str(self.resume_step)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write `hparams.yaml`."""
        text = yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True)
        replace(self.path.with_name("hparams.yaml"), [text])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a row, or add to the last one; nested values go to columns like "a/b/0"."""
        if kwargs:
            raise TypeError(f"Expected no options for the CSV tracker. Received: {', '.join(kwargs)}. Leave them out.")
        cells = {"step": _text(step), **{key: _text(value) for key, value in flatten(values).items()}}
        added = [name for name in cells if name not in self._columns]
        if added:
            self._rewrite(added)
        if self._fits(cells):
            self._write(self._last | cells, before=self._last)
        else:
            self._offset = self._open().seek(0, os.SEEK_END)
            self._write(cells)

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _survives(self, row: Row) -> bool:
        step = row.get("step")
        return not step or self.resume_step is None or float(step) <= self.resume_step

    def _fits(self, cells: Row) -> bool:
        """Tell whether the values may go into the last row; a resumed run logs its first step's values again."""
        if not cells["step"] or self._last.get("step") != cells["step"]:
            return False
        same = all(self._last.get(name, "") in ("", cell) for name, cell in cells.items())
        return same or cells["step"] == self._repeated

    def _write(self, row: Row, *, before: Row | None = None) -> None:
        file, data = self._open(), self._encoded(row)
        file.seek(self._offset)
        if file.write(data) != len(data):  # the disk is full: half a row would spoil the next one
            file.seek(self._offset)
            file.write(self._encoded(before) if before else b"")
            file.truncate()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        file.truncate()
        self._last = row

    def _encoded(self, row: Row) -> bytes:
        return _line(row.get(name, "") for name in self._columns)

    def _rewrite(self, added: list[str], *, keep: Callable[[Row], bool] = lambda row: True) -> None:
        """Replace the file by one with further columns and only the rows to keep; a torn last row goes."""
        self.finish()
        self._last = {}
        rows = self._read() if self.path.exists() else iter(())
        first = next(rows, [])
        self._columns = first + [name for name in added if name not in first]

        def lines() -> Iterator[str]:
            size = 0
            for row in (dict(zip(first, cells)) for cells in rows):
                if keep(row):
                    self._last, self._offset = row, size + header_size
                    line = _line(row.get(name, "") for name in self._columns).decode()
                    size += len(line.encode())
                    yield line

        header = _line(self._columns).decode() if self._columns else ""
        header_size = len(header.encode())
        replace(self.path, _chained(header, lines()))

    def _read(self) -> Iterator[list[str]]:
        """Yield the file's rows, without a last one that has no end."""
        with open(self.path, newline="", encoding="utf-8") as file:
            torn = not _ends_with_newline(self.path)
            previous: list[str] | None = None
            for row in csv.reader(file):
                if previous:
                    yield previous
                previous = row
            if previous and not torn:
                yield previous

    def _open(self) -> io.FileIO:
        if self._file is None:
            self._file = io.FileIO(self.path, "r+")
        return self._file


def _chained(header: str, lines: Iterator[str]) -> Iterator[str]:
    yield header
    yield from lines


def _line(cells: Any) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(list(cells))
    return buffer.getvalue().encode()


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _text(value: Any) -> str:
    value = plain(value)
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)
