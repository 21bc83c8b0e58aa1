"""What a checkpoint holds, in words: counters, hyperparameters, files, tensors. No tensor is read for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...strategies.checkpoint import CheckpointError
from .places import Place

_FIELDS = {
    "step": "step",
    "epoch": "epoch",
    "samples": "samples",
    "strategy": "strategy",
    "world_size": "world size",
    "precision": "precision",
    "run_id": "run",
    "time": "saved",
}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def described(place: Place, *, every: bool) -> dict[str, Any]:
    """Return what a checkpoint holds; the tensors of weights, or of ``every`` file."""
    manifest = place.manifest()
    names = [name for name in manifest["files"] if name.endswith((".safetensors", ".shards.json"))]
    shown = [name for name in names if (every or name.startswith("model")) and ".shard-" not in name]
    return {
        "path": str(place),
        **{key: manifest.get(key) for key in _FIELDS},
        "versions": manifest.get("versions"),
        "hparams": manifest.get("hparams") or {},
        "datamodule_hparams": manifest.get("datamodule_hparams") or {},
        "files": {name: record["size"] for name, record in manifest["files"].items()},
        "tensors": {name: _tensors(place, name) for name in shown},
    }


def overview(place: Place) -> dict[str, Any]:
    """Return one row about a checkpoint of a folder, whatever state it is in."""
    if state := place.unfinished():
        return {"path": str(place), "problem": state}
    try:
        manifest = place.manifest()
    except CheckpointError as error:
        return {"path": str(place), "problem": str(error)}
    size = sum(record["size"] for record in manifest["files"].values())
    return {"path": str(place), **{key: manifest.get(key) for key in ("step", "epoch", "time")}, "size": size}


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of `overview` as text."""
    width = max(len(row["path"]) for row in rows)
    lines = []
    for row in rows:
        told = row.get("problem") or (
            f"step {row['step']}, epoch {row['epoch']}, {size_text(row['size'])}, saved {_when(row['time'])}"
        )
        lines.append(f"{row['path']:<{width}}  {told}\n")
    return "".join(lines)


def page(found: dict[str, Any]) -> str:
    """Return what `described` returned as text."""
    lines = [found["path"]]
    for key, title in _FIELDS.items():
        if found[key] is not None:
            lines.append(f"  {title:<12}{_when(found[key]) if key == 'time' else found[key]}")
    lines.append(f"  {'written by':<12}{', '.join(f'{name} {v}' for name, v in (found['versions'] or {}).items())}")
    for key, title in (("hparams", "hyperparameters"), ("datamodule_hparams", "hyperparameters of the data")):
        lines += [title, *(f"  {name:<12}{value!r}" for name, value in found[key].items())] if found[key] else []
    width = max(map(len, found["files"]), default=0)
    lines += ["files", *(f"  {name:<{width}}  {size_text(size):>9}" for name, size in found["files"].items())]
    for name, tensors in found["tensors"].items():
        lines += [_summary(name, tensors), *_rows(tensors)]
    return "\n".join(lines) + "\n"


def size_text(size: int) -> str:
    """Return a number of bytes in words: "6.7 kB"."""
    number, unit = float(size), 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def _tensors(place: Place, name: str) -> dict[str, dict[str, Any]]:
    if name.endswith(".shards.json"):  # in parts by rank: the whole tensors are told
        return {key: _whole(record) for key, record in place.json(name)["tensors"].items()}
    return {
        entry.name: {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "bytes": entry.stop - entry.start,
        }
        for entry in place.header(name)
    }


def _whole(record: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, record["dtype"])
    return {
        "dtype": record["dtype"],
        "shape": record["shape"],
        "bytes": math.prod(record["shape"]) * dtype.itemsize,
        "parts": len(record["parts"]),
    }


def _summary(name: str, tensors: dict[str, dict[str, Any]]) -> str:
    elements = 0
    for tensor in tensors.values():
        count = 1
        for length in tensor["shape"]:
            count *= length
        elements += count
    return f"{name}: {len(tensors)} tensors, {elements:,} elements"


def _rows(tensors: dict[str, dict[str, Any]]) -> list[str]:
    width = max(map(len, tensors), default=0)
    return [
        f"  {name:<{width}}  {tensor['dtype']:<9} {tensor['shape']!s:<14} {size_text(tensor['bytes']):>9}"
        for name, tensor in tensors.items()
    ]


def _when(time: str) -> str:
    return f"{time[:19].replace('T', ' ')} UTC"
