"""Megatron's own random states: of dropout in layers that ranks share. They belong to one arrangement of ranks."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from . import random
from .megatron_groups import core
from .world import World

logger = logging.getLogger(__name__)
_SIZES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel",
          "data_parallel")  # fmt: skip


def save(writer: Any, world: World) -> None:
    """Writes this rank's states."""
    states = dict(_tracker().get_states())
    writer.state(_name(world), {"arrangement": _arrangement(), "states": states})


def load(checkpoint: Any, world: World) -> None:
    """Restores them where ranks stand as they did; else all ranks begin anew, so that those that share layers agree."""
    name = _name(world)
    saved = checkpoint.state(name) if checkpoint.has(f"{name}.json") else {"arrangement": None}
    if not world.agree(saved["arrangement"] == _arrangement(), how="all"):
        if world.rank == 0:
            logger.warning(
                "The checkpoint %s has random states of other ranks of Megatron. They begin anew with the run's seed: "
                "dropout draws other numbers from here on.", checkpoint.directory,
            )  # fmt: skip
        stage = core().get_pipeline_model_parallel_rank()
        _module().model_parallel_cuda_manual_seed(random.run_seed() % 2**31 + 100 * stage)
        return
    _tracker().set_states(saved["states"])


def _name(world: World) -> str:
    return f"rank-{world.rank:05d}-megatron"


def _arrangement() -> dict[str, int]:
    return {name: int(getattr(core(), f"get_{name}_world_size")()) for name in _SIZES}


def _module() -> Any:
    return import_module("megatron.core.tensor_parallel.random")


def _tracker() -> Any:
    return _module().get_cuda_rng_tracker()
