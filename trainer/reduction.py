"""Logged values from this rank's to all ranks': one collective for sums, one for extremes, whatever was logged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable

import torch
import xxhash
from torch import Tensor

from ..strategies.world import World

if TYPE_CHECKING:
    from .metrics import Series

Row = dict[str, float]
_REDUCTIONS = ("mean", "sum", "min", "max")
_SAME_AS = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    min: "min",
    max: "max",
    sum: "sum",
}


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


def adopt(
    table: dict[str, Series], world: World, metrics: dict[str, Any], *, here: bool, make: Callable[..., Series]
) -> None:
    """Give ranks that had no batch (``here``) the names that the others logged, in one order on all (collective).

    ``metrics`` are this rank's by their place in the module. Raises ValueError, on all ranks, for one without a place.
    """
    places = {id(metric): place for place, metric in metrics.items()}
    entries: dict[str, tuple[Any, ...]] = {}
    for mine in world.gather_object([_entry(s, places) for s in table.values() if s.due and not s.rank_zero_only]):
        entries |= {entry[0]: entry for entry in mine if entry[0] not in entries}
    for name, options, on_step, metric in entries.values():
        if metric is not None and metric not in metrics:
            raise ValueError(
                f"Expected the metric logged as {name!r} to be an attribute of the module, where ranks without a batch "
                "find it. Received: an object from elsewhere. Assign it to self in __init__."
            )
        series = table.pop(name, None)
        if here and (series is None or not series.due):
            series = make(name, (*options[:4], options[4] or elsewhere, *options[5:]), on_step=on_step, on_epoch=True)
            series.metric, series.touched = metrics.get(metric), True
        if series is not None:
            table[name] = series


def reduction_name(name: str, reduce_fx: Any) -> str | Callable[[Tensor], Tensor]:
    """Return the name of a reduction, or the function itself where it is the user's own."""
    reduction = reduce_fx if isinstance(reduce_fx, str) else _SAME_AS.get(reduce_fx, reduce_fx)
    if reduction in _REDUCTIONS or callable(reduction):
        return reduction
    raise ValueError(
        f"Expected reduce_fx to be mean, sum, min, max or a function. Received: {name}: {reduce_fx!r}. Use one of them."
    )


def elsewhere(values: Tensor) -> float:
    """Stand for a user's reduction on a rank that did not log."""
    return math.nan


def final(series: Series, ranks: list[dict[str, Any]]) -> float:
    """Return what a user's function makes of the values of ``ranks`` so far (of their states; nan where it fails).

    After an interruption it stands for a function that is not heard of again before the values are due.
    """
    if series.reduction is elsewhere:
        return series.final
    counted = ranks if series.sync and not series.rank_zero_only else ranks[:1]
    found = [rank["series"].get(series.name, {}).get("values") for rank in counted]
    found = [values for values in found if values is not None]
    try:
        return float(series.reduction(torch.cat(found)))  # type: ignore[operator]
    except Exception:  # of a few values it may make nothing
        return math.nan


def _entry(series: Series, places: dict[int, str]) -> tuple[Any, ...]:
    reduction = series.reduction if isinstance(series.reduction, str) else None
    options = (*series.options[:4], reduction, *series.options[5:])
    metric = None if series.metric is None else places.get(id(series.metric), "")
    return series.name, options, series.on_step, metric


def stack(values: list[Any]) -> Tensor:
    """Return scalars (tensors or numbers) as one float64 vector (float32 where the device has no float64)."""
    devices = {v.device for v in values if isinstance(v, Tensor)}
    if not devices:
        return torch.tensor(values, dtype=torch.float64)
    device = max(devices, key=lambda one: one.type != "cpu")  # what a checkpoint held goes to where the new values are
    dtype = torch.float32 if device.type == "mps" else torch.float64
    same = len(devices) == 1 and all(isinstance(v, Tensor) for v in values)
    if same and all(v.dim() == 0 and v.dtype is values[0].dtype for v in values):
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
