"""Where the time of some batches goes by torch's operators."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ..strategies.settings import ProfileKwargs
from .base import Callback
from .sections import LAST


class Operators:
    """torch.profiler over some batches, on every rank."""

    def __init__(
        self, options: dict[str, Any], row_limit: int, sort_by: str | None, *, memory_timeline: bool = False
    ) -> None:
        self.options, self.row_limit, self.sort_by = options, row_limit, sort_by
        self.memory_timeline = memory_timeline
        self.schedule: dict[str, int] = options["schedule_option"]
        self.hooks = {"on_train_start": lambda *_: self._start()}
        self.end = Callback()  # hears events after everybody else
        self.end.priority = LAST
        self.end.on_train_batch_end = lambda *_: self.profile.step()  # type: ignore[method-assign]
        self.running = False

    def open(self, trainer: Any, module: Any, path: Path) -> None:
        """Make ready for a fit whose results go to ``path`` and an ending."""
        device = trainer.device.type
        self.device = str(trainer.device)
        self.order = self.sort_by or f"self_{device if device in ('cuda', 'xpu') else 'cpu'}_time_total"
        self.path, self.written = path, 0
        self.profile = ProfileKwargs(**self.options, on_trace_ready=self._write).build()

    def stop(self) -> str:
        """Return what was written where; "" where nothing ran."""
        if not self.running:
            return ""
        self.running = False
        self.profile.stop()
        if self.written:
            traces = f"{self.path}-*.pt.trace.json (for chrome://tracing and TensorBoard)"
            return f"Profiled operators: {traces} and {self.path}-*.txt"
        ahead = self.schedule["wait"] + self.schedule["warmup"]
        warnings.warn(
            f"Expected more than {ahead} batches to profile. Received: {self.profile.step_num}. "
            "Train for longer, or lower wait and warmup.",
            stacklevel=2,
        )
        return ""

    def close(self) -> None:
        """Let go of the fit."""

    def _start(self) -> None:
        self.running = True
        self.profile.start()

    def _write(self, profile: Any) -> None:
        ahead = self.schedule["wait"] + self.schedule["warmup"]
        if profile.step_num % (ahead + self.schedule["active"]) == ahead:
            return  # the run ended before the first batch to record
        self.written += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(f"{self.path}-{self.written}.pt.trace.json")
        text = profile.key_averages().table(sort_by=self.order, row_limit=self.row_limit)
        Path(f"{self.path}-{self.written}.txt").write_text(text)
        if self.memory_timeline:
            with warnings.catch_warnings():  # that torch prefers its memory snapshots, which only CUDA has
                warnings.simplefilter("ignore", FutureWarning)
                profile.export_memory_timeline(f"{self.path}-{self.written}-memory.json", device=self.device)
