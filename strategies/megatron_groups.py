"""The ranks of a run in Megatron's groups, their seeds, and which stages of a model a rank has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from .availability import has_package
from .megatron_plugin import MegatronLMPlugin
from .subgroup import subworld
from .world import World

_RANKS = {
    "tp": "get_tensor_model_parallel_rank", "pp": "get_pipeline_model_parallel_rank", "dp": "get_data_parallel_rank",
    "cp": "get_context_parallel_rank", "ep": "get_expert_model_parallel_rank",
}  # fmt: skip


@dataclass
class Ranks:
    """The worlds of those with other data, of those whose losses are parts of the whole, and of a replica's stages."""

    data: World = field(default_factory=World)
    loss: World = field(default_factory=World)
    pipeline: World = field(default_factory=World)


def check(device: torch.device, plugin: MegatronLMPlugin, size: int) -> None:
    """Raises for what megatron-core would fail at later, and names what to use instead.

    Raises:
        ImportError: it is not installed.
        ValueError: there is no CUDA device, the number of processes does not fit, or Transformer Engine is missing.
    """
    core()
    try:
        current = torch.device(torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise ValueError(_NO_CUDA.format(received=str(error).splitlines()[0])) from error
    if current.type != device.type:
        raise ValueError(_NO_CUDA.format(received=f"device={str(device)!r}"))
    degrees = plugin.degrees
    product = math.prod(size for name, size in degrees.items() if not name.startswith("expert"))
    if size % product:
        shown = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
        raise ValueError(
            f"Expected a number of processes that {product} divides ({shown}). Received: {size}. Start more, or lower "
            "the degrees."
        )
    if degrees["context_parallel_size"] > 1 and not has_package("transformer_engine"):
        raise ValueError(
            "Expected Transformer Engine for context_parallel_size, as megatron-core has no other attention over parts "
            f"of sequences. Received: context_parallel_size={degrees['context_parallel_size']} without it. Install "
            "transformer-engine, or use strategy='cp'."
        )


_NO_CUDA = (
    "Expected a CUDA device for Megatron, which computes on no other. Received: {received}. Use strategy='tp', 'pp' or "
    "'fsdp', which share a model on any device."
)


def core() -> Any:
    """Returns megatron-core's module of groups.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise ImportError(
            f"Expected the package megatron-core. Received: {error}. Install it: pip install 'drivetrain[megatron]'."
        ) from error


def create(world: World, plugin: MegatronLMPlugin, timeout: timedelta | None) -> Ranks:
    """Makes Megatron's groups of all processes (collective)."""
    state = core()
    if state.is_initialized():
        state.destroy_model_parallel()
    minutes = {} if timeout is None else {"distributed_timeout_minutes": max(1, int(timeout.total_seconds() // 60))}
    state.initialize_model_parallel(
        **plugin.degrees, expert_tensor_parallel_size=plugin.expert_tensor_parallel_size, **minutes
    )
    return Ranks(
        data=subworld(world, state.get_data_parallel_group()),
        loss=subworld(world, state.get_data_parallel_group(with_context_parallel=True)),
        pipeline=subworld(world, state.get_pipeline_model_parallel_group()),
    )


def destroy() -> None:
    """Forgets Megatron's groups."""
    state = core()
    if state.is_initialized():
        state.destroy_model_parallel()


def rank_in(dimension: str) -> int:
    """Returns this process's place in one of Megatron's groups.

    Raises:
        RuntimeError: there is no such group.
    """
    if dimension not in _RANKS:
        raise RuntimeError(
            f"Expected a dimension of {', '.join(_RANKS)}. Received: {dimension!r} under Megatron. Ask for one."
        )
    return int(getattr(core(), _RANKS[dimension])())


def seed(known: int | None) -> int:
    """Seeds Megatron's random numbers from torch's seed, unless that is known already; returns that seed.

    Ranks that share a layer draw alike outside of it, other stages draw otherwise, as Megatron-LM has it.
    """
    own = torch.initial_seed() % 2**31
    if own != known:
        stage = core().get_pipeline_model_parallel_rank()
        random = import_module("megatron.core.tensor_parallel.random")
        random.model_parallel_cuda_manual_seed(own + 100 * stage)
    return own


def stages(config: Any) -> list[tuple[bool, bool, int | None]]:
    """Returns for each chunk of this rank whether it is the model's first, its last, and its virtual stage."""
    state = core()
    rank, last = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size() - 1
    virtual = config.virtual_pipeline_model_parallel_size
    if state.get_pipeline_model_parallel_world_size() > 1:
        state.set_virtual_pipeline_model_parallel_world_size(virtual)
    if virtual is None:
        return [(rank == 0, rank == last, None)]
    return [(rank == 0 and one == 0, rank == last and one == virtual - 1, one) for one in range(virtual)]


def refuse_parallelism(parallelism: Any) -> None:
    """Raises ValueError for degrees of a ParallelismConfig beside Megatron's own."""
    sizes = {} if parallelism is None else dict(parallelism.sizes)
    given = [f"{name}_size={size}" for name, size in sizes.items() if size not in (None, 1)]
    if given:
        raise ValueError(
            f"Expected Megatron's options alone to arrange ranks. Received: {', '.join(given)} in a ParallelismConfig. "
            "Use tp_degree, pp_degree, context_parallel_size and expert_model_parallel_size."
        )
