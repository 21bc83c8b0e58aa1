"""Megatron: models of megatron-core, whose layers, stages, sequences and experts are shared out over the ranks.

Files and what they know:

    megatron_plugin     the options: MegatronLMPlugin
    megatron_models, …  architectures: what a rank's chunk of a GPT, BERT or T5 is made of
    megatron_model      MegatronModel: what a user's module holds (`chunks`, `config`, `architecture`)
    megatron_engine     Engine: one model on this rank: its chunks in Megatron's DDP, its schedule, its optimizer
    megatron_optimizer  from torch's optimizer to Megatron's; what the script holds of it
    megatron_state      weights and optimizer states in our checkpoints
    megatron_loop       Accelerate's MegatronEngine, its train steps and stand-ins

For the state: `strategy.engine_of(model)` is the Engine of a prepared model (a TrainModule, a MegatronModel or a
MegatronEngine), else None. It has `model` (the MegatronModel), `model.chunks` (plain chunks: `sharded_state_dict`),
`chunks` (the same in DDP), `config` (TransformerConfig), `optimizer` (what get_megatron_optimizer gave, else None) and
`given` (the user's torch optimizer, whose groups have the live options). `strategy.pipeline_world` are the stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch

from . import megatron_groups as groups
from . import megatron_data, megatron_model, megatron_optimizer, megatron_scheduler
from .base import Settings, is_scheduler
from .environment import Placement
from .gradients import GradientState
from .megatron_config import Fields, data_parallel, engine_fields
from .megatron_engine import Engine
from .megatron_loop import MegatronEngine, loop_model
from .megatron_model import MegatronModel
from .megatron_optimizer import MegatronLMOptimizerWrapper, Stepper
from .megatron_plugin import MegatronLMPlugin
from .megatron_precision import MegatronPrecision
from .megatron_saving import MegatronState
from .megatron_scheduler import MegatronLMDummyScheduler, MegatronLMSchedulerWrapper
from .megatron_state_parts import locals_of
from .optimizer import AcceleratedOptimizer, unwrap_optimizer
from .pipelined import Recorder
from .precision import Precision
from .scheduler import AcceleratedScheduler
from .settings import AutocastKwargs, DistributedType, GradScalerKwargs, TorchDynamoPlugin
from .world import World

_TRAINING = "training_step"


class MegatronStrategy(MegatronState):
    """Training by megatron-core: its groups, its DDP, its schedules, its optimizers.

    Args:
        plugin: all options; single ones may be given by name instead (`tp_degree=2`). Without a plugin nothing is
            clipped unless `gradient_clipping` is given.
        parallelism: refused: Megatron's options say how ranks are arranged.
        process_group_backend, timeout, start_method: see ProcessGroupStrategy.
        options: those of MegatronLMPlugin.

    Raises:
        ValueError: options contradict each other.
    """

    name = "megatron"
    inference_mode = False  # buffers that an evaluation makes are used in training again

    def __init__(
        self,
        plugin: MegatronLMPlugin | None = None,
        *,
        parallelism: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        if plugin is not None and options:
            raise ValueError(f"Expected Megatron's options once. Received: plugin and {sorted(options)}. Give one.")
        groups.refuse_parallelism(parallelism)
        self.plugin: MegatronLMPlugin = plugin or _unclipped(**options)
        self.fields = Fields(self.plugin.other_megatron_args or {})
        self.ranks = groups.Ranks()
        self.precision_in_use = MegatronPrecision(None)
        self._engines: list[Engine] = []
        self._steppers: list[Stepper] = []
        self._loops: list[MegatronEngine] = []
        self._samples: int | None = None  # of a step over all ranks, where a loader says it
        self._syncing = True
        self._seeded: int | None = None

    # Environment

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        groups.check(device, self.plugin, placement.size)
        world = super()._create_world(placement, device, settings)
        self.ranks = groups.create(world, self.plugin, self.timeout)
        megatron_model.set_builder(self._chunks)
        return world

    @property
    def data_world(self) -> World:
        return self.ranks.data

    @property
    def loss_world(self) -> World:
        return self.ranks.loss

    @property
    def pipeline_world(self) -> World:
        """The ranks with the stages of one replica."""
        return self.ranks.pipeline

    def rank_in(self, dimension: str) -> int:
        return groups.rank_in(dimension)

    @property
    def equal_forwards(self) -> bool:  # type: ignore[override]
        """Experts that ranks with other data share need all of them in every forward."""
        return (self.plugin.expert_model_parallel_size or 1) > 1

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.MEGATRON_LM

    def release(self) -> None:
        """Lets go of the engines; their models can be prepared again."""
        self._engines.clear()
        self._steppers.clear()
        self._loops.clear()
        self.precision_in_use.release()

    def teardown(self) -> None:
        self.release()
        megatron_model.set_builder(None)
        groups.destroy()
        super().teardown()

    def precision(
        self,
        name: str | int | None,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        **options: Any,
    ) -> Precision:
        """Returns the precision of a word, as Megatron computes it.

        Raises:
            ValueError: it does not, or options of autocast are given, which it does without.
        """
        if autocast is not None:
            raise ValueError(
                "Expected no options of autocast: Megatron's weights are in 16 bits themselves. Received: "
                "AutocastKwargs. Leave them out."
            )
        self.precision_in_use = MegatronPrecision(name, scaler)
        return self.precision_in_use

    # Preparing

    def _chunks(self, model: MegatronModel) -> tuple[Any, list[torch.nn.Module]]:
        """Makes this rank's chunks of a model."""
        self._seeded = groups.seed(self._seeded)
        architecture, fields = engine_fields(model.architecture, self.plugin, self.precision_in_use.dtype)
        model.architecture = architecture
        config = architecture.config(**{**fields, **self.fields.model})
        chunks = []
        for pre, post, stage in groups.stages(config):
            chunk = architecture.build(config, pre_process=pre, post_process=post, vp_stage=stage)
            chunks.append(chunk.to(self.device))
        return config, chunks

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Models first, whose chunks the optimizers then follow; schedulers last."""
        objects = megatron_data.replaced(objects, self.plugin, self.data_world.size)
        done = {id(obj): one(obj) for obj in objects if isinstance(obj, torch.nn.Module)}
        loaders = {id(obj): one(obj) for obj in objects if isinstance(obj, torch.utils.data.DataLoader)}
        self._note_samples(list(loaders.values()))
        done |= loaders
        done |= {id(obj): one(obj) for obj in objects if id(obj) not in done and not is_scheduler(obj)}
        return [done[id(obj)] if id(obj) in done else one(obj) for obj in objects]

    def _note_samples(self, loaders: list[Any]) -> None:
        """Tells the options how many samples a step has, where loaders say it."""
        sizes = [size for loader in loaders if (size := getattr(loader, "total_batch_size", None))]
        if sizes:
            self._samples = (min if self.plugin.is_train_batch_min else max)(sizes)
            ranks, parts = self.data_world.size, self.plugin.num_micro_batches or 1
            self.plugin.set_training_args(self._samples // (ranks * parts), ranks)

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        *,
        place: bool = True,
        evaluation: bool = False,
        dynamo: TorchDynamoPlugin | None = None,
    ) -> torch.nn.Module:
        """Puts Megatron's DDP around the chunks of a model; the same object comes back.

        Raises:
            ValueError: the module has no MegatronModel, or parameters beside it.
        """
        if self.engine_of(model) is not None:
            return model
        model = loop_model(self, model)
        if isinstance(model, MegatronEngine):
            self._loops.append(model)
        found = _model_of(model)
        found.build()
        locals_of(found.chunks)  # refuses layers that no checkpoint could hold, before hours of training
        trains = not evaluation and any(parameter.requires_grad for parameter in found.parameters())
        chunks = data_parallel(list(found.chunks), found.config, self.plugin, self.fields, trains=trains)
        engine = Engine(
            found, chunks, pipeline=self.pipeline_world, micro_batches=self.plugin.num_micro_batches or 1, trains=trains
        )
        self._engines.append(engine)
        if dynamo is not None and dynamo.active:
            raise ValueError("Expected no compilation under Megatron. Received: a dynamo backend. Leave it out.")
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True
    ) -> AcceleratedOptimizer:
        """Returns the optimizer, which Megatron's steps in its place.

        Raises:
            ValueError: it has no model that trains, or is of a kind that Megatron does not have.
        """
        engine = self._without_optimizer()
        made = megatron_optimizer.create(
            engine, optimizer, self.plugin, word=self.precision_in_use.name, scale=self.precision_in_use.loss_scale,
            extra=self.fields.optimizer,
        )  # fmt: skip
        engine.optimizer, engine.given = made, optimizer
        engine.config.grad_scale_func = made.scale_loss if self.precision_in_use.skips_steps else None
        self._steppers.append(Stepper(engine, made, optimizer, self.plugin))
        self.precision_in_use.optimizers.append(made)
        wrapper = MegatronLMOptimizerWrapper(optimizer, step=functools.partial(self.step, precision=precision))
        wrapper.drop = engine.forget
        wrapper.read, wrapper.write = self.access(engine)
        return wrapper

    def prepare_scheduler(
        self, scheduler: Any, optimizers: list[Any], *, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> AcceleratedScheduler:
        if not isinstance(scheduler, MegatronLMDummyScheduler):
            return super().prepare_scheduler(
                scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=split_batches
            )
        made, increment = megatron_scheduler.create(scheduler, self.plugin, self._samples)
        own = [one for one in optimizers if unwrap_optimizer(one) is unwrap_optimizer(scheduler.optimizer)]
        wrapper = MegatronLMSchedulerWrapper(made, own or optimizers, step_with_optimizer, split_batches)
        wrapper.increment = increment
        for loop in self._loops:
            loop.scheduler, wrapper.by_engine = wrapper, True
        return wrapper

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        """Training goes through Megatron's schedule; other methods run on every rank, and their calls of the model do.

        Raises:
            ValueError: the method calls `backward` itself.
        """
        function = super().entry(model, method, precision, manual=manual)
        engine = self.engine_of(model)
        if engine is None or method != _TRAINING:
            return function
        if manual:
            raise ValueError(
                "Expected automatic optimization under Megatron, whose schedule differentiates. Received: "
                "automatic_optimization=False. Leave it at True."
            )
        recorder = Recorder(self.unwrap(model))

        def through(batch: Any, *rest: Any) -> Any:
            return engine.run(function, batch, *rest, recorder=recorder)

        return through

    # A step

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        """Scales the gradients of the step that gave this loss, and reduces them at the end of a window.

        Raises:
            ValueError: no training step of Megatron gave the loss.
        """
        engine = next((one for one in self._engines if one.pending is not None), None)
        if engine is None and self._loops:
            return  # a MegatronEngine has done everything
        if engine is None:
            raise ValueError(
                "Expected the loss of a training step through Megatron's schedule. Received: another one. Train with "
                "Trainer, or call what accelerator.entry(model, 'training_step') returns."
            )
        if loss is engine.pending and not kwargs:
            engine.settle(None)
        else:
            super().backward(loss, Precision(), **kwargs)
        if self._syncing and GradientState().sync_gradients:
            engine.finish()

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any] | None = None, *, precision: Precision
    ) -> tuple[bool, Any]:
        if closure is not None:
            raise ValueError("Expected no closure under Megatron. Received: one. Use an optimizer that needs none.")
        skipped = self._stepper(lambda one: one.given is optimizer).step()
        precision.skipped_steps += skipped
        return skipped, None

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks by their norm, as Megatron's optimizer does; returns the norm before."""
        if norm_type != 2:
            raise ValueError(f"Expected norm_type=2, by which Megatron clips. Received: {norm_type}. Leave it out.")
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}

        def whole(stepper: Stepper) -> bool:
            return given == {id(one) for one in stepper.engine.model.parameters() if one.requires_grad}

        return self._stepper(whole).clip(max_norm).to(self.device)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        raise ValueError(
            "Expected clipping by norm, as Megatron's optimizers do. Received: clipping by value. Use clip_grad_norm_, "
            "or gradient_clip_algorithm='norm'."
        )

    def gradient_holders(self, models: Iterable[Any]) -> list[Any]:
        """Where the engines keep what a window has so far."""
        engines = [found for found in map(self.engine_of, models) if found is not None]
        return [holder for engine in engines for holder in engine.holders()]

    def drop_gradients(self, models: Iterable[Any]) -> None:
        for engine in map(self.engine_of, models):
            if engine is not None:
                engine.forget()

    def join(self, joinables: list[Any], **options: Any) -> Any:
        raise NotImplementedError(
            "Expected equally many batches on all ranks under Megatron. Received: join_uneven_inputs. Leave it out, "
            "and even_batches as it is (True)."
        )

    # Which engine

    def stepper_of(self, engine: Engine) -> Stepper:
        """Returns what steps the optimizer of an engine.

        Raises:
            ValueError: it has none.
        """
        return self._stepper(lambda one: one.engine is engine)

    def engine_of(self, model: Any) -> Engine | None:
        """Returns the engine of a prepared model, or None."""
        found = megatron_model.find(model) if isinstance(model, torch.nn.Module) else None
        return next((one for one in self._engines if one.model is found), None)

    def _without_optimizer(self) -> Engine:
        found = [one for one in self._engines if one.trains and one.optimizer is None]
        if len(found) != 1:
            raise ValueError(
                f"Expected a model and its optimizer in one prepare(). Received: an optimizer for {len(found)} models. "
                "Prepare each pair together."
            )
        return found[0]

    def _stepper(self, fits: Callable[[Stepper], bool]) -> Stepper:
        found = next(filter(fits, self._steppers), None)
        if found is None:
            raise ValueError(
                "Expected a prepared optimizer, and all trained parameters of its model. Received: others. Pass "
                "model.parameters(), and prepare model and optimizer together."
            )
        return found


def _unclipped(**options: Any) -> MegatronLMPlugin:
    """The options of a run that is not told by Accelerate's names: clipping is the script's."""
    plugin = MegatronLMPlugin(**options)
    if not plugin.clips:
        plugin.gradient_clipping = 0.0
    return plugin


def _model_of(module: torch.nn.Module) -> MegatronModel:
    found = megatron_model.find(module)
    if found is None:
        raise ValueError(
            f"Expected a module with a MegatronModel. Received: {type(module).__name__} without one. Make one in "
            "configure_model, or use strategy='fsdp' for other models."
        )
    own = {id(parameter) for parameter in found.parameters()}
    beside = [name for name, parameter in module.named_parameters() if id(parameter) not in own]
    if beside:
        raise ValueError(
            f"Expected all parameters in Megatron's model. Received: {', '.join(beside[:5])} beside it. Move them into "
            "its architecture."
        )
    return found
