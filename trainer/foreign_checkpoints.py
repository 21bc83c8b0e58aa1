"""Imports the weights of Lightning's and Accelerate's checkpoints: pickles, and read by an explicit command only.

They are read by ``torch.load(weights_only=True)``, which builds tensors and plain containers and calls nothing else.
What else they hold (optimizers, places in the data) means something else there, and is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..strategies.checkpoint import Writer, encode, load_weights, save_weights


def import_checkpoint(library: str, source: str | Path, target: str | Path) -> str:
    """Write the weights of a "lightning" .ckpt file or an "accelerate" save_state folder as the checkpoint ``target``.

    Returns in words what it holds. Raises ValueError for what is no such file, or holds more than plain data.
    """
    path = Path(source)
    if not path.exists():
        raise ValueError(f"Expected a checkpoint of {library}. Received: {path}, which is not there.")
    models, metadata = _of_lightning(path) if library == "lightning" else _of_accelerate(path)
    with Writer(target) as writer:
        for name, weights in models.items():
            save_weights(writer, weights, name=name)
        writer.commit({**metadata, "imported_from": library})
    count = sum(map(len, models.values()))
    return f"{count} tensors of {library}'s {path.name}; a fit from it begins with new optimizers and counters"


def _of_lightning(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    content = _plain(path)
    weights = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"Expected a .ckpt file of Lightning. Received: {path}, which has no state_dict.")
    metadata: dict[str, Any] = {"hparams": _storable(content.get("hyper_parameters") or {})}
    for name, key in (("step", "global_step"), ("epoch", "epoch")):
        if isinstance(content.get(key), int):
            metadata[name] = content[key]
    return {"model": _tensors(path, weights)}, metadata


def _of_accelerate(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    models: dict[str, dict[str, Tensor]] = {}
    for index in range(len(list(path.iterdir())) if path.is_dir() else 0):
        name, pickled = ("model", "pytorch_model") if not index else (f"model_{index}", f"pytorch_model_{index}")
        if any((path / f"{name}.safetensors{ending}").exists() for ending in ("", ".index.json")):
            models[name] = load_weights(path, name=name, foreign=True)
        elif (file := path / f"{pickled}.bin").exists():
            models[name] = _tensors(file, _plain(file))
    if not models:
        raise ValueError(
            f"Expected a save_state folder of Accelerate. Received: {path}, which has neither model.safetensors nor "
            "pytorch_model.bin."
        )
    return models, {}


def _plain(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an UnpicklingError, and many others for what is no such file
        raise ValueError(
            f"Expected tensors and plain values in {path}. Received: {str(error).splitlines()[0]} "
            "Load it in the library that wrote it, and save its state_dict alone."
        ) from error


def _tensors(path: Path, weights: Any) -> dict[str, Tensor]:
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"Expected weights by name. Received: {path}, which holds something else.")
    return {str(name): value for name, value in weights.items()}


def _storable(hparams: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that a manifest can hold."""
    kept = {}
    for name, value in hparams.items():
        try:
            _, tensors = encode(value, name)
        except TypeError:
            continue
        if not tensors:
            kept[str(name)] = value
    return kept
