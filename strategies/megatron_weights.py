"""Weights of Megatron's models from Hugging Face's and back: of a rank's chunks, whatever its place.

`load` reads from tensors or from a folder of safetensors, of which each rank reads its own part. `whole` gathers what
the ranks have, weights or anything of their shapes (moments of an optimizer), under Hugging Face's names.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import world as worlds
from .checkpoint.tensors import save_weights
from .checkpoint.writer import Writer
from .megatron_models import core
from .megatron_weights_names import Entry, Ref, entries

_INDEX = "model.safetensors.index.json"
_MODEL = "model.safetensors"
# Transformer Engine's names of what its fused layers have, and of experts that are computed together.
_RENAMED = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(\w+)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(\w+)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"experts\.(linear_fc\d)\.weight(\d+)$"), r"experts.local_experts.\2.\1.weight"),
)
_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=experts\.local_experts\.)(\d+)")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank stands: among those that share layers, and those that share experts."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0  # of those that share one expert's layers
    expert_size: int = 1

    @classmethod
    def here(cls) -> Place:
        """Returns this rank's place in Megatron's groups."""
        state = core("parallel_state")
        return cls(
            state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size(),
        )  # fmt: skip

    def of(self, entry: Entry) -> tuple[int, int]:
        """Returns this rank and how many there are, for a weight."""
        return (self.rank, self.size) if entry.expert is None else (self.expert_rank, self.expert_size)


class Source:
    """Tensors by name, of which parts can be read: a mapping, or a folder (or file) of safetensors."""

    def __init__(self, tensors: Mapping[str, Tensor] | str | Path) -> None:
        self.tensors = tensors if isinstance(tensors, Mapping) else _Files(Path(tensors))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def part(self, ref: Ref, dim: int | None = None, first: int = 0, last: int | None = None) -> Tensor:
        """Returns a tensor, or from `first` to `last` along a dimension (of the tensor as Megatron has it)."""
        shape = list(self.shape(ref))
        ranges = [(0, size) for size in shape]
        if dim is not None:
            ranges[dim] = (first, shape[dim] if last is None else last)
        which, of = ref.part
        offset = which * shape[0] if of > 1 else 0
        ranges[0] = (ranges[0][0] + offset, ranges[0][1] + offset)
        slices: list[Any] = [slice(*one) for one in (reversed(ranges) if ref.transposed else ranges)]
        found: Tensor = self.tensors[ref.name][tuple(slices if ref.index is None else [ref.index, *slices])]
        return found.T if ref.transposed else found

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Returns the shape of what a Ref names, as Megatron has it."""
        shape = list(self.tensors[ref.name].shape)
        shape = shape if ref.index is None else shape[1:]
        shape = shape[::-1] if ref.transposed else shape
        return (shape[0] // ref.part[1], *shape[1:])


class _Files(Mapping[str, Any]):
    """Tensors in files, that are read when a part of them is taken."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        files = [path] if path.is_file() else self._in_folder(path)
        opened = [safe_open(str(one), "pt") for one in files]
        self._where = {name: file for file in opened for name in list(file.keys())}

    @staticmethod
    def _in_folder(folder: Path) -> list[Path]:
        index = folder / _INDEX
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {_MODEL}
        files = [folder / name for name in sorted(names)]
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(
                f"Expected weights in safetensors. Received: no {missing[0]}. Save them by save_pretrained."
            )
        return files

    def __getitem__(self, name: str) -> Any:
        return _Slice(self._where[name].get_slice(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


class _Slice:
    """A tensor of a file, with a shape as a tensor has it."""

    def __init__(self, found: Any) -> None:
        self.found, self.shape = found, tuple(found.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self.found[index]
        return tensor


def load(architecture: Any, chunks: Iterable[Any], tensors: Any, *, place: Place | None = None) -> None:
    """Loads Hugging Face's weights into this rank's chunks.

    `tensors` is a model of transformers, a mapping of tensors, or a folder (or file) of safetensors.

    Raises:
        KeyError: a tensor is missing.
        ValueError: one has another shape, or the chunks have weights that the architecture does not know.
    """
    if hasattr(tensors, "state_dict"):
        tensors = tensors.state_dict()
    source, place = Source(tensors), place or Place.here()
    known = {entry.name: entry for entry in entries(architecture)}
    with torch.no_grad():
        for name, parameter in named(chunks).items():
            if name not in known:
                raise ValueError(f"Expected weights of {architecture.kind}. Received: {name}. Build chunks by `build`.")
            part = part_of(known[name], source, place, architecture)
            if part.shape != parameter.shape:
                raise ValueError(
                    f"Expected {name} as {tuple(parameter.shape)}. Received: {tuple(part.shape)} in the weights. "
                    "Load weights of the same config."
                )
            parameter.copy_(part)


def named(chunks: Iterable[Any]) -> dict[str, Any]:
    """Returns this rank's parameters by the names that they have in the whole model on one rank."""
    found = {}
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        stacks = {side: getattr(chunk, side, None) for side in ("encoder", "decoder")}
        for name, parameter in chunk.named_parameters():
            found[_whole_name(name, stacks)] = parameter
    return found


def part_of(entry: Entry, source: Source, place: Place, architecture: Any) -> Tensor:
    """Returns a rank's part of a weight."""
    refs = entry.refs
    if entry.files is not None and entry.refs[0].name not in source:
        refs = entry.files
    missing = [ref.name for ref in refs if ref.name not in source]
    if missing:
        raise KeyError(f"Expected {missing[0]} in the weights. Received: none. Load weights of the same config.")
    rank, size = place.of(entry)
    if entry.kind == "copy":
        return source.part(refs[0])
    dim = 1 if entry.kind == "columns" else 0
    if entry.kind == "vocabulary":
        return _vocabulary(source, refs[0], rank, architecture.padded_vocab_size(size) // size)
    parts = []
    for ref in refs:
        share = source.shape(ref)[dim] // size
        parts.append(source.part(ref, dim, rank * share, (rank + 1) * share))
    if entry.kind != "grouped":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    groups = entry.groups // size
    return torch.cat([one.reshape(groups, -1, *one.shape[1:]) for one in parts], dim=1).flatten(0, 1)


def _vocabulary(source: Source, ref: Ref, rank: int, rows: int) -> Tensor:
    count = source.shape(ref)[0]
    first, last = min(rank * rows, count), min((rank + 1) * rows, count)
    part = source.part(ref, 0, first, last)
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])]) if len(part) < rows else part


