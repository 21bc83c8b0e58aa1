"""The Strategy: what an engine does at each point of training, with defaults that are right for one device.

A new engine overrides what it does differently, and nothing outside of this folder ever asks which engine it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import precision as precisions
from . import subgroup
from . import world as worlds
from .checkpoint.tensors import clean_keys
from .contents import fitted, load_module, load_state, save_module
from .contexts import NOTHING
from .environment import Placement
from .optimizer import AcceleratedOptimizer, load_named_state, named_state, unwrap_optimizer
from .precision import Precision
from .scheduler import AcceleratedScheduler
from .settings import (
    AutocastKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
)
from .world import World

Settings = Mapping[type, KwargsHandler]


class Strategy:
    """One device: the interface of every engine and its defaults.

    `launches` says whether the engine may be given more than one process; `start_method` how a launcher starts them
    (None: by what the environment allows).
    """

    name = "single"
    launches = False
    replicates = False  # each process holds the whole state, so that some can save without the others
    start_method: str | None = None
    shows_gradients = True  # `parameter.grad` is what the loss gave, before an optimizer steps
    plugin: Any = None  # the option object that it was made from
    parallelism: Any = None  # its ParallelismConfig
    mesh: Any = None  # the DeviceMesh of its ranks, after `setup`
    divide_batch: Any = None  # a function of a batch: this rank's part of its sequences, and that part's share
    reads_parts = False  # of weights and optimizer states it reads only what this process holds
    inference_mode = True  # evaluations may run in torch.inference_mode; else in torch.no_grad
    equal_forwards = False  # every rank needs the same number of forwards, in evaluations too
    device_type: str | None = None  # the only kind of device that the engine has, if there is only one
    takes_parallelism = False  # a ParallelismConfig may come beside the engine's name, to which it adds degrees

    def __init__(self) -> None:
        self.world = World()

    @property
    def data_world(self) -> World:
        """The ranks that see different data, which is all of them unless some share one replica of the model."""
        return self.world

    @property
    def loss_world(self) -> World:
        """The ranks whose losses are parts of the whole: those with different data, or other tokens of the same."""
        return self.data_world

    def rank_in(self, dimension: str) -> int:
        """Returns this process's place along a dimension of the mesh ("tp", "cp", "pp", "dp_shard", …).

        Raises:
            RuntimeError: the mesh has no such dimension.
        """
        if self.mesh is None or dimension not in (self.mesh.mesh_dim_names or ()):
            raise RuntimeError(
                f"Expected a mesh with a dimension {dimension!r}. Received: strategy={self.name!r} without one. Pass "
                "a ParallelismConfig that has it."
            )
        return int(self.mesh.get_local_rank(dimension))

    # Environment

    def setup(
        self,
        placement: Placement,
        *,
        device: str | torch.device | None = None,
        cpu: bool = False,
        settings: Settings | None = None,
    ) -> World:
        """Takes this process's place among the launched ones and returns their world.

        `settings` holds the option objects of the run by their type; an engine takes those that it knows.

        Raises:
            ValueError: the device does not exist or contradicts `cpu`, or several processes were launched.
        """
        if placement.size > 1 and not self.launches:
            raise ValueError(
                f"Expected one process for strategy={self.name!r}. Received: {placement.size} processes started by "
                f"{placement.launcher}. Use strategy='ddp', or start one process."
            )
        self.world = self._create_world(placement, choose_device(device, cpu=cpu), settings or {})
        worlds.set_current(self.world)
        subgroup.set_data(self.world, self.data_world)
        return self.world

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        return World(_current(device))

    def teardown(self) -> None:
        """Leaves the world; other processes are not waited for."""
        self.world.close()

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.world.device

    @property
    def distributed_type(self) -> DistributedType:
        """A label for users: nothing in the library asks for it."""
        return DistributedType.NO

    def precision(
        self,
        name: str | int | None,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        **options: Any,
    ) -> Precision:
        """Returns the precision that a word names, as this engine computes it; further options as `create` takes."""
        return precisions.create(name, self.device, autocast=autocast, scaler=scaler, **options)

    def windows(self, plugin: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """Returns how gradients are accumulated, in which the options of an engine may have a say."""
        return plugin

    # Preparing

    def init_context(self) -> Any:
        """Returns the context in which new modules are made where this engine wants them: on the device."""
        return torch.device(self.device)

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Prepares objects that belong together, each by `one`; schedulers last, as they need their optimizers."""
        prepared = [obj if is_scheduler(obj) else one(obj) for obj in objects]
        return [one(obj) if is_scheduler(obj) else obj for obj in prepared]

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        *,
        place: bool = True,
        evaluation: bool = False,
        dynamo: TorchDynamoPlugin | None = None,
    ) -> torch.nn.Module:
        """Returns a model that computes on the device in this precision, compiled where that is asked for."""
        if place and not hasattr(model, "hf_device_map"):
            model = model.to(self.device)
        model = precision.prepare_model(model, evaluation=evaluation)
        if dynamo is not None and dynamo.active:
            compile_model(model, dynamo)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True
    ) -> AcceleratedOptimizer:
        """Returns the optimizer as the engine steps it."""
        precision.register(optimizer)
        step = functools.partial(self.step, precision=precision)
        return AcceleratedOptimizer(optimizer, place, precision.scaler, step=step)

    def prepare_scheduler(
        self, scheduler: Any, optimizers: list[Any], *, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> AcceleratedScheduler:
        """Returns the scheduler in step with its own optimizer, or with all of them where it is not known."""
        own = [opt for opt in optimizers if unwrap_optimizer(opt) is unwrap_optimizer(_optimizer_of(scheduler))]
        return AcceleratedScheduler(scheduler, own or optimizers, step_with_optimizer, split_batches)

    def prepare_loader(self, loader: Any, **options: Any) -> Any:
        """Returns the loader that gives this process its share of every batch."""
        from .data.preparing import prepare_loader

        return prepare_loader(loader, world=self.data_world, **options)

    def release(self) -> None:
        """Lets go of what was prepared."""

    def unwrap(self, model: Any, *, keep_compiled: bool = False) -> torch.nn.Module:
        """Returns the user's own module inside what this engine and, unless it is kept, a compiler put around it."""
        return model if keep_compiled else getattr(model, "_orig_mod", model)

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        """Returns a method of the user's module, routed as the engine needs it; here the bound method itself.

        `manual` says that the method calls `backward` itself.
        """
        return precision.entry(getattr(self.unwrap(model), method))

    # A step

    def no_sync(self, model: Any) -> Any:
        """Returns the context in which backward passes leave gradients unreduced."""
        return NOTHING

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        """Differentiates a loss; `via=function` lets the user's own function do it in the place of `Tensor.backward`.

        Raises:
            ValueError: the loss has no graph, or is no scalar; the message says which.
        """
        try:
            kwargs.pop("via", torch.Tensor.backward)(precision.scale(loss), **kwargs)
        except RuntimeError as error:
            problem = _loss_error(loss, kwargs)
            if problem is None:
                raise
            raise problem from error

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable | None = None, *, precision: Precision
    ) -> tuple[bool, Any]:
        """Steps an optimizer; returns whether that was skipped, and what the optimizer returned."""
        return precision.step(optimizer, closure)

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips gradients by their total norm, which is returned as it was before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clips every element of the gradients to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def norm(self, parameters: Any, norm_type: float = 2.0) -> torch.Tensor:
        """Returns the total norm of gradients and leaves them as they are."""
        return self.clip_norm(parameters, float("inf"), norm_type)

    def gradient_holders(self, models: Iterable[Any]) -> list[Any]:
        """Returns what holds gradients of these models, each as its `grad`: their parameters."""
        return list(parameters_of(models))

    def drop_gradients(self, models: Iterable[Any]) -> None:
        """Drops the gradients of a window that will not be finished."""
        for holder in self.gradient_holders(models):
            holder.grad = None

    def divided_buffers(self, buffers: list[Any], dims: list[int], kept: set[Any]) -> Any:
        """Returns the context in which this process has its part of each tensor along a dimension of sequences."""
        return NOTHING

    def join(self, joinables: list[Any], **options: Any) -> Any:
        """Returns the context in which processes that ran out of batches take part in the others' reductions."""
        return NOTHING

    def flush(self) -> None:
        """Computes what an engine may only have recorded so far; called before values are read."""

    def before_evaluation(self, model: Any) -> None:
        """Makes a model the same on all processes, where training leaves buffers different (collective)."""

    # State

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns the weights of the user's module, under its own names."""
        module = self.unwrap(model)
        return clean_keys(module.state_dict(), module)

    def weights(self, model: Any) -> dict[str, Any]:
        """Returns the weights as a checkpoint keeps them, on the first process at least; every process calls this."""
        return self.state_dict(model)

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads weights into the user's module; returns the keys that did not fit."""
        module = self.unwrap(model)
        return module.load_state_dict(fitted(state, module), strict=strict)

    def optimizer_state(self, optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
        """Returns an optimizer's whole state by parameter names (`names`: by ids); every process has to call this."""
        return named_state(optimizer, names)

    def load_optimizer_state(
        self, optimizer: Any, state: Mapping[str, Any], names: Mapping[int, str], *, label: str
    ) -> None:
        """Loads what `optimizer_state` returned, under any strategy."""
        load_named_state(optimizer, state, names, label=label)

    def save_weights(self, writer: Any, state: dict[str, Any], *, stem: str, **options: Any) -> None:
        """Writes the weights of a model, as `weights` gave them; every rank calls this."""
        if writer.world.rank == 0:
            save_module(writer, state, name=stem, **options)

    def save_model(self, writer: Any, model: Any, **options: Any) -> None:
        """Writes a model's whole weights as Hugging Face keeps them; every rank calls this."""
        state = self.state_dict(model)
        if writer.world.rank == 0:
            save_module(writer, state, **options)

    def load_weights(self, checkpoint: Any, model: Any, *, stem: str, strict: bool = True) -> Any:
        """Loads the weights of a model; returns the keys that did not fit."""
        return self.load_state_dict(model, load_module(checkpoint, name=stem), strict=strict)

    def save_optimizer(self, writer: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        """Writes the state of an optimizer by its parameters' names; every rank calls this."""
        state = self.optimizer_state(optimizer, names)
        if writer.world.rank == 0:
            writer.state(stem, state)

    def load_optimizer(self, checkpoint: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        """Loads the state of an optimizer."""
        self.load_optimizer_state(optimizer, load_state(checkpoint, stem), names, label=stem.replace("-", " "))

    def save(self, writer: Any, contents: Any, **options: Any) -> None:
        """Writes what was prepared (see contents.py) into a checkpoint that is open for writing."""
        contents.save(writer, self, **options)

    def load(self, checkpoint: Any, contents: Any, **options: Any) -> dict[str, Any]:
        """Restores what was prepared from a checkpoint."""
        return contents.load(checkpoint, self, **options)


class SingleDeviceStrategy(Strategy):
    """One process on one device."""


def choose_device(device: str | torch.device | None = None, *, cpu: bool = False) -> torch.device:
    """Returns the device to use: the one given, the CPU if asked for, else this machine's accelerator.

    An accelerator without an index is this process's own, by its local rank.
    """
    chosen = torch.device(device) if device is not None else None
    if cpu and chosen is not None and chosen.type != "cpu":
        raise ValueError(f"Expected one device. Received: cpu=True, device={str(chosen)!r}. Give one of the two.")
    if cpu or (chosen is None and not torch.accelerator.is_available()):
        return torch.device("cpu")
    if chosen is not None and chosen.type in ("cpu", "meta"):
        return chosen
    own = torch.accelerator.current_accelerator(check_available=True)
    if chosen is not None and (own is None or chosen.type != own.type):
        available = "cpu" if own is None else f"cpu, {own.type}"
        raise ValueError(f"Expected a device of this machine ({available}). Received: device={str(chosen)!r}.")
    return chosen or torch.device(own.type if own is not None else "cpu")


def _current(device: torch.device) -> torch.device:
    """The device with its index, made the current one of its kind."""
    if device.type in ("cpu", "meta", "mps"):
        return device
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    torch.accelerator.set_device_index(device.index)
    return device


def is_scheduler(obj: Any) -> bool:
    """Whether an object is a learning-rate scheduler, by torch's class or by its methods."""
    if isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)):
        return True
    methods = ("step", "state_dict", "load_state_dict")
    return hasattr(obj, "optimizer") and all(callable(getattr(obj, name, None)) for name in methods) and not (
        isinstance(obj, (torch.optim.Optimizer, torch.nn.Module))
    )


def compile_model(model: torch.nn.Module, dynamo: TorchDynamoPlugin) -> None:
    """Compiles a model in place, so that its type and its parameters' names stay; regionally by repeated blocks."""
    blocks = []
    if dynamo.use_regional_compilation:
        blocks = [block for part in model.modules() if isinstance(part, torch.nn.ModuleList) for block in part]
    for part in blocks or [model]:
        part.compile(**dynamo.to_kwargs())


def _optimizer_of(scheduler: Any) -> Any:
    return getattr(scheduler, "optimizer", None)


def _loss_error(loss: torch.Tensor, kwargs: dict[str, Any]) -> Exception | None:
    """What is wrong with a loss whose backward failed, if it is the loss."""
    if not loss.requires_grad:
        return ValueError(
            f"Expected a loss with a graph. Received: a tensor of shape {tuple(loss.shape)} that no parameter led to. "
            "Do not detach it, compute it outside of torch.no_grad(), and let some parameter require gradients."
        )
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        return ValueError(
            f"Expected a scalar loss. Received: shape {tuple(loss.shape)}. Reduce it, for example with loss.mean()."
        )
    return None


def parameters_of(models: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Returns the parameters of these models, each once."""
    return list({id(p): p for model in models for p in model.parameters()}.values())
