"""The seconds of a fit by the parts of its loop, measured with nothing but hooks."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any, Callable, Mapping

from .base import HOOKS, Callback

LAST = 1_000_000
"""The priority of what hears an event after everybody else."""


class Sections:
    """Adds up the time between marks: what passes until the next mark belongs to the section that the last one named.

    The hooks of all other callbacks and of the module are wrapped while a fit runs, so that each is a section of its
    own.
    """

    def __init__(self) -> None:
        self.running = False
        self.section, self.since = "other", 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.batches = 0
        self.end = Callback()  # hears events after everybody else
        self.end.priority = LAST
        self.end.on_train_batch_end = self._after_batch  # type: ignore[method-assign,assignment]
        self.end.on_validation_end = self._mark("waiting for data")  # type: ignore[method-assign]
        self.end.on_train_epoch_end = self._mark("other")  # type: ignore[method-assign]
        self._wrapped: list[tuple[Any, str, Any]] = []
        self.hooks = {
            "on_train_start": lambda *_: self.start(),
            "on_train_epoch_start": self._mark("waiting for data"),
            "on_train_batch_start": self._mark("training_step"),
            "on_before_backward": self._mark("backward"),
            "on_after_backward": self._mark("other"),
            "on_before_optimizer_step": self._mark("optimizer"),
            "on_train_batch_end": self._mark("logging"),
            "on_train_epoch_end": self._mark("logging"),
            "on_validation_start": self._mark("validation"),
            "on_save_checkpoint": self._mark("checkpoint"),
        }

    def open(self, trainer: Any, module: Any, path: Path) -> None:
        """Make ready for a fit: listen to everybody's hooks."""
        self.path, self.batches = Path(f"{path}.txt"), 0
        for callback in trainer.session.callbacks:
            if callback.priority == -LAST:
                continue  # that is the profiler
            own = [name for name in HOOKS if _is_own(callback, name, "Callback")]
            self._wrap(callback, own, f"{type(callback).__name__} (callback)")
        self._wrap(module, [name for name in HOOKS if _is_own(module, name, "ModuleHooks")], "hooks of the module")

    def start(self) -> None:
        """Begin to count; what passed before does not."""
        self.seconds.clear()
        self.running, self.section, self.since = True, "other", perf_counter()

    def enter(self, section: str) -> None:
        """Add the time since the last mark to its section and go over to another."""
        now = perf_counter()
        self.seconds[self.section] += now - self.since
        self.section, self.since = section, now

    def stop(self) -> str:
        """Return the table, which is also written; "" where nothing ran."""
        if not self.running:
            return ""
        self.enter("other")
        self.running = False
        text = table(self.seconds, self.batches)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text + "\n")
        return f"{text}\n{self.path}"

    def close(self) -> None:
        """Let go of everybody's hooks."""
        for thing, name, before in reversed(self._wrapped):
            delattr(thing, name) if before is None else setattr(thing, name, before)
        self._wrapped.clear()

    def _mark(self, section: str) -> Callable[..., None]:
        return lambda *_: self.enter(section)

    def _after_batch(self, *_: Any) -> None:
        self.batches += 1
        self.enter("waiting for data")

    def _wrap(self, thing: Any, names: list[str], section: str) -> None:
        for name in names:
            self._wrapped.append((thing, name, vars(thing).get(name)))
            setattr(thing, name, self._timed(getattr(thing, name), section))

    def _timed(self, function: Callable[..., Any], section: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            before = self.section
            self.enter(section)
            try:
                return function(*arguments, **named)
            finally:
                self.enter(before)

        return timed


def table(seconds: Mapping[str, float], batches: int) -> str:
    """Return the sections as a table, largest first; the shares are rounded such that they make 100.0."""
    rows = sorted(((name, value) for name, value in seconds.items() if value > 0), key=lambda row: -row[1])
    total = sum(value for _, value in rows) or 1.0
    shares = _rounded([1000 * value / total for _, value in rows])
    width = max(len(name) for name, _ in [*rows, ("section", 0)])
    lines = [
        f"Where {total:.3f} s of {batches} batches went",
        f"{'section':{width}}  {'seconds':>10}  {'%':>5}  {'ms/batch':>9}",
    ]
    for (name, value), share in zip(rows, shares):
        lines.append(f"{name:{width}}  {value:10.3f}  {share / 10:5.1f}  {1000 * value / max(batches, 1):9.3f}")
    lines.append(f"{'total':{width}}  {total:10.3f}  {sum(shares) / 10:5.1f}  {1000 * total / max(batches, 1):9.3f}")
    return "\n".join(lines)


def _rounded(values: list[float]) -> list[int]:
    """Round to whole numbers that keep the sum: those with the largest remainders go up."""
    floors = [math.floor(value) for value in values]
    missing = round(sum(values)) - sum(floors)
    up = sorted(range(len(values)), key=lambda index: floors[index] - values[index])[:missing]
    return [floor + (index in up) for index, floor in enumerate(floors)]


def _is_own(thing: Any, name: str, base: str) -> bool:
    """Tell whether a hook is more than the empty one of the class named ``base``."""
    if name in vars(thing):
        return True
    function = getattr(type(thing), name, None)
    return function is not None and not function.__qualname__.startswith(f"{base}.")
