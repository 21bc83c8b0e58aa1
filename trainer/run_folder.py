"""The folder of a run: ``<root>/runs/<run id>``, one per run, the same after every resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def is_run_id(name: Any) -> bool:
    """Tell whether this names a folder of its own: what a checkpoint says may have been written by anybody."""
    return isinstance(name, str) and re.fullmatch(r"\w[\w.=+ -]{0,200}", name) is not None


class RunFolder:
    """Finds a free run id once, on the main process, and tells it to all ranks."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.run_id: str | None = None

    @property
    def path(self) -> Path:
        """The folder; exists only once something is written."""
        return self.root / "runs" / (self.run_id or "run-0001")

    def claim(self, world: Any, *, run_id: str | None = None, anew: bool = True, create: bool = True) -> None:
        """Take over a run's id, or find a free one where there is none or ``anew`` (collective).

        ``create`` makes the folder, so that no other run takes it.
        """
        if run_id is not None or self.run_id is not None and not anew:
            self.run_id = run_id or self.run_id
            return
        found = self._free(create=create) if world.rank == 0 else None
        self.run_id = world.broadcast_object(found)

    def _free(self, *, create: bool) -> str:
        runs = self.root / "runs"
        taken = [int(match[1]) for path in runs.glob("run-*") if (match := re.fullmatch(r"run-(\d+)", path.name))]
        number = max(taken, default=0) + 1
        while create:
            try:
                (runs / f"run-{number:04d}").mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
        return f"run-{number:04d}"
