"""Folders that appear and disappear in one step, and what dead processes left of theirs.

While a folder is written, replaced or removed it lies beside its final name under a hidden one,
`.<name>.<kind>-<host>-<pid>-<start>-<token>`: kind is "writing", "replaced", "removing", or "copying" (second names of
its files for as long as they are copied elsewhere); host, pid and start (when that process began) say whose it is, so
that anybody can tell whether its owner still lives.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from .files import sync_folder

_log = logging.getLogger(__name__)
_HIDDEN = re.compile(
    r"\.(?P<name>.+)\.(?P<kind>writing|replaced|removing|copying)"
    r"-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-(?P<token>[0-9a-f]{8})",
    re.DOTALL,
)
_FOREIGN_AGE = 24 * 3600.0  # seconds without a change, after which another machine's folder counts as abandoned
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV}
_mine: set[str] = set()  # hidden folders that this process is working with


@dataclass(frozen=True)
class Hidden:
    """A hidden folder: where it lies, what it was or shall be called, and whose it is."""

    path: Path
    name: str
    kind: str
    host: str
    pid: int
    start: int

    @property
    def target(self) -> Path:
        """The visible place that this folder belongs to."""
        return self.path.parent / self.name

    def alive(self) -> bool:
        """Whether its owner may still be working with it."""
        if self.host != _host():
            return time.time() - _last_change(self.path) < _FOREIGN_AGE
        if (self.pid, self.start) == (os.getpid(), _started(os.getpid())):
            return str(self.path) in _mine
        return _exists(self.pid) and _started(self.pid) == self.start


def claim(directory: Path, kind: str) -> Path:
    """Return a new hidden name beside `directory`, marked as in use by this process until `release`."""
    owner = f"{_host()}-{os.getpid()}-{_started(os.getpid())}"
    path = directory.parent / f".{directory.name}.{kind}-{owner}-{os.urandom(4).hex()}"
    _mine.add(str(path))
    return path


def release(path: Path) -> None:
    """This process no longer works with a hidden folder."""
    _mine.discard(str(path))


def hidden_folders(parent: Path) -> list[Hidden]:
    """Return the hidden folders in `parent`, those of living and of dead owners."""
    found = []
    for name in sorted(os.listdir(parent)):
        match = _HIDDEN.fullmatch(name)
        if match:
            pid, start = int(match["pid"]), int(match["start"])
            found.append(Hidden(parent / name, match["name"], match["kind"], match["host"], pid, start))
    return found


def shown(path: Path) -> Path:
    """Return the visible place of a folder that may be a hidden one."""
    match = _HIDDEN.fullmatch(path.name)
    return path.with_name(match["name"]) if match else path


def make_parents(directory: Path) -> None:
    """Create a folder with all those above it, durably."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def publish(finished: Path, directory: Path, *, sync: bool = True) -> Path | None:
    """Give a finished hidden folder its name, durably; return where the folder that had this name lies hidden now.

    Atomic where the system can exchange two names (Linux: renameat2). Elsewhere the old folder steps aside first; a
    crash between these two renames is put right by `recover`. After an error everything is as it was before.
    """
    aside = None
    if not os.path.lexists(directory) or is_empty(directory):
        os.rename(finished, directory)
    elif exchange(finished, directory):
        aside = finished
    else:
        aside = _step_aside(finished, directory)
    try:
        if sync:
            sync_folder(directory.parent)
    except BaseException:
        _undo(finished, directory, aside)
        raise
    return aside


def recover(parent: Path) -> None:
    """Finish the replacements in `parent` that a crash stopped while neither the old nor the new folder was visible."""
    for hidden in hidden_folders(parent):
        if hidden.kind == "replaced" and not hidden.alive() and not os.path.lexists(hidden.target):
            finished = hidden.path.with_name(_sibling(hidden.path, "writing"))
            # The old folder only steps aside for one that is complete and durable.
            source = finished if finished.is_dir() else hidden.path
            try:
                os.rename(source, hidden.target)
                sync_folder(parent)
            except OSError as error:  # another process was quicker, or the disk cannot be written
                _log.debug("could not recover %s: %s", hidden.target, error)


def settle(directory: Path, patience: float = 2.0) -> None:
    """Return when `directory` is not just being replaced: by a living process (waited for, seconds), or a dead one."""
    deadline = time.monotonic() + patience
    while not os.path.lexists(directory) and directory.parent.is_dir():
        recover(directory.parent)
        stepped_aside = [hidden for hidden in hidden_folders(directory.parent) if hidden.kind == "replaced"]
        if directory.name not in {hidden.name for hidden in stepped_aside} or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def sweep(parent: Path) -> None:
    """Recover what can be recovered in `parent`, then delete what dead processes left there."""
    recover(parent)
    for hidden in hidden_folders(parent):
        if not hidden.alive() and (hidden.kind != "replaced" or os.path.lexists(hidden.target)):
            _log.info("deleting %s, left by a process that has ended", hidden.path)
            discard(hidden.path)


def discard(path: Path) -> None:
    """Delete a hidden folder or file; what resists is left for a later sweep, with a warning."""

    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        _log.warning("could not delete all of %s", path)
    release(path)


def link(path: Path, place: Path) -> None:
    """Give a file a second name, or a copy of it where the file system has no links."""
    try:
        os.link(path, place, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, place, follow_symlinks=False)


def is_empty(directory: Path) -> bool:
    """Whether this is a real folder with nothing in it."""
    return directory.is_dir() and not directory.is_symlink() and not os.listdir(directory)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def _step_aside(finished: Path, directory: Path) -> Path:
    aside = finished.with_name(_sibling(finished, "replaced"))
    _mine.add(str(aside))
    try:
        os.rename(directory, aside)
        os.rename(finished, directory)
    except BaseException:  # also a signal's: nobody else would bring it back while this process lives
        if not os.path.lexists(directory):
            os.rename(aside, directory)
        release(aside)
        raise
    return aside


def _undo(finished: Path, directory: Path, aside: Path | None) -> None:
    if aside == finished:
        exchange(finished, directory)
        return
    os.rename(directory, finished)
    if aside is not None:
        os.rename(aside, directory)
        release(aside)


def _sibling(hidden: Path, kind: str) -> str:
    match = _HIDDEN.fullmatch(hidden.name)
    assert match is not None
    return f"{hidden.name[: match.start('kind')]}{kind}{hidden.name[match.end('kind') :]}"


def _last_change(folder: Path) -> float:
    try:
        return max([os.stat(folder).st_mtime, *(entry.stat().st_mtime for entry in os.scandir(folder))])
    except OSError:
        return time.time()  # it is being changed right now


@cache
def _host() -> str:
    """This machine since its last boot, and the process namespace: where a pid means something."""
    parts = [socket.gethostname()]
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        try:
            parts.append(read())
        except OSError:
            parts.append("")
    return xxh3_64_hexdigest("\n".join(parts).encode())[:8]


def _started(pid: int) -> int:
    """When a process began (ticks since boot), which tells it from a later one of this id. 0: unknown, -1: it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return -1 if fields[0] in "ZX" else int(fields[19])  # a zombie only waits for its parent


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
