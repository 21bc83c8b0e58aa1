"""XLA: TPUs, and other devices for which torch_xla compiles whole steps.

One device for each process, or (SPMD) one process that uses all devices of its machine as if they were one, over which
batches and weights are shared out. What a step does is recorded and handed over as one graph (see xla_steps.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import initial_weights, random, subgroup, xla_launch, xla_runtime
from . import world as worlds
from .base import Settings, Strategy, is_scheduler
from .checkpoint.tensors import clean_keys
from .contents import fitted
from .environment import Placement
from .gradient_mean import GradientMean
from .mesh import ParallelismConfig
from .nested import leaves_of, recursively_apply
from .optimizer import AcceleratedOptimizer, load_named_state, named_state
from .precision import Precision, canonical_name
from .replaced_parameters import Replaced
from .settings import DistributedType, TorchDynamoPlugin
from .world import World
from .xla_loader import prepare
from .xla_placing import move
from .xla_plugin import XLAPlugin
from .xla_sharding import Sharding, arrange
from .xla_steps import Steps, XLAOptimizer
from .xla_world import XLAWorld, check_processes

_ALTERNATIVES = {"16-mixed": "bf16-mixed", "16-true": "bf16-true", "fp8-mixed": "bf16-mixed"}
_COMPILERS = ("openxla", "openxla_eval")


class XLAStrategy(Strategy):
    """Training on XLA devices by torch_xla.

    Args:
        plugin: all options; single ones may be given by name instead (`spmd=True`).
        parallelism: how batches and weights are shared out over the devices of this process (SPMD): dp_replicate_size,
            dp_shard_size (FSDP) and tp_size.

    Raises:
        ValueError: options contradict each other.
    """

    name = "xla"
    launches = True
    replicates = True
    inference_mode = False  # torch_xla records views of weights, which inference tensors could not be
    device_type = "xla"
    takes_parallelism = True

    def __init__(
        self, plugin: XLAPlugin | None = None, *, parallelism: ParallelismConfig | None = None, **options: Any
    ) -> None:
        super().__init__()
        if plugin is not None and options:
            raise ValueError(f"Expected XLA's options once. Received: plugin and {sorted(options)}. Give one.")
        self.plugin = plugin or XLAPlugin(**options)
        self.parallelism = parallelism
        if parallelism is not None and self.plugin.spmd is False and parallelism.total_size != 1:
            raise ValueError(
                "Expected spmd=True for a ParallelismConfig. Received: spmd=False in the XLAPlugin. Leave it out."
            )
        self.sharding: Sharding | None = None
        self._steps = Steps()
        self._replaced = Replaced()
        self._gradients = GradientMean(World())
        self._syncing = True

    @property
    def spmd(self) -> bool:
        """Whether this process uses all devices of its machine as one."""
        given = self.plugin.spmd
        return (self.parallelism is not None and self.parallelism.total_size != 1) if given is None else bool(given)

    # Environment

    def setup(
        self, placement: Placement, *, device: Any = None, cpu: bool = False, settings: Settings | None = None
    ) -> World:
        """Takes this process's device; see Strategy.

        Raises:
            ImportError: torch_xla is missing, or made for another torch.
            ValueError: the device is none of XLA's, or several processes were launched that would not see each other.
        """
        xla_runtime.package()
        _check_device(device, cpu=cpu)
        check_processes(placement, spmd=self.spmd)
        xla_launch.join(placement)
        found = xla_runtime.start(spmd=self.spmd)
        if self.spmd:
            config = self.parallelism or (ParallelismConfig(dp_shard_size=-1) if self.plugin.fsdp else None)
            self.parallelism = arrange(config, xla_runtime.device_count())
            self.sharding = Sharding(self.parallelism)
        self.world = XLAWorld.of(placement, found, spmd=self.spmd)
        self._gradients = GradientMean(self.world)
        worlds.set_current(self.world)
        subgroup.set_data(self.world, self.data_world)
        random.register("xla", xla_runtime.Generator)
        return self.world

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.XLA

    def precision(self, name: Any, **options: Any) -> Precision:
        """Returns the precision of a word: float32 or bfloat16.

        Raises:
            ValueError: it has 16-bit floats of the other kind, or 8-bit floats.
        """
        word = canonical_name(name)
        if word in _ALTERNATIVES:
            raise ValueError(
                f"Expected a precision of XLA: '32-true', 'bf16-mixed' or 'bf16-true'. Received: {word!r}. Use "
                f"{_ALTERNATIVES[word]!r}."
            )
        return super().precision(word, **options)

    def teardown(self) -> None:
        self._gradients.clear()
        super().teardown()

    # Preparing

    def init_context(self) -> Any:
        """New modules are made on the CPU: with the weights of every other engine, and without a graph of their own."""
        return torch.device("cpu")

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Models first, whose parameters the optimizers then follow; schedulers last."""
        done = {id(obj): one(obj) for obj in objects if isinstance(obj, torch.nn.Module)}
        done |= {id(obj): one(obj) for obj in objects if id(obj) not in done and not is_scheduler(obj)}
        prepared = [done[id(obj)] if id(obj) in done else one(obj) for obj in objects]
        self.flush()
        return prepared

    def prepare_model(
        self,
        model: torch.nn.Module,
        precision: Precision,
        *,
        place: bool = True,
        evaluation: bool = False,
        dynamo: TorchDynamoPlugin | None = None,
    ) -> torch.nn.Module:
        """Moves a model to the device in place, shared out as the run asks for; the same object comes back."""
        if dynamo is not None and dynamo.active and dynamo.to_kwargs().get("backend") not in _COMPILERS:
            raise ValueError(
                f"Expected dynamo_backend to be a compiler for XLA: {' or '.join(map(repr, _COMPILERS))}. Received: "
                f"dynamo_backend={dynamo.to_kwargs().get('backend')!r}. XLA compiles every step anyway: leave it out."
            )
        model = precision.prepare_model(model, evaluation=evaluation)  # parameters get their dtype before they go
        if place:
            self._place(model)
        initial_weights.synchronize([tensor.detach() for tensor in _tensors(model)], self.world)
        if not evaluation:
            self._gradients.add(model.parameters())
        return super().prepare_model(model, Precision(), place=False, evaluation=evaluation, dynamo=dynamo)

    def _place(self, model: torch.nn.Module) -> None:
        initial_weights.materialize(model, torch.device("cpu"), None)
        if self.sharding is None:
            device = self.device
            move(model, lambda tensor: tensor.detach().to(device), self._replaced)
        else:
            self.sharding.place(model, lambda function: move(model, function, self._replaced))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True
    ) -> AcceleratedOptimizer:
        self._replaced.follow(optimizer)
        precision.register(optimizer)
        step = functools.partial(self.step, precision=precision)
        prepared = XLAOptimizer(optimizer, place, precision.scaler, step=step)
        prepared.steps = self._steps
        return prepared

    def prepare_loader(self, loader: Any, **options: Any) -> Any:
        rows = None if self.sharding is None else (self.sharding.mesh, self.sharding.rows)
        return prepare(loader, world=self.data_world, between=self._steps.between_batches(), rows=rows, **options)

    # A step

    def flush(self) -> None:
        """Hands over what was recorded, so that reading a value afterwards computes nothing twice."""
        self._steps.hand_over()

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        self._steps.before_backward()
        try:
            super().backward(loss, precision, **kwargs)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise RuntimeError(
                "Expected XLA's device before the first backward pass of the process, at which torch counts its "
                "devices. Received: one that ran on the CPU before. Call torch_xla.device() at the top of the script."
            ) from error
        if self._syncing:
            self._gradients.reduce()

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any] | None = None, *, precision: Precision
    ) -> tuple[bool, Any]:
        result = super().step(optimizer, closure, precision=precision)
        self._steps.after_step()
        return result

    def join(self, joinables: list[Any], **options: Any) -> Any:
        if self.world.size > 1:
            raise NotImplementedError(
                "Expected equally many batches on all ranks under strategy='xla'. Received: join_uneven_inputs. Leave "
                "it out, and even_batches as it is (True)."
            )
        return super().join(joinables, **options)

    def before_evaluation(self, model: Any) -> None:
        """Hands over the step before, so that it is no part of the first batch's graph."""
        self.flush()
        for buffer in self.unwrap(model).buffers() if self.world.size > 1 else ():
            self.world.broadcast(buffer)

    # State

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns the weights under the names of the user's module: whole and on the CPU, in one transfer."""
        module = self.unwrap(model)
        state = clean_keys(module.state_dict(keep_vars=True), module)
        values = xla_runtime.on_cpu(state.values())
        return {key: value.detach() if isinstance(value, torch.Tensor) else value
                for key, value in zip(state, values, strict=True)}  # fmt: skip

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        module = self.unwrap(model)
        state = fitted(state, module)
        if self.sharding is not None:
            own = dict(module.named_parameters(remove_duplicate=False))
            state = {key: self.sharding.like(value, own[key]) if key in own else value for key, value in state.items()}
        found = module.load_state_dict(state, strict=strict)
        self.flush()
        return found

    def optimizer_state(self, optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
        state = named_state(optimizer, names)
        values = [value for value in leaves_of(state) if isinstance(value, torch.Tensor)]
        found = iter(xla_runtime.on_cpu(values))
        return dict(recursively_apply(lambda value: next(found), state))

    def load_optimizer_state(
        self, optimizer: Any, state: Mapping[str, Any], names: Mapping[int, str], *, label: str
    ) -> None:
        if self.sharding is not None:
            share, parameters = self.sharding.like, self._named_parameters(optimizer, names)
            own = {name: {key: share(value, parameters[name]) for key, value in values.items()}
                   if name in parameters and isinstance(values, Mapping) else values
                   for name, values in state["state"].items()}  # fmt: skip
            state = {**state, "state": own}
        load_named_state(optimizer, state, names, label=label)
        self.flush()

    @staticmethod
    def _named_parameters(optimizer: Any, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {names[id(parameter)]: parameter for parameter in parameters if id(parameter) in names}


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _check_device(device: Any, *, cpu: bool) -> None:
    kind = xla_runtime.kind()
    wanted = "cpu" if cpu else None if device is None else torch.device(device).type
    if wanted not in (None, "xla", kind.lower()):
        raise ValueError(
            f"Expected a device of XLA for strategy='xla'. Received: device={wanted!r}, where torch_xla has {kind}. "
            "Leave the device out; PJRT_DEVICE=CPU computes on the processor."
        )
