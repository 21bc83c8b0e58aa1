"""Weights as Hugging Face keeps them: model.safetensors, or numbered shards and an index that says what lies where."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from . import folders, manifest
from .files import CheckpointError, HashingReader, HashingWriter, reason, require_space, sync_folder
from .format import Checkpoint
from .tensor_file import data_size, read_tensors, split_aliases, write_tensors

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_WRAPPERS = {"_orig_mod", "module"}  # what torch.compile and the data-parallel wrappers call the module inside
Value = TypeVar("Value")


class Target(Protocol):
    """Where weights can be written: a `Writer`, or a folder without a manifest."""

    def tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None: ...  # noqa: D102, E704

    def json(self, name: str, tree: Any) -> None: ...  # noqa: D102, E704


def save_weights(
    target: Target | str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    *,
    name: str = "model",
    max_shard_size: int | str = "10GB",
) -> list[str]:
    """Write weights as `<name>.safetensors`, or in shards with an index where they take more; returns the files' names.

    `target` is a `Writer` (a checkpoint's) or a folder, which gets the plain files that Hugging Face libraries read:
    each appears complete, and those of an earlier save under this name go. `max_shard_size` is in bytes or "10GB",
    "500MiB"; a tensor that is larger gets a shard of its own. Tied weights are stored once, under their first name;
    the file's metadata tells the others. Raises TypeError by the tensor's name for what a file cannot hold.
    """
    if isinstance(target, (str, os.PathLike)):
        return _PlainFolder(Path(target)).save(state_dict, name, max_shard_size)
    unique, aliases = split_aliases(state_dict)
    shards = shards_of(unique, max_shard_size)
    names = [f"{name}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{name}.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        own = {alias: first for alias, first in aliases.items() if first in shard}
        target.tensors(file, shard, aliases=own)
    if len(shards) > 1:
        index = f"{name}.safetensors.index.json"
        places = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        target.json(index, {"metadata": {"total_size": data_size(unique.values())}, "weight_map": places})
        names.append(index)
    return names


def save_streamed(
    folder: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    name: str = "model",
    max_shard_size: int | str = "10GB",
) -> list[str]:
    """Write a folder's weights as `save_weights` does, with one tensor in memory at a time.

    `entries` tells type and shape of each, `read(name)` gives it when it is written, and is asked once for each.
    `aliases` are further names of tied weights, name → name of an entry.
    """
    # An element stands for a whole tensor: it has its shape and takes no memory.
    outlines = {key: torch.empty((), dtype=dtype).expand(shape) for key, (dtype, shape) in entries.items()}
    return _PlainFolder(folder, read=read, aliases=aliases).save(outlines, name, max_shard_size)


def load_weights(
    source: Checkpoint | str | os.PathLike[str],
    *,
    name: str = "model",
    foreign: bool = False,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return weights that `save_weights` or a Hugging Face library wrote, tied ones under all their names.

    `source` is a checkpoint or its folder; what is read is verified. With `foreign=True` a folder that has no manifest,
    or a single .safetensors file, is read too: safely, but nobody can tell whether it is what was written. `into`: see
    `Checkpoint.tensors`. Raises CheckpointError naming the file.
    """
    if isinstance(source, Checkpoint):
        return _gather(_Verified(source), name, into)
    path = Path(source)
    if os.path.lexists(path / manifest.NAME):
        return _gather(_Verified(Checkpoint.open(path, verify=into is not None)), name, into)
    if not foreign:
        raise CheckpointError(
            f"Expected a checkpoint with a {manifest.NAME}. Received: {path}, which has none. If these are weights of "
            "another library that you trust to be complete, load them with foreign=True."
        )
    if path.is_file():
        return _read_foreign(path, into)
    return _gather(_Foreign(path), name, into)


def shards_of(tensors: Mapping[str, Tensor], max_shard_size: int | str) -> list[dict[str, Tensor]]:
    """Return the tensors in files of at most `max_shard_size` each (bytes, "10GB"); a larger one gets its own."""
    limit = room = _size(max_shard_size)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        size = data_size([tensor])
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= size
    return shards


def clean_keys(state_dict: Mapping[str, Value], module: nn.Module | None = None) -> dict[str, Value]:
    """Return a state dict under the user's own names, without what torch.compile and wrappers put into them.

    With the `module` that it comes from only real wrappers are left out. Without it, every part `_orig_mod` or `module`
    is; names that would become equal by that stay as they are.
    """
    wrappers = None if module is None else _wrapper_names(module)
    names = {key: _clean(key, wrappers) for key in state_dict}
    taken = list(names.values())
    unclear = {name for name in taken if taken.count(name) > 1} if len(set(taken)) < len(taken) else set()
    return {key if names[key] in unclear else names[key]: value for key, value in state_dict.items()}


class _Verified:
    """The files of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.directory, self.has, self.json = checkpoint.directory, checkpoint.has, checkpoint.json
        self.tensors = checkpoint.tensors


class _Foreign:
    """The files of a folder without a manifest."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def json(self, name: str) -> Any:
        with HashingReader(self.directory / name, follow=True) as file:
            return manifest.parse_json(bytes(file.take(file.size)), str(file.path))

    def tensors(self, name: str, *, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        return _read_foreign(self.directory / name, into)


class _PlainFolder:
    """A folder that gets files which appear complete, each in one step, and no manifest."""

    def __init__(self, directory: Path, *, read: Callable[[str], Tensor] | None = None,
                 aliases: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.directory = directory
        self._read, self._aliases = read, aliases or {}
        self._unfinished: dict[str, Path] = {}

    def save(self, state_dict: Mapping[str, Tensor], name: str, max_shard_size: int | str) -> list[str]:
        try:
            folders.make_parents(self.directory)
            folders.sweep(self.directory)
            names = save_weights(self, state_dict, name=name, max_shard_size=max_shard_size)
            for file in names:  # the index, which makes the shards count, comes last
                os.replace(self._unfinished[file], self.directory / file)
            for old in self._files_of(name) - set(names):
                (self.directory / old).unlink()
            sync_folder(self.directory)
        except OSError as error:
            place = error.filename or self.directory / name
            raise CheckpointError(f"Could not write {place}: {reason(error)}.") from error
        finally:
            for path in self._unfinished.values():
                folders.discard(path)
        return names

    def tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        require_space(self.directory, data_size(tensors.values()), name)
        own = {alias: first for alias, first in self._aliases.items() if first in tensors}
        with self._new(name) as file:
            write_tensors(file, tensors, metadata=metadata, aliases={**own, **(aliases or {})}, read=self._read)
            file.close()

    def json(self, name: str, tree: Any) -> None:
        with self._new(name) as file:
            file.write([json.dumps(tree, indent=2).encode()])
            file.close()

    def _new(self, name: str) -> HashingWriter:
        self._unfinished[name] = folders.claim(self.directory / name, "writing")
        return HashingWriter(self._unfinished[name])

    def _files_of(self, name: str) -> set[str]:
        pattern = re.compile(re.escape(name) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
        return {file for file in os.listdir(self.directory) if pattern.fullmatch(file)}


def _gather(files: _Verified | _Foreign, name: str, into: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    single, index = f"{name}.safetensors", f"{name}.safetensors.index.json"
    if files.has(single):
        return files.tensors(single, into=into)
    if not files.has(index):
        raise CheckpointError(f"{files.directory}: has neither {single} nor {index}.")
    tree = files.json(index)
    places = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{files.directory / index}: has no weight_map.")
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        with suppress(ValueError):
            manifest.check_name(file)
            found.update(files.tensors(file, into=into))
            continue
        raise CheckpointError(f"{files.directory / index}: names {file!r}, which is no file of this folder.")
    for tensor in places.keys() - found.keys():
        raise CheckpointError(f"{files.directory / index}: names {tensor}, which is not in {places[tensor]}.")
    return found


def _read_foreign(path: Path, into: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    with HashingReader(path, follow=True) as file:  # Hugging Face's cache is made of links
        return read_tensors(file, into=into)[0]


def _size(text: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)?\s*", str(text), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size <= 0:
        raise ValueError(
            f'Expected a size such as "10GB" or a number of bytes. Received: max_shard_size={text!r}. Correct it.'
        )
    return size


def _clean(key: str, wrappers: set[str] | None) -> str:
    parts = key.split(".")
    kept = [
        part
        for index, part in enumerate(parts)
        if part not in _WRAPPERS or (wrappers is not None and ".".join(parts[: index + 1]) not in wrappers)
    ]
    return ".".join(kept)


def _wrapper_names(module: nn.Module) -> set[str]:
    """The names of all modules that a wrapper holds as its only content."""
    return {".".join(filter(None, (name, inner))) for name, inner in _wrapped(module)}


def _wrapped(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, part in module.named_modules(remove_duplicate=False):
        if type(part).__name__ == "OptimizedModule":
            yield name, "_orig_mod"
        elif isinstance(part, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            yield name, "module"
