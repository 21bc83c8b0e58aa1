"""Weights in many pieces, brought into one Hugging Face checkpoint: one tensor in memory at a time.

A source says which tensors there are and reads each when it is written. Sources are checkpoints of drivetrain, folders
of safetensors files, and sharded folders that torch.distributed.checkpoint wrote (Accelerate's FSDP among them).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from . import manifest, shard_index
from .files import CheckpointError
from .format import Checkpoint
from .sharded import open_parts
from .tensor_file import LazyTensors
from .tensors import clean_keys, save_streamed

Entry = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """Weights by name: type and shape of each, and how to read it; `text` says what kind of place they come from."""

    text: str
    entries: dict[str, Entry]
    read: Callable[[str], Tensor]
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied weights

    def renamed(self, names: dict[str, str]) -> Source:
        """The same weights under other names, new → old."""
        known = {old: new for new, old in names.items()}
        aliases = {alias: known[first] for alias, first in self.aliases.items()}
        entries = {new: self.entries[old] for new, old in names.items()}
        return Source(self.text, entries, lambda name: self.read(names[name]), aliases)


def merge(source: Source, target: Path, *, max_shard_size: int | str = "10GB") -> list[str]:
    """Write all weights as `model.safetensors`, or in shards with an index; returns the files' names."""
    if not source.entries:
        raise CheckpointError(f"Expected weights. Received: {source.text} without any.")
    return save_streamed(
        target, source.entries, source.read, aliases=source.aliases, max_shard_size=max_shard_size
    )


def find(directory: Path, *, foreign: bool = False) -> Source:
    """Return the weights in a folder, whichever kind it is.

    Raises CheckpointError for a folder without weights, for one whose index is a pickle unless `foreign` allows it to
    be read (see shard_index.py), and for a checkpoint of drivetrain that is damaged.
    """
    if (directory / manifest.NAME).exists():
        return _of_checkpoint(Checkpoint.open(directory))  # verifies every file
    sharded = [one for one in (directory, *sorted(directory.glob("pytorch_model_fsdp_*"))) if _is_sharded(one)]
    if len(sharded) > 1:
        names = ", ".join(one.name for one in sharded)
        raise CheckpointError(f"Expected one model. Received: {directory} with {names}. Name one of these folders.")
    if sharded and not foreign:
        raise CheckpointError(
            f"Expected safetensors files. Received: {sharded[0]}, whose index {shard_index.NAME} is a pickle. Add "
            "--foreign to read it: only as an index, and a file that asks for anything else is refused."
        )
    return _of_torch(sharded[0]) if sharded else _of_safetensors(directory)


def _is_sharded(directory: Path) -> bool:
    return (directory / shard_index.NAME).is_file()


def _of_checkpoint(checkpoint: Checkpoint) -> Source:
    parts = open_parts(checkpoint)
    entries = {name: (stored.dtype, stored.shape) for name, stored in parts.tensors.items()}
    return Source("a checkpoint", entries, parts.read, parts.aliases)


def _of_safetensors(directory: Path) -> Source:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for name in names:
            manifest.check_name(name)
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"Expected a checkpoint, a folder of safetensors files, or one of sharded weights. Received: {directory}."
        )
    return _of_files("a folder of safetensors files", files)


def _of_files(text: str, paths: list[Path]) -> Source:
    """Whole tensors in safetensors files."""
    files = [LazyTensors(path) for path in paths]
    places = {name: file for file in files for name in file.entries}
    entries = {name: file.entries[name] for name, file in places.items()}
    aliases = {alias: first for file in files for alias, first in file.aliases.items()}
    return Source(text, entries, lambda name: places[name].read(name), aliases).renamed(_clean(list(entries)))


def _clean(names: list[str]) -> dict[str, str]:
    """Names without what wrappers put into them, new → old."""
    return dict(zip(clean_keys(dict.fromkeys(names)), names, strict=True))


def _of_torch(directory: Path) -> Source:
    """Sharded tensors, each put together when it is read; `model.` before every name is the writer's and goes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    reader = shard_index.IndexReader(directory)
    found = {name: record for name, record in reader.index.state_dict_metadata.items()
             if isinstance(record, dcp.metadata.TensorStorageMetadata)}  # fmt: skip
    entries = {name: (record.properties.dtype, tuple(record.size)) for name, record in found.items()}

    def read(name: str) -> Tensor:
        dtype, shape = entries[name]
        state = {name: torch.empty(shape, dtype=dtype)}
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(f"{directory}: {name} cannot be read ({error!r:.300}).") from error
        return state[name]

    source = Source("sharded weights of torch", entries, read)
    whole = all(name.startswith("model.") for name in entries)
    plain = {name.removeprefix("model.") if whole else name: name for name in entries}
    return source.renamed(plain).renamed(_clean(list(plain)))
