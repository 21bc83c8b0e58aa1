"""Pipeline parallel: a part of the model is cut into stages, which pass micro-batches on from rank to rank.

    class Module(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(...)          # cut into stages
        def training_step(self, batch, index):     # as for one device; it calls self.net once
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    Trainer(strategy=PipelineStrategy(2, schedule="1F1B", microbatches=4), devices=2)

How a step runs is said in pipelined.py, how a part is cut in stages.py. In evaluation all ranks of a pipeline run the
user's step, and get the output of the last stage from its call of the part.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import initial_weights, replaced_parameters, sharded_gradients, stages
from .arranged import Arranged
from .base import Settings, is_scheduler
from .checkpoint import sharded
from .contents import fitted
from .environment import Placement
from .gradient_mean import GradientMean
from .mesh import ParallelismConfig
from .optimizer import load_named_state, unwrap_optimizer
from .parallel_options import PipelineConfig
from .pipelined import Pipeline, Recorder, places
from .precision import Precision
from .replaced_parameters import part_like
from .settings import AutocastKwargs, DistributedType, GradScalerKwargs, TorchDynamoPlugin
from .sharded_state import ShardedState
from .world import World

_TRAINING = "training_step"


class PipelineStrategy(ShardedState, Arranged):
    """Stages on the ranks of a pipeline, and replicas of it.

    Args:
        size: ranks of a pipeline; -1 for what `replicas` leaves.
        replicas: pipelines, each on other samples.
        parallelism: all of that, and the options, as a ParallelismConfig.
        options: those of PipelineConfig (module, split, schedule, microbatches, stages_per_rank).
    """

    name = "pp"

    def __init__(
        self,
        size: int = -1,
        *,
        replicas: int = 1,
        parallelism: ParallelismConfig | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(start_method=start_method)
        self.parallelism = parallelism or ParallelismConfig(
            pp_size=size, dp_replicate_size=replicas, pp_handler=PipelineConfig(**options)
        )
        self.name = "+".join(self.parallelism.active_mesh_dims) or "pp"
        self.gradients = GradientMean(World())
        self._replaced = replaced_parameters.Replaced()
        self._gone: Any = torch.utils.weak.WeakIdKeyDictionary()  # parameters of other ranks' stages
        self._pipelines: Any = weakref.WeakKeyDictionary()  # module -> Pipeline
        self._syncing = True

    def __getstate__(self) -> dict[str, Any]:
        """What goes to processes that are started with this strategy: the options, not what runs here."""
        return {**self.__dict__, "_pipelines": None, "_gone": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        none = {"_pipelines": weakref.WeakKeyDictionary(), "_gone": torch.utils.weak.WeakIdKeyDictionary()}
        self.__dict__.update(state, **none)

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        world = super()._create_world(placement, device, settings)
        self.gradients = GradientMean(self.layout.loss)
        self.pipeline_world = self.layout.world("pp")
        return world

    def teardown(self) -> None:
        self.gradients.clear()
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
        if made.scaler is not None:
            raise ValueError(
                "Expected a precision without a loss scale in a pipeline, which differentiates before a loss is "
                f"scaled. Received: {made.name}. Use 'bf16-mixed'."
            )
        return made

    # Preparing

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Models first, of whose parameters optimizers keep what is here; schedulers last."""
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
        """Cuts a model in place; the same object comes back, with the stages of this rank."""
        if model in self._pipelines:
            return model
        config = self.parallelism.pp_handler or PipelineConfig()
        _, part = stages.find_part(model, config.module)
        before, absent = list(model.parameters()), initial_weights.on_meta(model)
        if not absent and stages.known(part) is None:
            initial_weights.synchronize([tensor.detach() for tensor in [*before, *model.buffers()]], self.world)
        own = self._cut(model, precision, config)
        if absent:  # each rank makes its stages only; replicas get those of the first
            initial_weights.materialize(model, self.device, None)
            made = [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]
            initial_weights.synchronize(made, self.data_world)
        if place:
            model.to(self.device)
        if isinstance(precision.dtype, torch.dtype) and precision.name.endswith("-true"):
            model.to(precision.dtype)
        here = {id(parameter) for parameter in model.parameters()}
        for parameter in before:
            if id(parameter) not in here:
                self._gone[parameter] = True
        self.gradients.add(model.parameters())
        if dynamo is not None and dynamo.active:
            for stage in own.values():
                stage.compile(**dynamo.to_kwargs())
        return model

    def _cut(self, model: torch.nn.Module, precision: Precision, config: PipelineConfig) -> dict[int, torch.nn.Module]:
        world = self.pipeline_world
        ranks = places(config.schedule, world.size, config.stages_per_rank or 1)
        name, part = stages.find_part(model, config.module)
        outside = [one for one, _ in model.named_parameters() if name and not one.startswith(f"{name}.")]
        if outside:
            raise ValueError(
                "Expected all parameters in the part that is cut into stages. Received: "
                f"{', '.join(outside[:5])} beside {name!r}. Move them into it."
            )
        own = stages.kept(part, config, ranks, world.rank)
        group = getattr(world, "group", None)
        self._pipelines[model] = Pipeline(
            part, own, ranks, world=world, group=group, schedule=config.schedule,
            microbatches=config.microbatches or 2 * len(ranks), computing=lambda: precision.autocast(),
        )  # fmt: skip
        return own

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True) -> Any:
        for group in unwrap_optimizer(optimizer).param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._gone]
        return super().prepare_optimizer(optimizer, precision, place=place)

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        """Training goes through the pipeline; other methods run on every rank, and their calls of the part do."""
        function = super().entry(model, method, precision, manual=manual)
        pipeline = self._pipelines.get(model)
        if pipeline is None or method != _TRAINING:
            return function
        if manual:
            raise ValueError(
                "Expected automatic optimization in a pipeline, which differentiates on its own. Received: "
                "automatic_optimization=False. Leave it at True."
            )
        recorder = Recorder(model)

        def through(batch: Any, *rest: Any) -> Any:
            return pipeline.run(function, batch, *rest, recorder=recorder)

        return through

    # A step

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Any:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        super().backward(loss, precision, **kwargs)
        if self._syncing:
            self.gradients.reduce()

    @property
    def _across(self) -> tuple[Any, ...]:
        world = self.pipeline_world
        return () if world.size == 1 else (getattr(world, "group", torch.distributed.group.WORLD),)

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return sharded_gradients.clip_norm(parameters, max_norm, norm_type, across=self._across)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        sharded_gradients.clip_value(parameters, clip_value)

    # State

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns the weights of this rank's stages with `full=False`, else of all, on the first rank only."""
        state = self._parts(model)
        if not full:
            return state
        own = {name: value.detach().cpu() if hasattr(value, "detach") else value for name, value in state.items()}
        merged = {name: value for part in self.pipeline_world.gather_object(own) for name, value in part.items()}
        return merged if self.world.rank == 0 else {}

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads the weights of this rank's stages out of those of a whole model."""
        module = self.unwrap(model)
        own = self._parts(model)
        kept = {name: value for name, value in state.items() if name in own}
        return module.load_state_dict(fitted(kept, module), strict=strict)

    def _wanted(self, names: list[str], targets: Mapping[str, Any]) -> list[str]:
        return [name for name in names if name in targets]

    def load_optimizer(self, checkpoint: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        optimizer = unwrap_optimizer(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        targets = {names[id(parameter)]: parameter for parameter in parameters if id(parameter) in names}
        saved = sharded.load_sharded_state(checkpoint, stem, targets)
        groups = [{**g, "params": [name for name in g["params"] if name in targets]} for g in saved["param_groups"]]
        state = {name: entry for name, entry in saved["state"].items() if name in targets}
        load_named_state(optimizer, {**saved, "param_groups": groups, "state": state}, names, label=stem)
        for parameter, entry in optimizer.state.items():
            entry.update({key: part_like(value, parameter) for key, value in entry.items()})
