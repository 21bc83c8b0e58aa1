"""What a checkpoint holds, in words: counters, hyperparameters, files, tensors. No tensor is read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...strategies.checkpoint import Checkpoint, CheckpointError
from ...strategies.checkpoint.files import HashingReader
from ...strategies.checkpoint.tensor_file import read_header

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


def described(checkpoint: Checkpoint, *, every: bool) -> dict[str, Any]:
    """Return what a checkpoint holds; the tensors of weights, or of ``every`` file."""
    manifest = checkpoint.manifest
    names = [name for name in checkpoint.files if name.endswith(".safetensors")]
    shown = [name for name in names if every or name.startswith("model")]
    return {
        "path": str(checkpoint.directory),
        **{key: manifest.get(key) for key in _FIELDS},
        "versions": manifest.get("versions"),
        "hparams": manifest.get("hparams") or {},
        "datamodule_hparams": manifest.get("datamodule_hparams") or {},
        "files": {name: record["size"] for name, record in checkpoint.files.items()},
        "tensors": {name: _tensors(checkpoint, name) for name in shown},
    }


def overview(path: Path) -> dict[str, Any]:
    """Return one row about a checkpoint of a folder, whatever state it is in."""
    try:
        checkpoint = Checkpoint.open(path, verify=False)
    except CheckpointError as error:
        return {"path": str(path), "problem": str(error)}
    size = sum(record["size"] for record in checkpoint.files.values())
    return {"path": str(path), **{key: checkpoint.manifest.get(key) for key in ("step", "epoch", "time")}, "size": size}


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


def _tensors(checkpoint: Checkpoint, name: str) -> dict[str, dict[str, Any]]:
    with HashingReader(checkpoint.directory / name) as file:
        entries, _ = read_header(file)
    return {
        entry.name: {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "bytes": entry.stop - entry.start,
        }
        for entry in entries
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
