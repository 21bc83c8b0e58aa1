"""Logged values from this rank's to all ranks': one collective for sums, one for extremes, whatever was logged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from ..strategies.world import World

if TYPE_CHECKING:
    from .metrics import Series

Row = dict[str, float]


def over_ranks(local: list[tuple[str, Series, Any, float, str]], world: World) -> Row:
    """Return name → value over all ranks of rows (name, series, value, weight, reduction)."""
    tensors = [value for _, _, value, _, _ in local if isinstance(value, Tensor)]
    numbers = iter(stack(tensors).tolist() if tensors else ())
    rows = [(n, s, next(numbers) if isinstance(v, Tensor) else float(v), w, kind) for n, s, v, w, kind in local]
    if world.size == 1:
        return {name: _finish(value, weight, kind) for name, _, value, weight, kind in rows}
    shared = [row for row in rows if not row[1].rank_zero_only and row[4] != "same"]
    totals = {row[0]: total for row, total in zip(shared, _all_reduce(shared, world))}
    result = {}
    for name, series, value, weight, kind in rows:
        value, weight = totals.get(name, (value, weight))
        if not series.rank_zero_only or world.rank == 0:
            result[name] = _finish(value, weight, kind)
    return result


def check_same_names(names: list[str], world: World) -> None:
    """Raise ValueError on every rank, naming keys and ranks, unless all ranks hold the same names in the same order."""
    if world.size == 1:
        return
    digest = xxhash.xxh3_64_intdigest("\n".join(names).encode()) >> 2
    low, high = world.all_reduce(torch.tensor([-digest, digest], device=_device(world)), op="max").tolist()
    if -low == high:
        return
    keys = world.gather_object(names)
    everywhere = set(keys[0]).intersection(*keys[1:])
    odd = {f"rank {rank}": sorted(set(mine) - everywhere) for rank, mine in enumerate(keys)}
    raise ValueError(
        f"Expected every rank to log the same names in the same order. Received: only on {odd}; "
        f"on all ranks {sorted(everywhere)}. Log the name on every rank, or with rank_zero_only=True."
    )


def stack(values: list[Any]) -> Tensor:
    """Return scalars (tensors or numbers) as one float64 vector (float32 where the device has no float64)."""
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    if device is None:
        return torch.tensor(values, dtype=torch.float64)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if all(isinstance(v, Tensor) and v.dim() == 0 and v.dtype is values[0].dtype for v in values):
        return torch.stack(values).to(dtype)
    return torch.stack([torch.as_tensor(v, dtype=dtype, device=device).reshape(()) for v in values])


def _finish(value: float, weight: float, kind: str) -> float:
    if weight == 0 and kind != "sum":
        return math.nan
    return value / weight if kind == "mean" else value


def _all_reduce(rows: list[tuple[str, Series, float, float, str]], world: World) -> list[tuple[float, float]]:
    """Return (value, weight) over all ranks; a rank without values, or unsynced and not the first, counts nothing."""
    if not rows:
        return []
    sums, highs = [], []
    for _, series, value, weight, kind in rows:
        counts = weight > 0 and (series.sync or world.rank == 0)
        sums += [value, weight] if counts else [0.0, 0.0]
        highs.append((-value if kind == "min" else value) if counts else -math.inf)
    sums = world.all_reduce(torch.tensor(sums, dtype=torch.float64, device=_device(world)), op="sum").tolist()
    highs = world.all_reduce(torch.tensor(highs, dtype=torch.float64, device=_device(world)), op="max").tolist()
    extremes = {"min": -1.0, "max": 1.0}
    return [
        (highs[i] * extremes[kind] if kind in extremes else sums[2 * i], sums[2 * i + 1])
        for i, (_, _, _, _, kind) in enumerate(rows)
    ]


def _device(world: World) -> torch.device:
    return torch.device("cpu") if world.backend in (None, "gloo") else world.device
