"""FSDP, version 2: each rank keeps a part of every weight, and units of the model are whole only while they compute.

One dimension of ranks shares the weights; with a second one around it (HSDP) there are several such replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from . import initial_weights, replaced_parameters, sharded_gradients, sharding, wrapping
from .base import Settings, is_scheduler
from .contexts import NOTHING
from .deferred import Deferred, Recording
from .environment import Placement
from .fsdp_plugin import FullyShardedDataParallelPlugin
from .gradients import GradientState
from .optimizer import AcceleratedOptimizer
from .precision import Precision, canonical_name
from .process_group import ProcessGroupStrategy
from .settings import AutocastKwargs, DistributedType, GradScalerKwargs, TorchDynamoPlugin
from .sharded_gradients import ShardedScaled
from .sharded_state import ShardedState
from .world import World


class FSDPStrategy(ShardedState, ProcessGroupStrategy):
    """Sharded data parallel training by torch's `fully_shard`, on any device, the CPU included.

    Args:
        plugin: all options; single ones may be given by name instead (`reshard_after_forward=False`).
        parallelism: a ParallelismConfig whose `dp_replicate_size` and `dp_shard_size` arrange the ranks.
        replicate: replicas of the model (HSDP): a number, or "nodes": each machine holds one; on a single machine two.
        shard: ranks that share one replica's weights; None for what `replicate` leaves.
        process_group_backend, timeout, start_method: see ProcessGroupStrategy.

    Raises:
        ValueError: options contradict each other or belong to version 1; at `setup` also sizes that do not fit the
            number of processes.
    """

    name = "fsdp"
    version = 2
    equal_forwards = True
    inference_mode = False  # a tensor that weights are first gathered into there could never be trained with

    def __init__(
        self,
        plugin: FullyShardedDataParallelPlugin | None = None,
        *,
        parallelism: Any = None,
        replicate: int | str | None = None,
        shard: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        if plugin is not None and options:
            raise ValueError(f"Expected FSDP's options once. Received: plugin and {sorted(options)}. Give one.")
        plugin = plugin or FullyShardedDataParallelPlugin(fsdp_version=self.version, **options)
        if plugin.fsdp_version != self.version:
            raise ValueError(
                f"Expected fsdp_version={self.version}. Received: {plugin.fsdp_version}. Use strategy='fsdp' for "
                "version 2, 'fsdp1' for version 1."
            )
        if parallelism is not None and self.version == 1 and parallelism.non_dp_dim_names:
            shown = ", ".join(f"{name}_size={parallelism.sizes[name]}" for name in parallelism.active_mesh_dims)
            raise ValueError(
                "Expected fsdp_version=2 together with other kinds of parallelism. Received: fsdp_version=1 and "
                f"{shown}. Set fsdp_version=2."
            )
        self.plugin, self.parallelism = plugin, parallelism
        self.full_state = plugin.full_state
        self._replicate, self._shard = replicate, shard
        if parallelism is None and replicate is None and plugin.hybrid:
            self._replicate = "nodes"
        if self._hybrid() and self.version == 2:
            self.name = "hsdp"
        self._replaced = replaced_parameters.Replaced()
        self._recording = Recording()  # of modules that were built under `init_context`
        self._by_hand: sharding.Route | None = None
        self._replicated: list[torch.nn.Parameter] = []  # trained, and not sharded

    # Environment

    def setup(
        self, placement: Placement, *, device: Any = None, cpu: bool = False, settings: Settings | None = None
    ) -> World:
        world = super().setup(placement, device=device, cpu=cpu, settings=settings)
        self.mesh = self._make_mesh()
        return world

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.FSDP

    @property
    def shard_mesh(self) -> Any:
        """The mesh over which weights are sharded: one dimension, or replicas and shards."""
        return self.mesh

    def precision(
        self,
        name: str | int | None,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        **options: Any,
    ) -> Precision:
        if canonical_name(name) == "16-mixed":
            scaled = ShardedScaled("16-mixed", torch.float16, self.device, autocast, scaler)
            scaled.agree = lambda found: self.world.all_reduce(found, "max")
            return scaled
        found = super().precision(name, autocast=autocast, scaler=scaler, **options)
        found.sharded = True
        return found

    def _hybrid(self) -> bool:
        if self.parallelism is not None:
            return bool(self.parallelism.dp_replicate_size not in (None, 1))
        return self._replicate not in (None, 1)

    def _make_mesh(self) -> Any:
        if self.parallelism is None:
            replicas, shards = self._degrees()
        else:
            degrees = self.parallelism.resolved(self.world.size)
            replicas, shards = degrees.dp_replicate_size, degrees.dp_shard_size
        if self._hybrid():
            names = ("dp_replicate", "dp_shard")
            return init_device_mesh(self.device.type, (replicas, shards), mesh_dim_names=names)
        return init_device_mesh(self.device.type, (shards,), mesh_dim_names=("dp_shard",))

    def _degrees(self) -> tuple[int, int]:
        """How many replicas there are, and how many ranks share each."""
        size, replicas, shards = self.world.size, self._replicate, self._shard
        if replicas == "nodes":
            nodes = self.world.num_nodes
            replicas = nodes if nodes > 1 else 2 if size % 2 == 0 else 1
        if replicas is None:
            replicas = size // shards if shards else 1
        shards = size // int(replicas) if shards is None else shards
        if int(replicas) * shards != size or not shards:
            raise ValueError(
                f"Expected replicas × shards to be the number of processes. Received: replicate={replicas}, "
                f"shard={shards} for {size} processes. Start as many, or change one of the two."
            )
        return int(replicas), shards

    # Preparing

    def init_context(self) -> Any:
        """New modules get the values of their weights as they are sharded: no rank ever holds a model whole."""
        return Deferred(self._recording) if self._defers() else super().init_context()

    def _defers(self) -> bool:
        return type(self)._parallelize is FSDPStrategy._parallelize and self.version == 2

    def prepare(self, objects: tuple[Any, ...], one: Callable[[Any], Any]) -> list[Any]:
        """Models first: an optimizer's parameters are replaced as its model is sharded."""
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
        """Shards a model in place; the same object comes back. `evaluation` makes no difference: it is sharded, too."""
        if sharding.is_prepared(model):  # for an earlier stage
            return model
        before = replaced_parameters.named([model])
        # A precision may convert what has no memory yet.
        with Deferred(self._recording) if self._recording.storages else NOTHING:
            model = precision.prepare_model(model, evaluation=evaluation)
        self._parallelize(model)
        ignored = self.plugin.ignored_in(model)
        units = wrapping.units(model, self.plugin.policy_for(model), ignored=ignored)
        self._wrap_forwards(model, units, dynamo)
        self._shard_model(model, units, ignored)
        self._replaced.note(before, model)
        return model

    def _parallelize(self, model: torch.nn.Module) -> None:
        """What other kinds of parallelism do to a model before its weights are sharded."""

    def _wrap_forwards(self, model: torch.nn.Module, units: list[Any], dynamo: TorchDynamoPlugin | None) -> None:
        options = dynamo.to_kwargs() if dynamo is not None and dynamo.active else None
        sharding.wrap_forwards(
            model, units, recompute=bool(self.plugin.activation_checkpointing),
            offload=bool(self.plugin.activation_checkpointing_offload), compile=options,
        )  # fmt: skip

    def _shard_model(self, model: torch.nn.Module, units: list[Any], ignored: list[Any]) -> None:
        plugin = self.plugin
        values = initial_weights.Values(
            model, self.world, function=plugin.param_init_fn, synchronize=plugin.sync_module_states is not False,
            place=torch.device("cpu") if plugin.offloads else self.device, recording=self._recording,
        )  # fmt: skip
        left_out = {id(p): p for module in ignored for p in module.parameters()}
        sharding.shard(
            model, mesh=self.shard_mesh, units=units, ignored=left_out.values(), before=values.before,
            reshard=plugin.reshard_after_forward, mixed_precision=plugin.mixed_precision_policy,
            prefetch=bool(plugin.forward_prefetch), offload=plugin.offload_on(self.device), apart=self._apart(model),
        )  # fmt: skip
        values.fill()
        self._replicated += [p for p in model.parameters() if id(p) in left_out and p.requires_grad]

    def _apart(self, model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
        """Units that are sharded over another mesh than the rest."""
        return {}

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True
    ) -> AcceleratedOptimizer:
        self._replaced.follow(optimizer)
        return super().prepare_optimizer(optimizer, precision, place=place)

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        """Methods run in the place of the model's forward, so that its own weights are whole inside of them."""
        function = super().entry(model, method, precision, manual=manual)
        module = self.unwrap(model)
        if not sharding.is_sharded(module):
            return function
        route = sharding.Route.of(module)
        if not manual:
            return functools.partial(route, function)

        def manually(*args: Any, **kwargs: Any) -> Any:
            self._by_hand = route
            try:
                return route(function, *args, **kwargs)
            finally:
                self._by_hand = None

        return manually

    # A step

    def no_sync(self, model: Any) -> Any:
        module = self.unwrap(model)
        return sharding.Unsynchronized(module) if sharding.is_sharded(module) else NOTHING

    def backward(self, loss: torch.Tensor, precision: Precision, **kwargs: Any) -> None:
        plainly = super().backward

        def differentiate(loss: torch.Tensor) -> None:
            plainly(loss, precision, **kwargs)

        if self._by_hand is None:
            differentiate(loss)
        else:
            self._by_hand.backward(loss, differentiate)
        if self._replicated and GradientState().sync_gradients:
            sharded_gradients.average(self._replicated, self.world)

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *, precision: Precision
    ) -> tuple[bool, Any]:
        result = super().step(optimizer, closure, precision=precision)
        if self._by_hand is not None:
            self._by_hand.stepped()
        return result

    def gradient_holders(self, models: Iterable[Any]) -> list[Any]:
        return sharding.holders([self.unwrap(model) for model in models])

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return sharded_gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        sharded_gradients.clip_value(parameters, clip_value)

    def join(self, joinables: list[Any], **options: Any) -> Any:
        raise NotImplementedError(
            f"Expected equally many batches on all ranks under strategy={self.name!r}, whose forwards need all ranks. "
            "Received: join_uneven_inputs. Leave it out, and even_batches as it is (True)."
        )

    def before_evaluation(self, model: Any) -> None:
        """A checkpoint keeps the first rank's buffers, so these count in an evaluation, too."""
        for buffer in self.unwrap(model).buffers():
            self.world.broadcast(buffer)