def whole(
    architecture: Any, tensors: Mapping[str, Tensor], *, files: bool = False, place: Place | None = None
) -> dict[str, Tensor]:
    """Returns whole tensors under Hugging Face's names, on the CPU of every rank; every rank calls this.

    Args:
        architecture: of the model.
        tensors: this rank's, by the names that `named` gives.
        files: with the names and shapes that folders have, where a model in memory has others.
        place: this rank's; without one the tensors are those of a model on one rank.

    Raises:
        ValueError: a tensor is none of the architecture's.
    """
    known = {entry.name: entry for entry in entries(architecture)}
    pieces: dict[Ref, Tensor] = {}
    for name in tensors:
        if name not in known:
            raise ValueError(f"Expected tensors of {architecture.kind}. Received: {name!r}. Use the names of `named`.")
    for name, entry in known.items():
        if name in tensors and not entry.again:
            refs = (entry.files if files else None) or entry.refs
            pieces.update(zip(refs, _whole(entry, tensors[name], len(refs), architecture, place)))
    for group in _other_groups(place):
        pieces = _shared(pieces, group)
    written = [entry for entry in known.values() if not entry.again]
    return _assembled(pieces, [ref for entry in written for ref in (entry.files if files else None) or entry.refs])


def weights(architecture: Any, chunks: Iterable[Any], *, files: bool = False) -> dict[str, Tensor]:
    """Returns the whole weights of chunks under Hugging Face's names, on every rank; every rank calls this."""
    tensors = {name: parameter.detach() for name, parameter in named(chunks).items()}
    return whole(architecture, tensors, files=files, place=Place.here())


def save_pretrained(
    architecture: Any, chunks: Iterable[Any], folder: str | Path, *, max_shard_size: int | str = "5GB"
) -> None:
    """Writes a folder that transformers' `from_pretrained` loads: config.json and safetensors; every rank calls this.

    Raises:
        ValueError: the architecture is not of a Hugging Face config.
    """
    if architecture.hugging_face is None:
        raise ValueError(
            "Expected a model of a Hugging Face config. Received: one of TransformerConfig's fields. Save a checkpoint,"
            " or build the model from a config of transformers."
        )
    state, world = weights(architecture, chunks, files=True), worlds.current()
    with Writer(str(folder), world=world) as writer:
        if world.rank == 0:
            save_weights(writer, state, max_shard_size=max_shard_size)
            writer.json("config.json", json.loads(architecture.hugging_face.to_json_string()))
        writer.commit()


