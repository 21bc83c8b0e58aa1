"""What trackers of packages have in common that hold rows in memory, which a killed process loses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .base import GeneralTracker, needed, on_main_process


class ServiceTracker(GeneralTracker):
    """A tracker whose package bears its name, whose native object is a run of it, kept in `run`.

    `run_name` is the project, `kwargs` are those of the package's function that opens a run.
    """

    requires_logging_directory = False
    survives_kill = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self._package = needed(self.name)
        self.run_name = run_name
        self.run: Any = None
        self._options = kwargs
        self._before: dict[str, set[int]] | None = None  # steps that the run had when it was first asked, by name

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def logged_steps(self, name: str) -> Collection[int]:
        """Return the steps that earlier parts of the run have."""
        if self._before is None:
            self._before = {}
            for found, step in self._earlier():
                self._before.setdefault(found, set()).add(step)
        return self._before.get(name, ())

    def _earlier(self) -> Iterable[tuple[str, int]]:
        """Yield names and steps of what earlier parts of the run hold."""
        raise NotImplementedError
