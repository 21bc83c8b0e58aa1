"""Operations on nested data (lists, tuples, named tuples, mappings of tensors) between the ranks of `world.current()`.

Names and meanings are those of Hugging Face Accelerate's `utils.operations`; those that need no ranks are in `nested`
and can be had from here as well. Before ranks exchange tensors they compare, in one small collective, what each
has brought, so that a difference is an error with ranks and shapes in it rather than an abort inside the backend.
Small leaves travel together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .nested import (
    TensorInformation,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    fill_to,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    leaves_of,
    listify,
    pad_input_tensors,
    paths_of,
    recursively_apply,
    send_to_device,
    slice_tensors,
    unsupported,
)
from .subgroup import data
from .world import DistributedOperationException, World, as_bytes, current, raise_unequal, signature

__all__ = [
    "CannotPadNestedTensorWarning", "DistributedOperationException", "TensorInformation", "broadcast",
    "broadcast_object_list", "concatenate", "convert_outputs_to_fp32", "convert_to_fp32", "find_batch_size",
    "find_device", "gather", "gather_for_metrics", "gather_object", "gather_uneven", "get_data_structure", "get_shape",
    "honor_type", "ignorant_find_batch_size", "initialize_tensors", "is_namedtuple", "is_tensor_information",
    "is_torch_tensor", "listify", "pad_across_processes", "pad_input_tensors", "recursively_apply", "reduce",
    "send_to_device", "slice_tensors",
]

Data = TypeVar("Data")
_SIZES = 15  # leaves whose sizes fit into the one header; more take a second collective
_HEADER = 8 * (1 + _SIZES)  # bytes: a signature and sizes
_FIRST = 1024  # bytes of the collective that comes first: its header, and leaves that are so small
_PACKED = 1 << 22  # bytes: leaves smaller than this in all travel as one


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was handed to `pad_across_processes`, which leaves it as it is."""


def gather(tensor: Any) -> Any:
    """Every rank's nested data, joined along dimension 0 in rank order; a scalar becomes one row a rank.

    One process gives back its own data. Raises ValueError, on every rank, where structure, dtypes or shapes differ,
    and TypeError for leaves that are no tensors (see `gather_object`).
    """
    return _gather(tensor, current())


def _gather(tensor: Any, world: World) -> Any:
    if world.size == 1:
        return tensor
    leaves = _tensors("gather", tensor)
    kinds = [(path, _kind(leaf), leaf.shape) for path, leaf in leaves]
    rows = [_with_rows(leaf) for _, leaf in leaves]
    if _fits(rows):  # what is compared and what is gathered travel together
        everyones = torch.stack(_compared(world, kinds, payload=_pack(rows) if rows else None))
        return _rebuild(tensor, _unpack_all(everyones[:, _HEADER:], rows))
    _agree_on(world, kinds)
    return _rebuild(tensor, _join(world, rows))


def gather_uneven(tensor: Any) -> Any:
    """As `gather`, for tensors whose dimension 0 may differ between ranks (0 rows too)."""
    return _gather_uneven(tensor, current())


def _gather_uneven(tensor: Any, world: World) -> Any:
    if world.size == 1:
        return tensor
    leaves = [(path, _with_rows(leaf)) for path, leaf in _tensors("gather_uneven", tensor)]
    kinds = [(path, _kind(leaf), leaf.shape[1:]) for path, leaf in leaves]
    rows = _agree_on(world, kinds, [leaf.shape[0] for _, leaf in leaves])
    most = [max(counts) for counts in zip(*rows, strict=True)]
    padded = [fill_to(leaf, 0, size) for (_, leaf), size in zip(leaves, most, strict=True)]
    return _rebuild(tensor, _join(world, padded, rows))


def gather_object(object: Any) -> Any:
    """The items of every rank's list, in rank order, in one list on every rank; one process gives back its own.

    Raises TypeError for what is not a collection of items.
    """
    return _gather_object(object, current())


def _gather_object(object: Any, world: World) -> Any:
    if world.size == 1:
        return object
    if isinstance(object, (str, bytes, Mapping)) or not isinstance(object, Iterable):
        raise TypeError(f"Expected a list of objects. Received: {type(object).__name__}. Put it into a list.")
    return [item for items in world.gather_object(list(object)) for item in items]


