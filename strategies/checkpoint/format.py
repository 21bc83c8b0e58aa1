"""Checkpoints: directories that are complete and verified, or not there.

A save (`Writer`) is written into a hidden folder beside its final name: every file hashed while it is written and made
durable, manifest.json last. Then the folder gets its name in one step, and only after that the folder it replaces is
deleted. docs/checkpoint-format.md describes the result for other programs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from . import folders, manifest
from .files import CheckpointError, HashingReader, sync_folder
from .state import decode
from .tensor_file import read_tensors
from .writer import Writer

__all__ = ["MANIFEST", "Checkpoint", "CheckpointError", "Writer", "complete", "newest", "ordered", "remove"]

MANIFEST = manifest.NAME
_THREADS = 4  # that read a checkpoint of at least _LARGE bytes; reading and hashing let go of the interpreter's lock
_LARGE = 64 * 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Tree:
    """What a JSON file says."""

    value: Any


class Checkpoint:
    """A complete checkpoint, open for reading; `Checkpoint.open` makes one."""

    def __init__(self, directory: Path, contents: dict[str, Any], *, verified: bool = False) -> None:
        self.directory = directory
        self.manifest = contents
        self.files: dict[str, dict[str, Any]] = contents["files"]
        self._verified = verified
        self._held: dict[str, Any] = {}  # what `fetch` has read: tensors by name, or a `_Tree`

    @classmethod
    def open(cls, directory: str | Path, verify: bool = True) -> Checkpoint:
        """Open a checkpoint; raises CheckpointError, naming the file, unless every file is as the manifest says.

        With `verify=False` a file is only verified when it is read (and always then), which saves a pass over all
        files, and finds damage later.
        """
        folders.settle(Path(os.path.abspath(directory)))
        real = Path(os.path.realpath(directory))  # a link that is turned round later does not mix two checkpoints
        if not real.is_dir():
            raise CheckpointError(f"{real}: is not there, or is no folder.")
        if not os.path.lexists(real / MANIFEST):
            raise CheckpointError(f"{real}: has no {MANIFEST}. It is no checkpoint, or one that was never finished.")
        checkpoint = cls(real, manifest.load(real), verified=verify)
        problems = checkpoint.verify() if verify else []
        if problems:
            raise CheckpointError(f"{real} is damaged: " + "; ".join(problems))
        return checkpoint

    def verify(self) -> list[str]:
        """Return what is wrong with the files, one sentence each; an empty list: nothing. Reads every byte."""
        return self.examine(self.files)

    def examine(self, names: Iterable[str]) -> list[str]:
        """Return what is wrong with some of the files, as `verify` does with all."""
        return [problem for problem in self._each(self._examine, names) if problem]

    def fetch(self, names: Iterable[str]) -> None:
        """Read these files, each once, and hold what is in them until it is asked for by `tensors`, `json` or `state`.

        Raises CheckpointError, naming each file that is not whole; then nothing is held. Who fetches everything that
        is to be loaded, before loading any of it, is never left with half of it.
        """
        held: dict[str, Any] = {}

        def hold(name: str) -> str:
            try:
                held[name] = self.tensors(name) if name.endswith(".safetensors") else _Tree(self.json(name))
            except CheckpointError as error:
                return str(error)
            return ""

        problems = [problem for problem in self._each(hold, dict.fromkeys(names)) if problem]
        if problems:
            raise CheckpointError(f"{self.directory} is damaged: " + "; ".join(problems))
        self._held.update(held)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a file of this name."""
        return name in self.files

    def read(self, name: str) -> bytes:
        """Return a file's bytes, verified."""
        with self._reader(name) as file:
            data = bytes(file.take(file.size))
            self._confirm(name, file)
        return data

    def json(self, name: str) -> Any:
        """Return the tree in a JSON file, verified."""
        if isinstance(self._held.get(name), _Tree):
            return self._held.pop(name).value
        return manifest.parse_json(self.read(name), str(self.directory / name))

    def tensors(self, name: str, *, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file, verified: the bytes that were hashed are the bytes returned.

        They are new ones on the CPU. With `into` those named there are read into the given tensors instead, without
        a copy on the way where these are contiguous and on the CPU; the file is verified before the first of them
        is touched.
        """
        if isinstance(self._held.get(name), dict):
            return _moved(self._held.pop(name), into or {}, str(self.directory / name))
        if into and not self._verified and (problem := self._examine(name)):
            raise CheckpointError(problem)
        with self._reader(name) as file:
            tensors, _ = read_tensors(file, into=into)
            self._confirm(name, file)
        return tensors

    def state(self, stem: str) -> Any:
        """Return nested state that `Writer.state` wrote."""
        tensors = self.tensors(f"{stem}.safetensors") if self.has(f"{stem}.safetensors") else {}
        return decode(self.json(f"{stem}.json"), tensors)

    def _examine(self, name: str) -> str:
        try:
            with self._reader(name) as file:
                if file.skim() != self.files[name][manifest.HASH]:
                    return f"{file.path}: is damaged (its hash is wrong)."
        except CheckpointError as error:
            return str(error)
        return ""

    def _each(self, action: Callable[[str], str], names: Iterable[str]) -> list[str]:
        """What `action` says to each file; large ones are dealt with side by side."""
        names = [*names]
        if sum(self.files[name]["size"] for name in names if name in self.files) < _LARGE:
            return [action(name) for name in names]
        with ThreadPoolExecutor(_THREADS) as pool:
            return [*pool.map(action, names)]

    def _reader(self, name: str) -> HashingReader:
        if name not in self.files:
            raise CheckpointError(f"{self.directory}: has no file {name!r}; it has {', '.join(self.files) or 'none'}.")
        path = self.directory / name
        if os.path.realpath(path) != str(path):
            raise CheckpointError(f"{path}: is, or lies behind, a symbolic link; expected a regular file.")
        reader = HashingReader(path)
        if reader.size != self.files[name]["size"]:
            reader.close()
            raise CheckpointError(
                f"{path}: is damaged (expected {self.files[name]['size']} bytes. Received: {reader.size})."
            )
        return reader

    def _confirm(self, name: str, file: HashingReader) -> None:
        if file.position != file.size or file.digest() != self.files[name][manifest.HASH]:
            raise CheckpointError(f"{file.path}: is damaged (its hash is wrong).")


def newest(parent: str | Path, *, by: str = "step") -> Path | None:
    """Return the newest complete and verified checkpoint in a folder: by its step and then the time of its commit,
    or by="time" alone, which is right where several runs, or one that went back, saved into the folder.

    A damaged one is named in a warning, and the one before it is taken. Hidden folders are unfinished saves and do not
    count; a link such as `last` counts as what it points to.
    """
    for directory in ordered(parent, by=by):
        try:
            Checkpoint.open(directory)
            return directory
        except CheckpointError as error:
            _log.warning("skipping a damaged checkpoint: %s", error)
    return None


def ordered(parent: str | Path, *, by: str = "step") -> list[Path]:
    """Return the checkpoints in a folder, the newest first, as `newest` looks at them; only manifests are read."""
    parent = Path(parent)
    if not parent.is_dir():
        return []
    folders.recover(parent)
    found: dict[Path, tuple[int, str, Path]] = {}
    for entry in sorted(parent.iterdir(), key=lambda entry: not entry.is_symlink()):  # its own name wins over a link's
        contents = _contents(entry)
        if contents is not None:
            real = Path(os.path.realpath(entry))
            step = -1 if contents.get("step") is None or by == "time" else contents["step"]
            found[real] = (step, contents["time"], real if entry.is_symlink() else entry)
    return [directory for _, _, directory in sorted(found.values(), reverse=True)]


def complete(directory: str | Path) -> bool:
    """Whether this is a finished checkpoint: manifest right, every file there and of its size. Hashes nothing."""
    try:
        checkpoint = Checkpoint.open(directory, verify=False)
        for name in checkpoint.files:
            checkpoint._reader(name).close()
    except (CheckpointError, OSError):
        return False
    return True


def remove(directory: str | Path) -> None:
    """Remove a checkpoint: first it becomes invisible in one step, then it is deleted. Nothing there: nothing to do.

    A link is removed, not what it points to. Raises CheckpointError for a folder that is no checkpoint, OSError where
    the system does not allow it.
    """
    directory = Path(os.path.abspath(directory))
    if directory.is_symlink():
        directory.unlink()
        return
    if not directory.exists():
        return
    if not os.path.lexists(directory / MANIFEST):
        raise CheckpointError(f"Expected a checkpoint to remove. Received: {directory}, which has no {MANIFEST}.")
    hidden = folders.claim(directory, "removing")
    try:
        os.rename(directory, hidden)
        sync_folder(directory.parent)
    except OSError:
        folders.release(hidden)
        raise
    folders.discard(hidden)


def _moved(tensors: dict[str, Tensor], into: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """Tensors that were read, those that have a place in `into` copied there; all names of one tensor stay one."""
    for name in tensors.keys() & into.keys():
        if tensors[name].shape != into[name].shape:
            raise CheckpointError(
                f"{place}: expected {name} to have the shape {list(into[name].shape)}. "
                f"Received: {list(tensors[name].shape)}."
            )
    places: dict[int, Tensor] = {}
    for name in tensors.keys() & into.keys():
        places[id(tensors[name])] = into[name].detach().copy_(tensors[name])
    return {name: into[name] if name in into else places.get(id(t), t) for name, t in tensors.items()}


def _contents(directory: Path) -> dict[str, Any] | None:
    """A folder's manifest; None, and a warning if it looks like a checkpoint, where it has no good one."""
    if directory.name.startswith("."):
        return None
    if directory.is_symlink() and not directory.exists():
        _log.warning("skipping %s, a link to what is not there", directory)
    if not directory.is_dir():
        return None
    try:
        return Checkpoint.open(directory, verify=False).manifest
    except CheckpointError as error:
        if os.path.lexists(directory / MANIFEST) or next(directory.glob("*.safetensors"), None):
            _log.warning("skipping a damaged checkpoint: %s", error)
        return None
