"""Restarts by an elastic agent: what a process that was started again goes on from, without being told.

Checkpoints of a launch that may restart its processes (`max_restarts`) carry its name, and which fit of the process
they belong to. After a restart the same fit goes on from the newest of them.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..strategies.checkpoint.format import Checkpoint, CheckpointError, ordered
from ..strategies.environment import detect, text

logger = logging.getLogger(__name__)

_fits = itertools.count(1)


class Attempt:
    """One fit of this process, as the processes before and after a restart of the same launch would count it."""

    def __init__(self) -> None:
        self.again = detect().attempt > 0
        number = next(_fits)
        restarts = int(text("TORCHELASTIC_MAX_RESTARTS") or 0)
        self.name = f"{_launch()}, fit {number}" if restarts else None

    def found(self, folders: Iterable[Path]) -> Path | None:
        """Return the newest whole checkpoint that this fit has left before the restart."""
        if not self.again or self.name is None:
            return None
        whole: list[tuple[str, Path]] = []
        for path in (path for folder in folders if folder.is_dir() for path in ordered(folder, by="time")):
            with suppress(CheckpointError):  # a damaged one is as good as none
                manifest = Checkpoint.open(path, verify=False).manifest
                if manifest.get("launch") == self.name:
                    whole.append((manifest["time"], Checkpoint.open(path).directory))
                    break
        return max(whole)[1].resolve() if whole else None


def _launch() -> str:
    """The agent that started this process: by its own name, which may be used again, its process and its beginning."""
    begun, agent = "", os.getppid()
    with suppress(OSError, IndexError):
        begun = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"launch {text('TORCHELASTIC_RUN_ID') or 'none'}, agent {agent} {begun}".rstrip()
