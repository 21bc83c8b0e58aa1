"""The engine of a ParallelismConfig: what each kind of parallelism does to a model, one after the other.

A model is placed, divided (tp, ep) and compiled; what is left is replicated over the data and sequence ranks, and its
gradients are averaged over them after each window. Where weights are sharded as well, `parallel_fsdp` puts FSDP in the
place of that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from . import sharded_gradients
from .base import Settings, Strategy, is_scheduler
from .environment import Placement
from .following import Replacements
from .gradient_mean import GradientMean
from .mesh import Layout, ParallelismConfig
from .parallel_options import TorchTensorParallelConfig
from .precision import Precision
from .settings import AutocastKwargs, DistributedType, GradScalerKwargs, InitProcessGroupKwargs, TorchDynamoPlugin
from .world import TorchWorld, World


def engine_for(parallelism: ParallelismConfig, plugin: Any = None) -> Strategy:
    """Returns the engine for these degrees; `plugin` are the options of FSDP, if some were given.

    Raises:
        ValueError: the degrees need DeepSpeed.
    """
    if parallelism.sp_backend == "deepspeed" and parallelism.sp_enabled:
        raise ValueError(
            f"Expected deepspeed_plugin for sp_backend='deepspeed'. Received: sp_size={parallelism.sp_size} without "
            "one. Pass a DeepSpeedPlugin, or sp_backend='torch'."
        )
    kinds: dict[tuple[str, ...], type[ParallelStrategy]] = {("tp",): TensorParallelStrategy}
    kind = kinds.get(tuple(parallelism.active_mesh_dims), ParallelStrategy)
    return kind(parallelism=parallelism)


class ParallelStrategy(Strategy):
    """Tensor, context, sequence and expert parallel over one mesh, and replicas of all that.

    Args:
        parallelism: the degrees.
        start_method: how a launcher starts the processes; None for what the environment allows.
    """

    name = "parallel"
    launches = True

    def __init__(self, parallelism: ParallelismConfig, *, start_method: str | None = None) -> None:
        super().__init__()
        self.parallelism: ParallelismConfig = parallelism
        self.start_method = start_method
        self.layout: Layout | None = None
        self.gradients: GradientMean | None = None
        self._replacements = Replacements()
        self._syncing = True
        self.name = "+".join(parallelism.active_mesh_dims) or "ddp"

    # Environment

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        group = settings.get(InitProcessGroupKwargs, InitProcessGroupKwargs()).to_kwargs()
        method = group.get("init_method")
        if not placement.launched and placement.size == 1 and method is None:
            method = "tcp://127.0.0.1:0"  # one process by itself: any free port
        self.parallelism = self.parallelism.resolved(placement.size)
        world = TorchWorld.create(
            placement, device, backend=group.get("backend"), timeout=group.get("timeout"), init_method=method
        )
        self.mesh = self.parallelism.build_device_mesh(world.device.type)
        self.layout = Layout(self.parallelism, self.mesh, world)
        self.gradients = GradientMean(self.layout.loss)
        self._draw_alike()
        return world

    def _draw_alike(self) -> None:
        """Ranks that share each layer draw the same random numbers: each of them computes the whole's dropout."""
        seed = self.layout_.world("tp").broadcast_object(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)

    def teardown(self) -> None:
        if self.gradients is not None:
            self.gradients.clear()
        super().teardown()

    @property
    def data_world(self) -> World:
        return self.world if self.layout is None else self.layout.data

    @property
    def loss_world(self) -> World:
        return self.world if self.layout is None else self.layout.loss

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
    ) -> Precision:
        made = super().precision(name, autocast=autocast, scaler=scaler)
        if made.scaler is None:
            return made
        scaled = sharded_gradients.ShardedScaled(made.name, made.dtype, self.device, autocast, scaler)
        scaled.agree = lambda found: self.world.all_reduce(found, "max")
        return scaled

    # Preparing

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Models first, whose parameters the optimizers then follow; schedulers last."""
        prepared = [one(obj) if isinstance(obj, torch.nn.Module) else obj for obj in objects]
        rest = [obj if isinstance(obj, torch.nn.Module) or is_scheduler(obj) else one(obj) for obj in prepared]
        return [one(obj) if is_scheduler(obj) else obj for obj in rest]

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        *,
        place: bool = True,
        evaluation: bool = False,
        dynamo: TorchDynamoPlugin | None = None,
    ) -> torch.nn.Module:
        before = self._replacements.names(model)
        model = super().prepare_model(model, precision, place=place, evaluation=evaluation)
        if not evaluation:
            self._same_everywhere(model)
        self.divide(model)
        self.replicate(model)
        self._replacements.note(before, model)
        return super().prepare_model(model, Precision(), place=False, evaluation=evaluation, dynamo=dynamo)

    def divide(self, model: torch.nn.Module) -> None:
        """Shares layers and experts out over the mesh."""
        if self.parallelism.tp_enabled and self.parallelism.tp_handler is not None:
            from .tensor_parallel import parallelize

            parallelize(model, self.layout_.submesh("tp"), self.parallelism.tp_handler)

    def replicate(self, model: torch.nn.Module) -> None:
        """Averages the gradients of what every data rank holds alike."""
        assert self.gradients is not None
        self.gradients.add(model.parameters())

    @property
    def layout_(self) -> Layout:
        if self.layout is None:
            raise RuntimeError("Expected a strategy that is set up. Received: no mesh yet. Call setup() first.")
        return self.layout

    def _same_everywhere(self, model: torch.nn.Module) -> None:
        """As DDP does: the first process's weights and buffers count."""
        for tensor in [*model.parameters(), *model.buffers()] if self.world.size > 1 else ():
            if not tensor.is_meta and not hasattr(tensor, "device_mesh"):
                self.world.broadcast(tensor.data)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True) -> Any:
        self._replacements.follow(optimizer)
        return super().prepare_optimizer(optimizer, precision, place=place)

    # A step

    @contextmanager
    def no_sync(self, model: Any) -> Any:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        super().backward(loss, precision, **kwargs)
        if self._syncing and self.gradients is not None:
            self.gradients.reduce()

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return sharded_gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        sharded_gradients.clip_value(parameters, clip_value)

    def norm(self, parameters: Any, norm_type: float = 2.0) -> torch.Tensor:
        return sharded_gradients.total_norm(parameters, norm_type)

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
    """

    def __init__(
        self,
        size: int = -1,
        plan: Any = None,
        *,
        loss_parallel: bool = False,
        parallelism: ParallelismConfig | None = None,
        start_method: str | None = None,
    ) -> None:
        handler = TorchTensorParallelConfig(plan=plan, loss_parallel=loss_parallel)
        super().__init__(
            parallelism or ParallelismConfig(tp_size=size, tp_handler=handler), start_method=start_method
        )
