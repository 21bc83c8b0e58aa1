"""Sharding a model by torch's `fully_shard`, and sending methods of it through the hooks that gather its weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)
_ROUTE = "_drivetrain_route"


def shard(
    model: nn.Module,
    *,
    mesh: Any,
    units: Iterable[nn.Module] = (),
    ignored: Iterable[nn.Parameter] = (),
    reshard: bool | int = True,
    mixed_precision: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
    prefetch: bool = False,
    before: Callable[[nn.Module], None] = lambda part: None,
    apart: Mapping[nn.Module, Any] | None = None,
) -> Route:
    """Shards a model in place, each of `units` apart and the rest with the root; returns the way into it.

    `mesh` has one dimension, over which weights are sharded, or two: replicas, and shards; `apart` are units with a
    mesh of their own. Weights that lie on "meta"
    get no values. `before` is called with each part just before it is sharded. Parameters become DTensors: other
    objects than before, under the same names. Every rank calls this.
    """
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision or MixedPrecisionPolicy()}
    options |= {"offload_policy": offload or OffloadPolicy(), "ignored_params": set(ignored)}
    for unit, own in [*(apart or {}).items(), *((unit, mesh) for unit in units)]:
        if not isinstance(unit, FSDPModule):
            before(unit)
            fully_shard(unit, reshard_after_forward=reshard, **{**options, "mesh": own})
    if not isinstance(model, FSDPModule):
        before(model)
        # The root is needed again at once in a backward: None keeps it whole, unless a number of ranks is asked for.
        fully_shard(model, reshard_after_forward=None if reshard is True else reshard, **options)
    root = cast(FSDPModule, model)
    root.set_reduce_scatter_unused_params(True)  # a rank may not use what the others do: its part is then zero
    if prefetch:
        _prefetch([module for module in model.modules() if isinstance(module, FSDPModule) and module is not model])
    route = Route.of(model)
    route.watch([module for module in model.modules() if isinstance(module, FSDPModule) and module is not model], mesh)
    return route


def wrap_forwards(
    model: nn.Module, units: list[nn.Module], *, recompute: bool, offload: bool, compile: dict[str, Any] | None
) -> None:
    """Lets the units of a model compute activations again in a backward, and be compiled with these options.

    With `offload` what they need for that waits on the CPU.
    """
    if recompute and not units:
        logger.warning("activation_checkpointing has no effect: the model has no units but itself.")
    for unit in units if recompute else ():
        replace(unit, lambda forward: functools.partial(checkpoint, forward, use_reentrant=False))
        if offload:
            replace(unit, lambda forward: functools.partial(_with_inputs_on_cpu, forward))
    for part in (units or [model]) if compile is not None else ():  # inside of the hooks, which are not compiled
        replace(part, lambda forward: torch.compile(forward, **compile))


def _with_inputs_on_cpu(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available()):
        return forward(*args, **kwargs)


def replace(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Gives a module a wrapped forward, inside of the hooks that gather its weights; its names stay as they are."""
    vars(module)["forward"] = wrap(module.forward)


