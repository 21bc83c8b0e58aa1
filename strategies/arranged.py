"""What all engines of a ParallelismConfig share: the mesh, who sees which data, and dividing a model over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from . import initial_weights
from .base import Settings
from .contexts import NOTHING
from .environment import Placement
from .mesh import Layout, ParallelismConfig
from .optimizer import unwrap_optimizer
from .precision import Precision
from .process_group import ProcessGroupStrategy
from .world import World

if TYPE_CHECKING:
    from .context_parallel import Sequences


class SharesSequences(ProcessGroupStrategy):
    """A strategy of which some ranks may work on the same samples, and on parts of their sequences."""

    _layout: Layout | None = None
    sequences: Sequences | None = None  # how they are divided, where they are

    def _arrange(self, parallelism: ParallelismConfig, world: World) -> None:
        """Makes the mesh of a world for these degrees (collective)."""
        self.mesh = parallelism.build_device_mesh(world.device.type)
        self._layout = Layout(parallelism, self.mesh, world)
        kind = "cp" if parallelism.cp_enabled else "sp"
        if parallelism.sizes[kind] != 1 and parallelism.cp_handler is not None:
            from .context_parallel import Sequences

            group = self.layout.submesh(kind).get_group()
            self.sequences = Sequences(kind, group, parallelism.cp_handler, world.device)
            if kind == "sp" and parallelism.sp_handler is not None:
                self.sequences.length = parallelism.sp_handler.fixed_length

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

    @property
    def layer_world(self) -> World | None:
        """The ranks that have different layers of the model; None where each has all of them."""
        return None

    @property
    def divide_batch(self) -> Any:  # type: ignore[override]
        """Cuts this rank's part out of a batch, where ranks share sequences; None where they do not."""
        return None if self.sequences is None else self.sequences.divide

    def divided_buffers(self, buffers: list[Any], dims: list[int], kept: set[Any]) -> Any:
        return NOTHING if self.sequences is None else self.sequences.buffers(buffers, dims, kept)

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        """Methods see whole sequences in their attention, where they work on parts of them."""
        return self.inside(super().entry(model, method, precision, manual=manual))

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that computes on parts of sequences, where ranks share these."""
        if self.sequences is None:
            return function
        return _inside(functools.partial(self.sequences.step, self.layer_world), function)

    def _attention(self) -> AbstractContextManager[None]:
        context: Any = NOTHING if self.sequences is None else self.sequences.attention()
        return context


class Arranged(SharesSequences):
    """A strategy whose ranks stand in a mesh, in which some of them share the work on the same samples."""

    parallelism: ParallelismConfig

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        self.parallelism = self.parallelism.resolved(placement.size)
        world = super()._create_world(placement, device, settings)
        self._arrange(self.parallelism, world)
        self._draw_alike()
        return world

    def _draw_alike(self) -> None:
        """Ranks that share each layer draw the same random numbers: each of them computes the whole's dropout."""
        seed = self.layout.world("tp").broadcast_object(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)

    def synchronize(self, model: torch.nn.Module) -> None:
        """Gives every rank the first one's weights, where they are whole."""
        tensors = [*model.parameters(), *model.buffers()]
        plain = [one.detach() for one in tensors if not (one.is_meta or isinstance(one, DTensor))]
        initial_weights.synchronize(plain, self.world)

    def divide(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Shares layers and experts out over the mesh, in place; returns the experts' parameters.

        All ranks have the same weights.
        """
        if self.sequences is not None:
            self.sequences.look_at(model)
        if self.parallelism.tp_enabled and self.parallelism.tp_handler is not None:
            from .tensor_parallel import parallelize

            parallelize(model, self.layout.submesh("tp"), self.parallelism.tp_handler)
        return self._share_experts(model)

    def _share_experts(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        if self.parallelism.ep_size == 1:
            return []
        from .expert_parallel import parallelize

        return parallelize(model, self.layout.submesh("ep"))

    def expert_shards(self, model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
        """Returns the modules of experts in a model, which are sharded over another mesh, each with that mesh."""
        if self.parallelism.ep_size == 1:
            return {}
        from .expert_parallel import experts_of

        return dict.fromkeys(experts_of(model).values(), self.layout.shards(of_experts=True))

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that computes on parts of sequences, and losses on parts, where ranks share these."""
        if self._divides_losses:
            function = _inside(self._losses, function)
        return super().inside(function)

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        with self._attention(), self._losses():  # activations that are computed again need attention, too
            super().backward(loss, precision, **kwargs)

    @property
    def _divides_losses(self) -> bool:
        handler = self.parallelism.tp_handler
        return self.parallelism.tp_enabled and handler is not None and handler.loss_parallel

    def _losses(self) -> AbstractContextManager[None]:
        nothing: Any = NOTHING
        if not self._divides_losses:
            return nothing
        from .tensor_parallel import losses_on_parts

        return losses_on_parts()

    def join(self, joinables: list[Any], **options: Any) -> Any:
        raise NotImplementedError(
            f"Expected equally many batches on all ranks under strategy={self.name!r}. Received: join_uneven_inputs. "
            "Leave it out, and even_batches as it is (True)."
        )

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True) -> Any:
        prepared = super().prepare_optimizer(optimizer, precision, place=place)
        update_one_by_one(optimizer)
        return prepared


def _inside(context: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return inside


def update_one_by_one(optimizer: Any) -> None:
    """Switches torch's fused loops off where they would meet parameters of several kinds, which they refuse."""
    for group in unwrap_optimizer(optimizer).param_groups:
        kinds = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in group["params"]}
        if len(kinds) > 1:
            group.update({name: False for name in ("foreach", "fused") if name in group})


