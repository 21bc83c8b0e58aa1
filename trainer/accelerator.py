"""The Accelerator: one object between a hand-written training loop and the engine that runs it.

It is composed of a Strategy (what the engine does), a World (which processes there are), a Precision, a GradientState
(where in an accumulation window the loop is), the contents of a checkpoint and trackers, and forwards to them. Names,
arguments and defaults are those of Accelerate 1.15; `strategy`, `device`, `seed` and the few methods marked so are
drivetrain's.

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import gc
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, overload

import torch
from torch.utils.hooks import RemovableHandle

from .. import strategies
from ..callbacks.tracking import trackers
from ..callbacks.tracking.base import filter_trackers
from ..strategies import collectives, environment, random, torch_files, weights
from ..strategies.accumulation import Accumulation, Window
from ..strategies.base import Strategy, is_scheduler
from ..strategies.checkpoint.format import Writer
from ..strategies.checkpoint.snapshot import LARGE, Saves
from ..strategies.contents import Contents
from ..strategies.contexts import NOTHING
from ..strategies.data.loader import skip_first_batches
from ..strategies.gradients import GradientState
from ..strategies.optimizer import unwrap_optimizer
from ..strategies.precision import Precision
from ..strategies.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    check_num_steps,
)
from ..strategies.state import AcceleratorState
from ..strategies.world import World
from ..strategies.wrappers import extract_model_from_parallel
from . import checkpoint_folders, resolution
from .expected import check, check_optional, parameter_list
from .standing import Standing

logger = logging.getLogger(__name__)

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
T6 = TypeVar("T6")


class Accelerator(Standing):
    """Runs the distributed and mixed-precision side of a training loop that the user writes.

    Args:
        device_placement: models, optimizer state and batches are moved to this process's device.
        split_batches: a loader's batch size is the global one, divided among the processes.
        mixed_precision: "no", "fp16", "bf16", "fp8" (torchao), or the Trainer's words: "32-true", "bf16-mixed",
            "16-mixed", "fp8-mixed", "bf16-true", "16-true", "64-true".
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: use the CPU though there is an accelerator.
        dataloader_config: how prepared loaders share data.
        rng_types: checked; order and augmentation are functions of seed and epoch here, the same on all processes.
        log_with: trackers by name ("all" for every one installed), or tracker objects.
        project_dir: where checkpoints and logs lie; `project_config` says more.
        gradient_accumulation_plugin: how gradients are accumulated, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: schedulers step as their optimizers do (see AcceleratedScheduler); False: exactly
            when called.
        kwargs_handlers: option objects, one of a type (AutocastKwargs, DistributedDataParallelKwargs, …).
        dynamo_backend: compiles prepared models; `dynamo_plugin` says more.
        strategy: drivetrain's: an engine by name or as an object; None for one device, or DDP under a launcher.
        deepspeed: drivetrain's: DeepSpeed by its JSON file or a dict of it; or a DeepSpeedPlugin.
        device: drivetrain's: this process's device, e.g. "cpu" or "cuda:1".
        seed: drivetrain's: seeds torch, numpy and random, and fixes the order of samples.
        fp16: the older way to say mixed_precision="fp16".

    Raises:
        ValueError: values that contradict each other or do not exist; the message shows them.
        NotImplementedError: a plugin of an engine that is not part of this version.
    """

    _accumulation: Accumulation

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        strategy: str | Strategy | None = None,
        deepspeed: Any = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        fp16: bool | None = None,
    ) -> None:
        check(device_placement=device_placement, cpu=cpu, step_scheduler_with_optimizer=step_scheduler_with_optimizer)
        check_optional(
            split_batches=split_batches, dataloader_config=dataloader_config, project_dir=project_dir,
            project_config=project_config, gradient_accumulation_plugin=gradient_accumulation_plugin,
            kwargs_handlers=kwargs_handlers, dynamo_plugin=dynamo_plugin, rng_types=rng_types, device=device,
        )  # fmt: skip
        deepspeed_plugin = resolution.deepspeed_options(
            deepspeed, {"deepspeed_plugin": deepspeed_plugin, "deepspeed_plugins": deepspeed_plugins},
            gradient_accumulation_steps=None if gradient_accumulation_steps == 1 else gradient_accumulation_steps,
            mixed_precision=mixed_precision,
        )  # fmt: skip
        engine_plugins = resolution.engine_plugins(
            deepspeed_plugin=deepspeed_plugin, deepspeed_plugins=deepspeed_plugins, fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin,
        )  # fmt: skip
        if fp16:
            mixed_precision = resolution.one_value("precision", {"mixed_precision": mixed_precision, "fp16": "fp16"})
        plugin = resolution.accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.dynamo_plugin = resolution.compilation_plugin(dynamo_backend, dynamo_plugin)
        self.dataloader_config = resolution.loader_configuration(dataloader_config, split_batches)
        self.project_configuration = resolution.project_configuration(project_config, project_dir)
        self.profile_handler: ProfileKwargs | None = None
        engine = strategies.create(
            strategy, size=environment.detect().size, plugins=engine_plugins, parallelism=parallelism_config
        )
        self.strategy, self.precision = self._set_up(engine, device, cpu, mixed_precision, kwargs_handlers)
        self.world: World = self.strategy.world
        self.gradient_state = GradientState(self.strategy.windows(plugin))
        self.state = AcceleratorState(
            self.precision.mixed_precision, dynamo_plugin=self.dynamo_plugin, **resolution.slots(self.strategy)
        )
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = resolution.rng_types(rng_types)
        self.log_with = filter_trackers(log_with, "")  # unknown words and missing packages are told now
        self._seed = seed
        if seed is not None:
            random.set_seed(seed)
        self._begin()

    def _begin(self) -> None:
        """Sets up what is empty at first."""
        self.trackers: list[Any] = []
        self.grad_norm: torch.Tensor | None = None
        self._contents = Contents()
        self.saves = Saves(self.world)
        self._begin_windows()
        self._triggered = False
        self._save_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def _set_up(
        self,
        engine: Strategy,
        device: Any,
        cpu: bool,
        mixed_precision: Any,
        kwargs_handlers: list[KwargsHandler] | None,
    ) -> tuple[Strategy, Precision]:
        handlers = resolution.handlers_by_type(kwargs_handlers)
        self.profile_handler = handlers.get(ProfileKwargs)
        cpu = cpu or environment.flag("USE_CPU")
        device = device if cpu or device is not None else environment.text("TORCH_DEVICE")
        engine.setup(environment.detect(), device=device, cpu=cpu, settings=handlers)
        AcceleratorState.establish(engine)
        word = resolution.precision_name(mixed_precision)
        precision = engine.precision(
            word, autocast=handlers.get(AutocastKwargs), scaler=handlers.get(GradScalerKwargs),
            **resolution.fp8_options(word, handlers),
        )  # fmt: skip
        return engine, precision

    # Preparing

    @overload
    def prepare(self, a: T1, /, *, device_placement: list[bool] | None = None) -> T1: ...
    @overload
    def prepare(self, a: T1, b: T2, /, *, device_placement: list[bool] | None = None) -> tuple[T1, T2]: ...
    @overload
    def prepare(self, a: T1, b: T2, c: T3, /, *, device_placement: list[bool] | None = None) -> tuple[T1, T2, T3]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, d: T4, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3, T4]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, d: T4, e: T5, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3, T4, T5]: ...
    @overload
    def prepare(
        self, a: T1, b: T2, c: T3, d: T4, e: T5, f: T6, /, *, device_placement: list[bool] | None = None
    ) -> tuple[T1, T2, T3, T4, T5, T6]: ...
    @overload
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any: ...

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares models, optimizers, loaders and schedulers, in any order; returns them in the same order.

        `device_placement` says for each object whether it is moved to the device. Other objects come back as they are.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ValueError(
                f"Expected device_placement for each of {len(args)} objects. Received: {len(device_placement)} values. "
                "Give one True or False for each object."
            )
        places = {id(obj): place for obj, place in zip(args, device_placement or [])}
        prepared = self.strategy.prepare(args, lambda obj: self._prepare_one(obj, places.get(id(obj))))
        return prepared[0] if len(args) == 1 else tuple(prepared)

    def _prepare_one(self, obj: Any, place: bool | None) -> Any:
        if isinstance(obj, torch.utils.data.DataLoader):
            return self.prepare_data_loader(obj, device_placement=place)
        if isinstance(obj, torch.nn.Module):
            return self.prepare_model(obj, device_placement=place)
        if isinstance(obj, torch.optim.Optimizer):
            return self.prepare_optimizer(obj, device_placement=place)
        return self.prepare_scheduler(obj) if is_scheduler(obj) else obj

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Returns the model on the device, in the run's precision, wrapped and compiled as the run asks for it.

        `evaluation_mode=True` says that it will not be trained: no wrapper that reduces gradients is put around it.
        """
        check(model=model)
        if any(model is known for known in self._contents.models):
            return model
        place = self.device_placement if device_placement is None else device_placement
        self.verify_device_map(model)
        prepared = self.strategy.prepare_model(
            model, self.precision, place=place, evaluation=evaluation_mode, dynamo=self.dynamo_plugin
        )
        return self._kept(prepared, self._contents.models)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Returns the optimizer in an AcceleratedOptimizer, which steps at the end of accumulation windows."""
        check(optimizer=optimizer)
        if any(optimizer is known for known in self._contents.optimizers):
            return optimizer
        place = self.device_placement if device_placement is None else device_placement
        prepared = self.strategy.prepare_optimizer(optimizer, self.precision, place=place)
        return self._kept(prepared, self._contents.optimizers)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Returns the scheduler in an AcceleratedScheduler, in step with its optimizer."""
        check(scheduler=scheduler)
        if any(scheduler is known for known in self._contents.schedulers):
            return scheduler
        prepared = self.strategy.prepare_scheduler(
            scheduler, self._contents.optimizers, step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )  # fmt: skip
        return self._kept(prepared, self._contents.schedulers)

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Returns the loader that gives this process its share of the data, on its device."""
        if any(data_loader is known for known in self._contents.loaders):
            return data_loader
        place = self.device_placement if device_placement is None else device_placement
        options = {} if slice_fn_for_dispatch is None else {"slice_fn_for_dispatch": slice_fn_for_dispatch}
        prepared = self.strategy.prepare_loader(
            data_loader, device=self.device, put_on_device=place, seed=self._data_seed(),
            config=self.dataloader_config, gradient_state=self.gradient_state, non_blocking=self.non_blocking,
            **options,
        )  # fmt: skip
        return self._kept(prepared, self._contents.loaders)

    @staticmethod
    def _kept(prepared: Any, contents: list[Any]) -> Any:
        prepared._is_accelerate_prepared = True  # libraries written for Accelerate ask for it
        contents.append(prepared)
        return prepared

    def _data_seed(self) -> int:
        for seed in (self.dataloader_config.data_seed, self._seed):
            if seed is not None:
                return seed
        return self.world.broadcast_object(random.run_seed())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Returns the loader: a prepared one hands out this process's part of each sequence already."""
        return dl

    def entry(self, model: Any, method: str, *, manual: bool = False) -> Callable[..., Any]:
        """Drivetrain's: returns a method of the user's module, routed as the engine needs it.

        On one device it is the bound method itself. `manual=True` says that the method calls `backward` itself.
        """
        check(model=model, method=method)
        return self.strategy.entry(model, method, self.precision, manual=manual)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Returns the user's module inside a prepared one.

        `keep_fp32_wrapper=False` also gives its forward back as it was before mixed precision; `keep_torch_compile`
        keeps the wrapper of a module that was given compiled.
        """
        check(model=model)
        module = self.strategy.unwrap(model, keep_compiled=keep_torch_compile)
        module = extract_model_from_parallel(module, keep_torch_compile=keep_torch_compile)
        return module if keep_fp32_wrapper else self.precision.restore_model(module)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Returns False: a model that is spread over devices cannot be trained by several processes.

        Raises:
            ValueError: the model has a device map over several devices, and there are several processes.
        """
        check(model=model)
        devices = set(getattr(model, "hf_device_map", {}).values())
        if len(devices) > 1 and self.world.size > 1:
            raise ValueError(
                f"Expected the model on one device. Received: a device map over {len(devices)} devices in "
                f"{self.world.size} processes. Load it without device_map, or start one process."
            )
        return False

    # A step

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """Returns the context of one micro-batch of these models (default: of all prepared ones).

        Inside, `sync_gradients` tells whether this micro-batch is the last of its window: the `num_steps`-th, or the
        last of the loader that is being iterated. Before that, gradients stay unreduced and optimizers do not step.
        """
        if models != self._accumulation.models:
            for model in models:
                check(model=model)
            self._accumulation = self._new_accumulation(models)
        return self._accumulation

    def abandon_window(self) -> None:
        """Drivetrain's: forgets the open window, its gradients too; the next micro-batch begins another one."""
        self.strategy.drop_gradients(self._contents.models)
        self._begin_windows()
        self.sync_gradients = True

    def _begin_windows(self) -> None:
        self._window = Window(self.gradient_state, self.strategy.loss_world, self._all_parameters)
        self._accumulation = self._new_accumulation(())

    def _new_accumulation(self, models: tuple[Any, ...]) -> Accumulation:
        parameters = (lambda: self.strategy.gradient_holders(models)) if models else self._all_parameters
        return Accumulation(self._window, self.strategy, models, parameters)

    # transformers.Trainer and its like ask for these
    _models = property(lambda self: self._contents.models)
    _optimizers = property(lambda self: self._contents.optimizers)
    _schedulers = property(lambda self: self._contents.schedulers)
    _dataloaders = property(lambda self: self._contents.loaders)

    def _all_parameters(self) -> list[Any]:
        return self.strategy.gradient_holders(self._contents.models)

    @property
    def step(self) -> int:
        """Micro-batches of the current window so far; 0 between windows."""
        return self._window.count

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are complete after this micro-batch, so that optimizers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; a new value holds from the next window on."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.num_steps = check_num_steps(value)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Returns the context in which backward passes leave this model's gradients unreduced."""
        check(model=model)
        context: AbstractContextManager[None] = self.strategy.no_sync(model)
        return context

    @staticmethod
    def trigger_sync_in_backward(model: Any) -> AbstractContextManager[None]:
        """Returns the context in which a backward reduces gradients although its forward ran under `no_sync`."""
        check(model=model)
        sync = getattr(model, "sync_in_backward", None)
        return NOTHING if sync is None else sync()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Returns the context that computes in the run's precision; the handler replaces the run's options."""
        if autocast_handler is not None:
            check(autocast_handler=autocast_handler)
        context: AbstractContextManager[None] = self.precision.autocast(autocast_handler)
        return context

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Differentiates the loss of one micro-batch, scaled for the accumulation window and the precision.

        `weight` (drivetrain's) is the number of items, such as tokens, that the loss is a mean over: the window's
        gradient is then the mean over all items of all its micro-batches and processes. Give it on every process.
        Further arguments go to `loss.backward`, or to `via=function`, which then differentiates in its place.

        Raises:
            TypeError: the loss is no tensor.
            ValueError: the loss is no scalar or has no graph, or only some losses of a window have a weight.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"Expected the loss as a tensor. Received: {type(loss).__name__}. Compute it from the model's output."
            )
        self.strategy.backward(self._window.scale(loss, weight), self.precision, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Differentiates the loss and steps at once, by those prepared optimizers that do both (LOMO's).

        Raises:
            ValueError: no prepared optimizer does.
        """
        check(learning_rate=learning_rate)
        fused = [one for one in map(unwrap_optimizer, self._contents.optimizers) if hasattr(one, "fused_backward")]
        if not fused:
            raise ValueError("Expected a LOMO optimizer. Received: none prepared. Call backward() and step() instead.")
        for optimizer in fused:
            optimizer.fused_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Brings the gradients of an optimizer (default: of all) to their true scale, once per step."""
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = self._contents.optimizers if optimizer is None else chosen
        for one in optimizers:
            check(optimizer=one)
            self.precision.unscale(unwrap_optimizer(one))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clips gradients at the end of a window by their total norm, and returns that norm as it was before.

        Inside a window nothing is clipped, and the norm is that of the gradients so far.
        """
        parameters = parameter_list(parameters)
        usual = type(max_norm) in (float, int) and max_norm >= 0 and type(norm_type) in (float, int) and norm_type > 0
        if not usual:
            check(max_norm=max_norm, norm_type=norm_type)
        if self.sync_gradients:
            resolution.check_clipping(max_norm)
            self._unscale_for(parameters)
            self.grad_norm = self.strategy.clip_norm(parameters, max_norm, norm_type)
            return self.grad_norm
        return self.strategy.norm(parameters, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips every element of the gradients to [-clip_value, clip_value] at the end of a window."""
        parameters = parameter_list(parameters)
        if type(clip_value) not in (float, int) or not clip_value >= 0:
            check(clip_value=clip_value)
        if self.sync_gradients:
            self._unscale_for(parameters)
            self.strategy.clip_value(parameters, clip_value)

    def _unscale_for(self, parameters: list[torch.Tensor]) -> None:
        """Unscales the optimizers that hold these parameters, and no other: those may have no gradients yet."""
        if self.precision.scaler is not None:
            ids = {id(parameter) for parameter in parameters}
            for optimizer in self._contents.optimizers:
                if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
                    self.precision.unscale(unwrap_optimizer(optimizer))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last step was skipped because its gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._contents.optimizers)

    @property
    def skipped_steps(self) -> int:
        """Drivetrain's: how many optimizer steps were skipped because gradients overflowed."""
        return self.precision.skipped_steps

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Trains on data of which some processes have more batches than others.

        Inside, a process that ran out of batches takes part in the others' reductions. `even_batches` replaces the
        setting of all prepared loaders for this block.
        """
        check(joinables=joinables)
        before = [(loader, loader.even_batches) for loader in self._contents.loaders if hasattr(loader, "even_batches")]
        try:
            for loader, own in before:
                loader.even_batches = own if even_batches is None else even_batches
            with self.strategy.join(joinables):
                yield
        finally:
            for loader, own in before:
                loader.even_batches = own

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Returns a context in which tensors are this process's part of each sequence, and attention sees all of it.

        `buffers` are cut in place along `buffer_seq_dims`, and put back at its end but for `no_restore_buffers`.
        Without cp_size or sp_size it does nothing.
        """
        return self.strategy.divided_buffers(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def set_trigger(self) -> None:
        """Raises this process's flag, which `check_trigger` shows to all."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Returns, on every process, whether any of them raised its flag, and lowers it; all have to call this."""
        raised = self.world.agree(self._triggered)
        self._triggered = self._triggered and not raised
        return raised

    # Between processes

    def gather(self, tensor: Any) -> Any:
        """Returns nested data of tensors with those of all processes one behind the other along dimension 0."""
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers what was computed from one batch, each sample once.

        Repeated samples in the last batch of the loader that is being iterated are left out. Data that is no tensor,
        or `use_gather_object=True`, is gathered as a list of objects.
        """
        return collectives.gather_for_metrics(input_data, self.gradient_state.active_dataloader, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns nested data of tensors reduced over the processes ("sum", "mean" or "none"), times `scale`."""
        check(scale=scale)
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Returns nested data of tensors padded along `dim` to the longest of any process."""
        check(dim=dim)
        return collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def wait_for_everyone(self) -> None:
        """Waits until every process has come here."""
        self.world.barrier("wait_for_everyone")

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Returns a context with this process's share of a list, tuple, tensor or dict (see PartialState)."""
        check(inputs=inputs)
        return self.state.split_between_processes(inputs, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Returns a context that the first process runs before all others do."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Returns a context that the first process of each machine runs before the machine's others do."""
        return self.state.local_main_process_first()

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns a function that runs on the first process only and gives None on the others."""
        check_optional(function=function)
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns a function that runs on the first process of each machine only."""
        check_optional(function=function)
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs on the last process only."""
        check(function=function)
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Returns a function that runs on the process of this rank only; without a function a decorator."""
        check(process_index=process_index)
        check_optional(function=function)
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Returns a function that runs on the process of this rank on each machine; without a function a decorator."""
        check(local_process_index=local_process_index)
        check_optional(function=function)
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each machine."""
        self.state.print(*args, **kwargs)

    # Trackers

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Starts the trackers that `log_with` named; `config` is stored as the run's settings.

        `init_kwargs` holds arguments for each tracker's constructor by the tracker's name.
        """
        check(project_name=project_name)
        check_optional(config=config, init_kwargs=init_kwargs)
        self.trackers = trackers.start_trackers(self.log_with, project_name, config, self.logging_dir, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a running tracker by name, or with `unwrap` what it writes to; a blank one where nothing tracks.

        Raises:
            ValueError: no tracker of that name was started; the message lists those that were.
        """
        check(name=name)
        for tracker in self.trackers if unwrap else ():
            tracker.flush()  # what is written past it comes after what was logged
        return trackers.get_tracker(self.trackers, name, unwrap)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Gives values to every tracker; `log_kwargs` holds further arguments by tracker name."""
        check(values=values)
        check_optional(log_kwargs=log_kwargs)
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finishes saves and trackers and leaves the process group; call it once, at the end of the script."""
        self.saves.wait()
        trackers.finish_trackers(self.trackers)
        self.trackers = []
        self.world.barrier("end_training")
        self.strategy.teardown()

    # State

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object on the first process (or on each machine's, if so set): by `torch.save`, or as safetensors.

        Raises:
            TypeError: `safe_serialization` is asked for, and the object is no dict of tensors.
        """
        check(f=f)
        each_node = self.project_configuration.save_on_each_node
        weights.save(obj, f, save_on_each_node=each_node, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the weights of a model as Hugging Face's libraries read them; call it on every process.

        Files above `max_shard_size` are split, with an index beside them. Shared weights are stored once. Without
        `safe_serialization` they are written by `torch.save` (pytorch_model.bin).
        """
        check(model=model, save_directory=save_directory)
        with Writer(os.fspath(save_directory), world=self.world) as writer:
            if safe_serialization:
                self.strategy.save_model(writer, model, max_shard_size=max_shard_size)
            else:
                state = self.get_state_dict(model)
                if self.is_main_process:
                    torch_files.save_weights(writer, state, max_shard_size=max_shard_size)
            writer.commit({"strategy": self.strategy.name})

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Returns the full weights of a prepared model, under the names of the user's own module."""
        check(model=model)
        return self.strategy.state_dict(model) if unwrap else model.state_dict()

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls `hook(models, weights, output_dir)` before every `save_state`; returns a handle to remove it.

        The hook may take models' weights out of the list, and write files of its own into `output_dir`.
        """
        return self._registered(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Calls `hook(models, input_dir)` before every `load_state`; models that it takes out are not loaded."""
        return self._registered(self._load_hooks, hook)

    @staticmethod
    def _registered(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
        check(hook=hook)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Saves and restores further objects with `save_state` and `load_state`.

        An object with an attribute `per_rank = True` is saved for each process apart; else the first one's counts.

        Raises:
            ValueError: an object lacks `state_dict` or `load_state_dict`.
        """
        checkpoint_folders.check_registered(objects)
        self._contents.objects.extend(objects)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metadata: dict[str, Any] | None = None,
        weights_only: bool = False,
        loaders: bool = True,
        asynchronous: bool | None = False,
        then: Callable[[], None] | None = None,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Writes a checkpoint of everything prepared and registered, and returns its folder; call it on every process.

        It is written beside its place and appears there complete. Without `output_dir` it is the next numbered one in
        the project's folder `checkpoints` (automatic naming). `metadata` goes into its manifest; `loaders=False` leaves
        the places of loaders to the caller.

        `asynchronous` (None: where the state takes 64 MiB or more) returns when the state is copied, and a thread
        writes the copy. When the checkpoint is durable the next `save_state`, `load_state`, `wait_for_saves` or
        `end_training` calls `then`, or it raises the error with which the save failed. One save is written at a time.

        Raises:
            ValueError: no folder is given or configured.
            CheckpointError: it could not be written; the checkpoints that were there still are.
        """
        check_optional(output_dir=output_dir, metadata=metadata, then=then)
        if not safe_serialization:
            logger.warning(checkpoint_folders.ALWAYS_SAFE)
        if self.step and not self.sync_gradients:
            logger.warning(checkpoint_folders.MID_WINDOW, self.step)
        config = self.project_configuration
        if config.save_on_each_node:
            logger.warning(checkpoint_folders.SHARED_STORAGE)
        directory = checkpoint_folders.next_checkpoint(config, output_dir)

        def fill(writer: Any) -> None:
            states = [self.strategy.weights(model) for model in self._contents.models]
            checkpoint_folders.run_save_hooks(self._save_hooks, list(self._contents.models), states, writer)
            self.strategy.save(
                writer, self._contents, precision=self.precision, weights=states, weights_only=weights_only,
                loaders=loaders, extra={"iteration": config.iteration}, **save_model_func_kwargs,
            )  # fmt: skip

        if asynchronous is None:
            asynchronous = self.world.agree(self._contents.size() >= LARGE)
        described = {"strategy": self.strategy.name, "precision": self.precision.name, **(metadata or {})}
        follow = checkpoint_folders.follow_up(config, directory, self.is_main_process, then)
        self.saves.save(directory, fill, metadata=described, then=follow, background=asynchronous)
        config.iteration += config.automatic_checkpoint_naming
        return str(directory)

    def wait_for_saves(self) -> None:
        """Drivetrain's: returns when an asynchronous save is durable; raises the error with which it failed."""
        self.saves.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        weights_only: bool = False,
        strict: bool = True,
        **load_model_func_kwargs: Any,
    ) -> dict[str, Any]:
        """Restores everything prepared and registered from a checkpoint, verified; returns the checkpoint's manifest.

        Without `input_dir` it is the newest complete one under automatic naming. `weights_only` restores the models
        alone; `strict=False` lets a model lack weights of the checkpoint and the other way round.

        Raises:
            ValueError: there is no checkpoint, or other objects were saved than are prepared.
            CheckpointError: a file is missing or damaged; the message names it.
        """
        check_optional(input_dir=input_dir, load_kwargs=load_kwargs)
        options = checkpoint_folders.loading_options(strict, load_kwargs, load_model_func_kwargs)
        self.saves.wait()
        checkpoint = checkpoint_folders.open_checkpoint(
            self.project_configuration, input_dir, self.world, weights_only=weights_only,
            parts=self.strategy.reads_parts,
        )  # fmt: skip
        self._begin_windows()
        models = list(self._contents.models)
        for hook in self._load_hooks.values():
            hook(models, str(checkpoint.directory))
        extra = self.strategy.load(
            checkpoint, self._contents, precision=self.precision, models=models, weights_only=weights_only,
            positions=self.use_stateful_dataloader, **options,
        )  # fmt: skip
        if self.project_configuration.automatic_checkpoint_naming and extra:
            self.project_configuration.iteration = extra["iteration"] + 1
            if input_dir is None and self.is_main_process:  # a crash may have come between a save and this
                folder = checkpoint_folders.numbered_folder(self.project_configuration)
                checkpoint_folders.tidy(folder, self.project_configuration.total_limit)
        self.world.barrier("load_state")
        return checkpoint.manifest

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a view of a loader whose next iteration begins after `num_batches` batches."""
        check(dataloader=dataloader, num_batches=num_batches)
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Lets go of everything prepared, and frees what nobody else holds; returns a None for each given object."""
        self.saves.release()
        self.release()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()
        return [None] * len(objects)

    def release(self) -> None:
        """Drivetrain's: lets go of everything prepared, and leaves it to Python when to free it (cheap)."""
        self._contents.clear()
        self.precision.release()
        self.strategy.release()
        self._begin_windows()

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profiles the block by torch.profiler; each process writes a Chrome trace where the handler says so."""
        check_optional(profile_handler=profile_handler)
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, f"profile_{self.process_index}.json"))
