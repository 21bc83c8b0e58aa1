"""DeepSpeed: its engine runs the model, shares out optimizer states, gradients and weights (ZeRO), and steps.

The engine accumulates, reduces and clips gradients itself, so what a loop does around it is translated: the end of a
window becomes the engine's boundary, clipping becomes the norm to which its next step clips, `optimizer.step()` its
step. What it cannot do is an error that names the alternative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from . import deepspeed_gradients as gradients
from . import deepspeed_state as states
from . import deepspeed_tensor as tensor
from . import environment
from .base import Settings, compile_model, is_scheduler
from .checkpoint.tensors import clean_keys
from .contents import fitted
from .deepspeed_config import HfDeepSpeedConfig, Said, of_batches, of_precision, settle
from .deepspeed_engine import DeepSpeedEngineWrapper, create_engine, package, samples_of, settled
from .deepspeed_optimizer import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper, EngineOptimizer
from .deepspeed_pairs import TOGETHER, is_of, paired
from .deepspeed_plugin import DeepSpeedPlugin, choose
from .deepspeed_precision import float16
from .deepspeed_ranks import DeepSpeedRanks, arranged
from .environment import Placement
from .gradients import GradientState
from .optimizer import AcceleratedOptimizer, unwrap_optimizer
from .precision import Precision, canonical_name
from .settings import DistributedType, GradientAccumulationPlugin, GradScalerKwargs
from .world import World

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

class DeepSpeedStrategy(DeepSpeedRanks):
    """Training by engines of DeepSpeed, one for each model that is prepared with an optimizer.

    Args:
        config: DeepSpeed's own configuration: a JSON file, a dict, or an HfDeepSpeedConfig.
        plugin: all options; single ones may be given by name instead (`zero_stage=3`).
        plugins: several of them by name, the first of which is in force (see `select`).
        parallelism: a ParallelismConfig: `tp_size` ranks share a layer (AutoTP), `sp_size` a sequence (Ulysses).
        process_group_backend, timeout, start_method: see ProcessGroupStrategy.

    Raises:
        ValueError: options contradict each other; the message shows all of them.
    """

    name = "deepspeed"

    def __init__(
        self,
        config: Any = None,
        *,
        plugin: DeepSpeedPlugin | None = None,
        plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        said = [name for name, value in options.items() if value != getattr(DeepSpeedPlugin, name, None)]
        said += [] if config is None else ["config"]
        if (plugin is not None or plugins is not None) and said:
            first = "plugins" if plugin is None else "plugin"
            raise ValueError(f"Expected DeepSpeed's options once. Received: {first} and {sorted(said)}. Give one.")
        if plugin is None and plugins is None:
            plugin = DeepSpeedPlugin(hf_ds_config=config, **options)
        self.plugins: dict[str, Any] = {"default": plugin} if plugins is None else dict(plugins)
        self.parallelism = arranged(parallelism, [one.hf_ds_config for one in self.plugins.values()])
        self.select(next(iter(self.plugins)))
        self.word: str | None = None  # the precision's name
        self._engines: list[DeepSpeedEngineWrapper] = []
        self._parts: dict[int, tuple[Any, Any]] = {}  # the optimizer and scheduler of a model that is being prepared
        self._samples: int | None = None

    # Several sets of options

    def select(self, name: str) -> None:
        """Puts the options of this name in force, for models that are prepared from now on."""
        self.plugin = self.options(name)
        choose(self.plugins.values(), self.plugin)

    def options(self, name: str) -> DeepSpeedPlugin:
        """Returns the options of this name; ValueError, which lists the names, where there are none."""
        if name not in self.plugins:
            raise ValueError(
                f"Expected one of the plugins {', '.join(self.plugins)}. Received: {name!r}. Name one of these."
            )
        return self.plugins[name]

    @property
    def equal_forwards(self) -> bool:  # type: ignore[override]
        """ZeRO-3 gathers weights in every forward, which needs all ranks."""
        return any(plugin.zero_stage == 3 for plugin in self.plugins.values())

    @property
    def inference_mode(self) -> bool:  # type: ignore[override]
        """ZeRO-3 keeps small weights whole from one forward to the next, and could not train those of an evaluation."""
        return not self.equal_forwards

    # Environment

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        if GradScalerKwargs in settings:
            raise ValueError(
                "Expected the options of loss scaling in DeepSpeed's configuration. Received: GradScalerKwargs. Write "
                '"fp16": {"initial_scale_power": …, "loss_scale_window": …} there.'
            )
        if device.type == "mps":
            raise ValueError("Expected an accelerator or the CPU for DeepSpeed. Received: mps. Use strategy='single'.")
        package(device)
        return super()._create_world(placement, device, settings)

    def release(self) -> None:
        """Takes the engines off their modules, which can then be prepared again."""
        for wrapper in self._engines:
            wrapper.release()
        self._engines.clear()

    def teardown(self) -> None:
        self.release()
        super().teardown()

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.DEEPSPEED

    def precision(self, name: Any, *, autocast: Any = None, scaler: Any = None, **options: Any) -> Precision:
        """Returns the precision of a word, else of the configuration; the engine scales losses itself.

        Raises:
            ValueError: the configuration says another one, or the device or DeepSpeed cannot compute in it.
        """
        word = self._word(name)
        if word == "64-true":
            raise ValueError("Expected 32 or 16 bits for DeepSpeed. Received: precision='64-true'. Use strategy='ddp'.")
        if word.startswith("16") and not self._computes("fp16"):
            raise ValueError(
                f"Expected a device on which DeepSpeed computes in fp16. Received: precision={word!r}, "
                f"device={str(self.device)!r}: Type fp16 is not supported on your device. Use 'bf16-mixed'."
            )
        if word.startswith("16") and not all(plugin.zero_stage for plugin in self.plugins.values()):
            raise ValueError(
                f"Expected a stage of ZeRO from 1 on for precision={word!r}, as DeepSpeed divides gradients by a scale "
                "without it that losses do not have. Received: zero_stage=0. Use zero_stage=1, or 'bf16-mixed'."
            )
        self.word = word
        for plugin in self.plugins.values():
            plugin.precision_word = word
            plugin.set_deepspeed_weakref()
        if word.startswith("16"):
            return float16(word, self.device, autocast, self._engines)
        return super().precision(word, autocast=autocast, **options)

    def _word(self, name: Any) -> str:
        """The precision's name, which a configuration may say instead of the script."""
        config = self.plugin.hf_ds_config
        kinds = [kind for kind in ("fp16", "bf16") if config.get_value(f"{kind}.enabled") is True]
        if name is None and kinds:
            return canonical_name(kinds[0])
        word = canonical_name(name)
        if name is not None:
            settle(HfDeepSpeedConfig(config), of_precision(word, f"precision={word!r}"), complete=False)
        return word

    def _computes(self, kind: str) -> bool:
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        return bool(getattr(accelerator, f"is_{kind}_supported")())

    def windows(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """The configuration may say how many micro-batches make a window."""
        steps = self.plugin.get_value("gradient_accumulation_steps")
        if not isinstance(steps, int) or steps == (plugin.num_steps or 1):
            return plugin
        if plugin.num_steps not in (None, 1):
            source = self.plugin.hf_ds_config.source
            raise ValueError(
                f"Expected one number of accumulated micro-batches. Received: {steps} in {source}, "
                f"{plugin.num_steps} in the Accelerator. Set it in one place."
            )
        return dataclasses.replace(plugin, num_steps=steps)

    # Preparing

    def init_context(self) -> Any:
        """Under ZeRO-3 new modules are partitioned as they are made."""
        if self.plugin.zero_stage != 3 or self.plugin.refuses_init:
            return super().init_context()
        zero = package(self.device).zero
        with environment.exported(environment.child_environment({"LOCAL_RANK": str(self.world.local_rank)})):
            return zero.Init(config_dict_or_path=self.plugin.ready_config().config)

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Prepares loaders, then each model with the optimizer that holds its parameters, and its scheduler."""
        models = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
        optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        schedulers = [obj for obj in objects if is_scheduler(obj)]
        known = {id(obj) for obj in [*models, *optimizers, *schedulers]}
        prepared = {id(obj): one(obj) for obj in objects if id(obj) not in known}
        loaders = [made for made in prepared.values() if hasattr(made, "total_batch_size")]
        self._samples = samples_of(loaders, self.data_world.size, smallest=self.plugin.is_train_batch_min)
        pairs = {id(optimizer): paired(optimizer, models) for optimizer in optimizers}
        if len(set(map(id, pairs.values()))) < len(pairs):
            raise ValueError(
                f"Expected one optimizer for a model. Received: {len(optimizers)} optimizers for {len(models)} models. "
                "Give one optimizer several parameter groups, or use strategy='ddp'."
            )
        for obj in [*optimizers, *schedulers]:
            prepared[id(obj)] = one(obj)
        for optimizer in optimizers:
            own = [scheduler for scheduler in schedulers if is_of(scheduler, optimizer, len(optimizers))]
            self._parts[id(pairs[id(optimizer)])] = prepared[id(optimizer)], prepared[id(own[0])] if own else None
        for model in models:
            prepared[id(model)] = one(model)
        self._parts.clear()
        return [prepared[id(obj)] for obj in objects]

    def prepare_model(
        self, model: torch.nn.Module, precision: Precision, *, evaluation: bool = False, dynamo: Any = None,
        place: bool = True,
    ) -> torch.nn.Module:  # fmt: skip
        """Returns the engine of a model, or without an optimizer the model itself, which then only evaluates."""
        if self.sequences is not None:
            self.sequences.look_at(model)
        optimizer, scheduler = self._parts.get(id(model), (None, None))
        if optimizer is None and self.plugin.zero_stage != 3:
            return super().prepare_model(model, precision, place=place, evaluation=True, dynamo=dynamo)
        if not states.partitioned(model):
            model = precision.prepare_model(model, evaluation=evaluation)
        self.plugin.set_moe_leaf_modules(model)
        if self.parallelism is not None:
            tensor.share(model, self.model_world)
        wrapper = DeepSpeedEngineWrapper(self._create(model, optimizer, scheduler))
        tensor.check(wrapper.engine.module)
        wrapper.config = self.plugin.hf_ds_config
        self._engines.append(wrapper)
        if optimizer is not None:
            optimizer.drop = wrapper.forget
        if isinstance(scheduler, DeepSpeedSchedulerWrapper) and scheduler.by_engine:
            scheduler.scheduler = wrapper.engine.lr_scheduler
        if dynamo is not None and dynamo.active:
            compile_model(model, dynamo)
        engine: torch.nn.Module = wrapper.engine
        return engine

    def _create(self, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> Any:
        config = HfDeepSpeedConfig(self.plugin.hf_ds_config)
        inner: Any = None if optimizer is None else unwrap_optimizer(optimizer)
        dummy = scheduler.scheduler if scheduler is not None and scheduler.by_engine else None
        if optimizer is None:
            for part in ("optimizer", "scheduler"):
                config.del_config_sub_tree(part)
        settled(
            config, model, optimizer=None if inner is None else inner.given, scheduler=dummy,
            samples=self._samples, micro_batches=GradientState().num_steps, ranks=self.data_world.size,
            processes=self.world.size, precision=self.word or "32-true", spread=scheduler.spread if dummy else 1,
        )  # fmt: skip
        return create_engine(model, config, optimizer=inner, scheduler=dummy, world=self.world)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True
    ) -> AcceleratedOptimizer:
        return DeepSpeedOptimizerWrapper(optimizer, step=functools.partial(self.step, precision=precision))

    def prepare_scheduler(
        self, scheduler: Any, optimizers: list[Any], *, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> DeepSpeedSchedulerWrapper:
        own = [one for one in optimizers if is_of(scheduler, one, len(optimizers))]
        made = DeepSpeedSchedulerWrapper(scheduler, own or optimizers, step_with_optimizer, split_batches)
        made.spread = self.world.size if step_with_optimizer and not split_batches else 1
        return made

    def unwrap(self, model: Any, *, keep_compiled: bool = False) -> torch.nn.Module:
        wrapper = self._of_model(model)
        return super().unwrap(model if wrapper is None else wrapper.engine.module, keep_compiled=keep_compiled)

    # A step

    @contextmanager
    def no_sync(self, model: Any) -> Any:
        wrapper = self._of_model(model)
        held = self._engines if wrapper is None else [wrapper]
        for one in held:
            one.held += 1
        try:
            yield
        finally:
            for one in held:
                one.held -= 1

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        """Differentiates by the engine; `model=` says by which one, where several are trained."""
        wrapper = self._of_loss(kwargs.pop("model", None))
        if not loss.requires_grad or loss.numel() != 1:
            return super().backward(loss, Precision())  # which says what is wrong with it
        others = sorted(set(kwargs) - {"via", "retain_graph"})
        if others:
            raise ValueError(
                f"Expected retain_graph, via or model for DeepSpeed's backward. Received: {', '.join(others)}. Leave "
                "them out, or use strategy='ddp'."
            )
        if not wrapper.told_batch:
            self._check_batch(wrapper)
        with self._attention():  # activations that are computed again need it, too
            wrapper.backward(loss, GradientState().sync_gradients and not wrapper.held, **kwargs)

    def _check_batch(self, wrapper: DeepSpeedEngineWrapper) -> None:
        """What is known only when training begins: the loader that is trained on, and a callback's micro-batches."""
        wrapper.told_batch = True
        loader, engine, steps = GradientState().active_dataloader, wrapper.engine, GradientState().num_steps
        samples = None if loader is None else samples_of([loader], self.data_world.size, smallest=True)
        samples = None if self._samples is not None else samples
        who = f"the script (gradient_accumulation_steps={steps})"
        said = [Said("gradient_accumulation_steps", steps, who), *of_batches(samples, steps, self.data_world.size)]
        settle(HfDeepSpeedConfig(wrapper.config), said, complete=False)
        if samples is not None and samples != engine.train_micro_batch_size_per_gpu():
            engine.set_train_micro_batch_size(samples)

    def step(
        self, optimizer: Any, closure: Callable | None = None, *, precision: Precision
    ) -> tuple[bool, Any]:
        """Steps an engine; a closure is called once before."""
        wrapper = self._of_engine(optimizer.engine)
        result = None if closure is None else closure()
        skipped = wrapper.step()
        precision.skipped_steps += skipped
        return skipped, result

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Lets the engine's next step clip to a norm; returns the norm before."""
        if norm_type != 2:
            raise ValueError(f"Expected norm_type=2, by which DeepSpeed clips. Received: {norm_type}. Leave it out.")
        return self._of_parameters(list(parameters)).clip(max_norm)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        wrapper = self._of_parameters(list(parameters))
        if wrapper.engine.zero_optimization_stage() or wrapper.engine.bfloat16_enabled():
            raise ValueError(
                "Expected clipping by norm: DeepSpeed shares gradients out, and clips them itself. Received: clipping "
                "by value. Use clip_grad_norm_, gradient_clip_algorithm='norm', or strategy='ddp'."
            )
        super().clip_value(wrapper.engine.module.parameters(), clip_value)

    def gradient_holders(self, models: Any) -> list[Any]:
        """Where the engines keep what a window has so far."""
        wrappers = [found for found in map(self._of_model, models) if found is not None]
        return [holder for wrapper in wrappers for holder in gradients.holders(wrapper.engine)]

    def drop_gradients(self, models: Any) -> None:
        for wrapper in map(self._of_model, models):
            if wrapper is not None:
                gradients.forget(wrapper.engine)

    # State

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns the whole weights in the model's own precision, gathered under ZeRO-3.

        Raises:
            ValueError: the options refuse to gather the model.
        """
        wrapper = self._of_model(model)
        if wrapper is not None and wrapper.config.is_zero3() and wrapper.config.is_false(_GATHER):
            raise ValueError(
                f"Expected {_GATHER} to save a whole model under ZeRO-3. Received: False. Set it, or "
                "zero3_save_16bit_model=True."
            )
        return self._weights(model)

    def weights(self, model: Any) -> dict[str, Any]:
        """The float32 weights that the engine trains, on the first process."""
        return self._weights(model, master=True, keep=self.world.rank == 0)

    def _weights(self, model: Any, **options: bool) -> dict[str, Any]:
        module, wrapper = self.unwrap(model), self._of_model(model)
        engine = None if wrapper is None else wrapper.engine
        return clean_keys(states.weights(module, engine=engine, **options), module)

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        module, wrapper = self.unwrap(model), self._of_model(model)
        engine = None if wrapper is None else wrapper.engine
        return states.load_weights(module, fitted(state, module), engine=engine, strict=strict)

    def save(self, writer: Any, contents: Any, **options: Any) -> None:
        inner = [] if options.get("weights_only") else self._inner(contents)
        with states.Gathered(inner, keep=self.world.rank == 0):
            super().save(writer, contents, **options)

    def load(self, checkpoint: Any, contents: Any, **options: Any) -> dict[str, Any]:
        inner = [] if options.get("weights_only") else self._inner(contents)
        with states.Gathered(inner, keep=True, states=False):
            return super().load(checkpoint, contents, **options)

    def save_native(self, model: Any, directory: str, **options: Any) -> None:
        """Writes DeepSpeed's own checkpoint of an engine (pickles): only where it is asked for by this name."""
        self._of_loss(model).engine.save_checkpoint(directory, **options)

    def load_native(self, model: Any, directory: str, **options: Any) -> Any:
        """Reads DeepSpeed's own checkpoint, which runs what its pickles say: only for files that you trust."""
        return self._of_loss(model).engine.load_checkpoint(directory, **options)

    # Which engine

    def _inner(self, contents: Any) -> list[EngineOptimizer]:
        found = [unwrap_optimizer(optimizer) for optimizer in contents.optimizers]
        return [one for one in found if isinstance(one, EngineOptimizer) and one.engine is not None]

    def _of_model(self, model: Any) -> DeepSpeedEngineWrapper | None:
        model = getattr(model, "_orig_mod", model)
        return next((one for one in self._engines if model is one.engine or model is one.engine.module), None)

    def _of_engine(self, engine: Any) -> DeepSpeedEngineWrapper:
        found = next((one for one in self._engines if one.engine is engine), None)
        if found is None:
            raise ValueError(TOGETHER.format(received="an optimizer without its model"))
        return found

    def _of_loss(self, model: Any) -> DeepSpeedEngineWrapper:
        training = [one for one in self._engines if one.trains]
        found = self._of_model(model) if model is not None else training[0] if len(training) == 1 else None
        if found is not None and found.trains:
            return found
        if not training:
            raise ValueError(TOGETHER.format(received="a model without its optimizer"))
        raise ValueError(
            f"Expected the engine that computed the loss. Received: {len(training)} that train. Pass "
            "accelerator.backward(loss, model=model)."
        )

    def _of_parameters(self, parameters: list[Any]) -> DeepSpeedEngineWrapper:
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        found = next((one for one in self._engines if one.trained == given), None)
        if found is None:
            raise ValueError(
                "Expected all trained parameters of one prepared model, whose norm DeepSpeed clips. Received: "
                f"{len(given)} others. Pass model.parameters(), or use strategy='ddp' to clip apart."
            )
        return found
