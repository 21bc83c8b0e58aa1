"""Bars drawn by rich, an option of `Progress`."""

from __future__ import annotations

from time import monotonic
from typing import Any, Iterable, TextIO

from .displays import Display


class RichBars(Display):
    """One row of rich's live display for each counter; what is printed meanwhile goes above it."""

    def __init__(self, stream: TextIO, leave: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(file=stream)
        self._leave = leave
        # Without a thread of its own: it is drawn when it is told to, as every display
        self._live = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[notes]}"), console=self._console, auto_refresh=False, redirect_stdout=True,
            redirect_stderr=stream.isatty(),
        )  # fmt: skip
        self._rows: dict[str, Any] = {}
        self._shown = monotonic()

    needs_time_left = True

    def open(self, key: str, title: str, total: int | None, done: int) -> None:
        row = self._rows.get(key)
        if row is not None and not self._leave:
            self._live.reset(row, description=title, total=total, completed=done, notes="")
        else:
            self._rows[key] = self._live.add_task(title, total=total, completed=done, notes="")
        self._live.start()
        self._refresh()

    def draw(self, key: str, done: int, notes: Iterable[str]) -> None:
        self._live.update(self._rows[key], completed=done, notes=", ".join(notes))
        self._refresh()

    def close(self, key: str, *, keep: bool = False) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        if not keep and key != "train":
            self._live.remove_task(row)
        self._refresh()
        if not self._rows:
            self._live.stop()
            for task in list(self._live.task_ids):
                self._live.remove_task(task)

    def alive(self) -> None:
        self._refresh()

    def silent_for(self) -> float:
        return monotonic() - self._shown

    def write(
        self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
    ) -> None:
        text = sep.join(map(str, values))
        if file is None and self._rows:
            self._live.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, end=end, file=file, flush=flush)

    def _refresh(self) -> None:
        self._live.refresh()
        self._shown = monotonic()


def require_rich() -> None:
    """Raise ImportError, which names the extra, where rich is missing."""
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        raise ImportError(
            "Expected rich for Progress(style='rich'). Received: it is not installed. Run "
            "`pip install 'drivetrain[rich]'`, or leave style out."
        ) from None
