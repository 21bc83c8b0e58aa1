"""Copies of checkpoints at other places, by fsspec: "s3://bucket/run/checkpoint-000120", "memory://checkpoint-1".

The rule of completeness is the folder's own: the manifest goes last, so a checkpoint without one is none. fsspec comes
with torch; what a protocol needs beside it (s3fs, gcsfs, ...) fsspec names when it is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import folders, manifest
from .files import CheckpointError, HashingReader, reason, require_space, sync_folder
from .format import Checkpoint


def upload(directory: str | Path, url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Copy a complete checkpoint to `url`, and return that; it counts there when its manifest has come, which is last.

    A checkpoint that is there is replaced; until its manifest has come there is none. `storage_options` are those of
    fsspec's file system: keys, endpoints. Raises CheckpointError, naming the place, where the checkpoint is damaged or
    cannot be copied.
    """
    checkpoint = Checkpoint.open(directory)
    system, root = _place(url, storage_options)
    with _told(f"copy {checkpoint.directory} to {url}"):
        if system.exists(f"{root}/{manifest.NAME}"):
            system.rm_file(f"{root}/{manifest.NAME}")
        system.makedirs(root, exist_ok=True)
        for name in checkpoint.files:
            system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            system.put_file(str(checkpoint.directory / name), f"{root}/{name}")
        _check_sizes(system, root, checkpoint.files, url)
        system.put_file(str(checkpoint.directory / manifest.NAME), f"{root}/{manifest.NAME}")
    return url


def download(url: str, directory: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> Path:
    """Copy the checkpoint at `url` into a new folder, verified; returns the folder, which appears when it is complete.

    Raises CheckpointError, naming the place, where there is no complete checkpoint, a byte is not as its manifest
    says, or something lies at `directory` already.
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
            _fetch(system, root, hidden, [*contents["files"]])
            (hidden / manifest.NAME).write_bytes(data)
        Checkpoint.open(hidden)
        _make_durable(hidden)
        folders.publish(hidden, directory)
    except BaseException:
        folders.discard(hidden)
        raise
    folders.release(hidden)
    return directory


def complete_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a finished checkpoint lies at `url`: its manifest right, every file there and of its size."""
    system, root = _place(url, storage_options)
    try:
        contents, _ = _manifest(system, root, url)
        _check_sizes(system, root, contents["files"], url)
    except CheckpointError:
        return False
    return True


def _place(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """The file system of a URL, asked anew about what it holds, and the place in it."""
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url, **{"use_listings_cache": False, **(options or {})})
    return system, root.rstrip("/")


def _manifest(system: Any, root: str, url: str) -> tuple[dict[str, Any], bytes]:
    place = f"{root}/{manifest.NAME}"
    with _told(f"read {url}"):
        if not system.exists(place):
            raise CheckpointError(
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
