"""The engines of a ParallelismConfig: what each kind of parallelism does to a model, one after the other.

A model is placed and divided; what is left is replicated over the data and sequence ranks, and its gradients are
averaged over them after each window. Where weights are sharded as well, FSDP takes the place of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import initial_weights, replaced_parameters, sharded_gradients
from .arranged import Arranged
from .base import Settings, is_scheduler
from .environment import Placement
from .gradient_mean import GradientMean
from .mesh import ParallelismConfig
from .parallel_options import TorchContextParallelConfig, TorchTensorParallelConfig
from .precision import Precision
from .settings import AutocastKwargs, DistributedType, GradScalerKwargs, TorchDynamoPlugin
from .sharded_state import ShardedState
from .world import World


class ParallelStrategy(ShardedState, Arranged):
    """Tensor, context, sequence and expert parallel over one mesh, and replicas of all that.

    Args:
        parallelism: the degrees.
        options: see ProcessGroupStrategy.
    """

    name = "parallel"

    def __init__(self, parallelism: ParallelismConfig, **options: Any) -> None:
        super().__init__(**options)
        self.parallelism = parallelism
        self.gradients = self._expert_gradients = GradientMean(World())
        self._replaced = replaced_parameters.Replaced()
        self._syncing = True
        self.name = "+".join(parallelism.active_mesh_dims) or "parallel"

    # Environment

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        world = super()._create_world(placement, device, settings)
        self.gradients = GradientMean(self.layout.loss)
        self._expert_gradients = GradientMean(self.layout.world("dp_replicate", "cp", "sp"))
        return world

    def teardown(self) -> None:
        self.gradients.clear()
        self._expert_gradients.clear()
        super().teardown()

    @property
    def distributed_type(self) -> DistributedType:
        name = f"MULTI_{self.device.type.upper()}"
        return DistributedType(name) if name in DistributedType.__members__ else DistributedType.MULTI_GPU

    def precision(
        self,
        name: str | int | None,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        **options: Any,
    ) -> Precision:
        made = super().precision(name, autocast=autocast, scaler=scaler, **options)
        if made.scaler is None:
            return made
        scaled = sharded_gradients.ShardedScaled(made.name, made.dtype, self.device, autocast, scaler)
        scaled.agree = lambda found: self.world.all_reduce(found, "max")
        return scaled

    # Preparing

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Models first, whose parameters the optimizers then follow; schedulers last."""
        done = {id(obj): one(obj) for obj in objects if isinstance(obj, torch.nn.Module)}
        done |= {id(obj): one(obj) for obj in objects if id(obj) not in done and not is_scheduler(obj)}
        return [done[id(obj)] if id(obj) in done else one(obj) for obj in objects]

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        *,
        place: bool = True,
        evaluation: bool = False,
        dynamo: TorchDynamoPlugin | None = None,
    ) -> torch.nn.Module:
        """Divides a model in place; the same object comes back. `evaluation` makes no difference but for gradients."""
        before = replaced_parameters.named([model])
        initial_weights.materialize(model, self.device, None)
        model = super().prepare_model(model, precision, place=place, evaluation=evaluation)
        self.synchronize(model)
        experts = self.divide(model)
        if not evaluation:
            self._follow_gradients(model.parameters(), experts)
        self._replaced.note(before, model)
        return super().prepare_model(model, Precision(), place=False, evaluation=evaluation, dynamo=dynamo)

    def _follow_gradients(self, parameters: Iterable[Any], experts: Iterable[Any]) -> None:
        """Takes in what is averaged after each window: experts among themselves, as they have seen all tokens."""
        apart = {id(parameter) for parameter in experts}
        parameters = list(parameters)
        self.gradients.add(parameter for parameter in parameters if id(parameter) not in apart)
        self._expert_gradients.add(parameter for parameter in parameters if id(parameter) in apart)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True) -> Any:
        self._replaced.follow(optimizer)
        return super().prepare_optimizer(optimizer, precision, place=place)

    # A step

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        super().backward(loss, precision, **kwargs)
        if self._syncing:
            self._reduce()

    def _reduce(self) -> None:
        """Makes gradients those of all ranks, at a window's end."""
        self.gradients.reduce()
        self._expert_gradients.reduce()

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return sharded_gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        sharded_gradients.clip_value(parameters, clip_value)

    def before_evaluation(self, model: Any) -> None:
        """The first process's buffers count, as they do in a checkpoint."""
        for buffer in self.unwrap(model).buffers() if self.world.size > 1 else ():
            self.world.broadcast(buffer)


class TensorParallelStrategy(ParallelStrategy):
    """Tensor parallel alone: all ranks share each layer, as a plan says (see tensor_parallel.py).

    Args:
        size: the degree; -1 for all processes.
        plan: names and words, or a function of the module; None for the plan that Hugging Face models carry.
        loss_parallel: losses on outputs that are left divided.
        parallelism: all of that as a ParallelismConfig.
        options: see ProcessGroupStrategy.
    """

    def __init__(
        self,
        size: int = -1,
        plan: Any = None,
        *,
        loss_parallel: bool = False,
        parallelism: ParallelismConfig | None = None,
        **options: Any,
    ) -> None:
        handler = TorchTensorParallelConfig(plan=plan, loss_parallel=loss_parallel)
        super().__init__(parallelism or ParallelismConfig(tp_size=size, tp_handler=handler), **options)


class ContextParallelStrategy(ParallelStrategy):
    """Context parallel alone: all ranks share each sequence, and attention gathers keys and values.

    Args:
        size: the degree; -1 for all processes.
        sequence_dims: which entries of a batch are sequences (see TorchContextParallelConfig).
        cp_comm_strategy: "allgather", or "alltoall" for torch's ring attention.
        parallelism: all of that as a ParallelismConfig.
        options: see ProcessGroupStrategy.
    """

    dimension = "cp"

    def __init__(
        self,
        size: int = -1,
        *,
        sequence_dims: Any = None,
        cp_comm_strategy: str | None = None,
        parallelism: ParallelismConfig | None = None,
        **options: Any,
    ) -> None:
        handler = TorchContextParallelConfig(cp_comm_strategy, sequence_dims)
        sizes: dict[str, Any] = {f"{self.dimension}_size": size}
        super().__init__(parallelism or ParallelismConfig(**sizes, cp_handler=handler), **options)


class SequenceParallelStrategy(ContextParallelStrategy):
    """Sequence parallel alone, as Ulysses does it: all ranks share each sequence, and exchange it for heads.

    The arguments are those of ContextParallelStrategy.
    """

    dimension = "sp"


class ExpertParallelStrategy(ParallelStrategy):
    """Expert parallel alone: all ranks share the experts, each on other samples (see expert_parallel.py).

    Args:
        size: the degree; -1 for all processes.
        parallelism: that as a ParallelismConfig.
        options: see ProcessGroupStrategy.
    """

    def __init__(self, size: int = -1, *, parallelism: ParallelismConfig | None = None, **options: Any) -> None:
        super().__init__(parallelism or ParallelismConfig(ep_size=size), **options)
