"""Tensors in parts: each rank writes what it holds, and reads what it is to hold, whatever wrote it.

`<stem>.shards.json` lists for each tensor its type, its shape, and its parts: boxes of its elements, each in one of the
files `<stem>.shard-00000.safetensors`, …, under the tensor's name. docs/checkpoint-format.md describes it.
Whole tensors, as Hugging Face keeps them, are read in the same way: as tensors of one part.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import manifest
from .files import CheckpointError, HashingReader
from .format import Checkpoint
from .pieces import Box, Pieces, is_shared_out, overlap, rectangle, within
from .state import decode, encode
from .tensor_file import ALIASES, COMPLEX, Entry, read_header, unstorable

_WINDOW = 64 * 1024 * 1024  # bytes that are read at once where only some columns of a part are wanted


@dataclass(frozen=True)
class Part:
    """A box of a tensor's elements, and the file that holds it."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    name: str  # in the file


@dataclass
class Stored:
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


class Parts:
    """The tensors of a checkpoint by name, of which any box can be read; only what is asked for is read.

    What is read has to be verified before (`Checkpoint.examine`): no hash is compared here.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, Stored], aliases: Mapping[str, str]) -> None:
        self.directory, self.tensors, self.aliases = directory, dict(tensors), dict(aliases)
        self._files: dict[str, _Region] = {}

    def names(self) -> list[str]:
        """All names, further ones of tied tensors included."""
        return [*self.tensors, *self.aliases]

    def stored(self, name: str) -> Stored:
        """Type, shape and parts of a tensor; CheckpointError for one that is not there."""
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            raise CheckpointError(f"{self.directory}: has no tensor {name!r}.")
        return found

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or a box of it, on the CPU."""
        stored = self.stored(name)
        box = box or ((0,) * len(stored.shape), stored.shape)
        result = torch.empty(box[1], dtype=stored.dtype)
        filled = 0
        for part in stored.parts:
            common = overlap(box, (part.offsets, part.sizes)) if box[1] else box
            if common is not None:
                wanted = within(common, part.offsets)
                self._region(part.file).copy(part.name, wanted, result[within(common, box[0])])
                filled += math.prod(common[1])
        if filled != result.numel():
            raise CheckpointError(f"{self.directory}: parts of the tensor {name!r} are missing.")
        return result

    def like(self, name: str, target: Any) -> Tensor:
        """Return a tensor shared out as another is: of a DTensor only this rank's part is read.

        Raises CheckpointError where the shapes differ.
        """
        shape = self.stored(name).shape
        if tuple(target.shape) != shape:
            raise CheckpointError(
                f"{self.directory}: expected {name} to have the shape {list(target.shape)}. Received: {list(shape)}."
            )
        if not is_shared_out(target):
            return self.read(name)
        part = self.read(name, rectangle(target)).to(target.device)
        return type(target.detach()).from_local(
            part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
        )

    def _region(self, file: str) -> _Region:
        if file not in self._files:
            self._files[file] = _Region(self.directory / file)
        return self._files[file]


def save_sharded(writer: Any, tensors: Mapping[str, Tensor | Pieces], *, stem: str) -> None:
    """Write tensors of which each rank of the writer holds a part, or which it alone has; every rank has to call this.

    Parts that several ranks hold are written by one of them, in turn; of whole tensors that of the first rank that has
    it counts. Names that stand for one object are one tensor. Raises TypeError by name for what a file cannot hold.
    """
    unique, aliases = once(tensors)
    boxes = {name: _describe(name, tensor) for name, tensor in unique.items()}
    gathered = writer.world.gather_object((boxes, aliases))
    index = _Index(gathered, stem)
    for number, own in enumerate(index.files.get(writer.world.rank, [])):
        views = {name: _view(unique[name], box) for name, box in own.items()}
        writer.tensors(_file(stem, writer.world.rank, number), views)
    if writer.world.rank == 0:
        writer.json(f"{stem}.shards.json", index.tree())


