"""Copies of checkpoints at other places, by fsspec: "s3://bucket/run/checkpoint-000120", "memory://checkpoint-1".

The rule of completeness is the folder's own: the manifest goes last, so a checkpoint without one is none. fsspec comes
with torch; what a protocol needs beside it (s3fs, gcsfs, ...) fsspec names when it is missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from . import folders, manifest
from .files import CheckpointError, HashingReader, reason, require_space, sync_folder
from .format import Checkpoint
from .tensor_file import Entry, read_header

_BLOCK = 4 * 1024 * 1024
_log = logging.getLogger(__name__)


def upload(directory: str | Path, url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Copy a complete checkpoint to `url`, and return that; it counts there when its manifest has come, which is last.

    A checkpoint that is there is replaced, and until the new manifest has come there is none; the very same one stays.
    `storage_options` are those of fsspec's file system: keys, endpoints. Raises CheckpointError, naming the place,
    where the checkpoint is damaged or cannot be copied.
    """
    checkpoint = Checkpoint.open(directory)
    system, root = _place(url, storage_options)
    with _told(f"copy {folders.shown(checkpoint.directory)} to {url}"):
        if _there(system, f"{root}/{manifest.NAME}"):
            if _same(system, root, checkpoint):
                return url
            system.rm_file(f"{root}/{manifest.NAME}")
        system.makedirs(root, exist_ok=True)
        for name in checkpoint.files:
            system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            system.put_file(str(checkpoint.directory / name), f"{root}/{name}")
        _check_sizes(system, root, checkpoint.files, url)
        system.put_file(str(checkpoint.directory / manifest.NAME), f"{root}/{manifest.NAME}")
    return url


def download(
    url: str, directory: str | Path, *, storage_options: Mapping[str, Any] | None = None, only: str | None = None
) -> Path:
    """Copy the checkpoint at `url` into a new folder, verified; returns the folder, which appears when it is complete.

    With `only` one file and the manifest come, and the file is verified when it is read. Raises CheckpointError, naming
    the place, where there is no complete checkpoint, a byte is not as its manifest says, or something lies at
    `directory` already.
    """
    directory = Path(os.path.abspath(directory))
    if os.path.lexists(directory) and not folders.is_empty(directory):
        raise CheckpointError(f"Expected a new or empty place for a checkpoint. Received: {directory}, which is taken.")
    system, root = _place(url, storage_options)
    contents, data = _manifest(system, root, url)
    folders.make_parents(directory.parent)
    folders.sweep(directory.parent)
    require_space(directory.parent, sum(record["size"] for record in contents["files"].values()), directory.name)
    hidden = folders.claim(directory, "writing")
    try:
        with _told(f"copy {url} to {directory}"):
            _fetch(system, root, hidden, [*contents["files"]] if only is None else [only])
            (hidden / manifest.NAME).write_bytes(data)
        Checkpoint.open(hidden, verify=only is None)
        _make_durable(hidden)
        folders.publish(hidden, directory)
    except BaseException:
        folders.discard(hidden)
        raise
    folders.release(hidden)
    return directory


def complete_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a finished checkpoint lies at `url`: its manifest right, every file there and of its size."""
    try:
        system, root = _place(url, storage_options)
        contents, _ = _manifest(system, root, url)
        _check_sizes(system, root, contents["files"], url)
    except CheckpointError:
        return False
    return True


def manifest_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `url`; raises CheckpointError where there is none, or no good one."""
    system, root = _place(url, storage_options)
    return _manifest(system, root, url)[0]


def header_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[Entry]:
    """Return what tensors the safetensors file at `url` has; only its header is read."""
    system, path = _place(url, storage_options)
    with _told(f"read {url}"), system.open(path, "rb") as stream:
        return read_header(_Stream(stream, url, system.size(path)))[0]


def verify_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return what is wrong with the files of the checkpoint at `url`, one sentence each; reads every byte."""
    system, root = _place(url, storage_options)
    contents, _ = _manifest(system, root, url)
    problems = [_examine(system, root, name, record, url) for name, record in contents["files"].items()]
    return [problem for problem in problems if problem]


def checkpoints_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs of the checkpoints in the folder at `url`, the newest (by the time of its commit) first.

    Those whose manifest is no good are left out. Raises CheckpointError where the place cannot be asked.
    """
    system, root = _place(url, storage_options)
    with _told(f"list {url}"):
        entries = _entries(system, root)
    found = []
    for entry in entries:
        name = entry["name"].rstrip("/").rpartition("/")[2]
        place = f"{url.rstrip('/')}/{name}"
        if entry["type"] != "directory" or name.startswith("."):
            continue
        try:
            found.append((_manifest(system, f"{root}/{name}", place)[0]["time"], place))
        except _Absent:
            continue
        except CheckpointError as error:
            _log.warning("skipping a damaged checkpoint: %s", error)
    return [place for _, place in sorted(found, reverse=True)]


