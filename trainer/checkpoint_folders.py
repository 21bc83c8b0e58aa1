"""Where an Accelerator's checkpoints lie: given folders, numbered ones, old ones that go."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..strategies.checkpoint.folders import settle, sweep
from ..strategies.checkpoint.format import Checkpoint, CheckpointError, Writer, ordered, remove
from ..strategies.checkpoint.snapshot import Snapshot
from ..strategies.contents import read_by
from ..strategies.settings import ProjectConfiguration
from ..strategies.world import World

logger = logging.getLogger(__name__)

MID_WINDOW = (
    "The checkpoint is saved inside an accumulation window: the gradients of its %d micro-batches so far are not part "
    "of it. Save where accelerator.sync_gradients is true, and what is loaded goes on exactly."
)
ALWAYS_SAFE = (
    "safe_serialization=False changes nothing here: a checkpoint's files are safetensors and JSON in any case. "
    "save_model(..., safe_serialization=False) writes weights in torch's own format."
)
SHARED_STORAGE = (
    "save_on_each_node=True holds for Accelerator.save: a checkpoint is one folder, on storage that all machines share."
)
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def next_checkpoint(config: ProjectConfiguration, output_dir: str | os.PathLike | None) -> Path:
    """Returns the folder to save into: the given one, or under automatic naming `checkpoints/checkpoint_<iteration>`.

    Raises:
        ValueError: neither is set, or the numbered folder exists.
    """
    if not config.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "Expected output_dir, or automatic_checkpoint_naming=True. Received: neither. Pass a folder, or "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        return Path(output_dir)
    if output_dir is not None:
        logger.warning("output_dir=%r is not used: automatic_checkpoint_naming chooses the folder.", str(output_dir))
    directory = numbered_folder(config) / f"checkpoint_{config.iteration}"
    if directory.exists():
        raise ValueError(
            f"Expected a folder that does not exist yet. Received: {directory}. Continue the numbers with "
            "ProjectConfiguration(iteration=...), or load the newest with load_state() first."
        )
    return directory


def numbered_folder(config: ProjectConfiguration) -> Path:
    """Returns the folder that holds the numbered checkpoints."""
    if config.project_dir is None:
        raise ValueError("Expected project_dir for automatic_checkpoint_naming. Received: None. Set project_dir.")
    return Path(config.project_dir) / "checkpoints"


def open_checkpoint(
    config: ProjectConfiguration,
    input_dir: str | os.PathLike | None,
    world: World,
    *,
    weights_only: bool = False,
    parts: bool = False,
) -> Checkpoint:
    """Opens the given checkpoint, or the newest complete one under automatic naming (collective).

    Every rank has read what it loads, and together they have verified every file, before this returns: a damaged one
    leaves nothing half loaded. With `parts` weights and optimizer states are only verified, and read later in parts.

    Raises:
        ValueError: no folder is given or configured, or there is no checkpoint.
        CheckpointError: a file is missing or damaged; the message names it.
    """
    candidates, problem = None, None
    if world.rank == 0:
        try:
            candidates = _candidates(config, input_dir)
        except Exception as error:
            problem = error
    candidates, problem = world.broadcast_object((candidates, problem))
    if problem is not None:
        raise problem
    for path in candidates or []:
        checkpoint, problem = _fetched(path, world, weights_only=weights_only, parts=parts)
        if problem is None:
            assert checkpoint is not None
            return checkpoint
        if input_dir is not None:
            raise problem
        logger.warning("skipping a damaged checkpoint: %s", problem)
    raise ValueError(f"Expected a checkpoint in {numbered_folder(config)}. Received: none. Save one first.")


def _candidates(config: ProjectConfiguration, input_dir: str | os.PathLike | None) -> list[Path]:
    if input_dir is not None:
        path = Path(os.path.abspath(input_dir))
        settle(path)  # it may be just being replaced
        if not path.exists():
            near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], n=1)
            advice = f"Did you mean {near[0]!r}?" if near else "Pass a folder that save_state has written."
            shown = os.fspath(input_dir)
            raise ValueError(f"Expected a checkpoint. Received: input_dir={shown!r}, which is not there. {advice}")
        return [path]
    if not config.automatic_checkpoint_naming:
        raise ValueError("Expected input_dir, or automatic_checkpoint_naming=True. Received: neither. Pass a folder.")
    return ordered(numbered_folder(config))


def _fetched(path: Path, world: World, **options: bool) -> tuple[Checkpoint | None, Exception | None]:
    """The checkpoint with what this rank loads, or the first rank's error, the same on all ranks."""
    checkpoint, problem = None, None
    try:
        checkpoint = Checkpoint.open(path, verify=False)
        checkpoint.fetch(read_by(world.rank, checkpoint.files, **options))
        read = {name for rank in range(world.size) for name in read_by(rank, checkpoint.files, **options)}
        others = sorted(checkpoint.files.keys() - read)[world.rank :: world.size]
        if found := checkpoint.examine(others):
            raise CheckpointError(f"{checkpoint.directory} is damaged: " + "; ".join(found))
    except Exception as error:
        problem = error
    problems = [error for error in world.gather_object(problem) if error is not None]
    return (None, problems[0]) if problems else (checkpoint, None)


