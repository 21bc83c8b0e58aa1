"""Copies of a run's checkpoints at another place, made beside training: S3, GCS, whatever fsspec knows."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..strategies.checkpoint import Checkpoint, CheckpointError, complete
from ..strategies.checkpoint.folders import claim, discard, link
from ..strategies.checkpoint.remote import remove_at, upload
from .base import AFTER_MODULE, Callback


class CheckpointUpload(Callback):
    """Copy each checkpoint that a fit saves to ``url`` ("s3://bucket/run"), under its own name.

    A thread of the main process copies while training goes on; a checkpoint that is removed here in the meantime is
    copied all the same. There it counts when its manifest has come, which is last. What ``ModelCheckpoint`` removes is
    removed there too, once the newer one is complete there; ``keep_all`` leaves it. A copy that fails raises at the end
    of a later step. ``fit`` ends when the last one is complete. ``resume="last"`` finds what was copied where this
    machine has nothing newer.

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
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._problem: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}({self.url})"

    def state_dict(self) -> dict[str, Any]:
        return {"sent": dict(self._sent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sent = dict(state_dict["sent"])

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
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        stamp = [os.stat(folder).st_mtime_ns for folder in _folders(trainer)]
        if stamp == self._stamp and not again:
            return
        self._stamp = stamp
        found = {path.name: (path, time) for path, time in _checkpoints(trainer)}
        for name, (path, time) in found.items():
            if self._sent.get(name) != time:
                self._sent[name] = time
                self._send(path)
        for name in [name for name in self._sent if name not in found and not self.keep_all]:
            del self._sent[name]
            self._do(lambda name=name: remove_at(f"{self.url}/{name}", storage_options=self.storage_options))

    def _send(self, path: Path) -> None:
        copy = _held(path)

        def send() -> None:
            try:
                upload(copy, f"{self.url}/{path.name}", storage_options=self.storage_options)
            finally:
                discard(copy)

        self._do(send)

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            target, name = self._work, "checkpoint upload"
            self._thread = threading.Thread(target=target, args=(self._jobs,), name=name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self, jobs: queue.Queue[Any]) -> None:
        """One job after the other; after a failure nothing old is removed, as its successor may be what failed."""
        failed = False
        while (job := jobs.get()) is not None:
            try:
                if not failed or job.__name__ == "send":
                    job()
            except Exception as error:
                failed, self._problem = True, error

    def _finish(self, trainer: Any) -> None:
        """Return when everything that is here is copied, or has failed."""
        try:
            self._look(trainer, again=True)
        except (CheckpointError, OSError) as error:
            self._problem = error
        if self._thread is not None:
            self._jobs.put(None)  # type: ignore[arg-type]
            self._thread.join()
            self._thread = None


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