def save_sharded_state(writer: Any, stem: str, value: Any) -> None:
    """Write nested state, as `Writer.state` does, whose tensors may be in parts; every rank has to call this.

    Dicts of different ranks are joined: each rank may bring the state of other parameters.
    """
    tree, tensors = encode(value, stem, sharded=True)
    trees = writer.world.gather_object(json.dumps(tree))
    if writer.world.rank == 0:
        different = list(dict.fromkeys(trees))
        writer.json(f"{stem}.json", _joined([json.loads(text) for text in different]))
    save_sharded(writer, tensors, stem=stem)


def is_sharded(checkpoint: Checkpoint, stem: str) -> bool:
    """Whether a checkpoint has the tensors of a stem in parts."""
    return checkpoint.has(f"{stem}.shards.json")


def open_parts(source: Checkpoint | str | os.PathLike[str], *, stem: str = "model", foreign: bool = False) -> Parts:
    """Return the tensors of a stem: in parts, or whole in one or several files.

    `source` is a checkpoint, or with `foreign=True` a folder (or one file) of weights as Hugging Face keeps them.
    """
    if isinstance(source, Checkpoint):
        if is_sharded(source, stem):
            return _of_index(source, stem)
        return _of_files(source.directory, _whole_files(source.directory, stem, source.json, source.has))
    path = Path(source)
    if path.is_file() and not path.name.endswith(".index.json"):
        return _of_files(path.parent, [path.name])
    folder = path.parent if path.is_file() else path
    if os.path.lexists(folder / manifest.NAME):
        return open_parts(Checkpoint.open(folder), stem=stem)
    if not foreign:
        raise CheckpointError(f"Expected a checkpoint. Received: {folder} without {manifest.NAME}. Add foreign=True.")
    return _of_files(folder, _whole_files(folder, stem, lambda name: json.loads((folder / name).read_text()),
                                          lambda name: (folder / name).is_file()))  # fmt: skip


def load_sharded_state(checkpoint: Checkpoint, stem: str, targets: Mapping[str, Tensor]) -> Any:
    """Return nested state that `save_sharded_state` or `Writer.state` wrote.

    A tensor under `state.<name>` with the shape of `targets[name]` (an optimizer's, of that parameter) is shared out
    as the target is; others are whole.
    """
    tree = checkpoint.json(f"{stem}.json")
    if not is_sharded(checkpoint, stem) and not checkpoint.has(f"{stem}.safetensors"):
        return decode(tree, {})
    parts = open_parts(checkpoint, stem=stem)
    like: dict[str, Tensor] = {}
    for name, entries in _mapping(tree.get("state") if isinstance(tree, dict) else None):
        target: Any = targets.get(name)
        for tensor in _tensors_in(entries) if target is not None else ():
            if parts.stored(tensor).shape == tuple(target.shape):
                like[tensor] = target
    return decode(tree, _Lazy(parts, like))


class _Lazy(Mapping[str, Tensor]):
    """Tensors that are read when somebody asks for them."""

    def __init__(self, parts: Parts, like: Mapping[str, Tensor]) -> None:
        self._parts, self._like = parts, like

    def __getitem__(self, name: str) -> Tensor:
        target = self._like.get(name)
        return self._parts.read(name) if target is None else self._parts.like(name, target)

    def __contains__(self, name: object) -> bool:
        return name in self._parts.tensors or name in self._parts.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.names())

    def __len__(self) -> int:
        return len(self._parts.names())


