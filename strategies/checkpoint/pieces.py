"""Which part of a tensor this process holds: a box of its elements, by where it begins and how long it is."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes), each with one number for each dimension of the whole tensor."""


@dataclass(frozen=True)
class Pieces:
    """What this process holds of a tensor: some boxes of its elements, none of them twice, and a view of each."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...] = ()
    views: tuple[Tensor, ...] = ()


def boxes_between(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns the boxes that elements number `start` to `stop` of a tensor make up, rows first, in their order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row, zeros = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    found = _in_row(shape, first, head, row) if head else []
    first += bool(head)
    if last > first:
        found.append(((first, *zeros), (last - first, *shape[1:])))
    return found + _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_between(shape[1:], start, stop)]


def is_shared_out(tensor: Any) -> bool:
    """Whether this is a DTensor; torch's module of these, which takes a while to import, is only there if some are."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def rectangle(tensor: Any) -> Box:
    """Returns the box that this process holds of a tensor; the whole of it, unless it is a DTensor.

    Raises:
        ValueError: the DTensor holds partial sums, which are no part of it.
    """
    if not is_shared_out(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"Expected parts of a tensor. Received: partial sums of it ({tensor.placements}). Redistribute it first."
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the box that two boxes have in common, None if that is empty."""
    starts = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)]
    if any(end <= start for start, end in zip(starts, ends)):
        return None
    return tuple(starts), tuple(end - start for start, end in zip(starts, ends))


def within(box: Box, outer: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices of a box in a tensor that begins at `outer`."""
    return tuple(slice(start - begin, start - begin + size) for start, size, begin in zip(*box, outer, strict=True))
