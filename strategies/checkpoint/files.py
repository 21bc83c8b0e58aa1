"""Single files: written once with their hash on the way, made durable, read back through the same hash."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64

# Small enough to lie in a core's cache: the hash then costs almost nothing beside the copy to or from the kernel.
CHUNK = 256 * 1024
MAX_VECTORS = 256  # buffers in one system call; IOV_MAX is 1024 on Linux and macOS
_WINDOW = 16 * 1024 * 1024
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14 and newer
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


class CheckpointError(Exception):
    """A checkpoint could not be written, or is not what its manifest says; the message names the file."""


class HashingWriter:
    """A new file whose size and xxh3 hash are known when it is closed.

    The file must not exist yet (FileExistsError). `close` makes the content durable unless `sync=False`.
    """

    def __init__(self, path: str | Path, *, sync: bool = True) -> None:
        self.path, self.size, self._sync = Path(path), 0, sync
        self._hash = xxh3_64()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Append buffers of bytes; they are neither copied nor kept."""
        for batch in batches(buffers, self.size):
            self._write_all(batch)
            for part in batch:  # after the kernel's copy, which has drawn it into the cache
                self._hash.update(part)

    def close(self) -> tuple[int, str]:
        """Return (size in bytes, hash as 16 hexadecimal digits)."""
        try:
            if self._sync:
                sync_file(self._file)
        finally:
            self._release()
        return self.size, self._hash.hexdigest()

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _write_all(self, batch: list[memoryview]) -> None:
        while batch:
            written = os.writev(self._file, batch)
            if written == 0:  # never seen for a regular file; without this a file system that does it would spin
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self.size += written
            batch = _behind(batch, written)

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class HashingReader:
    """A regular file read once from start to end, hashed on the way.

    Opening never blocks and follows no symbolic link: anything but a regular file is a CheckpointError.
    """

    def __init__(self, path: str | Path, *, follow: bool = False) -> None:
        self.path, self.position = Path(path), 0
        self._hash = xxh3_64()
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        try:
            self._file = os.open(self.path, flags)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {_why(error)}.") from error
        found = os.fstat(self._file)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CheckpointError(f"{self.path}: expected a regular file.")

    def take(self, count: int) -> bytearray:
        """Return the next `count` bytes; a file that ends before is a CheckpointError."""
        if count > self.size - self.position:
            raise CheckpointError(f"{self.path}: ends early, at {self.size} bytes.")
        data = bytearray(count)
        self.fill([memoryview(data)])
        return data

    def fill(self, buffers: Iterable[memoryview]) -> None:
        """Read on into writable buffers of bytes until they are full."""
        for batch in batches(buffers, self.position):
            self._read_all(batch)
            for part in batch:
                self._hash.update(part)

    def skim(self) -> str:
        """Return the hash of the whole file; nothing may have been read yet, and nothing is kept."""
        if self.size >= _WINDOW and sys.platform == "linux":
            with suppress(OSError):  # an older system, or a block that cannot be read: reading will tell
                return _hash_by_mapping(self._file, self.size)
        buffer = memoryview(bytearray(CHUNK))
        while self.position < self.size:
            self.fill([buffer[: self.size - self.position]])
        return self.digest()

    def digest(self) -> str:
        """Return the hash of all that has been read, 16 hexadecimal digits."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Make what somebody else has written to the file durable."""
        sync_file(self._file)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> HashingReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_all(self, batch: list[memoryview]) -> None:
        while batch:
            try:
                count = os.readv(self._file, batch)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {_why(error)}.") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends early, at {self.position} bytes.")
            self.position += count
            batch = _behind(batch, count)


def batches(buffers: Iterable[bytes | memoryview], position: int) -> Iterator[list[memoryview]]:
    """Cut and group buffers into lists that end at multiples of CHUNK in the file, which stands at `position`.

    Small buffers so share a system call, and no page of the file is touched twice (which costs a tenth of the time).
    """
    batch: list[memoryview] = []
    room = CHUNK - position % CHUNK
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            part, rest = rest[:room], rest[room:]
            batch.append(part)
            room -= len(part)
            if room == 0 or len(batch) == MAX_VECTORS:
                yield batch
                batch, room = [], room or CHUNK
    if batch:
        yield batch


def sync_file(file: int) -> None:
    """Return when an open file's content is on the disk, not only handed to it."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves the data in the drive's cache
    if full is None:
        os.fsync(file)
    else:
        fcntl.fcntl(file, full)


def sync_folder(path: str | Path) -> None:
    """Return when a folder's entries are on the disk; file systems that cannot do this for a folder are let off."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(file)


def require_space(folder: str | Path, size: int, what: str) -> None:
    """Raise CheckpointError unless the folder's file system has `size` bytes free for `what`."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if space.f_blocks and free < size:  # a remote file system may not count its blocks at all
        raise CheckpointError(
            f"Expected {size / 1e6:,.1f} MB of free space for {what}. Received: {free / 1e6:,.1f} MB free at {folder}. "
            "Remove older checkpoints or save somewhere else."
        )


def reason(error: OSError) -> str:
    """Return what an error of the system says, with its name: "No space left on device (ENOSPC)"."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'unknown')})"


def _behind(batch: list[memoryview], count: int) -> list[memoryview]:
    """What is left of a batch after its first `count` bytes were dealt with."""
    for index, part in enumerate(batch):
        if count < len(part):
            return [part[count:], *batch[index + 1 :]]
        count -= len(part)
    return []


def _hash_by_mapping(file: int, size: int) -> str:
    """Twice as quick as reading. Each window is populated first: a bad block is an error there, not a SIGBUS later."""
    digest = xxh3_64()
    for start in range(0, size, _WINDOW):
        count = min(_WINDOW, size - start)
        with mmap.mmap(file, count, prot=mmap.PROT_READ, offset=start) as window:
            window.madvise(_POPULATE_READ)
            digest.update(window)
    return digest.hexdigest()


def _why(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "is missing"
    if error.errno == errno.ELOOP:
        return "is a symbolic link, expected a regular file"
    return f"cannot be read: {reason(error)}"