def loading_options(strict: bool, *given: dict[str, Any] | None) -> dict[str, Any]:
    """Returns how weights are loaded; options that only mean something for pickles hold in any case and are left out.

    Raises:
        TypeError: an option is unknown.
    """
    options = {"strict": strict}
    for name, value in {name: value for part in given for name, value in (part or {}).items()}.items():
        if name == "strict":
            options["strict"] = value
        elif name not in ("weights_only", "map_location", "mmap"):
            raise TypeError(f"Expected load_kwargs to hold strict. Received: {name}={value!r}. Leave it out.")
    return options


def tidy(parent: Path, limit: int | None) -> None:
    """Finishes what a killed process has left half done: folders half written or removed, more of them than `limit`."""
    sweep(parent)
    remove_old(parent, limit)


def remove_old(parent: Path, limit: int | None) -> None:
    """Removes the numbered checkpoints with the lowest numbers until `limit` are left."""
    if limit is None:
        return
    numbered = [(int(match[1]), path) for path in parent.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    for _, path in sorted(numbered)[:-limit]:
        remove(path)


def follow_up(
    config: ProjectConfiguration, directory: Path, first: bool, then: Callable[[], None] | None
) -> Callable[[], None]:
    """Returns what is done once a checkpoint is durable: on the first process old ones go, then `then` is called."""
    limit = config.total_limit if config.automatic_checkpoint_naming and first else None

    def follow() -> None:
        remove_old(directory.parent, limit)
        if then is not None:
            then()

    return follow


def run_save_hooks(
    hooks: Mapping[int, Callable[..., None]],
    models: list[Any],
    weights: list[dict[str, Any]],
    writer: Writer | Snapshot,
) -> None:
    """Calls the hooks of `save_state`; files that they wrote become part of the checkpoint."""
    if not hooks:
        return
    for hook in hooks.values():
        hook(models, weights, str(writer.folder))
    writer.world.barrier("hooks of save_state")
    if writer.world.rank == 0:
        for path in sorted(writer.folder.rglob("*")):
            if path.is_file():
                writer.adopt(path.relative_to(writer.folder).as_posix())
    writer.world.barrier("files of save_state's hooks")  # what ranks write from here on is no hook's


def check_registered(objects: tuple[Any, ...]) -> None:
    """Raises ValueError, naming each of them, for objects that a checkpoint cannot keep."""
    wrong = {
        index: [name for name in ("state_dict", "load_state_dict") if not callable(getattr(obj, name, None))]
        for index, obj in enumerate(objects)
    }
    shown = [
        f"Item at index {index} ({type(objects[index]).__name__}) without {' and '.join(lacks)}"
        for index, lacks in wrong.items() if lacks
    ]  # fmt: skip
    if shown:
        raise ValueError(
            f"Expected objects with state_dict and load_state_dict. Received: {', '.join(shown)}. Give them both."
        )