class Route:
    """The way into a sharded model: `forward` or any other method, inside of which its own weights are whole.

    Calls within such a method go straight to the module. A method that calls `backward` and steps optimizers itself
    is routed by `manually`, and then tells of each backward and step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.depth = 0
        self._by_hand = False
        self._watch: list[Any] = []  # hooks on the units, until the first pass ends
        self._group: Any = None
        self._state = cast(FSDPModule, model)._get_fsdp_state()
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after)

    @classmethod
    def of(cls, model: nn.Module) -> Route:
        """Returns the route into a model that is sharded, the same at each call."""
        if _ROUTE not in vars(model):
            vars(model)[_ROUTE] = cls(model)
        return cast(Route, vars(model)[_ROUTE])

    def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method of the model in the place of its forward."""
        if self.depth:
            return method(*args, **kwargs)
        args, kwargs = self._state._pre_forward(self.model, args, kwargs)
        outputs = self._run(method, *args, **kwargs)
        return self._after(self.model, args, outputs)

    def watch(self, units: Iterable[nn.Module], mesh: Any) -> None:
        """Lets the ranks of a mesh tell each other in the first pass which unit they are going to call.

        A unit that some of them leave out is an error by name then. Later passes tell nothing.
        """
        names = {id(module): name for name, module in self.model.named_modules()}
        self._group = mesh.get_group(mesh.ndim - 1)
        for unit in units if dist.get_backend(self._group) != "fake" else ():
            hook = functools.partial(self._agree, names[id(unit)])
            self._watch.append(unit.register_forward_pre_hook(hook, prepend=True))

    def _agree(self, name: str, *arguments: Any) -> None:
        if not self._watch:
            return  # a hook that was removed, and put back where an extra pass of an evaluation was forgotten
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, name, group=self._group)
        if len(set(told)) > 1:
            ranks = dist.get_process_group_ranks(self._group)
            shown = ", ".join(f"{one or 'the end'} on rank {rank}" for rank, one in zip(ranks, told))
            raise RuntimeError(
                f"Expected all ranks to call the same unit of a sharded model. Received: {shown}. Call it on every "
                "rank, and multiply what it returns by zero where it is not wanted."
            )

    def _end_watch(self) -> None:
        if self._watch:
            self._agree("")
            for hook in self._watch:
                hook.remove()
            self._watch.clear()

    def manually(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a method that calls backward itself; see `backward` and `stepped`."""
        self._by_hand = True
        try:
            return self(method, *args, **kwargs)
        finally:
            self._by_hand = False

    @property
    def by_hand(self) -> bool:
        """Whether a method runs that calls backward itself."""
        return self._by_hand

    def backward(self, loss: Tensor, differentiate: Callable[[Tensor], None]) -> None:
        """Differentiates a loss in the middle of such a method: for the hooks a forward ends, and another begins."""
        differentiate(self._state._post_forward(self.model, (), loss))
        self._state._pre_forward(self.model, (), {})

    def stepped(self) -> None:
        """The weights have changed in the middle of such a method: they are gathered anew."""
        for group in self._state._fsdp_param_groups:
            group._to_sharded()  # `reshard` would do nothing within a forward that keeps the root whole
        cast(FSDPModule, self.model).unshard()

    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return method(*args, **kwargs)
        except BaseException:
            self._abandon()
            raise
        finally:
            self.depth -= 1

    def _abandon(self) -> None:
        """Puts the hooks' states back after an error, so that the model can be used again."""
        cast(FSDPModule, self.model).reset_iter_state()

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.depth else self._state._pre_forward(model, args, kwargs)

    def _after(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if self.depth:
            return None
        self._end_watch()
        outputs = self._state._post_forward(model, args, outputs)
        if not torch.is_grad_enabled():  # no backward follows, for which the root would have to stay whole
            for group in _groups(model):
                group.reshard()
        return outputs


class Unsynchronized:
    """The context in which backward passes of a sharded model leave gradients whole and unreduced."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = _groups(model)

    def __enter__(self) -> None:
        self._set(False)

    def __exit__(self, *error: object) -> None:
        self._set(True)

    def _set(self, synchronizes: bool) -> None:
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = synchronizes


class Held:
    """A whole gradient that a sharded model keeps until it is reduced, as something that has a `grad`."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        """The gradient so far; None without one."""
        kept: Tensor | None = self._parameter.unsharded_accumulated_grad
        if kept is not None:
            return kept
        return None if self.whole is None else self.whole.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._parameter.unsharded_accumulated_grad = value
        if self.whole is not None:
            self.whole.grad = None

    @property
    def whole(self) -> Any:
        """The whole parameter, which has no memory outside of a pass; None before the first."""
        return getattr(self._parameter, "_unsharded_param", None)


class WholeForPass:
    """Around several passes through sharded stages, each of which finds and leaves weights and gradients whole.

    Gradients are reduced by `reduce` afterwards.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._stages = [cast(FSDPModule, stage) for stage in stages if isinstance(stage, FSDPModule)]

    def __enter__(self) -> None:
        for stage in self._stages:
            stage.set_is_last_backward(False)
            stage.set_reshard_after_backward(False)
            stage.set_requires_gradient_sync(False)

    def __exit__(self, *error: object) -> None:
        for stage in self._stages:
            for group in _groups(cast(nn.Module, stage)):
                group.reshard()

    def reduce(self) -> None:
        """Makes the gradients of all ranks those of their parts (collective)."""
        for stage in self._stages:
            stage.set_is_last_backward(True)
            stage.set_reshard_after_backward(True)
            stage.set_requires_gradient_sync(True)
            for group in _groups(cast(nn.Module, stage)):
                group.post_backward()
            stage._get_fsdp_state()._root_post_backward_final_callback()


def held_gradients(model: nn.Module) -> list[Held]:
    """Returns the places of gradients that wait in a model for their reduction."""
    return [Held(parameter) for group in _groups(model) for parameter in group.fsdp_params]


def holders(models: Iterable[nn.Module]) -> list[Any]:
    """Returns what holds gradients of models: parameters, and what keeps whole gradients until their reduction."""
    models = list(models)
    held = [one for model in models for one in held_gradients(model)]
    whole = {id(one.whole) for one in held}  # which may stand in the place of the parameters just now
    return [p for model in models for p in model.parameters() if id(p) not in whole] + held


def _groups(model: nn.Module) -> list[Any]:
    return [group for state in _states(model) for group in state._fsdp_param_groups]


def _states(model: nn.Module) -> list[Any]:
    found = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in found}.values())


def _prefetch(units: list[Any]) -> None:
    for unit, following in zip(units, units[1:]):
        unit.set_modules_to_forward_prefetch([following])


def is_prepared(model: nn.Module) -> bool:
    """Whether `shard` was applied to a module."""
    return _ROUTE in vars(model)


def is_sharded(model: Any) -> bool:
    """Whether `fully_shard` was applied to a module."""
    return isinstance(model, FSDPModule)
