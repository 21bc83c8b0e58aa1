"""Weights in files, as Accelerate's functions name it: saving, loading, putting into a model.

Files are safetensors, or torch's own where that is asked for; nothing that is read can run code (see torch_files.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import torch_files
from . import world as worlds
from .checkpoint.files import CheckpointError
from .checkpoint.sharded import open_parts
from .checkpoint.tensors import load_weights
from .sizes import id_tensor_storage
from .wrappers import model_has_dtensor

logger = logging.getLogger(__name__)



def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Writes an object on the first process (or on the first of each machine): by `torch.save`, to a path or open file.

    With `safe_serialization=True` it is a dict of tensors and becomes a safetensors file, shared memory stored once.
    A path appears complete.

    Raises:
        TypeError: the object is to be safetensors, and holds something else.
    """
    world = worlds.current()
    if (world.local_rank if save_on_each_node else world.rank) != 0:
        return
    if not safe_serialization:
        torch_files.save_file(obj, f)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(key, str) for key in obj):
        raise TypeError(_only_tensors(obj))
    state = clean_state_dict_for_safetensors(obj)
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise TypeError(_only_tensors(obj))
    path = Path(f)
    part = path.with_name(f".{path.name}.part")
    save_file({name: value.detach().cpu() for name, value in state.items()}, part, metadata={"format": "pt"})
    os.replace(part, path)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Returns what a file of `save` holds, on the device `map_location`: of safetensors, or of torch's own format.

    The latter is read as plain data (`weights_only=True`), whatever else it holds: no code of a file runs.

    Raises:
        CheckpointError: the file holds other objects, or is damaged.
        ValueError: `weights_only=False` is asked for.
        TypeError: another argument is given that only means something for pickles.
    """
    if not kwargs.pop("weights_only", True):
        raise ValueError(
            "Expected weights_only=True. Received: weights_only=False, with which loading a file can run its code. "
            "Leave it out; if you trust the file, read it with torch.load."
        )
    unknown = sorted(set(kwargs) - {"mmap"})
    if unknown:
        raise TypeError(f"Expected no arguments for pickles. Received: {', '.join(unknown)}. Leave them out.")
    if hasattr(f, "read") or torch_files.is_torch_file(f):
        return torch_files.load_file(f, map_location, **kwargs)
    return load_state_dict(f, None if map_location is None else {"": map_location})


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors or .bin file, on the devices that `device_map` gives to names or beginnings.

    Raises:
        CheckpointError: the file holds something else, or is damaged.
    """
    state = _read(Path(checkpoint_file))
    if device_map is None:
        return state
    return {name: tensor.to(_place(name, device_map)) for name, tensor in state.items()}


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: dict[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads weights into a model: from a safetensors or .bin file, a folder of them, or an index of shards.

    `dtype` converts floating-point weights, but not those of modules in `keep_in_fp32_modules`. `strict` refuses
    missing and unexpected names. Parameters on "meta" become real ones, sharded ones take their part. With
    `broadcast_from_rank0` only the first process reads; `full_state_dict=False` says that the file holds this
    process's shards alone. Nothing is offloaded: `offload_state_dict` and `offload_buffers` change nothing.

    Raises:
        ValueError: a device map over several devices or an offload is asked for, which drivetrain does not have.
    """
    devices = set((device_map or {}).values())
    if len(devices) > 1 or "disk" in devices or offload_folder or offload_8bit_bnb:
        raise ValueError(
            f"Expected weights for one device. Received: device_map={device_map}, offload_folder={offload_folder}, "
            f"offload_8bit_bnb={offload_8bit_bnb}. Leave these out: models are not spread or offloaded here."
        )
    kept = keep_in_fp32_modules or []
    if model_has_dtensor(model) and full_state_dict and not broadcast_from_rank0 and _in_safetensors(Path(checkpoint)):
        _load_parts(model, Path(checkpoint), strict, lambda name, value: _converted(name, value, dtype, kept))
        return
    reads = worlds.current().rank == 0 or not broadcast_from_rank0
    state = _read(Path(checkpoint)) if reads else {}
    state = {name: _converted(name, value, dtype, kept) for name, value in state.items()}
    if devices:
        state = {name: value.to(next(iter(devices))) for name, value in state.items()}
    if broadcast_from_rank0 or not full_state_dict or model_has_dtensor(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(
            full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
        )
        set_model_state_dict(model, dict[str, Any](state), options=options)
        return
    on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.load_state_dict(state, strict=strict, assign=on_meta)


def _in_safetensors(path: Path) -> bool:
    folder = path.parent if path.name.endswith(".index.json") else path
    return any(folder.glob("*.safetensors*")) if folder.is_dir() else path.suffix == ".safetensors"


def _load_parts(
    model: torch.nn.Module, path: Path, strict: bool, convert: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Of each weight that is shared out only this rank's part is read, so that no rank ever holds the whole model."""
    parts = open_parts(path, stem=_name_in(path.parent if path.name.endswith(".json") else path), foreign=True)
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        model.to_empty(device=worlds.current().device)
    targets = model.state_dict(keep_vars=True)
    missing, unexpected = sorted(targets.keys() - set(parts.names())), sorted(set(parts.names()) - targets.keys())
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Expected the weights of {type(model).__name__}. Received: missing {missing[:5]}, unexpected "
            f"{unexpected[:5]} in {path}. Load with strict=False, or another file."
        )
    with torch.no_grad():
        for name, target in targets.items():
            if name not in missing:
                target.copy_(convert(name, parts.like(name, target)))


