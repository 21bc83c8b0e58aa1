"""Imports checkpoints of Lightning and Accelerate: pickles, and read by an explicit command only.

They are read by ``torch.load(weights_only=True)``, which builds tensors, arrays and plain containers and calls nothing
else. Weights, optimizers, schedulers, loss scaler, counters and (Accelerate) random states and registered objects are
taken over. These libraries number an optimizer's parameters, so its state goes to the parameters in their order, as it
does there. Places within an epoch mean something else there: a fit goes on with the epoch that was not finished, from
its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..strategies.checkpoint import Writer, clean_keys, encode, load_weights, save_weights
from ..strategies.optimizer_order import in_order

_LIGHTNING_KEYS = {
    "state_dict", "epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers", "hparams_name",
    "hyper_parameters", "hparams_type", "datamodule_hparams_name", "datamodule_hyper_parameters",
    "datamodule_hparams_type", "pytorch-lightning_version", "MixedPrecision", "native_amp_scaling_state",
    "precision_plugin",
}  # fmt: skip
_SHARDED = ("*/.metadata", "pytorch_model_fsdp_*", "*/zero_pp_rank_*", "latest")
_NUMPY = ("_reconstruct", "scalar")


@dataclass
class _Found:
    """What a foreign checkpoint holds."""

    models: dict[str, dict[str, Tensor]]
    metadata: dict[str, Any] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    objects: list[Any] = field(default_factory=list)
    random: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    iteration: int = 0
    whole: bool = True  # there is more than weights


def import_checkpoint(library: str, source: str | Path, target: str | Path) -> str:
    """Write a "lightning" .ckpt file or an "accelerate" save_state folder as the checkpoint ``target``.

    Returns in words what it holds. Raises ValueError for what is no such file, or holds more than plain data.
    """
    path = Path(source)
    if not path.exists():
        raise ValueError(f"Expected a checkpoint of {library}. Received: {path}, which is not there.")
    found = _of_lightning(path) if library == "lightning" else _of_accelerate(path)
    with Writer(target) as writer:
        for name, weights in found.models.items():
            save_weights(writer, weights, name=name)
        if found.whole:
            _write_training(writer, found)
        writer.commit({**found.metadata, "imported_from": library})
    count = sum(map(len, found.models.values()))
    return f"{count} tensors of {library}'s {path.name}; {_told(found)}"


def _write_training(writer: Writer, found: _Found) -> None:
    for index, state in enumerate(found.optimizers):
        writer.state(f"optimizer-{index}", in_order(state))
    writer.state("training", {
        "optimizers": len(found.optimizers), "schedulers": found.schedulers, "precision": found.precision,
        "loaders": None, "objects": found.objects, "extra": {"iteration": found.iteration},
    })  # fmt: skip
    for rank, state in found.random.items():
        writer.state(f"rank-{rank:05d}", {"random": state, "objects": []})


def _told(found: _Found) -> str:
    if not found.whole:
        return "a fit from it begins with new optimizers and counters"
    parts = [f"{len(found.optimizers)} optimizer states", f"{len(found.schedulers)} schedulers"]
    parts += ["the loss scaler"] if found.precision else []
    parts += [f"random states of {len(found.random)} processes"] if found.random else []
    parts += [f"{len(found.objects)} registered objects"] if found.objects and found.random else []
    counters = [f"{key} {found.metadata[key]}" for key in ("step", "epoch") if found.metadata.get(key) is not None]
    return ", ".join([*parts, *counters])


# Lightning


def _of_lightning(path: Path) -> _Found:
    content = _plain(path)
    weights = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"Expected a .ckpt file of Lightning. Received: {path}, which has no state_dict.")
    step, epoch = (_count(content.get(key)) for key in ("global_step", "epoch"))
    states = content.get("optimizer_states")
    metadata = {
        "hparams": _storable(content.get("hyper_parameters") or {}),
        "datamodule_hparams": _storable(content.get("datamodule_hyper_parameters") or {}),
        "step": step, "epoch": epoch,
    }  # fmt: skip
    found = _Found({"model": _tensors(path, weights)}, metadata)
    if not states or step is None or epoch is None:
        found.whole = False
        return found
    found.optimizers = [_optimizer_state(path, state) for state in states]
    found.schedulers = [_kept(path, "a scheduler's state", state) for state in content.get("lr_schedulers") or []]
    scaler = content.get("MixedPrecision") or content.get("native_amp_scaling_state") or {}
    found.precision = {**scaler, "skipped_steps": 0} if "scale" in scaler else {}
    progress, found.metadata["epoch"] = _progress(content, step, epoch)
    own = {key: value for key, value in content.items() if key not in _LIGHTNING_KEYS and isinstance(key, str)}
    found.objects = [{"progress": progress, "entries": _storable(own)}]
    return found


def _progress(content: dict[str, Any], step: int, epoch: int) -> tuple[dict[str, int], int]:
    """The Trainer's counters. ``epoch`` is the index of the epoch that was running, finished or not, at the save."""
    loop = (content.get("loops") or {}).get("fit_loop") or {}
    batches = loop.get("epoch_loop.batch_progress") or {}
    processed = _count((loop.get("epoch_progress") or {}).get("current", {}).get("processed"))
    finished = epoch + bool(batches.get("is_last_batch")) if processed is None else processed
    done = _count((batches.get("total") or {}).get("completed")) or 0
    return {"epoch": finished, "step": step, "batches": done}, finished


