"""Extensions in C++ that DeepSpeed builds at their first use, and locks that a killed build leaves behind.

torch puts a file `lock` into the folder of an extension while one process builds it, holds it open, and has all others
wait until it is gone (torch/utils/file_baton.py): after a kill they would wait for ever. Such a lock is removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from . import environment

logger = logging.getLogger(__name__)
_FOREIGN = 3600.0  # seconds after which a lock of nobody on this machine counts as left, where folders are shared


def folder() -> Path:
    """Returns where extensions are built and kept: TORCH_EXTENSIONS_DIR, else torch's cache."""
    named = environment.live().get("TORCH_EXTENSIONS_DIR")
    return Path(named or import_module("torch.utils.cpp_extension").get_default_build_root())


def clear_left_locks(where: Path | None = None) -> list[Path]:
    """Removes the locks of DeepSpeed's extensions that no living process holds; returns them.

    A lock on a file system that machines share may be another one's: it has to be an hour old.
    """
    if not Path("/proc/self/fd").is_dir():
        return []  # nobody can be asked what it holds
    where, names = folder() if where is None else where, import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    found = [path for pattern in ("*/lock", "*/*/lock") for path in where.glob(pattern) if path.parent.name in names]
    return [path for path in found if _removed(path)]


def _removed(lock: Path) -> bool:
    """Under a lock of the folder itself, as other ranks look at the same file: one may be building again already."""
    import fcntl  # there is /proc, so this is there too

    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        left = lock.exists() and not _held(lock) and not _may_be_foreign(lock)
        if left:
            lock.unlink()
            logger.warning("Removed %s, which a build of DeepSpeed has left that was killed.", lock)
        return left
    except FileNotFoundError:  # its owner has just finished
        return False
    finally:
        os.close(folder)


def _held(lock: Path) -> bool:
    """Whether a process of this machine has the file open."""
    wanted = lock.stat()
    for path in _open_files():
        with suppress(OSError):
            found = os.stat(path)
            if (found.st_ino, found.st_dev) == (wanted.st_ino, wanted.st_dev):
                return True
    return False


def _open_files() -> Iterator[str]:
    for process in os.listdir("/proc"):
        if process.isdigit():
            with suppress(OSError):
                yield from (f"/proc/{process}/fd/{number}" for number in os.listdir(f"/proc/{process}/fd"))


def _may_be_foreign(lock: Path) -> bool:
    age = time.time() - max(path.stat().st_mtime for path in (lock, lock.parent))
    return age < _FOREIGN and _kind_of_file_system(lock) in ("nfs", "nfs4", "cifs", "lustre", "gpfs", "ceph", "beegfs")


def _kind_of_file_system(path: Path) -> str:
    """The kind of the innermost mount that a path lies in."""
    whole = str(path.resolve())
    kinds: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        kinds[mount.rstrip("/")] = kind
    around = [mount for mount in kinds if whole == mount or whole.startswith(f"{mount}/")]
    return kinds[max(around, key=len)] if around else ""
