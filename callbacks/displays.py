"""Ways to show progress: bars, lines, nothing. All of them show the same few counters."""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from time import monotonic
from typing import Any, Iterable, Mapping, TextIO


class Display:
    """Shows nothing. A counter has a key, "train" or "evaluate"; several can be open at once."""

    needs_time_left = False  # whether it cannot tell by itself how long a counter still takes

    def open(self, key: str, title: str, total: int | None, done: int) -> None:
        """Begin a counter, or begin it anew."""

    def draw(self, key: str, done: int, notes: Iterable[str]) -> None:
        """Show a counter with notes."""

    def close(self, key: str, *, keep: bool = False) -> None:
        """End a counter; ``keep`` leaves what it shows."""

    def alive(self) -> None:
        """Show that the process lives although nothing was counted for long."""

    def silent_for(self) -> float:
        """Return the seconds since it last showed something."""
        return 0.0

    def write(
        self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
    ) -> None:
        """Print as ``print`` does, in lines of their own."""
        print(*values, sep=sep, end=end, file=file, flush=flush)


class Bars(Display):
    """One bar of tqdm for each counter, below each other."""

    def __init__(self, stream: TextIO, position: int, leave: bool) -> None:
        self._stream, self._position, self._leave = stream, position, leave
        self._bars: dict[str, Any] = {}
        self._kind = _bar_class()
        known = in_notebook() or _knows_its_size(stream)
        self._size: dict[str, Any] = {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}
        self._shown = monotonic()

    def open(self, key: str, title: str, total: int | None, done: int) -> None:
        bar = self._bars.get(key)
        if bar is not None and self._leave:
            bar.close()
            bar = None
        if bar is None:
            nested = key == "evaluate" and "train" in self._bars
            bar = self._bars[key] = self._kind(
                total=total, initial=done, desc=title, position=self._position + nested, leave=not nested,
                file=self._stream, mininterval=0, miniters=1, **self._size,
            )  # fmt: skip
        else:
            bar.set_description_str(title, refresh=False)
            bar.reset(total)
            bar.initial = bar.n = bar.last_print_n = done

    def draw(self, key: str, done: int, notes: Iterable[str]) -> None:
        bar = self._bars[key]
        bar.set_postfix_str(", ".join(notes), refresh=False)
        if done > bar.n:
            bar.update(done - bar.n)  # redraws
        else:
            bar.refresh()
        self._shown = monotonic()

    def close(self, key: str, *, keep: bool = False) -> None:
        bar = self._bars.pop(key, None)
        if bar is not None:
            bar.leave = keep or key == "train"
            bar.close()

    def alive(self) -> None:
        for bar in list(self._bars.values()):
            bar.refresh()
        self._shown = monotonic()

    def silent_for(self) -> float:
        return monotonic() - self._shown

    def write(
        self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
    ) -> None:
        self._kind.write(sep.join(map(str, values)), end=end, file=file or sys.stdout)
        if flush:
            (file or sys.stdout).flush()


class Lines(Display):
    """A line each time, without control characters; for files and pipes."""

    needs_time_left = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._counters: dict[str, tuple[str, int | None, float, int]] = {}
        self._last = ""
        self._shown = monotonic()

    def open(self, key: str, title: str, total: int | None, done: int) -> None:
        self._counters[key] = (title, total, monotonic(), done)

    def draw(self, key: str, done: int, notes: Iterable[str]) -> None:
        title, total, since, first = self._counters[key]
        rate = (done - first) / max(monotonic() - since, 1e-9)
        count = f"{done}" if total is None else f"{done}/{total}"
        speed = f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"
        self._last = f"{title}: {', '.join([count, speed, *notes])}"
        self._print(self._last)

    def close(self, key: str, *, keep: bool = False) -> None:
        self._counters.pop(key, None)

    def alive(self) -> None:
        open_ones = list(self._counters.values())  # the other thread may open one just now
        title = open_ones[-1][0] if open_ones else "Preparing"
        self._print(f"{title}: no batch has ended for {self.silent_for():.0f} s. Last: {self._last or 'nothing'}")

    def silent_for(self) -> float:
        return monotonic() - self._shown

    def _print(self, line: str) -> None:
        self._shown = monotonic()
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a full disk or a closed pipe is no reason to stop training
            pass


class Pulse:
    """Lets a display show that the process lives whenever it was silent for ``seconds``, by a thread of its own."""

    def __init__(self, display: Display, seconds: float) -> None:
        self._display, self._seconds = display, seconds
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="drivetrain-progress", daemon=True).start()

    def stop(self) -> None:
        """End the thread, at its next turn."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.05, self._seconds - self._display.silent_for())):
            if self._display.silent_for() >= self._seconds:
                self._display.alive()


def in_notebook() -> bool:
    """Tell whether this is a Jupyter kernel."""
    return "ipykernel" in sys.modules


def shown(metrics: Mapping[str, float]) -> list[str]:
    """Return "name=value" of each metric, briefly."""
    return [f"{name}={_brief(value)}" for name, value in metrics.items()]


def clock(seconds: float) -> str:
    """Return seconds as hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _brief(value: float) -> str:
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e9
    return str(int(value)) if whole else f"{value:.4g}"


def _knows_its_size(terminal: TextIO) -> bool:
    try:
        return all(os.get_terminal_size(terminal.fileno()))
    except (OSError, ValueError, AttributeError):
        return False


def _bar_class() -> Any:
    """Return tqdm's class for a terminal or a notebook, without the thread that it would start."""
    from tqdm.std import TqdmExperimentalWarning

    if in_notebook():
        with warnings.catch_warnings():  # that the choice is an experiment
            warnings.simplefilter("ignore", TqdmExperimentalWarning)
            from tqdm.autonotebook import tqdm
    else:
        from tqdm.std import tqdm
    return type("Bar", (tqdm,), {"monitor_interval": 0})
