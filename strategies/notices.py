"""Short texts that ranks leave for each other without a collective: a thread of a rank that hangs can send one."""

from __future__ import annotations

import time
from contextlib import suppress

from . import rendezvous
from .world import World


class Notices:
    """The texts of the ranks of ``world``; a rank alone, or one whose group the user has made, finds only its own."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self._store = rendezvous.store() if world.size > 1 else None

    def exchange(self, name: str, text: str, seconds: float) -> dict[int, str]:
        """Leave ``text`` under ``name``, and return by rank what was left there after at most ``seconds``."""
        found = {self.rank: text}
        if self._store is None:
            return found
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):  # the store may have gone with rank 0
            self._store.set(_key(name, self.rank), text)
            while len(found) < self.size and time.monotonic() < deadline:
                found |= {rank: left for rank in set(range(self.size)) - set(found) if (left := self._left(name, rank))}
                time.sleep(0.05)
        return dict(sorted(found.items()))

    def _left(self, name: str, rank: int) -> str:
        assert self._store is not None
        return self._store.get(_key(name, rank)).decode() if self._store.check([_key(name, rank)]) else ""

    def leave(self, name: str, text: str) -> None:
        """Leave ``text`` under a name that all ranks share; the last one counts, "" takes it back."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_key(name), text)

    def left(self, name: str) -> str:
        """Return what somebody has left under a name that all ranks share, or ""; waits for nobody."""
        if self._store is None:
            return ""
        with suppress(RuntimeError):
            return self._store.get(_key(name)).decode() if self._store.check([_key(name)]) else ""
        return ""

    def withdraw(self, name: str) -> None:
        """Take back what this rank has left under ``name``."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_key(name, self.rank), "")


def _key(name: str, rank: int | str = "all") -> str:
    return f"drivetrain/notice/{name}/{rank}"
