"""Copies of a run's checkpoints at another place, made beside training: S3, GCS, whatever fsspec knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..strategies.checkpoint import Checkpoint, CheckpointError, complete
from ..strategies.checkpoint.folders import claim, discard, link
from ..strategies.checkpoint.remote import remove_at, upload
from .base import AFTER_MODULE, Callback


class CheckpointUpload(Callback):
    """Copy each checkpoint that a fit saves to ``url`` ("s3://bucket/run"), under its own name.

    A thread of the main process copies while training goes on, one at a time: a checkpoint whose copy has begun is
    copied to its end, though it is removed here in the meantime; one that waits and is removed here is passed over.
    There it counts when its manifest has come, which is last. What ``ModelCheckpoint`` removes is removed there too,
    once a newer one is complete there; ``keep_all`` leaves it. A copy that fails raises at the end of a later step.
    ``fit`` ends when the last one is complete. ``resume="last"`` finds what was copied where this machine has nothing
    newer.

    ``storage_options`` are those of fsspec's file system (keys, endpoint_url, …); without them the usual variables and
    files of that service count. Raises ValueError for what is no URL, CheckpointError for a copy that fails.
    """

    priority = AFTER_MODULE + 200  # a checkpoint that is saved at an event is there by then

    def __init__(self, url: str, *, storage_options: dict[str, Any] | None = None, keep_all: bool = False) -> None:
        if not isinstance(url, str) or "://" not in url.rstrip("/"):
            raise ValueError(f'Expected a URL such as "s3://bucket/run". Received: url={url!r}. Name the protocol.')
        self.url, self.storage_options, self.keep_all = url.rstrip("/"), storage_options, keep_all
        self._begin()

    def _begin(self) -> None:
        self._sent: dict[str, str] = {}  # name → time of its commit
        self._stamp: list[int] = []
        self._problem: Exception | None = None
        self._copies: Copies | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}({self.url})"

    def state_dict(self) -> dict[str, Any]:
        return {"sent": dict(self._sent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sent = {name: time for name, time in state_dict["sent"].items() if "/" not in name and name[:1] != "."}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._begin()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._look(trainer)  # the one that the run goes on from counts as sent

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._look(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._look(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._look(trainer)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Copy what the run could still save; what stands in the way is not what it failed by."""
        if trainer.session.stage == "fit" and trainer.is_global_zero:
            self._finish(trainer)
            if self._problem is not None and self._problem is not exception:
                trainer.print(f"The last checkpoint was not copied: {self._problem}")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit" or trainer.session.failed:
            return
        if trainer.is_global_zero:
            self._finish(trainer)
        problem = trainer.accelerator.world.broadcast_object(self._problem)
        self._problem = None
        if problem is not None:
            raise problem

    def _look(self, trainer: Any, *, again: bool = False) -> None:
        """Have new checkpoints copied and old ones removed; raise what has failed since the last look."""
        if not trainer.is_global_zero:
            return
        if self._copies is not None and (problem := self._copies.take_problem()) is not None:
            raise problem
        stamp = [os.stat(folder).st_mtime_ns for folder in _folders(trainer)]
        if stamp == self._stamp and not again:
            return
        self._stamp = stamp
        found = {path.name: (path, time) for path, time in _checkpoints(trainer)}
        copies = self._copies = self._copies or Copies(self.url, self.storage_options)
        for name, (path, time) in found.items():
            if self._sent.get(name) != time:
                self._sent[name] = time
                copies.add(name, _held(path))
        for name in [name for name in self._sent if name not in found and not self.keep_all]:
            del self._sent[name]
            copies.drop(name)

    def _finish(self, trainer: Any) -> None:
        """Return when everything that is here is copied, or has failed."""
        try:
            self._look(trainer, again=True)
        except (CheckpointError, OSError) as error:
            self._problem = error
        if self._copies is not None:
            self._copies.finish()
            self._problem = self._copies.take_problem() or self._problem
            self._copies = None


class Copies:
    """The thread that copies, and what it has still to do."""

    def __init__(self, url: str, storage_options: dict[str, Any] | None) -> None:
        self._url, self._options = url, storage_options
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[int, Path]] = {}  # name → (number, folder): to be copied, the oldest first
        self._old: dict[str, int] = {}  # to be removed once a copy of this number, or a later one, is complete
        self._number = self._done = 0
        self._problem: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="checkpoint upload", daemon=True)
        self._thread.start()

    def add(self, name: str, folder: Path) -> None:
        """Have a hidden folder copied, and then deleted."""
        with self._changed:
            self._number += 1
            earlier = self._waiting.pop(name, None)
            self._waiting[name] = (self._number, folder)
            self._old.pop(name, None)
            self._changed.notify()
        if earlier is not None:
            discard(earlier[1])

    def drop(self, name: str) -> None:
        """Pass over what is not copied yet; have removed what is."""
        with self._changed:
            waiting = self._waiting.pop(name, None)
            if waiting is None:
                self._old[name] = self._number
            self._changed.notify()
        if waiting is not None:
            discard(waiting[1])

    def take_problem(self) -> Exception | None:
        """Return what a copy has failed by since the last call."""
        problem, self._problem = self._problem, None
        return problem

    def finish(self) -> None:
        """Return when nothing is left to do."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            name, number, folder = job
            try:
                if folder is None:
                    remove_at(f"{self._url}/{name}", storage_options=self._options)
                else:
                    upload(folder, f"{self._url}/{name}", storage_options=self._options)
                    self._done = max(self._done, number)
            except Exception as error:
                self._problem = error
            finally:
                if folder is not None:
                    discard(folder)

    def _next(self) -> tuple[str, int, Path | None] | None:
        """What to copy (with its folder) or to remove next; None at the end."""
        with self._changed:
            while True:
                gone = next((name for name, number in self._old.items() if number <= self._done), None)
                if gone is not None:
                    return gone, self._old.pop(gone), None
                if self._waiting:
                    name = next(iter(self._waiting))
                    number, folder = self._waiting.pop(name)
                    return name, number, folder
                if self._closing:
                    return None
                self._changed.wait()


def _folders(trainer: Any) -> list[Path]:
    found = {callback.dirpath for callback in trainer.checkpoint_callbacks if callback.dirpath is not None}
    return sorted(folder for folder in found if folder.is_dir())


def _checkpoints(trainer: Any) -> Iterator[tuple[Path, str]]:
    """The complete checkpoints of this run, the oldest first, with the time of each."""
    found = []
    for folder in _folders(trainer):
        for entry in os.scandir(folder):
            if entry.name.startswith(".") or entry.is_symlink() or not complete(entry.path):
                continue
            manifest = Checkpoint.open(entry.path, verify=False).manifest
            if manifest.get("run_id") == trainer.run_id:
                found.append((manifest["time"], Path(entry.path)))
    yield from ((path, time) for time, path in sorted(found))


def _held(path: Path) -> Path:
    """A second name, hidden, for each file of a checkpoint: it stays when the checkpoint is removed."""
    copy = claim(path, "copying")
    copy.mkdir()
    for folder, _, names in os.walk(path):
        place = copy / Path(folder).relative_to(path)
        place.mkdir(exist_ok=True)
        for name in names:
            link(Path(folder, name), place / name)
    return copy