def _whole(entry: Entry, tensor: Tensor, count: int, architecture: Any, place: Place | None) -> list[Tensor]:
    """What a weight is made of, whole, on the CPU."""
    parts = [tensor]
    if place is not None and place.of(entry)[1] > 1 and entry.kind != "copy":
        state = core("parallel_state")
        expert = entry.expert is not None
        parts = _gathered(tensor, state.get_expert_tensor_parallel_group() if expert else
                          state.get_tensor_model_parallel_group())  # fmt: skip
    parts = [part.to("cpu", copy=True) for part in parts]
    if entry.kind in ("copy", "rows", "columns", "vocabulary"):
        found = torch.cat(parts, dim=1 if entry.kind == "columns" else 0) if len(parts) > 1 else parts[0]
        return [found[: architecture.vocab_size].clone() if entry.kind == "vocabulary" else found]
    if entry.kind == "fused":
        return [torch.cat(one) for one in zip(*(part.chunk(count) for part in parts))]
    groups = [part.reshape(entry.groups // len(parts), -1, *part.shape[1:]) for part in parts]
    return [one.flatten(0, 1) for one in torch.cat(groups).split(_widths(architecture, count), dim=1)]


def _widths(architecture: Any, count: int) -> list[int]:
    """Rows of query, key and value in a group of heads; of key and value alone."""
    fields = architecture.fields
    heads = fields["num_attention_heads"]
    channels = fields.get("kv_channels") or fields["hidden_size"] // heads
    queries = heads // (fields.get("num_query_groups") or heads)
    return [channels] * 2 if count == 2 else [queries * channels, channels, channels]


def _gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _other_groups(place: Place | None) -> list[Any]:
    """The groups whose ranks have other weights: stages, and other experts."""
    if place is None:
        return []
    state = core("parallel_state")
    groups = [state.get_pipeline_model_parallel_group(), state.get_expert_model_parallel_group()]
    return [group for group in groups if group.size() > 1]


def _shared(pieces: dict[Ref, Tensor], group: Any) -> dict[Ref, Tensor]:
    """What all ranks of a group have, on each of them."""
    dist = torch.distributed
    ranks, device = dist.get_process_group_ranks(group), torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    told: list[Any] = [None] * len(ranks)
    mine = [(ref, tuple(tensor.shape), tensor.dtype) for ref, tensor in pieces.items()]
    dist.all_gather_object(told, mine, group=group)
    found: dict[Ref, Tensor] = {}
    for rank, content in zip(ranks, told):
        for ref, shape, dtype in content:
            if ref not in found:
                own = rank == dist.get_rank()
                tensor = pieces[ref].to(device).contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, src=rank, group=group)
                found[ref] = tensor.cpu()
    return found


def _assembled(pieces: Mapping[Ref, Tensor], order: list[Ref]) -> dict[str, Tensor]:
    """Tensors of which Refs name parts, in the model's order; those of which there is nothing are left out."""
    parts: dict[str, dict[int | None, list[Tensor]]] = {}
    turned = {ref.name for ref in order if ref.transposed}
    for ref in order:
        if ref in pieces:
            parts.setdefault(ref.name, {}).setdefault(ref.index, []).append(pieces[ref])
    found = {}
    for name, experts in parts.items():
        joined = [torch.cat(one) if len(one) > 1 else one[0] for one in experts.values()]
        tensor = joined[0] if None in experts else torch.stack(joined)
        found[name] = (tensor.T if name in turned else tensor).contiguous()
    return found


def _whole_name(name: str, stacks: Mapping[str, Any]) -> str:
    """The name of a parameter with its layer's and its expert's numbers in the whole model."""
    layer = _LAYER.match(name)
    if layer is not None:
        module = stacks[layer[1]].layers[int(layer[2])]
        name = f"{layer[1]}.layers.{module.layer_number - 1}.{name[layer.end() :]}"
    for pattern, other in _RENAMED:
        name = pattern.sub(other, name)
    if name.startswith("lm_head.output_layer."):  # of T5, which has it under both names
        name = name.removeprefix("lm_head.")
    expert = _EXPERT.search(name)
    if expert is not None and layer is not None:
        experts = module.mlp
        first = experts.ep_group.rank() * experts.num_local_experts
        name = _EXPERT.sub(str(first + int(expert[1])), name)
    return name
