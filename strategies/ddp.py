"""DistributedDataParallel: every process holds the whole model, and gradients are averaged during backward."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from .base import Settings, Strategy
from .contexts import NOTHING
from .environment import Placement
from .launched import ddp_options
from .precision import Precision
from .settings import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from .world import TorchWorld, World

_EVALUATION = ("validation_step", "test_step", "predict_step")
_UNUSED = (
    "Parameters that took no part in a loss on this rank: {names}. Freeze them (requires_grad_(False)), let every "
    "parameter take part, or pass strategy='ddp_find_unused_parameters_true' or "
    "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)], which costs a search per step."
)


class DDPStrategy(Strategy):
    """Data parallel training by torch's DistributedDataParallel, on any device that has a process group backend.

    Args:
        settings: all options of DDP at once; single ones may be given by name instead (`find_unused_parameters=True`).
        sync_batchnorm: batch normalization over the batches of all processes; not on the CPU.
        process_group_backend: e.g. "gloo" or "nccl"; None for the device's own.
        timeout: how long a collective may wait; None for torch's default.
        start_method: how a launcher starts the processes; None for what the environment allows.
    """

    name = "ddp"
    launches = True
    replicates = True

    def __init__(
        self,
        settings: DistributedDataParallelKwargs | None = None,
        *,
        sync_batchnorm: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if settings is not None and options:
            raise ValueError(f"Expected DDP's options once. Received: settings and {sorted(options)}. Give one.")
        self.given = settings is not None or bool(options)
        self.named = frozenset(options)
        self.settings = settings or DistributedDataParallelKwargs(**options)
        self.sync_batchnorm = sync_batchnorm
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.start_method = start_method
        self._manual: Replica | None = None
        self._replicas: weakref.WeakSet[Replica] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """What goes to processes that are started with this strategy: the options, not what runs here."""
        return {**self.__dict__, "_replicas": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _replicas=weakref.WeakSet())

    # Environment

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        self._take(settings.get(DistributedDataParallelKwargs))
        self.settings = ddp_options(self.settings, self.named)
        group = settings.get(InitProcessGroupKwargs, InitProcessGroupKwargs()).to_kwargs()
        backend = _one("backend", self.process_group_backend, group.get("backend"))
        timeout = _one("timeout", self.timeout, group.get("timeout"))
        method = group.get("init_method")
        if not placement.launched and placement.size == 1 and method is None:
            method = "tcp://127.0.0.1:0"  # one process by itself: any free port
        return TorchWorld.create(placement, device, backend=backend, timeout=timeout, init_method=method)

    def teardown(self) -> None:
        for replica in list(self._replicas):  # a reducer that outlives its process group may block when it is freed
            replica.release()
        super().teardown()

    def _take(self, handler: Any) -> None:
        if handler is not None and self.given and handler != self.settings:
            raise ValueError(
                f"Expected DDP's options once. Received: {self.settings} from the strategy and {handler} from "
                "kwargs_handlers. Give them in one place."
            )
        self.settings = handler or self.settings

    @property
    def distributed_type(self) -> DistributedType:
        name = f"MULTI_{self.device.type.upper()}"
        return DistributedType(name) if name in DistributedType.__members__ else DistributedType.MULTI_GPU

    # Preparing

    def prepare_model(
        self, model: torch.nn.Module, precision: Precision, *, evaluation: bool = False, **options: Any
    ) -> torch.nn.Module:
        if self.sync_batchnorm and not evaluation:
            model = self._with_sync_batchnorm(model)
        model = super().prepare_model(model, precision, evaluation=evaluation, **options)
        if evaluation or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        devices = None if self.device.index is None else [self.device.index]
        replica = Replica(model, device_ids=devices, **self.settings.to_kwargs())
        self.settings.register_comm_hook(replica)
        self._replicas.add(replica)
        return replica

    def _with_sync_batchnorm(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.device.type == "cpu":
            raise ValueError(
                "Expected an accelerator for sync_batchnorm=True. Received: device='cpu', where torch has no "
                "SyncBatchNorm. Set sync_batchnorm=False, or use a normalization that does not look at the batch."
            )
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)

    def unwrap(self, model: Any, *, keep_compiled: bool = False) -> torch.nn.Module:
        replica = _replica(model)
        return super().unwrap(model if replica is None else replica.module, keep_compiled=keep_compiled)

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        """Training methods run inside DDP's forward, which prepares its reducer; evaluation runs the plain module."""
        function = super().entry(model, method, precision, manual=manual)
        replica = _replica(model)
        if replica is None or method in _EVALUATION:
            return function
        if not manual:
            return lambda *args, **kwargs: replica.route(function, *args, **kwargs)

        def manually(*args: Any, **kwargs: Any) -> Any:
            self._manual = replica
            try:
                return replica.route_manual(function, *args, **kwargs)
            finally:
                self._manual = None

        return manually

    # A step

    def no_sync(self, model: Any) -> Any:
        replica = _replica(model)
        return NOTHING if replica is None else replica.no_sync()

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        if self._manual is not None:
            self._manual.expect_backward(loss)
        super().backward(loss, precision, **kwargs)

    def before_evaluation(self, model: Any) -> None:
        """As DDP does before a training step, and a checkpoint keeps them: the first process's buffers count."""
        if self.settings.broadcast_buffers and self.world.size > 1:
            for buffer in self.unwrap(model).buffers():
                self.world.broadcast(buffer)

    def join(self, joinables: list[Any], **options: Any) -> Any:
        return Join([_replica(model) or model for model in joinables], **options)


