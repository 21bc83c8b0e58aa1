"""One save: hidden while it is written, by all ranks together, and visible in one step when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from ..world import World
from . import folders, manifest
from .files import CheckpointError, HashingReader, HashingWriter, reason, require_space, sync_folder
from .state import encode
from .tensor_file import data_size, split_aliases, write_tensors

_HEADROOM = 1024 * 1024  # bytes kept free beside what a file needs, for its header, the manifest and the folder
Value = TypeVar("Value")


class Writer:
    """One save, by all ranks of a world together: enter, write files, `commit`, leave.

    `with Writer(directory, world=world) as writer: writer.json("training.json", tree); writer.commit({"step": 10})`.
    Rank 0's `directory` counts for all. Every rank writes its own files, under names that no other rank uses, and
    every rank commits. After `commit` the checkpoint is there, durable and visible to all ranks; without it, or after
    an error on any rank, nothing has changed, and every rank raises (the others: CheckpointError with that error).
    A checkpoint of the same name is replaced; files in it that it does not list are kept. Anything else in the way is
    a CheckpointError. `expected_bytes`: what the whole save will take, checked against the free space before the
    start. `sync=False` does not wait for the disk: safe against a killed process, not against a power failure.
    """

    def __init__(
        self, directory: str | Path, *, world: World | None = None, expected_bytes: int = 0, sync: bool = True
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.world = world if world is not None else World()
        self.folder = self.directory  # while it is open: the hidden folder
        self._expected, self._sync = expected_bytes, sync
        self._files: dict[str, tuple[int, str]] = {}
        self._reported = False  # whether this rank has told the others how it went

    def __enter__(self) -> Writer:
        directory, self.folder = self._on_first_rank(self._open)
        self.directory = directory
        return self

    def json(self, name: str, tree: Any) -> None:
        """Write a JSON tree, such as `encode` returns."""
        try:
            data = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected a JSON tree for {name} (see encode). Received: {error}.") from error
        self._write(name, lambda file: file.write([data]), len(data))

    def tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Write a safetensors file; see `write_tensors`. Raises TypeError by the tensor's name."""
        unique, found = split_aliases(tensors)
        known = {**(aliases or {}), **found}
        self._write(name, lambda file: write_tensors(file, unique, metadata=metadata, aliases=known, read=read),
                    data_size(unique.values()))  # fmt: skip

    def state(self, stem: str, value: Any) -> None:
        """Write nested state as `<stem>.json`, its tensors (if any) as `<stem>.safetensors`; see `encode`."""
        tree, tensors = encode(value, stem)
        if tensors:
            self.tensors(f"{stem}.safetensors", tensors)
        self.json(f"{stem}.json", tree)

    def adopt(self, name: str) -> None:
        """Take in a file that another library has written into `self.folder`: hash it and make it durable."""
        with self._named(name) as path:
            with HashingReader(path) as file:
                self._files[name] = (file.size, file.skim())
                if self._sync:
                    file.sync()

    def commit(self, metadata: Mapping[str, Any] | None = None) -> Path:
        """Make the checkpoint complete and visible, on all ranks; returns its directory.

        `metadata` (rank 0's counts) goes into the manifest: step, epoch, samples, strategy, and whatever else plain.
        """
        described = manifest.describe(dict(metadata or {}), world_size=self.world.size)
        files = self._gather(None)
        aside = self._on_first_rank(lambda: self._publish(files, described))
        if self.world.rank == 0:
            if aside is not None:
                folders.discard(aside)
            folders.release(self.folder)
        self.folder = self.directory
        return self.directory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reported:
            return
        if error is None:
            self._gather("")
            return
        with suppress(Exception):  # this rank's own error is what is raised here
            self._gather(f"{type(error).__name__}: {error}")

    def _open(self) -> tuple[Path, Path]:
        folders.make_parents(self.directory.parent)
        folders.sweep(self.directory.parent)
        _check_place(self.directory)
        require_space(self.directory.parent, self._expected + _HEADROOM, self.directory.name)
        hidden = folders.claim(self.directory, "writing")
        try:
            hidden.mkdir()
        except OSError:
            folders.release(hidden)
            raise
        return self.directory, hidden

    def _write(self, name: str, fill: Callable[[HashingWriter], None], size: int) -> None:
        with self._named(name) as path:
            require_space(self.folder, size + _HEADROOM, name)
            if path.parent != self.folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            with HashingWriter(path, sync=self._sync) as file:
                fill(file)
                self._files[name] = file.close()

    @contextmanager
    def _named(self, name: str) -> Iterator[Path]:
        """The place of a file; an error of the system becomes one that names the file."""
        manifest.check_name(name)
        if self.folder == self.directory or self._reported:
            raise CheckpointError(f"Expected a save in progress for {name}. Use the writer inside its with-block.")
        if name == manifest.NAME or name in self._files:
            raise CheckpointError(f"Expected a name for each file once. Received: {name!r}, which is taken.")
        try:
            if not self.folder.is_dir():
                raise CheckpointError(
                    f"Expected rank {self.world.rank} to see {self.folder}, which rank 0 made. It does not. "
                    "Save to storage that all machines share."
                )
            yield self.folder / name
        except OSError as error:
            raise CheckpointError(f"Could not write {name} of {self.directory}: {reason(error)}.") from error

    def _gather(self, error: str | None) -> dict[str, tuple[int, str]]:
        """Tell all ranks how it went here (None: well; "": left without a commit) and return all ranks' files."""
        self._reported = True
        try:
            reports = self.world.gather_object((error, self._files))
            self._check_reports([report for report, _ in reports])
            return self._merge([files for _, files in reports])
        except BaseException:
            self._abandon()
            raise
        finally:
            if error is not None:
                self._abandon()

    def _check_reports(self, reports: list[str | None]) -> None:
        if all(report == "" for report in reports):
            return  # all left: that is what they wanted
        for rank, report in sorted(enumerate(reports), key=lambda item: not item[1]):
            if report is not None:
                raise CheckpointError(
                    f"Could not save {self.directory}: rank {rank} failed: {report or 'it left without a commit'}"
                )

    def _merge(self, parts: list[dict[str, tuple[int, str]]]) -> dict[str, tuple[int, str]]:
        merged: dict[str, tuple[int, str]] = {}
        for rank, files in enumerate(parts):
            for name in merged.keys() & files.keys():
                raise CheckpointError(f"Expected each file from one rank. Received: {name}, again by rank {rank}.")
            merged.update(files)
        return merged

    def _publish(self, files: dict[str, tuple[int, str]], described: dict[str, Any]) -> Path | None:
        for name, (size, _) in files.items():
            if not (self.folder / name).is_file() or (self.folder / name).stat().st_size != size:
                raise CheckpointError(f"Expected {name} with {size} bytes in {self.folder}, which rank 0 does not see.")
        _keep_other_files(self.directory, self.folder, files)
        with HashingWriter(self.folder / manifest.NAME, sync=self._sync) as file:
            file.write([manifest.compose(files, described)])
            file.close()
        if self._sync:
            for folder, _, _ in os.walk(self.folder, topdown=False):
                sync_folder(folder)
        return folders.publish(self.folder, self.directory, sync=self._sync)

    def _on_first_rank(self, action: Callable[[], Value]) -> Value:
        """What rank 0's action returned, on every rank; its error is raised on every rank."""
        value: Any = None
        problem: str | None = None
        own: BaseException | None = None
        if self.world.rank == 0:
            try:
                value = action()
            except BaseException as error:
                self._abandon()
                own, problem = error, _problem_of(error, self.directory)
        value, problem = self.world.broadcast_object((value, problem))
        if own is not None and not isinstance(own, OSError):
            raise own
        if problem is not None:
            raise CheckpointError(problem) from own
        return value

    def _abandon(self) -> None:
        if self.world.rank == 0 and self.folder != self.directory:
            folders.discard(self.folder)


