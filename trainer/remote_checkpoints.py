"""Going on from a checkpoint at another place: which one, and bringing it to where the run would have saved it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.upload import CheckpointUpload
from ..strategies.checkpoint.format import Checkpoint, CheckpointError
from ..strategies.checkpoint.remote import checkpoints_at, complete_at, download, manifest_at
from .run_folder import is_run_id

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A complete checkpoint at another place."""

    url: str
    run_id: str | None
    time: str
    storage_options: dict[str, Any] | None = None


def found_at(trainer: Trainer, url: str) -> Remote:
    """Return the checkpoint at ``url``, or the newest complete one in it; FileNotFoundError where there is none."""
    options = next((u.storage_options for u in _uploads(trainer) if url.startswith(u.url)), None)
    try:
        return _remote(url, options)
    except CheckpointError as problem:
        for place in checkpoints_at(url, storage_options=options):
            if complete_at(place, storage_options=options):
                return _remote(place, options)
        raise FileNotFoundError(f"Expected a checkpoint, or a folder of them. Received: {problem}") from problem


def newest_copy(trainer: Trainer, *, later_than: str) -> Remote | None:
    """Return the newest complete copy of ``CheckpointUpload`` that was saved later than that time."""
    found = []
    for upload in _uploads(trainer):
        options = upload.storage_options
        for place in checkpoints_at(upload.url, storage_options=options):
            if complete_at(place, storage_options=options):
                found.append(_remote(place, options))
                break
            logger.warning("skipping a damaged checkpoint: %s", place)
    newest = max(found, key=lambda remote: remote.time, default=None)
    return newest if newest is not None and newest.time > later_than else None


def brought(trainer: Trainer, remote: Remote) -> Path:
    """Return the folder of a copy on this machine: in the run's own folder of checkpoints (collective).

    One process of each machine copies, the main process first, so that machines with a shared disk copy once.
    """
    world = trainer.accelerator.world
    folder = Path(trainer.default_root_dir).absolute() / "runs" / (remote.run_id or "copied") / "checkpoints"
    path = world.broadcast_object(_place(folder, remote) if world.rank == 0 else None)
    problem = _bring(remote, path) if world.rank == 0 else None
    problem = world.broadcast_object(problem)
    if problem is None and world.rank != 0 and world.local_rank == 0:
        problem = _bring(remote, path)
    for error in world.gather_object(problem):
        if error is not None:
            raise error
    return path


def _place(folder: Path, remote: Remote) -> Path:
    """A name for the copy that nothing else has."""
    path = folder / remote.url.rstrip("/").rpartition("/")[2]
    number = 0
    while os.path.lexists(path) and not _is(path, remote):
        number += 1
        path = folder / f"{remote.url.rstrip('/').rpartition('/')[2]}-v{number}"
    return path


def _bring(remote: Remote, path: Path) -> CheckpointError | None:
    try:
        if _is(path, remote):
            return None
        download(remote.url, path, storage_options=remote.storage_options)
        logger.info("Copied %s to %s.", remote.url, path)
    except CheckpointError as error:
        return error
    return None


def _is(path: Path, remote: Remote) -> bool:
    """Whether the copy lies there already, whole."""
    try:
        return Checkpoint.open(path).manifest["time"] == remote.time
    except CheckpointError:
        return False


def _remote(url: str, options: dict[str, Any] | None) -> Remote:
    manifest = manifest_at(url, storage_options=options)
    run_id = manifest.get("run_id")
    return Remote(url, run_id if is_run_id(run_id) else None, manifest["time"], options)


def _uploads(trainer: Trainer) -> list[CheckpointUpload]:
    return [callback for callback in trainer.callbacks if isinstance(callback, CheckpointUpload)]
