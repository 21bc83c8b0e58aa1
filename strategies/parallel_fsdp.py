"""Other kinds of parallelism together with FSDP: a model is divided first, and its parts are then sharded."""

from __future__ import annotations

from typing import Any

import torch

from .arranged import Arranged
from .fsdp import FSDPStrategy
from .mesh import ParallelismConfig


class ParallelFSDPStrategy(Arranged, FSDPStrategy):
    """FSDP over the ranks that see different data or other tokens, with replicas around and divided layers inside.

    Args:
        plugin: the options of FSDP; None for their defaults.
        parallelism: the degrees.
        options: see FSDPStrategy.
    """

    def __init__(self, plugin: Any = None, *, parallelism: ParallelismConfig, **options: Any) -> None:
        super().__init__(plugin, parallelism=parallelism, **options)
        rest = [name for name in parallelism.active_mesh_dims if name not in ("dp_replicate", "dp_shard")]
        self.name = "+".join([self.name, *rest])

    def _make_mesh(self) -> Any:
        return self.mesh  # of all dimensions, made with the process group

    @property
    def shard_mesh(self) -> Any:
        return self.layout.shards()

    def _parallelize(self, model: torch.nn.Module) -> None:
        model.to(self.device)
        self.synchronize(model)
        self.divide(model)

    def _apart(self, model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
        return self.expert_shards(model)
