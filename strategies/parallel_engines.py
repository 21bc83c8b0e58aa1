"""Which engine a ParallelismConfig asks for."""

from __future__ import annotations

from typing import Any

from .base import Strategy
from .fsdp import FSDPStrategy
from .mesh import ParallelismConfig
from .parallel import (
    ContextParallelStrategy,
    ExpertParallelStrategy,
    ParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from .parallel_fsdp import ParallelFSDPStrategy
from .pipeline import PipelineStrategy


def engine_for(parallelism: ParallelismConfig, plugin: Any = None) -> Strategy:
    """Returns the engine for these degrees; `plugin` are the options of FSDP, if some were given.

    Raises:
        ValueError: the degrees need DeepSpeed, or options of FSDP come without anything to shard over.
    """
    if parallelism.sp_backend == "deepspeed" and parallelism.sp_enabled:
        raise ValueError(
            f"Expected deepspeed_plugin for sp_backend='deepspeed'. Received: sp_size={parallelism.sp_size} without "
            "one. Pass a DeepSpeedPlugin, or sp_backend='torch'."
        )
    active = tuple(parallelism.active_mesh_dims)
    if "pp" in active:
        if plugin is not None:
            _check_sharded(parallelism, active)
        return PipelineStrategy(parallelism=parallelism, plugin=plugin)
    if plugin is not None or parallelism.dp_shard_enabled:
        return _sharding_engine(parallelism, plugin, active)
    kinds: dict[tuple[str, ...], type[ParallelStrategy]] = {
        ("tp",): TensorParallelStrategy, ("cp",): ContextParallelStrategy, ("sp",): SequenceParallelStrategy,
        ("ep",): ExpertParallelStrategy,
    }  # fmt: skip
    kind: Any = kinds.get(active, ParallelStrategy)
    return kind(parallelism=parallelism)


def _check_sharded(parallelism: ParallelismConfig, active: tuple[str, ...]) -> None:
    sharing = {"dp_shard"} if "ep" in active else {"dp_shard", "cp", "sp"}
    if not set(active) & sharing:
        raise ValueError(
            "Expected dp_shard_size of 2 or more (or -1), as FSDP's options are given. Received: "
            f"{', '.join(f'{name}_size={parallelism.sizes[name]}' for name in active) or 'all degrees 1'}. Set it, or "
            "leave the options out."
        )


def _sharding_engine(parallelism: ParallelismConfig, plugin: Any, active: tuple[str, ...]) -> Strategy:
    _check_sharded(parallelism, active)
    if set(active) <= {"dp_replicate", "dp_shard"}:
        return FSDPStrategy(plugin, parallelism=parallelism)
    return ParallelFSDPStrategy(plugin, parallelism=parallelism)
