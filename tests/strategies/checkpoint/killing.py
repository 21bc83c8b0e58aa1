"""Counts the system calls of a save, dies at one of them, or writes down their order; for use in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from drivetrain.strategies.checkpoint import folders

CALLS = (
    "open",
    "write",
    "writev",
    "fsync",
    "close",
    "mkdir",
    "rename",
    "replace",
    "link",
    "unlink",
    "rmdir",
    "symlink",
)


class Trace:
    """Sees every call by which a save changes the disk, in order; `seen` gets (name, path, second path)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        exchange = folders.exchange
        folders.exchange = self._wrapped("exchange", exchange)

    def before(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A call is about to be made."""
        places = [_path(arg) for arg in args[:2] if isinstance(arg, (str, bytes, os.PathLike))]
        if args and isinstance(args[0], int):
            places = [os.readlink(f"/proc/self/fd/{args[0]}")]
        self.seen.append((name, *(places + ["", ""])[:2]))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.before(name, function, args)
            return function(*args, **kwargs)

        return call


class Killer(Trace):
    """Kills this process at the `point`-th call (from 0): before it, or half way through it where it writes."""

    def __init__(self, point: int, *, torn: bool = False) -> None:
        self.left, self.torn = point, torn
        super().__init__()

    def before(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.left == 0:
            if self.torn and name == "writev":
                function(args[0], [buffer[: len(buffer) // 2 + 1] for buffer in args[1][:1]])
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def _path(place: Any) -> str:
    return os.path.abspath(os.fsdecode(place))
