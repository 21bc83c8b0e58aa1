"""What differs between two checkpoints, a line each: counters, values by their path, tensors and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...strategies.checkpoint import Checkpoint
from .stems import content, stems

_ASIDE = ("files", "checksum", "time", "versions")
_CLOCKS = ("elapsed",)  # seconds on a clock, of which no two runs have the same


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Yield one line for each difference; raises CheckpointError for damage in what is read."""
    mine, other = ({key: value for key, value in c.manifest.items() if key not in _ASIDE} for c in (a, b))
    yield from values(mine, other, "")
    there = [stems(checkpoint) for checkpoint in (a, b)]
    for stem in dict.fromkeys([*there[0], *there[1]]):
        if not all(stem in found for found in there):
            yield f"{stem}: only in the {'first' if stem in there[0] else 'second'}"
            continue
        yield from values(content(a, stem), content(b, stem), stem)


def values(a: Any, b: Any, path: str) -> Iterator[str]:
    """Yield one line for each difference between nested values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            where = f"{path}: {key}" if path and ":" not in path else f"{path}.{key}" if path else str(key)
            if key in _CLOCKS:
                continue
            if key not in a or key not in b:
                yield f"{where}: only in the {'first' if key in a else 'second'}"
            else:
                yield from values(a[key], b[key], where)
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        yield from _tensors(a, b, path)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b)):
            yield from values(*pair, f"{path}[{index}]")
    elif type(a) is not type(b) or not (a == b or (a != a and b != b)):
        yield f"{path}: {_short(a)} → {_short(b)}"


def _tensors(a: Tensor, b: Tensor, path: str) -> Iterator[str]:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        yield f"{path}: {a.dtype} {list(a.shape)} → {b.dtype} {list(b.shape)}"
        return
    changed = int(((a != b) & ~((a != a) & (b != b))).sum())
    if not changed:
        return
    kind = torch.complex128 if a.is_complex() else torch.float64
    wide, other = a.to(kind), b.to(kind)
    apart = (wide - other).abs()
    size = max(float(wide.abs().max()), 1e-300)
    yield (
        f"{path}: {changed:,} of {a.numel():,} elements differ, by {float(apart.max()):.3g} at most "
        f"({float(apart.max()) / size:.2g} of the largest)"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
