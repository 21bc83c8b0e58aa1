"""What all engines of a ParallelismConfig share: the mesh, who sees which data, and dividing a model over it."""

from __future__ import annotations


from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import initial_weights
from .base import Settings
from .environment import Placement
from .mesh import Layout, ParallelismConfig
from .optimizer import unwrap_optimizer
from .precision import Precision
from .process_group import ProcessGroupStrategy
from .world import World


class Arranged(ProcessGroupStrategy):
    """A strategy whose ranks stand in a mesh, in which some of them share the work on the same samples."""

    parallelism: ParallelismConfig
    _layout: Layout | None = None

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        self.parallelism = self.parallelism.resolved(placement.size)
        world = super()._create_world(placement, device, settings)
        self.mesh = self.parallelism.build_device_mesh(world.device.type)
        self._layout = Layout(self.parallelism, self.mesh, world)
        self._draw_alike()
        return world

    @property
    def layout(self) -> Layout:
        """The ranks on their mesh.

        Raises:
            RuntimeError: the strategy is not set up yet.
        """
        if self._layout is None:
            raise RuntimeError("Expected a strategy that is set up. Received: no mesh yet. Call setup() first.")
        return self._layout

    @property
    def data_world(self) -> World:
        return self.world if self._layout is None else self._layout.data

    @property
    def loss_world(self) -> World:
        return self.world if self._layout is None else self._layout.loss

    def _draw_alike(self) -> None:
        """Ranks that share each layer draw the same random numbers: each of them computes the whole's dropout."""
        seed = self.layout.world("tp").broadcast_object(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)

    def divide(self, model: torch.nn.Module) -> None:
        """Shares layers out over the mesh, in place; weights are the first process's."""
        if self.parallelism.tp_enabled and self.parallelism.tp_handler is not None:
            from .tensor_parallel import parallelize

            tensors = [*model.parameters(), *model.buffers()]
            plain = [one.detach() for one in tensors if not (one.is_meta or isinstance(one, DTensor))]
            initial_weights.synchronize(plain, self.world)
            parallelize(model, self.layout.submesh("tp"), self.parallelism.tp_handler)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True) -> Any:
        prepared = super().prepare_optimizer(optimizer, precision, place=place)
        update_one_by_one(optimizer)
        return prepared


def update_one_by_one(optimizer: Any) -> None:
    """Switches torch's fused loops off where they would meet parameters of several kinds, which they refuse."""
    for group in unwrap_optimizer(optimizer).param_groups:
        kinds = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in group["params"]}
        if len(kinds) > 1:
            group.update({name: False for name in ("foreach", "fused") if name in group})