def _check_place(directory: Path) -> None:
    free = not os.path.lexists(directory) or directory.is_symlink() or folders.is_empty(directory)
    if not free and not (directory.is_dir() and os.path.lexists(directory / manifest.NAME)):
        raise CheckpointError(
            f"Expected a new or empty place for a checkpoint, or an older checkpoint. Received: {directory}, which "
            f"is neither. Save to a folder of its own, such as {directory / 'checkpoint'}."
        )


def _keep_other_files(old: Path, new: Path, files: Mapping[str, Any]) -> None:
    """Link into the new folder what somebody has put into the old checkpoint beside its own files."""
    if old.is_symlink() or not os.path.lexists(old / manifest.NAME):
        return
    try:
        listed = {manifest.NAME, *manifest.load(old)["files"], *files}
    except CheckpointError:
        return  # nobody can tell what is whose
    for folder, _, names in os.walk(old):
        for path in (Path(folder, name) for name in names):
            place = new / path.relative_to(old)
            if place.relative_to(new).as_posix() not in listed:
                place.parent.mkdir(parents=True, exist_ok=True)
                folders.link(path, place)


def _problem_of(error: BaseException, directory: Path) -> str:
    if isinstance(error, OSError):
        return f"Could not save {directory}: {reason(error)}."
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
