"""Tracking into one file of JSON lines, `metrics.jsonl`: one object per call, nested values as they are."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import GeneralTracker, on_main_process
from .files import replace
from .values import plain


class JSONLinesTracker(GeneralTracker):
    """Tracks into `logging_dir/run_name/metrics.jsonl`; the native object is the file's path.

    A line is {"step": 5, "time": seconds since 1970, "values": {...}}; hyperparameters are a line {"config": {...}},
    and a run that raised ends with {"error": text}. With `resume_step`, lines after that step are dropped at the start.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], *, file_name: str = "metrics.jsonl",
        resume_step: int | None = None,
    ) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / file_name
        self.resume_step = resume_step
        self._file: io.FileIO | None = None
        self._repeatable: list[Any] = []  # values of the step at which a run goes on: it may log them once more

    @property
    def tracker(self) -> Path:
        """The path of the file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Make the folder, or continue the file that is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            replace(self.path, self._surviving())
        self._file = io.FileIO(self.path, "a")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write a line with the hyperparameters, unless the file has the same already."""
        if plain(values) not in self._repeatable:
            self._write({"config": plain(values)})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a line."""
        if kwargs:
            raise TypeError(f"Expected no options for the JSON Lines tracker. Received: {', '.join(kwargs)}.")
        content = plain(values)
        if step is None or step != self.resume_step or content not in self._repeatable:
            self._write({"step": step, "time": self.logged_at or time.time(), "values": content})

    @on_main_process
    def fail(self, error: str) -> None:
        """Write a line with the error."""
        self._write({"error": error})

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _surviving(self) -> Iterator[str]:
        """Yield the lines to keep; a torn last line goes."""
        with open(self.path, newline="\n", encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line) if line.endswith("\n") else {"step": float("inf")}
                step, last = entry.get("step"), self.resume_step
                if not line.endswith("\n") or (step is not None and last is not None and step > last):
                    continue
                if "config" in entry or (step is not None and step == last):
                    self._repeatable.append(entry.get("config", entry.get("values")))
                yield line

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        data = json.dumps(entry).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(data) != len(data):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