class _Index:
    """Who writes which part, from what every rank holds; the same on every rank."""

    def __init__(self, gathered: list[tuple[dict[str, Any], dict[str, str]]], stem: str) -> None:
        self._stem = stem
        self._aliases: dict[str, str] = {}
        self._tensors: dict[str, Any] = {}
        self._writers: dict[str, list[tuple[int, Box]]] = {}
        holders: dict[tuple[str, Box], list[int]] = {}
        for rank, (boxes, aliases) in enumerate(gathered):
            self._aliases.update(aliases)
            for name, (dtype, shape, plain, own) in boxes.items():
                self._tensors.setdefault(name, (dtype, shape, plain))
                for box in own:
                    holders.setdefault((name, box), []).append(rank)
        for turn, ((name, box), ranks) in enumerate(holders.items()):
            first = ranks[0] if self._tensors[name][2] else ranks[turn % len(ranks)]
            self._writers.setdefault(name, []).append((first, box))
        for name, (_, _, plain) in self._tensors.items():
            if plain:  # whole tensors may differ between ranks: the first one counts
                self._writers[name] = self._writers.get(name, [])[:1]
        for name, (_, shape, _) in self._tensors.items():
            held = sum(math.prod(sizes) for _, (_, sizes) in self._writers.get(name, []))
            assert held == math.prod(shape), f"{stem}: {name} of {list(shape)} in parts of {held} elements"

        self.files: dict[int, list[dict[str, Box]]] = {}  # by rank; a file has one box of a tensor
        for name, parts in self._writers.items():
            counts: dict[int, int] = {}
            for rank, box in parts:
                number = counts[rank] = counts.get(rank, -1) + 1
                files = self.files.setdefault(rank, [])
                files.extend({} for _ in range(number + 1 - len(files)))
                files[number][name] = box

    def tree(self) -> dict[str, Any]:
        parts: dict[str, list[Any]] = {name: [] for name in self._tensors}
        names: list[str] = []
        for rank, files in sorted(self.files.items()):
            for number, own in enumerate(files):
                for name, (offsets, sizes) in own.items():
                    parts[name].append([len(names), list(offsets), list(sizes)])
                names.append(_file(self._stem, rank, number))
        tensors = {
            name: {"dtype": dtype, "shape": list(shape), "parts": parts[name]}
            for name, (dtype, shape, _) in self._tensors.items()
        }
        return {"tensors": tensors, "aliases": self._aliases, "files": names}


