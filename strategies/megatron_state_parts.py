"""Which part of the whole model a rank of Megatron has, under the names of the whole model.

Megatron tells it by `sharded_state_dict`: the place of each local tensor in the whole one. The names here are those of
the same model on one process: layers and experts are numbered over the whole model, not over this rank's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .checkpoint.files import CheckpointError
from .checkpoint.pieces import Box, Pieces, boxes_between, overlap, within

_LAYER = re.compile(r"^(.*?layers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"^(.*\.local_experts\.)\d+(\..*)$")
_GROUPED = re.compile(r"^(.*\.experts\.)(linear_fc\d\.(?:weight|bias))\d+$")  # of Transformer Engine
_OF_TOKENS = re.compile(r"(^|\.)(word_embeddings|output_layer)\.(weight|bias)$")  # a row for each, also T5's own
_REARRANGED = (
    "Expected layers whose checkpoints hold their weights as they are. Received: {name}, which Megatron rearranges. "
    "Use moe_grouped_gemm=False, or Transformer Engine."
)
# What Transformer Engine's layers call the norms that Megatron's own layers have beside them.
_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)  # fmt: skip


class Source(Protocol):
    """Whole tensors by name, of which any box can be read."""

    def names(self) -> Iterable[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        ...


@dataclass(frozen=True)
class Local:
    """A tensor of a chunk, and its place in the whole one.

    `blocks` are boxes of it, each with where it begins in the whole: several for fused layers. `spare`: another rank of
    the same replica has the same and saves it. `flexible`: the whole may have another length, where a vocabulary is
    padded. `also`: further names, where a module is held twice.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    blocks: tuple[tuple[Box, tuple[int, ...]], ...]
    spare: bool = False
    flexible: bool = False
    also: tuple[str, ...] = ()

    def pieces(self, tensor: Tensor, first: int | None = None, *, saved: bool = True) -> Pieces:
        """Returns the parts that a tensor like this one shows, or of its elements one after the other from `first` on.

        With `saved` a spare tensor has none, and padding of a vocabulary is left out.
        """
        boxes: list[Box] = []
        views: list[Tensor] = []
        whole = ((0,) * len(self.shape), self.shape)
        for place, part, view in [] if saved and self.spare else self._views(tensor, first):
            box: Box = tuple(start + offset for start, offset in zip(place, part[0])), part[1]
            kept = overlap(box, whole) if saved else box
            if kept is not None:
                boxes.append(kept)
                views.append(view[within(kept, box[0])])
        return Pieces(self.shape, tensor.dtype, tuple(boxes), tuple(views))

    def _views(self, tensor: Tensor, first: int | None) -> Iterator[tuple[tuple[int, ...], Box, Tensor]]:
        """For each part: where its block begins in the whole, its box within the block, and a view of it."""
        local = tuple(self.tensor.shape)
        if first is None:
            for block, place in self.blocks:
                yield place, ((0,) * len(local), block[1]), tensor[within(block, (0,) * len(local))]
            return
        for run in boxes_between(local, first, first + tensor.numel()):
            for block, place in self.blocks:
                common = overlap(run, block)
                if common is not None:
                    start = _number(common[0], local) - first
                    view = tensor.view(-1)[start : start + math.prod(common[1])].view(common[1])
                    yield place, (tuple(a - b for a, b in zip(common[0], block[0])), common[1]), view

    def fill(self, tensor: Tensor, source: Source, *, first: int | None = None) -> None:
        """Reads what a tensor like this one (see `pieces`) is to hold.

        Raises:
            CheckpointError: the whole tensor has another shape.
        """
        name = self.known_as(source.names())
        assert name is not None
        stored = source.shape(name)
        if stored != self.shape and not (self.flexible and stored[1:] == self.shape[1:]):
            raise CheckpointError(f"Expected {name} to have the shape {list(self.shape)}. Received: {list(stored)}.")
        found = self.pieces(tensor, first, saved=False)
        with torch.no_grad():
            for box, view in zip(found.boxes, found.views):
                _read(view, source, name, box, stored)

    def known_as(self, names: Iterable[str]) -> str | None:
        """Returns the name under which a checkpoint has this tensor: norms have two."""
        return next((name for name in (self.name, *_renamed(self.name), *self.also) if name in names), None)