class Replica(DistributedDataParallel):
    """DDP that can run another method of its module than forward, and that evaluates without collectives."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        self._method: Callable[..., Any] | None = None
        super().__init__(module, **options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._evaluates():
            return self.module(*inputs, **kwargs)
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise RuntimeError(_UNUSED.format(names=self._unused(error))) from error

    def _evaluates(self) -> bool:
        # An evaluation may have more batches on one rank than on another: nothing in it may wait for the others.
        return not self.training and not torch.is_grad_enabled()

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        method, self._method = self._method, None
        if method is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        with self._inside_ddp_forward():
            return method(*inputs, **kwargs)

    def route(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the module in the place of its forward, so that gradients are reduced in its backward."""
        if self._evaluates():
            return method(*args, **kwargs)
        self._method = method
        try:
            return self(*args, **kwargs)
        finally:
            self._method = None

    def route_manual(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method that calls backward itself: the reducer is then prepared by each of these calls."""
        synchronizes = self.require_backward_grad_sync

        def inside(*args: Any, **kwargs: Any) -> Any:
            self.require_backward_grad_sync = synchronizes
            try:
                return method(*args, **kwargs)
            finally:
                self.require_backward_grad_sync = False

        self.require_backward_grad_sync = False
        try:
            return self.route(inside, *args, **kwargs)
        finally:
            self.require_backward_grad_sync = synchronizes
            self.require_forward_param_sync = True

    def expect_backward(self, loss: torch.Tensor) -> None:
        """Prepares the reducer for one backward pass, as DDP's own forward does at its end."""
        if not self.require_backward_grad_sync:
            return
        searches = self.find_unused_parameters and not self.static_graph
        self.reducer._rebuild_buckets()  # after the first backward of all; a second one before it is an error
        self.reducer.prepare_for_backward([loss] if searches else [])

    def release(self) -> None:
        """Lets go of the process group; the module inside stays as it is."""
        self.reducer = self.logger = None

    @contextmanager
    def sync_in_backward(self) -> Any:
        """Reduces gradients in the next backward, though the forward ran without synchronization."""
        before = self.require_backward_grad_sync, self.require_forward_param_sync
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            self.require_backward_grad_sync, self.require_forward_param_sync = before

    def _unused(self, error: RuntimeError) -> str:
        # Not by p.grad: zero_grad has cleared those that took part, too.
        every = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [every[int(index)] for index in found[1].split()] if found else []
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return ", ".join(names[:5]) + more if names else "none here, so on another rank"


def _replica(model: Any) -> Replica | None:
    """The DDP around a module, which a compiler may have wrapped in its turn."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, Replica) else None


def _one(name: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise ValueError(f"Expected {name} once. Received: {first!r} and {second!r}. Give it in one place.")
    return second if first is None else first