class _Region:
    """A safetensors file of which any part is read."""

    def __init__(self, path: Path) -> None:
        with HashingReader(path, follow=True) as file:
            entries, self.notes = read_header(file)
            self._start = file.position
        self._path = path
        self.entries = {entry.name: entry for entry in entries}
        self.complex = set(json.loads(self.notes.get(COMPLEX, "[]")))

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Copy the elements of a tensor that `box` shows into `target`, which has its shape."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._path}: has no tensor {name!r}.")
        if name in self.complex:
            target, box = torch.view_as_real(target), (*box, slice(0, 2))
        shape = entry.shape or (1,)
        box, target = (box, target) if entry.shape else ((slice(0, 1),), target.reshape(1))
        row = math.prod(shape[1:]) * entry.dtype.itemsize
        step = max(1, _WINDOW // max(row, 1))
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for first in range(box[0].start, box[0].stop, step):
                last = min(first + step, box[0].stop)
                rows = self._rows(file, entry, row, first, last).view(last - first, *shape[1:])
                target[first - box[0].start : last - box[0].start].copy_(rows[(slice(None), *box[1:])])
        finally:
            os.close(file)

    def _rows(self, file: int, entry: Entry, row: int, first: int, last: int) -> Tensor:
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        view, place = memoryview(data.numpy()), self._start + entry.start + first * row
        while len(view):
            count = os.preadv(file, [view], place)
            if count == 0:
                raise CheckpointError(f"{self._path}: ends early.")
            view, place = view[count:], place + count
        return data.view(entry.dtype)


def _of_index(checkpoint: Checkpoint, stem: str) -> Parts:
    path, tree = checkpoint.directory / f"{stem}.shards.json", checkpoint.json(f"{stem}.shards.json")
    try:
        files = [str(name) for name in tree["files"]]
        missing = [name for name in files if not checkpoint.has(name)]
        tensors = {name: _stored(name, record, files) for name, record in tree["tensors"].items()}
        aliases = dict(tree["aliases"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: is no index of parts ({error!r}).") from error
    if missing or not set(aliases.values()) <= set(tensors):
        raise CheckpointError(f"{path}: names {missing or 'tied tensors'}, which the checkpoint has not.")
    return Parts(checkpoint.directory, tensors, aliases)


def _stored(name: str, record: Any, files: list[str]) -> Stored:
    dtype, shape = getattr(torch, record["dtype"]), tuple(map(int, record["shape"]))
    if not isinstance(dtype, torch.dtype) or any(number < 0 for number in shape):
        raise ValueError(f"{name}: {record['dtype']}, {shape}")
    parts = [Part(files[int(place)], tuple(offsets), tuple(sizes), name) for place, offsets, sizes in record["parts"]]
    for part in parts:
        ends = [offset + size for offset, size in zip(part.offsets, part.sizes, strict=True)]
        if len(ends) != len(shape) or any(not 0 <= o <= e <= n for o, e, n in zip(part.offsets, ends, shape)):
            raise ValueError(f"{name}: a part beyond its shape")
    return Stored(dtype, shape, parts)


def _of_files(directory: Path, files: list[str]) -> Parts:
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    regions = {file: _Region(directory / file) for file in files}
    for file, region in regions.items():
        for name, entry in region.entries.items():
            shape, dtype = entry.shape, entry.dtype
            if name in region.complex:
                shape, dtype = shape[:-1], torch.view_as_complex(torch.empty(2, dtype=dtype)).dtype
            tensors[name] = Stored(dtype, shape, [Part(file, (0,) * len(shape), shape, name)])
        aliases.update(json.loads(region.notes.get(ALIASES, "{}")))
    parts = Parts(directory, tensors, {alias: name for alias, name in aliases.items() if name in tensors})
    parts._files.update(regions)
    return parts


def _whole_files(directory: Path, stem: str, json_of: Any, has: Any) -> list[str]:
    if has(f"{stem}.safetensors"):
        return [f"{stem}.safetensors"]
    index = f"{stem}.safetensors.index.json"
    if not has(index):
        raise CheckpointError(f"{directory}: has neither {stem}.safetensors nor {index} nor {stem}.shards.json.")
    tree = json_of(index)
    places = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(places, dict):
        raise CheckpointError(f"{directory / index}: has no weight_map.")
    for file in set(places.values()):
        manifest.check_name(file)
    return sorted(set(places.values()))


def once(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return each tensor under its first name, and further name → first name."""
    unique: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        first = seen.setdefault(_identity(tensor), name)
        if first == name:
            unique[name] = tensor
        else:
            aliases[name] = first
    return unique, aliases


def _identity(tensor: Any) -> Any:
    if is_shared_out(tensor) or not isinstance(tensor, Tensor) or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _describe(name: str, tensor: Any) -> tuple[str, tuple[int, ...], bool, tuple[Box, ...]]:
    """(dtype, shape, whether it is whole, the boxes that are here)."""
    if isinstance(tensor, Pieces):
        boxes = tuple(box for box in tensor.boxes if 0 not in box[1])
        return str(tensor.dtype).removeprefix("torch."), tensor.shape, False, boxes
    problem = unstorable(_local(tensor)) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
    if problem:
        raise TypeError(f"Expected dense tensors with names. Received: {name}: {problem}.")
    box = rectangle(tensor)
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind, tuple(tensor.shape), not is_shared_out(tensor), () if 0 in box[1] else (box,)


def _view(tensor: Any, box: Box) -> Tensor:
    return tensor.views[tensor.boxes.index(box)].detach() if isinstance(tensor, Pieces) else _local(tensor)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_shared_out(tensor) else tensor
    return local.detach()


def _file(stem: str, rank: int, number: int) -> str:
    """The file of a rank; further ones hold the further boxes that it has of the same tensors."""
    return f"{stem}.shard-{rank:05d}{f'-{number}' if number else ''}.safetensors"


def _joined(trees: list[Any]) -> Any:
    """One tree of several: dicts with the keys of all, lists with the items of all; of other values the first."""
    first = trees[0]
    if len(trees) == 1:
        return first
    if all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _joined([tree[key] for tree in trees if key in tree]) for key in keys}
    if all(isinstance(tree, list) for tree in trees):
        if all(isinstance(item, str) for tree in trees for item in tree):
            return list(dict.fromkeys(item for tree in trees for item in tree))
        longest = max(map(len, trees))
        return [_joined([tree[place] for tree in trees if place < len(tree)]) for place in range(longest)]
    return first


def _mapping(tree: Any) -> list[tuple[str, Any]]:
    """The entries of a dict in a tree, whichever form it has."""
    if not isinstance(tree, dict):
        return []
    if "$dict" in tree:
        return [(key, value) for key, value in tree["$dict"] if isinstance(key, str)]
    return list(tree.items())


def _tensors_in(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict) and isinstance(tree.get("$tensor"), str):
        yield tree["$tensor"]
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(item)
