"""Weights in files, as Accelerate's functions name it: saving, loading, putting into a model. No pickle is read.

What is written and read is safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import world as worlds
from .checkpoint.tensors import load_weights
from .sizes import id_tensor_storage

def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Writes a dict of tensors as a safetensors file, on the first process (or on the first of each machine).

    The file is safetensors whatever `safe_serialization` says; it appears complete.

    Raises:
        TypeError: the object holds something else: pickles are not written.
    """
    if not isinstance(obj, Mapping) or not all(isinstance(key, str) for key in obj):
        raise TypeError(_only_tensors(obj))
    state = clean_state_dict_for_safetensors(obj)
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise TypeError(_only_tensors(obj))
    world = worlds.current()
    if (world.local_rank if save_on_each_node else world.rank) == 0:
        path = Path(f)
        part = path.with_name(f".{path.name}.part")
        save_file({name: value.detach().cpu() for name, value in state.items()}, part, metadata={"format": "pt"})
        os.replace(part, path)


def load(f: str | os.PathLike[str], map_location: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file, on the device `map_location` (default: the CPU).

    Raises:
        CheckpointError: the file is none of safetensors: pickles can run code, and are not read.
        TypeError: arguments are given that only mean something for pickles (but `weights_only`, which holds anyway).
    """
    unknown = sorted(set(kwargs) - {"weights_only", "mmap"})
    if unknown:
        raise TypeError(f"Expected no arguments for pickles. Received: {', '.join(unknown)}. Leave them out.")
    return load_state_dict(f, None if map_location is None else {"": map_location})


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file, on the devices that `device_map` gives to names or their beginnings.

    Raises:
        CheckpointError: the file is none of safetensors: pickles can run code, and are not read.
    """
    state = load_weights(checkpoint_file, foreign=True)
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
    """Loads weights into a model: from a safetensors file, a folder of them, or an index of shards.

    `dtype` converts floating-point weights, but not those of modules in `keep_in_fp32_modules`. `strict` refuses
    missing and unexpected names. Parameters on "meta" become real ones.

    Raises:
        ValueError: a device map over several devices or an offload is asked for, which drivetrain does not have.
    """
    devices = set((device_map or {}).values())
    if len(devices) > 1 or "disk" in devices or offload_folder or offload_8bit_bnb:
        raise ValueError(
            f"Expected weights for one device. Received: device_map={device_map}, offload_folder={offload_folder}, "
            f"offload_8bit_bnb={offload_8bit_bnb}. Leave these out: models are not spread or offloaded here."
        )
    path = Path(checkpoint)
    if path.name.endswith(".index.json"):
        path = path.parent
    state = load_weights(path, name=_name_in(path), foreign=True)
    state = {name: _converted(name, value, dtype, keep_in_fp32_modules or []) for name, value in state.items()}
    if devices:
        state = {name: value.to(next(iter(devices))) for name, value in state.items()}
    on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.load_state_dict(state, strict=strict, assign=on_meta)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights for a safetensors file: contiguous, each shared memory once, under its first name."""
    seen: dict[Any, str] = {}
    cleaned: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            key = (*id_tensor_storage(value), value.storage_offset() if not value.is_meta else 0, value.shape)
            if seen.setdefault(key, name) != name:
                continue
            value = value.contiguous()
        cleaned[name] = value
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
