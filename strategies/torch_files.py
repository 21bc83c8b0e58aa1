"""Files in torch's own format (`torch.save`: .bin, .pt): written where that is asked for, read without running code.

What is read goes through torch's reader of plain data (`weights_only=True`): tensors, numbers, texts and containers of
them, numpy's arrays; anything else is an error. Checkpoints never hold such files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint.files import CheckpointError
from .checkpoint.tensor_file import data_size, split_aliases
from .checkpoint.tensors import shards_of

NAME = "pytorch_model"  # of weights, as Hugging Face's libraries call them
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02")  # a zip archive; a pickle, before torch 1.6


def save_file(obj: Any, f: Any) -> None:
    """Writes an object by `torch.save`: to a path, where it appears complete, or to an open file."""
    if hasattr(f, "write"):
        torch.save(obj, f)
        return
    path = Path(f)
    part = path.with_name(f".{path.name}.part")
    try:
        torch.save(obj, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_file(f: Any, map_location: Any = "cpu", **options: Any) -> Any:
    """Returns what a file written by `torch.save` holds, if that is plain data; no code of the file runs.

    Raises:
        CheckpointError: it holds other objects, or is no such file; the message names it.
    """
    try:
        with torch.serialization.safe_globals(_numpys()):
            return torch.load(f, map_location=map_location, weights_only=True, **options)
    except FileNotFoundError:
        raise
    except Exception as error:  # an UnpicklingError, and many others for what is no such file
        raise CheckpointError(
            f"Expected tensors and plain values in {f}. Received: {str(error).splitlines()[0]} "
            "Only such data is read, as loading other objects can run code. Save a state_dict alone, as safetensors."
        ) from error


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as `torch.save` writes it."""
    with open(path, "rb") as file:
        return file.read(4).startswith(_BEGINNINGS)


def save_weights(writer: Any, state: Mapping[str, Tensor], *, max_shard_size: int | str = "10GB") -> list[str]:
    """Writes weights into an open checkpoint folder: `pytorch_model.bin`, or shards and an index; returns the names.

    Tied weights lie in one file, and are one tensor again when they are loaded.
    """
    unique, aliases = split_aliases(state)
    shards = shards_of(unique, max_shard_size)
    names = [f"{NAME}-{number:05d}-of-{len(shards):05d}.bin" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [f"{NAME}.bin"]
    places: dict[str, str] = {}
    for file, shard in zip(names, shards, strict=True):
        stored: dict[str, Tensor] = {name: _alone(tensor) for name, tensor in shard.items()}
        stored.update({alias: stored[first] for alias, first in aliases.items() if first in shard})
        save_file(stored, writer.folder / file)
        writer.adopt(file)
        places.update(dict.fromkeys(stored, file))
    if len(shards) > 1:
        index = f"{NAME}.bin.index.json"
        writer.json(index, {"metadata": {"total_size": data_size(unique.values())}, "weight_map": places})
        names.append(index)
    return names


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the weights in a .bin file, or in a folder: of `pytorch_model.bin`, or of its index's shards.

    Raises:
        CheckpointError: a file is missing, or holds something else than tensors by name.
    """
    place = Path(path)
    if not place.is_dir():
        return _tensors(place)
    index = place / f"{NAME}.bin.index.json"
    if not index.exists():
        return _tensors(place / f"{NAME}.bin")
    places = json.loads(index.read_text()).get("weight_map", {})
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index}: names {file!r}, which is no file of this folder.")
        found.update(_tensors(place / file))
    missing = sorted(set(places) - set(found))
    if missing:
        raise CheckpointError(f"{index}: names {missing[0]}, which is in none of its files.")
    return found


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights in this format."""
    return any((folder / f"{NAME}.bin{ending}").exists() for ending in ("", ".index.json"))


def _tensors(path: Path) -> dict[str, Tensor]:
    content = load_file(path)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"Expected tensors by name in {path}. Received: something else. Save a state_dict alone.")
    return content


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with no more memory behind it than it shows: torch.save would write all of that."""
    own = tensor.detach().cpu()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()


def _numpys() -> list[Any]:
    """What numpy's arrays and numbers are made of again: data, all of it."""
    core = import_module("numpy._core.multiarray")
    kinds = sorted({type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"}, key=repr)
    return [core._reconstruct, core.scalar, np.ndarray, np.dtype, *kinds]
