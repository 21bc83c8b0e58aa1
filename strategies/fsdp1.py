"""FSDP, version 1 (FullyShardedDataParallel): a unit's parameters lie in one flat tensor, of which ranks hold parts."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from . import initial_weights, sharded_gradients, sharding, wrapping
from .checkpoint import sharded
from .contexts import NOTHING
from .fsdp import FSDPStrategy
from .fsdp_plugin import FullyShardedDataParallelPlugin
from .optimizer import AcceleratedOptimizer, unwrap_optimizer
from .precision import Precision
from .replaced_parameters import part_like
from .settings import TorchDynamoPlugin
from .sharded_state import gathered

_ROOT = "_drivetrain_root"


class FSDP1Strategy(FSDPStrategy):
    """Sharded data parallel training by torch's older FullyShardedDataParallel.

    Arguments: see FSDPStrategy; the options are those of `FullyShardedDataParallelPlugin(fsdp_version=1)`. Parameters
    stay the same objects (`use_orig_params`), so that an optimizer may be made before or after.
    """

    name = "fsdp1"
    version = 1

    def __init__(self, plugin: FullyShardedDataParallelPlugin | None = None, **options: Any) -> None:
        super().__init__(plugin, **options)
        self._units: weakref.WeakSet[Any] = weakref.WeakSet()

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
        """Returns the model inside of a module that gathers its weights, the same at each call."""
        if _ROOT in vars(model):
            return vars(model)[_ROOT]  # type: ignore[no-any-return]
        model = precision.prepare_model(model, evaluation=evaluation)
        ignored = self.plugin.ignored_in(model)
        units = wrapping.units(model, self.plugin.policy_for(model), ignored=ignored)
        self._wrap_forwards(model, units, dynamo)
        self._give_values(model)
        root = Sharded(model, **self._options(units, ignored))
        self._units.add(root)
        model.__dict__[_ROOT] = root  # past nn.Module's own attributes, so that it is no part of the model
        left_out = {id(p) for module in ignored for p in module.parameters()}
        self._replicated += [p for p in root.parameters() if id(p) in left_out and p.requires_grad]
        return root

    def _options(self, units: list[Any], ignored: list[Any]) -> dict[str, Any]:
        plugin, chosen = self.plugin, {id(unit) for unit in units}
        on_cpu = self.device.type == "cpu"
        return {
            "device_mesh": self.shard_mesh, "device_id": self.device, "sharding_strategy": plugin.sharding_strategy,
            "auto_wrap_policy": CustomPolicy(lambda module: id(module) in chosen),
            "cpu_offload": None if on_cpu else plugin.cpu_offload,  # on the CPU they lie there anyway
            "backward_prefetch": plugin.backward_prefetch, "mixed_precision": plugin.mixed_precision_policy,
            "ignored_modules": ignored or None, "forward_prefetch": bool(plugin.forward_prefetch),
            "limit_all_gathers": plugin.limit_all_gathers, "use_orig_params": bool(plugin.use_orig_params),
        }  # fmt: skip

    def _give_values(self, model: torch.nn.Module) -> None:
        """The first rank's weights on all ranks; the wrapper cannot do it on every device."""
        absent = self.world.gather_object(initial_weights.on_meta(model))
        if absent[self.world.rank] and not absent[0]:
            model.to_empty(device=self.device)
        if absent[0]:
            initial_weights.materialize(model, self.device, self.plugin.param_init_fn)
        if any(absent) or self.plugin.sync_module_states is not False:
            initial_weights.synchronize([*model.parameters(), *model.buffers()], self.world)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, *, place: bool = True
    ) -> AcceleratedOptimizer:
        known = {id(parameter) for root in self._units for parameter in root.parameters()}
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self.plugin.use_orig_params and known and not any(id(parameter) in known for parameter in own):
            raise ValueError(
                "Expected an optimizer made from the prepared model, whose parameters are flat ones with "
                "use_orig_params=False. Received: one made before. Make it after prepare(model), or set "
                "use_orig_params=True."
            )
        return super().prepare_optimizer(optimizer, precision, place=place)

    def unwrap(self, model: Any, *, keep_compiled: bool = False) -> torch.nn.Module:
        return super().unwrap(model.module if isinstance(model, Sharded) else model, keep_compiled=keep_compiled)

    def entry(self, model: Any, method: str, precision: Precision, *, manual: bool = False) -> Callable[..., Any]:
        function = precision.entry(getattr(self.unwrap(model), method))
        if not isinstance(model, Sharded):
            return function
        if manual:
            raise NotImplementedError(
                "Expected automatic optimization under strategy='fsdp1', whose forward cannot hold a backward. "
                "Received: automatic_optimization=False. Use strategy='fsdp'."
            )
        return lambda *args, **kwargs: model.route(function, *args, **kwargs)

    # A step

    def no_sync(self, model: Any) -> Any:
        return model.no_sync() if isinstance(model, Sharded) else NOTHING

    def gradient_holders(self, models: Any) -> list[Any]:
        return [parameter for model in models for parameter in model.parameters()]

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        groups = self._groups()
        return sharded_gradients.clip_norm(
            parameters, max_norm, norm_type, sharing=lambda parameter: groups.get(id(parameter), ())
        )

    def _groups(self) -> dict[int, tuple[Any, ...]]:
        """The process groups over which each sharded parameter (by identity) is shared out."""
        found: dict[int, tuple[Any, ...]] = {}
        left_out = {id(parameter) for parameter in self._replicated}
        for root in self._units:
            shared = root.sharding_strategy is not ShardingStrategy.NO_SHARD and root.process_group.size() > 1
            group = (root.process_group,) if shared else ()
            found.update({id(parameter): group for parameter in root.parameters() if id(parameter) not in left_out})
        return found

    # State

    def _parts(self, model: Any) -> dict[str, Any]:
        root = _root(model)
        with _in_parts(root):
            return dict(root.state_dict())

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        root, targets = _root(model), self._parts(model)
        missing, unexpected = sorted(targets.keys() - state.keys()), sorted(state.keys() - targets.keys())
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Expected the weights of {type(root.module).__name__}. Received: missing {missing[:5]}, unexpected "
                f"{unexpected[:5]}. Load with strict=False, or build the model as it was."
            )
        parts = {name: part_like(state.get(name, value), value) for name, value in targets.items()}
        with _in_parts(root):
            return root.load_state_dict(parts, strict=strict)

    def save_optimizer(self, writer: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        root = self._root_of(optimizer)
        with _in_parts(root):
            state = FullyShardedDataParallel.optim_state_dict(root, unwrap_optimizer(optimizer))
        if not self.full_state:
            sharded.save_sharded_state(writer, stem, state)
            return
        held = gathered(_flat(state))
        if writer.world.rank == 0:
            writer.state(stem, {**state, "state": _nested(state, held)})

    def load_optimizer(self, checkpoint: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        root, inner = self._root_of(optimizer), unwrap_optimizer(optimizer)
        saved = sharded.load_sharded_state(checkpoint, stem, self._parts(root))
        with _in_parts(root):
            inner.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(root, inner, saved))

    def _root_of(self, optimizer: Any) -> Any:
        """The model whose parameters an optimizer steps."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for root in self._units:
            if any(id(parameter) in own for parameter in root.parameters()):
                return root
        raise ValueError(
            "Expected an optimizer of a prepared model. Received: one whose parameters no model has. Prepare its model."
        )


class Sharded(FullyShardedDataParallel):
    """The root of a model under version 1, which can run another method of its module than forward."""

    def route(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the module in the place of its forward."""
        attributes: dict[str, Any] = self.module.__dict__
        absent = object()
        own = attributes.get("forward", absent)

        def restore() -> None:
            if own is absent:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = own

        def once(*args: Any, **kwargs: Any) -> Any:
            restore()
            return method(*args, **kwargs)

        attributes["forward"] = once
        try:
            return self(*args, **kwargs)
        finally:
            restore()


def _root(model: Any) -> Any:
    """What is around a model, of which the user may have the module inside."""
    return vars(model).get(_ROOT, model)


@contextmanager
def _in_parts(root: Any) -> Iterator[None]:
    """States of a model, and of its optimizer, are parts (DTensors) inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that parts as DTensors are new, and that version 2 is newer
        with FullyShardedDataParallel.state_dict_type(
            root, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ):  # fmt: skip
            yield


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}\n{key}": value for name, values in state["state"].items() for key, value in values.items()}


def _nested(state: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {key: held[f"{name}\n{key}"] for key in values} for name, values in state["state"].items()}
