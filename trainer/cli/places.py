"""Where a checkpoint lies, for the commands: a folder of this machine, or a URL that fsspec knows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...strategies.checkpoint import Checkpoint, CheckpointError, manifest, remove
from ...strategies.checkpoint.files import HashingReader
from ...strategies.checkpoint.folders import Hidden, discard, hidden_folders, recover
from ...strategies.checkpoint.remote import checkpoints_at, download, header_at, manifest_at, remove_at, verify_at
from ...strategies.checkpoint.tensor_file import Entry, read_header


class Place:
    """A folder or URL with a checkpoint, or with several; as text it is what the user wrote."""

    def __init__(self, path: str | Path) -> None:
        self.url = str(path) if "://" in str(path) else None
        self.path = Path(path)
        self._text = str(path)
        self._manifest: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self._text

    def is_checkpoint(self) -> bool:
        """Whether a checkpoint lies here, whole or not. Raises ValueError where nothing, or a file, does."""
        if self.url is not None:
            return self._is_remote_checkpoint()
        if not os.path.isdir(self.path):
            imported = "a file. Import one of Lightning by: convert FILE TARGET --from lightning"
            what = imported if os.path.exists(self.path) else "which is not there"
            raise ValueError(f"Expected the folder of a checkpoint, or of several. Received: {self}, {what}.")
        return os.path.lexists(self.path / manifest.NAME)

    def within(self, *, unfinished: bool = False) -> list[Place]:
        """Return the checkpoints in this folder, damaged ones too; raises ValueError where there is none.

        With ``unfinished`` the hidden folders of saves that did not end are among them.
        """
        if self.url is not None:
            found = [Place(url) for url in reversed(checkpoints_at(self.url))]
        else:
            entries = [entry for entry in sorted(self.path.iterdir()) if not entry.name.startswith(".")]
            folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
            found = [Place(entry) for entry in folders if os.path.lexists(entry / manifest.NAME)]
            found += [Place(hidden.path) for hidden in hidden_folders(self.path)] if unfinished else []
        if not found:
            state = self.unfinished()
            raise ValueError(
                f"Expected checkpoints. Received: {self}, which has no {manifest.NAME} and holds no folder that has"
                + (f": it is {state}." if state else ".")
            )
        return found

    def manifest(self) -> dict[str, Any]:
        """Return the manifest; raises CheckpointError where it is no good."""
        if self._manifest is None:
            found = manifest_at(self.url) if self.url is not None else self._opened().manifest
            self._manifest = found
        return self._manifest

    def problems(self) -> list[str]:
        """Return what is wrong, one sentence each; reads every byte."""
        try:
            return verify_at(self.url) if self.url is not None else self._opened().verify()
        except CheckpointError as error:
            return [str(error)]

    def header(self, name: str) -> list[Entry]:
        """Return what tensors a safetensors file has; none of them is read."""
        if self.url is not None:
            return header_at(f"{self.url}/{name}")
        with HashingReader(self._opened().directory / name) as file:
            return read_header(file)[0]

    def json(self, name: str) -> Any:
        """Return the tree in a JSON file, verified."""
        with self.brought(only=name) as checkpoint:
            return checkpoint.json(name)

    @contextmanager
    def brought(self, *, verified: bool = False, only: str | None = None) -> Iterator[Checkpoint]:
        """The checkpoint, open; one at a URL is copied for as long as it is used, as a whole or ``only`` one file."""
        if self.url is None:
            yield self._opened(verify=verified)
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = download(self.url, Path(folder) / "checkpoint", only=only)
            yield Checkpoint.open(copy, verify=False)

    def remove(self) -> None:
        """Remove the checkpoint, or what is left of an unfinished one."""
        if self.url is not None:
            remove_at(self.url)
        elif self.unfinished():
            discard(self.path)
        else:
            remove(self.path)

    def linked(self) -> bool:
        """Whether a link beside it points to it."""
        if self.url is not None:
            return False
        links = [entry for entry in self.path.parent.iterdir() if entry.is_symlink()]
        return self.path.resolve() in {Path(os.path.realpath(link)) for link in links}

    def leftovers(self) -> list[Place]:
        """Return what processes that have ended left in this folder half written or half removed."""
        if self.url is not None:
            return []
        recover(self.path)
        return [Place(hidden.path) for hidden in hidden_folders(self.path) if not hidden.alive()]

    def unfinished(self) -> str:
        """Say what a hidden folder is; "" for any other place."""
        hidden = self._hidden()
        if hidden is None:
            return ""
        kinds = {"writing": "an unfinished save", "copying": "held for a copy elsewhere", "removing": "being removed",
                 "replaced": "a checkpoint that was just replaced"}  # fmt: skip
        owner = "whose process may still be at work" if hidden.alive() else "whose process has ended"
        return f"{kinds[hidden.kind]} of {hidden.name}, {owner}"

    def _hidden(self) -> Hidden | None:
        if self.url is not None or not self.path.parent.is_dir():
            return None
        return next((hidden for hidden in hidden_folders(self.path.parent) if hidden.path.name == self.path.name), None)

    def _opened(self, *, verify: bool = False) -> Checkpoint:
        return Checkpoint.open(self.path, verify=verify)

    def _is_remote_checkpoint(self) -> bool:
        assert self.url is not None
        try:
            self.manifest()
        except CheckpointError:
            if checkpoints_at(self.url):
                return False
            raise
        return True
