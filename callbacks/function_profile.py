"""Where the time of a fit goes by Python's functions."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path
from typing import Any

from .base import Callback
from .sections import LAST


class Functions:
    """Python's own profiler over the whole fit."""

    def __init__(self, row_limit: int) -> None:
        self.row_limit = row_limit
        self.hooks = {"on_train_start": lambda *_: self._start()}
        self.end = Callback()
        self.end.priority = LAST
        self.running = False

    def open(self, trainer: Any, module: Any, path: Path) -> None:
        """Make ready for a fit whose results go to ``path`` and an ending."""
        self.path, self.profile = Path(f"{path}.txt"), cProfile.Profile()

    def stop(self) -> str:
        """Return the table, which is also written; "" where nothing ran."""
        if not self.running:
            return ""
        self.running = False
        self.profile.disable()
        text = io.StringIO()
        pstats.Stats(self.profile, stream=text).sort_stats("cumulative").print_stats(self.row_limit)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text.getvalue())
        self.profile.dump_stats(self.path.with_suffix(".prof"))
        return f"{text.getvalue().rstrip()}\n{self.path}, and {self.path.with_suffix('.prof')} for pstats or snakeviz"

    def close(self) -> None:
        """Let go of the fit."""

    def _start(self) -> None:
        try:
            self.profile.enable()
        except ValueError as error:  # Python 3.12 has room for one
            raise ValueError(
                f'Expected no other profiler of Python to run. Received: {error}. Stop it, or use Profiler("simple").'
            ) from error
        self.running = True