def _read(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a file, a folder or behind an index, in whichever format they are; safetensors come first."""
    if path.name.endswith(".index.json"):
        path = path.parent
    if not path.exists():
        raise CheckpointError(f"Expected a file or folder of weights. Received: {path}, which is not there.")
    if path.is_dir():
        stored = any(path.glob("*.safetensors*")) or not torch_files.has_weights(path)
        return load_weights(path, name=_name_in(path), foreign=True) if stored else torch_files.load_weights(path)
    return torch_files.load_weights(path) if torch_files.is_torch_file(path) else load_weights(path, foreign=True)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights for a safetensors file: contiguous, each shared memory once, under its first name."""
    seen: dict[Any, str] = {}
    cleaned: dict[str, Any] = {}
    left_out = []
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            key = (*id_tensor_storage(value), value.storage_offset() if not value.is_meta else 0, value.shape)
            if seen.setdefault(key, name) != name:
                left_out.append(name)
                continue
            value = value.contiguous()
        cleaned[name] = value
    if left_out:
        logger.warning(
            "Removed shared tensor %s: each memory is stored once, under its first name. Loading into a model that "
            "shares them too gives all of them back.", ", ".join(left_out),
        )  # fmt: skip
    return cleaned


def named_module_tensors(
    module: torch.nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module with their names; those of its submodules with `recurse`."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        kept = set(module.state_dict()) if remove_non_persistent else None
        for name, buffer in module.named_buffers(recurse=recurse):
            if kept is None or name in kept:
                yield name, buffer


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names that stand for one parameter each, sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: torch.nn.Module, tied_params: list[list[str]]) -> None:
    """Lets each group of names stand for one parameter again: the first of the group that is not on "meta"."""
    for group in tied_params:
        found = [model.get_parameter(name) for name in group]
        kept = next((parameter for parameter in found if not parameter.is_meta), None)
        for name in group if kept is not None else ():
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, kept)


def _only_tensors(obj: Any) -> str:
    return (
        f"Expected a dict of tensors by name. Received: {type(obj).__name__}. Save other objects with "
        "Accelerator.register_for_checkpointing() and save_state(), which write no pickles."
    )


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    known = [key for key in device_map if key == "" or name == key or name.startswith(f"{key}.")]
    return device_map[max(known, key=len)] if known else "cpu"


def _name_in(path: Path) -> str:
    """The weights' name in a folder: that of its only index or file; "model" is the usual one."""
    if not path.is_dir() or any(path.glob("model*.safetensors*")):
        return "model"
    found = sorted({entry.name.split(".safetensors")[0] for entry in path.glob("*.safetensors*")})
    return found[0] if len(found) == 1 else "model"


def _converted(name: str, value: torch.Tensor, dtype: str | torch.dtype | None, kept: list[str]) -> torch.Tensor:
    if dtype is None or not value.is_floating_point():
        return value
    target = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return value.float() if set(kept) & set(name.split(".")) else value.to(target)