def remove_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove the checkpoint at `url`, its manifest first; nothing there: nothing to do.

    Only files that its manifest lists go. Raises CheckpointError for what is no checkpoint, or cannot be removed.
    """
    system, root = _place(url, storage_options)
    with _told(f"remove {url}"):
        if not _entries(system, root):
            return
        contents, _ = _manifest(system, root, url)
        for name in (manifest.NAME, *contents["files"]):
            if _there(system, f"{root}/{name}"):
                system.rm_file(f"{root}/{name}")
        with suppress(FileNotFoundError):  # stores of objects have no empty folders
            if not system.find(root):
                system.rm(root, recursive=True)


class _Stream:
    """An open file of a file system, as `read_header` reads one."""

    def __init__(self, stream: Any, url: str, size: int) -> None:
        self._stream, self.path, self.size = stream, url, size

    def take(self, count: int) -> bytes:
        data: bytes = self._stream.read(count)
        if len(data) < count:
            raise CheckpointError(f"{self.path}: ends early.")
        return data


class _Absent(CheckpointError):
    """There is no manifest."""


def _place(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """The file system of a URL, asked anew about what it holds, and the place in it."""
    from fsspec.core import url_to_fs

    try:
        # copied, as some clients change what they are given
        system, root = url_to_fs(url, **{"use_listings_cache": False, **deepcopy(dict(options or {}))})
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"Expected a place that fsspec knows. Received: {url} ({error}). Install what it needs: for s3:// "
            "drivetrain[remote]."
        ) from error
    return system, root.rstrip("/")


def _there(system: Any, path: str) -> bool:
    """Whether a file is there; unlike `exists`, which in some file systems also means "you may not know"."""
    try:
        system.info(path)
    except FileNotFoundError:
        return False
    return True


def _entries(system: Any, folder: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = system.ls(folder, detail=True)
    except FileNotFoundError:
        return []
    return found


def _same(system: Any, root: str, checkpoint: Checkpoint) -> bool:
    """Whether this very checkpoint lies there, complete."""
    own = (checkpoint.directory / manifest.NAME).read_bytes()
    if system.cat_file(f"{root}/{manifest.NAME}") != own:
        return False
    try:
        _check_sizes(system, root, checkpoint.files, root)
    except CheckpointError:
        return False
    return True


def _examine(system: Any, root: str, name: str, record: Mapping[str, Any], url: str) -> str:
    digest, size = xxh3_64(), 0
    try:
        with _told(f"read {url}/{name}"), system.open(f"{root}/{name}", "rb") as file:
            while data := file.read(_BLOCK):
                digest.update(data)
                size += len(data)
    except CheckpointError as error:
        return str(error)
    right = (size, digest.hexdigest()) == (record["size"], record[manifest.HASH])
    return "" if right else f"{url}/{name}: is damaged (its size or hash is wrong)."


def _manifest(system: Any, root: str, url: str) -> tuple[dict[str, Any], bytes]:
    place = f"{root}/{manifest.NAME}"
    with _told(f"read {url}"):
        if not _there(system, place):
            raise _Absent(
                f"{url}: has no {manifest.NAME}. It is no checkpoint, or one that was never finished."
            )
        data = system.cat_file(place)
    return manifest.parse(data, f"{url}/{manifest.NAME}"), data


def _check_sizes(system: Any, root: str, files: Mapping[str, dict[str, Any]], url: str) -> None:
    for name, record in files.items():
        with _told(f"find {url}/{name}"):
            size = system.size(f"{root}/{name}")
        if size != record["size"]:
            raise CheckpointError(f"{url}/{name}: is damaged (expected {record['size']} bytes. Received: {size}).")


def _fetch(system: Any, root: str, folder: Path, names: list[str]) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        system.get_file(f"{root}/{name}", str(folder / name))


def _make_durable(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            with HashingReader(Path(parent, name)) as file:
                file.sync()
        sync_folder(parent)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """An error of a file system, whatever its type, becomes one that says what was being done."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = reason(error) if isinstance(error, OSError) and error.errno else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"Could not {what}: {why}.") from error
