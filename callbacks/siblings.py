"""The other ranks of a run, as far as this one can tell without waiting for them: who has failed, who is gone."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..strategies.notices import Notices


_PAUSE = 1.0  # seconds between two looks at what the others say


class PeerFailed(RuntimeError):
    """Another rank has ended, and so this one has to; the message says which, and by what."""


class Siblings:
    """The ranks of ``world``; collective when it is made. Those on this machine are known by their processes too."""

    def __init__(self, world: Any) -> None:
        self.world = world
        here = (socket.gethostname(), os.getpid())
        everybody = world.gather_object(here)
        others = {rank: pid for rank, (host, pid) in enumerate(everybody) if host == here[0] and rank != world.rank}
        self._processes = {rank: pid for rank, pid in others.items() if alive(pid)}  # not those of another container
        self._notices = Notices(world)
        self._said, self._heard, self._listened = "", "", time.monotonic()

    @property
    def none(self) -> bool:
        """Whether this rank is the only one."""
        return self.world.size == 1

    def failure(self) -> str | None:
        """Return which rank has failed and how, or None; never waits, so that a signal's handler can ask."""
        if self.none:
            return None
        reported = self.world.peer_failure()
        if reported is not None:
            return reported
        gone = next((rank for rank, pid in self._processes.items() if not alive(pid)), None)
        return None if gone is None else f"rank {gone}: its process {self._processes[gone]} is gone"

    def gone(self) -> set[int]:
        """Return the ranks that are known to have failed, or to be no more."""
        told = re.match(r"rank (\d+): ", self.world.peer_failure() or "")
        failed = {int(told[1])} if told else set()
        return failed | {rank for rank, pid in self._processes.items() if not alive(pid)}

    def say(self, word: str) -> None:
        """Let all others know ``word``, without waiting for them; once."""
        if not self._said:
            self._said = word
            self._notices.leave("word", word)

    def heard(self) -> str:
        """Return what somebody has said, or ""; asks once a second, as ranks do so between any two of their batches."""
        if not self._heard and not self.none and time.monotonic() - self._listened > _PAUSE:
            self._listened, self._heard = time.monotonic(), self._notices.left("word")
        return self._heard

    def forget(self) -> None:
        """Take back what this rank has said; all have heard it."""
        if self._said:
            self._notices.leave("word", "")

    def wait(self) -> None:
        """Wait until every rank has come here; one that never comes is none of our business any more."""
        with suppress(RuntimeError):
            self.world.barrier("the end after a signal")


def siblings(trainer: Any) -> Siblings:
    """Return the other ranks of a trainer's run; collective where it is asked for the first time."""
    if trainer.session.siblings is None:
        trainer.session.siblings = Siblings(trainer.accelerator.world)
    return trainer.session.siblings


def alive(pid: int) -> bool:
    """Tell whether a process runs on this machine (one that has ended, but was not yet waited for, does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True