# Accelerate


def _of_accelerate(path: Path) -> _Found:
    models = _accelerate_models(path)
    if not models:
        for pattern in _SHARDED:
            if path.is_dir() and any(path.glob(pattern)):
                raise ValueError(
                    f"Expected a save_state folder with whole weights. Received: {path}, whose weights are sharded, "
                    "in files that only unpickling reads. Gather them by Accelerate (accelerate merge-weights, or "
                    "save_state with a full state dict)."
                )
        raise ValueError(
            f"Expected a save_state folder of Accelerate. Received: {path}, which has neither model.safetensors nor "
            "pytorch_model.bin."
        )
    found = _Found(models)
    for file in _numbered(path, "optimizer", ".bin"):
        found.optimizers.append(_optimizer_state(file, _plain(file)))
    for file in _numbered(path, "scheduler", ".bin"):
        found.schedulers.append(_kept(file, "a scheduler's state", _plain(file)))
    for index in range(len(list(path.glob("custom_checkpoint_*.pkl")))):
        file = path / f"custom_checkpoint_{index}.pkl"
        found.objects.append(_kept(file, "a registered object's state", _plain(file)))
    for file in path.glob("random_states_*.pkl"):
        if match := re.fullmatch(r"random_states_(\d+)\.pkl", file.name):
            found.random[int(match[1])] = _random(file)
    if (file := path / "scaler.pt").exists():
        found.precision = {**_kept(file, "the scaler's state", _plain(file)), "skipped_steps": 0}
    if match := re.fullmatch(r"checkpoint_(\d+)", path.resolve().name):
        found.iteration = int(match[1])
    found.whole = bool(found.optimizers or found.schedulers or found.objects or found.random)
    return found


def _accelerate_models(path: Path) -> dict[str, dict[str, Tensor]]:
    models: dict[str, dict[str, Tensor]] = {}
    for index in range(len(list(path.iterdir())) if path.is_dir() else 0):
        name, pickled = ("model", "pytorch_model") if not index else (f"model_{index}", f"pytorch_model_{index}")
        if any((path / f"{name}.safetensors{ending}").exists() for ending in ("", ".index.json")):
            models[name] = clean_keys(load_weights(path, name=name, foreign=True))
        elif (file := path / f"{pickled}.bin").exists():
            models[name] = clean_keys(_tensors(file, _plain(file)))
    return models


def _numbered(path: Path, stem: str, ending: str) -> list[Path]:
    """The files optimizer.bin, optimizer_1.bin, optimizer_2.bin, …"""
    found: list[Path] = []
    while (file := path / (f"{stem}_{len(found)}{ending}" if found else f"{stem}{ending}")).exists():
        found.append(file)
    return found


def _random(file: Path) -> dict[str, Any]:
    """One process's random states as `strategies.random.capture` gives them, without those of other devices."""
    states = _plain(file)
    try:
        version, words, second = states["random_state"]
        _, key, position, has_gauss, gauss = states["numpy_random_seed"]
        return {
            "torch": states["torch_manual_seed"].to("cpu", torch.uint8),
            "numpy": {"key": torch.from_numpy(np.asarray(key).astype(np.int64)), "position": int(position),
                      "has_gauss": int(has_gauss), "gauss": float(gauss)},
            "python": {"version": int(version), "words": torch.tensor(words, dtype=torch.int64), "gauss": second},
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"Expected random states of Accelerate. Received: {file}: {error!r}. Remove it.") from error


# Reading


def _plain(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_arrays()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an UnpicklingError, and many others for what is no such file
        said = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(
            f"Expected tensors and plain values in {path}. Received: {said} "
            "Load it in the library that wrote it, and save its state_dict alone."
        ) from error


def _arrays() -> list[Any]:
    """What numpy's arrays are made of: they hold numbers, and an array of objects is refused below."""
    try:
        from numpy._core import multiarray
    except ImportError:  # numpy 1
        from numpy.core import multiarray  # type: ignore[no-redef]
    kinds = {type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "?")}
    made: Iterable[Any] = (getattr(multiarray, name) for name in _NUMPY)
    return [np.ndarray, np.dtype, *made, *kinds]


def _tensors(path: Path, weights: Any) -> dict[str, Tensor]:
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"Expected weights by name. Received: {path}, which holds something else.")
    return {str(name): value for name, value in weights.items()}


def _optimizer_state(path: Path, state: Any) -> dict[str, Any]:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    numbered = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    if not numbered or not isinstance(state.get("state"), dict):
        raise ValueError(f"Expected an optimizer's state_dict. Received: {path}, which holds something else.")
    return _kept(path, "an optimizer's state", state)


def _kept(path: Path, what: str, value: Any) -> Any:
    """The value, if a checkpoint can hold it."""
    try:
        encode(value, what)
    except TypeError as error:
        raise ValueError(f"Expected {what} of plain values in {path}. Received: {error}") from error
    return value


def _storable(values: Any) -> dict[str, Any]:
    """Return what of a dict a manifest can hold."""
    kept = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            _, tensors = encode(value, str(name))
        except TypeError:
            continue
        if not tensors:
            kept[str(name)] = value
    return kept


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