def gather_for_metrics(input_data: Any, dataloader: Any = None, use_gather_object: bool = False) -> Any:
    """What all ranks computed from one batch of `dataloader` (a prepared one), each sample once and in order.

    The last batch may be short on some ranks, or filled up with repeated samples, which are left out. Data that is
    not all tensors, or `use_gather_object`, is gathered as by `gather_object`. Ranks that share the work on the same
    samples (tensor parallel and the like) count as one.
    """
    world = data()
    objects = use_gather_object or not all(torch.is_tensor(leaf) for leaf in leaves_of(input_data))
    remainder = dataloader.remainder if dataloader is not None and dataloader.end_of_dataloader else None
    if remainder is None or remainder <= 0:
        return _gather_object(input_data, world) if objects else _gather(input_data, world)
    mine = input_data
    if dataloader.samples == 0:  # a repeated sample that keeps the ranks in step, and does not count
        mine = input_data[:0] if objects else slice_tensors(recursively_apply(_with_rows, input_data), slice(0))
    gathered = _gather_object(mine, world) if objects else _gather_uneven(mine, world)
    total = dataloader.global_samples
    if total is None or total <= remainder:
        return gathered
    return gathered[:remainder] if objects else slice_tensors(gathered, slice(remainder))


def broadcast(tensor: Data, from_process: int = 0) -> Data:
    """Nested data whose tensors are overwritten by those of rank `from_process`; in place, and returned."""
    world = current()
    if world.size > 1:
        leaves = _tensors("broadcast", tensor)
        _agree_on(world, [(path, _kind(leaf), leaf.shape) for path, leaf in leaves])
        for _, leaf in leaves:
            world.broadcast(leaf, src=from_process)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """A list of any objects, overwritten by that of rank `from_process`; in place, and returned."""
    object_list[:] = current().broadcast_object(object_list, src=from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """New nested data with every tensor reduced over the ranks by "sum" or "mean" (or "none"), times `scale`.

    The mean of integers and booleans is float32. Raises ValueError, on every rank, where shapes or dtypes differ.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(
            f"Expected reduction to be 'sum', 'mean' or 'none'. Received: reduction={reduction!r}. "
            "Use 'mean' for an average."
        )
    world = current()
    leaves = _tensors("reduce", tensor)
    if world.size > 1 and reduction != "none":
        _agree_on(world, [(path, _kind(leaf), leaf.shape) for path, leaf in leaves])
    return _rebuild(tensor, [_reduced(world, leaf, reduction, scale) for _, leaf in leaves])


def pad_across_processes(tensor: Data, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Data:
    """Nested data whose tensors are filled with `pad_index` along `dim` to the size of the largest among the ranks.

    Filled at the end, or in front with `pad_first`. Tensors that have no such dimension stay as they are.
    """
    world = current()
    if world.size == 1:
        return tensor
    leaves = _tensors("pad_across_processes", tensor)
    sizes = [leaf.shape[dim] if _has(leaf, dim) else 0 for _, leaf in leaves]
    everyones = _agree_on(world, [(path, leaf.ndim) for path, leaf in leaves], sizes)
    largest = [max(column) for column in zip(*everyones, strict=True)]
    padded: Data = _rebuild(tensor, [
        fill_to(leaf, dim, size, pad_index, pad_first) if _has(leaf, dim) else leaf
        for (_, leaf), size in zip(leaves, largest, strict=True)
    ])
    return padded


def _tensors(operation: str, data: Any) -> list[tuple[str, Tensor]]:
    leaves = list(paths_of(data))
    for path, leaf in leaves:
        if not torch.is_tensor(leaf):
            raise unsupported(operation, leaf, path)
    return leaves


def _rebuild(data: Any, tensors: list[Tensor]) -> Any:
    replacements = iter(tensors)
    return recursively_apply(lambda _: next(replacements), data)


def _agree_on(world: World, kinds: list[tuple[Any, ...]], sizes: Sequence[int] = ()) -> list[list[int]]:
    """Compare what every rank has brought, and tell all sizes to all: a list for each rank."""
    everyones = [_numbers(one)[1 : 1 + len(sizes)].tolist() for one in _compared(world, kinds, sizes)]
    if len(sizes) > _SIZES:
        rest = world.all_gather(torch.tensor(sizes[_SIZES:], dtype=torch.int64))
        everyones = [known + more.tolist() for known, more in zip(everyones, rest, strict=True)]
    return everyones


def _compared(
    world: World, kinds: list[tuple[Any, ...]], sizes: Sequence[int] = (), *, payload: Tensor | None = None
) -> list[Tensor]:
    """Exchange one buffer of a fixed size, and raise an error on all ranks if they have brought different kinds."""
    buffer = torch.zeros(_FIRST, dtype=torch.uint8)
    numbers = _numbers(buffer)
    numbers[0] = signature(kinds)
    if sizes:
        known = sizes[:_SIZES]
        numbers[1 : 1 + len(known)] = torch.tensor(known, dtype=torch.int64)
    if payload is not None:
        buffer[_HEADER : _HEADER + payload.numel()] = payload
    everyones = world.all_gather(buffer)
    mine = buffer[:8]
    if not all(torch.equal(one[:8], mine) for one in everyones):
        raise_unequal(world.gather_object(", ".join(map(_described, kinds)) or "nothing"))
    return everyones


def _numbers(buffer: Tensor) -> Tensor:
    return buffer[:_HEADER].view(torch.int64)


def _fits(leaves: list[Tensor]) -> bool:
    """Whether leaves, on the CPU, have room beside the numbers that are compared; the same on ranks of equal kinds."""
    on_cpu = all(leaf.device.type == "cpu" for leaf in leaves)
    return on_cpu and sum(leaf.nbytes + 16 for leaf in leaves) <= _FIRST - _HEADER


def _kind(leaf: Tensor) -> str:
    return f"{leaf.device.type} {str(leaf.dtype)[6:]}"


def _described(kind: tuple[Any, ...]) -> str:
    path, *rest = kind
    shown = " ".join(str(list(part)) if isinstance(part, torch.Size) else str(part) for part in rest)
    return f"{path}: {shown}" if path else shown


def _join(world: World, leaves: list[Tensor], rows: list[list[int]] | None = None) -> list[Tensor]:
    """Each leaf of all ranks along dimension 0; of the same shapes on all, of which `rows[rank][leaf]` are kept."""
    everyones: list[Sequence[Tensor]]
    if len(leaves) > 1 and sum(leaf.nbytes for leaf in leaves) < _PACKED and len({leaf.device for leaf in leaves}) == 1:
        everyones = [_unpack(buffer, leaves) for buffer in world.all_gather(_pack(leaves))]
    else:
        everyones = list(zip(*(world.all_gather(leaf) for leaf in leaves), strict=True))
    if rows is not None:
        everyones = [[part[:count] for part, count in zip(*pair, strict=True)]
                     for pair in zip(everyones, rows, strict=True)]
    return [torch.cat(parts) for parts in zip(*everyones, strict=True)]


def _pack(leaves: list[Tensor]) -> Tensor:
    """All leaves in one row of bytes, each beginning where any dtype may begin."""
    parts: list[Tensor] = []
    for leaf in leaves:
        data = as_bytes(leaf.detach())
        parts += [data, data.new_zeros(-data.numel() % 16)]
    return torch.cat(parts)


def _unpack(buffer: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found, start = [], 0
    for leaf in leaves:
        found.append(buffer[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
        start += leaf.nbytes + -leaf.nbytes % 16
    return found


def _unpack_all(buffers: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Each leaf of all ranks along dimension 0, from their packed bytes, a row for each rank."""
    found, start = [], 0
    for leaf in leaves:
        part = buffers[:, start : start + leaf.nbytes].contiguous()
        found.append(part.view(leaf.dtype).reshape(len(buffers) * len(leaf), *leaf.shape[1:]))
        start += leaf.nbytes + -leaf.nbytes % 16
    return found


def _with_rows(leaf: Tensor) -> Tensor:
    return leaf[None] if leaf.ndim == 0 else leaf


def _has(leaf: Tensor, dim: int) -> bool:
    if leaf.is_nested:
        warnings.warn("A nested tensor cannot be padded; it stays as it is.", CannotPadNestedTensorWarning, 3)
        return False
    return -leaf.ndim <= dim < leaf.ndim


def _reduced(world: World, leaf: Tensor, reduction: str, scale: float) -> Tensor:
    integral = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    result = leaf.detach().to(torch.float32 if integral and reduction == "mean" else leaf.dtype, copy=True)
    if reduction != "none":
        world.all_reduce(result, reduction)
    return result if scale == 1.0 else result * scale


