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

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import initial_weights, replaced_parameters, sharded_gradients, sharding, stages, wrapping
from .checkpoint import sharded
from .checkpoint.gathering import save_gathered
from .contents import fitted, is_extra
from .environment import Placement
from .fsdp_plugin import FullyShardedDataParallelPlugin
from .mesh import ParallelismConfig
from .optimizer import load_named_state, unwrap_optimizer
from .parallel import ParallelStrategy
from .parallel_options import PipelineConfig
from .pipelined import Pipeline, Recorder, places
from .precision import Precision
from .replaced_parameters import part_like
from .settings import AutocastKwargs, GradScalerKwargs, TorchDynamoPlugin
from .sharded_state import whole
from .world import World

_TRAINING = "training_step"


class PipelineStrategy(ParallelStrategy):
    """Stages on the ranks of a pipeline; replicas of it, and stages that ranks share in any of the other ways.

    Args:
        size: ranks of a pipeline; -1 for what `replicas` leaves.
        replicas: pipelines, each on other samples.
        parallelism: all of that, and the options, as a ParallelismConfig.
        plugin: the options of FSDP, where `parallelism` has shards: weights are whole from a step's first micro-batch
            to its last, and are gathered and reduced once a step.
        options: those of PipelineConfig (module, split, schedule, microbatches, stages_per_rank).

    Raises:
        ValueError: an option of FSDP that stages do not have.
    """

    name = "pp"

    def __init__(
        self,
        size: int = -1,
        *,
        replicas: int = 1,
        parallelism: ParallelismConfig | None = None,
        plugin: FullyShardedDataParallelPlugin | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            parallelism or ParallelismConfig(
                pp_size=size, dp_replicate_size=replicas, pp_handler=PipelineConfig(**options)
            ),
            start_method=start_method,
        )  # fmt: skip
        self.plugin = plugin
        if plugin is None and self.parallelism.dp_shard_enabled:
            self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        if self.plugin is not None:
            _check(self.plugin)
            self.inference_mode, self.equal_forwards = False, True
        self._gone: Any = torch.utils.weak.WeakIdKeyDictionary()  # parameters of other ranks' stages
        self._pipelines: Any = weakref.WeakKeyDictionary()  # module -> Pipeline

    def __getstate__(self) -> dict[str, Any]:
        """What goes to processes that are started with this strategy: the options, not what runs here."""
        return {**self.__dict__, "_pipelines": None, "_gone": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        none = {"_pipelines": weakref.WeakKeyDictionary(), "_gone": torch.utils.weak.WeakIdKeyDictionary()}
        self.__dict__.update(state, **none)

    def _create_world(self, placement: Placement, device: torch.device, settings: Any) -> World:
        world = super()._create_world(placement, device, settings)
        self.pipeline_world = self.layout.world("pp")
        return world

    @property
    def layer_world(self) -> World:
        return self.pipeline_world

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
        before, cut_before = replaced_parameters.named([model]), stages.known(part) is not None
        late = initial_weights.on_meta(model) and not (self.parallelism.tp_enabled or self.parallelism.ep_size != 1)
        if not late and not cut_before:
            initial_weights.materialize(model, self.device, None)
            self.synchronize(model)
        experts = [] if cut_before else self.divide(model)
        if cut_before and self.sequences is not None:
            self.sequences.look_at(model)
        kinds = None if self.plugin is None else self._unit_kinds(model, self.plugin)
        own = self._cut(model, precision, config)
        if late:  # each rank makes its stages only; replicas get those of the first
            initial_weights.materialize(model, self.device, None)
            made = [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]
            initial_weights.synchronize(made, self.layout.world("dp_replicate", "dp_shard", "cp", "sp"))
        if place:
            model.to(self.device)
        if isinstance(precision.dtype, torch.dtype) and precision.name.endswith("-true"):
            model.to(precision.dtype)
        self._finish(model, part, own, kinds=kinds, dynamo=dynamo)
        self._note(before, model)
        shards = {id(p) for stage in own.values() if sharding.is_sharded(stage) for p in stage.parameters()}
        left_out = {id(p) for p in self._ignored(model)}
        rest = [p for p in model.parameters() if id(p) not in shards or id(p) in left_out]
        self._follow_gradients(rest, experts)
        return model

    def _unit_kinds(self, model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> Any:
        """Which modules are sharded apart, found in the whole model: a stage alone does not tell."""
        policy = plugin.policy_for(model)
        return wrapping.repeated_classes(model) if policy is None else policy

    def _ignored(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        modules = [] if self.plugin is None else self.plugin.ignored_in(model)
        return [parameter for module in modules for parameter in module.parameters()]

    def _finish(self, model: Any, part: Any, own: dict[int, Any], *, kinds: Any, dynamo: Any) -> None:
        """Compiles the stages, and shards them where that is asked for."""
        options = dynamo.to_kwargs() if dynamo is not None and dynamo.active else None
        if self.plugin is None:
            for stage in own.values() if options is not None else ():
                stage.compile(**options)
            return
        plugin, left_out = self.plugin, self.plugin.ignored_in(model)
        for stage in own.values():
            if sharding.is_sharded(stage):  # by an earlier run
                continue
            apart = self.expert_shards(stage)
            units = [one for one in wrapping.units(stage, kinds, ignored=left_out) if one not in apart]
            sharding.wrap_forwards(
                stage, units, recompute=bool(plugin.activation_checkpointing),
                offload=bool(plugin.activation_checkpointing_offload), compile=options,
            )  # fmt: skip
            sharding.shard(
                stage, mesh=self.layout.shards(), units=units, ignored=self._ignored(model), reshard=False,
                offload=plugin.offload_on(self.device), mixed_precision=plugin.mixed_precision_policy, apart=apart,
            )  # fmt: skip
        stages.keep(part, own)
        self._pipelines[model].follow_shards()

    def _note(self, before: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Remembers for optimizers which parameters took the place of others, and which are on other ranks now."""
        here = replaced_parameters.named([model])
        self._replaced.note({name: parameter for name, parameter in before.items() if name in here}, model)
        for name, parameter in before.items():
            if name not in here:
                self._gone[parameter] = True

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
        pipeline = self._pipelines.get(model)
        if pipeline is None or method != _TRAINING:
            return super().entry(model, method, precision, manual=manual)
        if manual:
            raise ValueError(
                "Expected automatic optimization in a pipeline, which differentiates on its own. Received: "
                "automatic_optimization=False. Leave it at True."
            )
        function = precision.entry(getattr(self.unwrap(model), method))
        recorder = Recorder(model)

        def through(batch: Any, *rest: Any) -> Any:
            return pipeline.run(function, batch, *rest, recorder=recorder)

        return self.inside(through)

    # A step

    def _reduce(self) -> None:
        for pipeline in list(self._pipelines.values()):
            pipeline.reduce()
        super()._reduce()

    def gradient_holders(self, models: Any) -> list[Any]:
        return sharding.holders([self.unwrap(model) for model in models])

    @property
    def _across(self) -> tuple[Any, ...]:
        world = self.pipeline_world
        return () if world.size == 1 else (getattr(world, "group", torch.distributed.group.WORLD),)

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return sharded_gradients.clip_norm(parameters, max_norm, norm_type, across=self._across)

    def before_evaluation(self, model: Any) -> None:
        """The buffers of the first replica count, as they do in a checkpoint."""
        for buffer in self.unwrap(model).buffers():
            self.loss_world.broadcast(buffer)

    # State

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns the weights of this rank's stages with `full=False`, else of all, on the first rank only."""
        state = self._parts(model)
        if not full:
            return state
        own = {name: whole(value) for name, value in state.items()}
        merged = {name: value for part in self.pipeline_world.gather_object(own) for name, value in part.items()}
        return merged if self.world.rank == 0 else {}

    def save_model(self, writer: Any, model: Any, **options: Any) -> None:
        """Writes whole weights, one after the other, each as the ranks of its stage have it."""
        own = self._parts(model)
        extra = {key: value for key, value in own.items() if is_extra(key, value)}
        extras = {key: value for part in self.pipeline_world.gather_object(extra) for key, value in part.items()}
        tensors, owners = self._everywhere({key: own[key] for key in own if key not in extra})

        def gather(tensor: Any) -> Any:
            owner = owners[id(tensor)]
            mine = owner == self.pipeline_world.rank
            value = whole(tensor) if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
            return self.pipeline_world.broadcast(value.contiguous(), src=owner)

        save_gathered(writer, tensors, gather, **options)
        if extras and writer.world.rank == 0:
            writer.state("model-extra", extras)

    def _everywhere(self, own: dict[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
        """The tensors of all stages by name, those of others on "meta", and by identity which rank of them has it."""
        unique, aliases = sharded.once(own)
        outlines = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in unique.items()}
        found: dict[str, Any] = {}
        owners: dict[int, int] = {}
        for rank, (shapes, tied) in enumerate(self.pipeline_world.gather_object((outlines, aliases))):
            mine = rank == self.pipeline_world.rank
            for name, (shape, dtype) in shapes.items():
                found[name] = unique[name] if mine else torch.empty(shape, dtype=dtype, device="meta")
                owners[id(found[name])] = rank
            found |= {name: found[first] for name, first in tied.items()}
        return found, owners

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads the weights of this rank's stages out of those of a whole model."""
        module = self.unwrap(model)
        own = self._parts(model)
        kept = {name: part_like(value, own[name]) for name, value in state.items() if name in own}
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


def _check(plugin: FullyShardedDataParallelPlugin) -> None:
    if plugin.full_state:
        raise ValueError(
            "Expected state_dict_type='SHARDED_STATE_DICT' in a pipeline, of which no rank has all. Received: "
            "'FULL_STATE_DICT'. Leave it out, and merge afterwards: drivetrain merge-weights."
        )
