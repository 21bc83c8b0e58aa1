"""A trace of the XLA runtime over some batches."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from .base import Callback
from .sections import LAST


class Traces:
    """The XLA runtime's profiler over ``active`` batches after ``wait`` of them, on every rank."""

    def __init__(self, wait: int, active: int) -> None:
        try:
            self.profiler = import_module("torch_xla.debug.profiler")
        except ImportError:
            raise ImportError(
                'Expected torch_xla for Profiler("xla"). Received: it is not installed. Run '
                "`pip install 'drivetrain[xla]'`, or use Profiler(\"torch\")."
            ) from None
        self.wait, self.active = wait, active
        self.batches, self.tracing, self.traced = 0, False, False
        self.hooks = {"on_train_batch_start": lambda *_: self._begin()}
        self.end = Callback()  # hears events after everybody else
        self.end.priority = LAST
        self.end.on_train_batch_end = lambda *_: self._count()  # type: ignore[method-assign]

    def open(self, trainer: Any, module: Any, path: Path) -> None:
        """Make ready for a fit whose traces go below ``path``."""
        self.path, self.batches, self.traced = path, 0, False

    def stop(self) -> str:
        """Return where the trace lies; "" where nothing was traced."""
        self._end()
        return f"Profiled the XLA runtime: tensorboard --logdir {self.path}" if self.traced else ""

    def close(self) -> None:
        """Let go of the fit."""
        self._end()

    def _begin(self) -> None:
        if self.batches == self.wait and not self.traced:
            self.path.mkdir(parents=True, exist_ok=True)
            self.profiler.start_trace(str(self.path))
            self.tracing = self.traced = True

    def _count(self) -> None:
        self.batches += 1
        if self.batches >= self.wait + self.active:
            self._end()

    def _end(self) -> None:
        if self.tracing:
            self.tracing = False
            self.profiler.stop_trace()