def locals_of(chunks: Iterable[Any], prefix: str = "", *, vocabulary: int | None = None) -> list[Local]:
    """Returns what these chunks have; a vocabulary that is padded counts with so many tokens.

    States that are no tensors are left out: Megatron's own layers have none, and Transformer Engine's are pickles of
    what 8-bit scales were lately.

    Raises:
        ValueError: a layer keeps its weights in another form than its checkpoints.
    """
    found: dict[int, Local] = {}
    for chunk in chunks:
        for key, value in chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True}).items():
            if type(value).__name__ == "ShardedObject":
                continue
            local = _local(key, value, prefix, vocabulary)
            first = found.get(id(local.tensor))
            found[id(local.tensor)] = local if first is None else replace(first, also=(*first.also, local.name))
    return sorted(found.values(), key=lambda local: not local.spare)  # of two with a name the last one counts


def _local(key: str, value: Any, prefix: str, vocabulary: int | None) -> Local:
    parts = [value] if hasattr(value, "global_shape") else list(_built(value.build()))
    before = parts[0].prepend_axis_num
    copy, *rest = value.replica_id if isinstance(value.replica_id, tuple) else (value.replica_id,)
    name = value.key if copy else _whole_name(key, value.key, parts[0].global_offset[:before])
    shape = tuple(parts[0].global_shape[before:])
    flexible = any(part.allow_shape_mismatch for part in parts) or bool(_OF_TOKENS.search(name))
    if flexible and vocabulary is not None:
        shape = (min(vocabulary, shape[0]), *shape[1:])
    blocks = tuple((_box(part, value.data, name), tuple(part.global_offset[before:])) for part in parts)
    return Local(prefix + name, value.data, shape, blocks, spare=any((copy, *rest[:-1])), flexible=flexible)


def _built(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _built(item)
    elif hasattr(tree, "global_shape"):
        yield tree


def _box(part: Any, whole: Tensor, name: str) -> Box:
    """The box of a local tensor that a part of it shows."""
    data, sizes = part.data, tuple(part.local_shape)
    if data is whole:
        return (0,) * len(sizes), sizes
    same = data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and data.stride() == whole.stride()
    if not same or not whole.is_contiguous():
        raise ValueError(_REARRANGED.format(name=name))
    rest = (data.data_ptr() - whole.data_ptr()) // whole.element_size()
    offsets = []
    for stride in whole.stride():
        offset, rest = divmod(rest, stride)
        offsets.append(offset)
    return tuple(offsets), sizes


def _whole_name(key: str, theirs: str, places: tuple[int, ...]) -> str:
    """A local name with the layer and the expert numbered over the whole model."""
    here, there = _LAYER.match(key), _LAYER.match(theirs)
    if here and there and here[1] == there[1]:
        key = f"{here[1]}{there[2]}{here[3]}"
    if not places:
        return key
    expert, grouped = _EXPERT.match(key), _GROUPED.match(key)
    if grouped:
        return f"{grouped[1]}local_experts.{places[-1]}.{grouped[2]}"
    if expert is None:
        raise ValueError(_REARRANGED.format(name=key))
    return f"{expert[1]}{places[-1]}{expert[2]}"


def _renamed(name: str) -> Iterator[str]:
    for plain, fused in _NORMS:
        for old, new in ((plain, fused), (fused, plain)):
            if old in name:
                yield name.replace(old, new)


def _read(view: Tensor, source: Source, name: str, box: Box, stored: tuple[int, ...]) -> None:
    """Copies a box, with zeros behind the end of a shorter tensor."""
    there = overlap(box, ((0,) * len(stored), stored)) if stored else box
    if there != box:
        view.zero_()
    if there is not None:
        view[within(there, box[0])].copy_(source.read(name, there))


def _number(place: tuple[int, ...], shape: tuple[int, ...]) -> int:
    number = 0
    for offset, size in zip(place, shape):
        number = number * size + offset
    return number


class Whole:
    """Whole tensors in memory, as a Source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """All names."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        return self._tensors[name][within(box, (0,) * len(box[0]))]


class Stored:
    """Tensors in a checkpoint, as a Source."""

    def __init__(self, parts: Any) -> None:
        self._parts, self._names = parts, set(parts.names())

    def names(self) -> Iterable[str]:
        """All names."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        shape: tuple[int, ...] = self._parts.stored(name).shape
        return shape

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        value: Tensor = self._parts.read(name, box)
        return value
