"""Accelerate's functions around FSDP that scripts call themselves; `Accelerator` does all of it by itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from . import environment, initial_weights, replaced_parameters, wrapping
from . import world as worlds
from .checkpoint import merging
from .checkpoint.files import CheckpointError
from .checkpoint.format import Checkpoint, Writer
from .contents import parameter_names


def enable_fsdp_ram_efficient_loading() -> None:
    """Lets Hugging Face's `from_pretrained` read weights on the first process only; set before models are made."""
    environment.live().setdefault("ACCELERATE_USE_FSDP", "True")
    environment.live()["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Lets `from_pretrained` read weights on every process."""
    environment.live()["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, output_dir: str | os.PathLike[str], model_index: int = 0,
    adapter_only: bool = False, use_dcp: bool = True,
) -> None:  # fmt: skip
    """Writes the weights of a prepared model into the folder `pytorch_model_fsdp_<model_index>`; every rank calls it.

    They are a checkpoint of their own, in parts (or whole, by the plugin's state_dict_type), whatever `use_dcp` says.
    """
    _check(adapter_only)
    strategy = accelerator.strategy
    with Writer(_folder(output_dir, "pytorch_model_fsdp", model_index), world=accelerator.world) as writer:
        strategy.save_weights(writer, strategy.weights(model), stem="model")
        writer.commit({"strategy": strategy.name})


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, input_dir: str | os.PathLike[str], model_index: int = 0,
    adapter_only: bool = False, use_dcp: bool = True,
) -> None:  # fmt: skip
    """Loads what `save_fsdp_model` wrote; every rank calls it."""
    _check(adapter_only)
    checkpoint = _opened(_folder(input_dir, "pytorch_model_fsdp", model_index), accelerator)
    accelerator.strategy.load_weights(checkpoint, model, stem="model")


def save_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, output_dir: str | os.PathLike[str],
    optimizer_index: int = 0, use_dcp: bool = True,
) -> None:  # fmt: skip
    """Writes the state of a prepared optimizer into the folder `optimizer_<optimizer_index>`; every rank calls it."""
    strategy, names = accelerator.strategy, parameter_names([accelerator.strategy.unwrap(model)])
    with Writer(_folder(output_dir, "optimizer", optimizer_index), world=accelerator.world) as writer:
        strategy.save_optimizer(writer, optimizer, names, stem="optimizer-0")
        writer.commit({"strategy": strategy.name})


def load_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, input_dir: str | os.PathLike[str],
    optimizer_index: int = 0, adapter_only: bool = False, use_dcp: bool = True,
) -> None:  # fmt: skip
    """Loads what `save_fsdp_optimizer` wrote; every rank calls it."""
    _check(adapter_only)
    strategy, names = accelerator.strategy, parameter_names([accelerator.strategy.unwrap(model)])
    checkpoint = _opened(_folder(input_dir, "optimizer", optimizer_index), accelerator)
    strategy.load_optimizer(checkpoint, optimizer, names, stem="optimizer-0")


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str], output_path: str | os.PathLike[str], safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:  # fmt: skip
    """Makes one Hugging Face checkpoint of sharded weights, one tensor in memory at a time; the first process does.

    Raises:
        CheckpointError: there are no weights, or their index is a pickle, which `drivetrain merge-weights --foreign`
            reads.
        ValueError: a pickle is asked for.
    """
    if not safe_serialization:
        raise ValueError("Expected safe_serialization=True. Received: False, which would write a pickle. Leave it out.")
    world = worlds.current()
    if world.rank == 0:
        merging.merge(merging.find(Path(checkpoint_dir)), Path(output_path))
        if remove_checkpoint_dir:
            shutil.rmtree(checkpoint_dir)
    world.barrier("merge_fsdp_weights")


def fsdp2_load_full_state_dict(
    accelerator: Any, model: torch.nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Fills a sharded model, on "meta" or not, with whole weights that the first process has; every rank calls it."""
    place = torch.device("cpu") if cpu_offload else accelerator.device
    if initial_weights.on_meta(model):
        model.to_empty(device=place)
    initial_weights.put_back(model, dict(full_sd), accelerator.world)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Gives an optimizer the parameters that a mapping has for its own: by `data_ptr()`, by `id`, or themselves.

    Raises:
        KeyError: one of its parameters is not in the mapping.
    """
    replaced_parameters.switch(optimizer, mapping)


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns named parameters without what compilers and activation checkpointing put into names."""
    junk = ("_orig_mod", "_checkpoint_wrapped_module")
    return {".".join(part for part in name.split(".") if part not in junk): p for name, p in named_params.items()}


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: Any, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool] | None:
    """Returns a function that tells of a module of this model whether it is sharded apart; None if none is."""
    chosen = {id(unit) for unit in wrapping.units(model, fsdp2_plugin.policy_for(model))}
    return (lambda module: id(module) in chosen) if chosen else None


def _folder(directory: str | os.PathLike[str], name: str, index: int) -> Path:
    return Path(directory) / f"{name}_{index}"


def _opened(path: Path, accelerator: Any) -> Checkpoint:
    """A checkpoint of which every rank verifies its share of the files."""
    checkpoint, world = Checkpoint.open(path, verify=False), accelerator.world
    own = sorted(checkpoint.files)[world.rank :: world.size]
    problems = [problem for found in world.gather_object(checkpoint.examine(own)) for problem in found]
    if problems:
        raise CheckpointError(f"{path} is damaged: " + "; ".join(problems))
    return checkpoint


def _check(adapter_only: bool) -> None:
    if adapter_only:
        raise ValueError(
            "Expected whole models. Received: adapter_only=True. Save the adapter by its own library, from "
            "accelerator.get_state_dict(model)."
        )
