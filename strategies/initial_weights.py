"""The values of a model's weights when it is sharded: the first rank's, on all ranks.

A model may come with values on every rank (the first rank's then count), on the first rank only, the others' on "meta",
or on "meta" everywhere; then its modules get values one unit at a time, so that no rank ever holds it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import deferred
from .checkpoint.pieces import rectangle, within
from .deferred import Recording
from .world import World

Initialize = Callable[[nn.Module], None]


class Values:
    """Around the sharding of a model: `before` each part of it is sharded, `fill` after all of it is.

    Args:
        model: on the CPU, on "meta", or on the device.
        recording: what was built under `Deferred`, whose values come now.
        function: gives one module on real memory the values of its own parameters; None for `reset_parameters`.
        synchronize: the first rank's weights go to all ranks.
        place: where sharded weights lie.
    """

    def __init__(
        self, model: nn.Module, world: World, *, function: Initialize | None, synchronize: bool, place: torch.device,
        recording: Recording,
    ) -> None:  # fmt: skip
        self.model, self.world, self.place, self._recording = model, world, place, recording
        self._function, self._synchronize = function, synchronize
        absent = world.gather_object(on_meta(model))
        self._set_aside: dict[str, Tensor] | None = None
        if any(absent) and not absent[0]:
            self._set_aside = set_aside(model) if world.rank == 0 else {}
            to_meta(model)
        self._initialize = absent[0]

    def before(self, part: nn.Module) -> None:
        """Gives a module values, where it has none, and the first rank's to all."""
        if self._set_aside is not None:
            return
        deferred.materialize(part, self._recording)
        if self._initialize:
            materialize(part, self.world.device, self._function)
        if self._synchronize or self._initialize:
            tensors = (*part.parameters(), *part.buffers())
            synchronize([tensor for tensor in tensors if not isinstance(tensor, DTensor)], self.world)

    def fill(self) -> None:
        """Gives a sharded model the weights that the first rank alone had."""
        if self._set_aside is not None:
            self.model.to_empty(device=self.place)
            put_back(self.model, self._set_aside, self.world)


def on_meta(model: nn.Module) -> bool:
    """Whether some parameter or buffer of a model has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def synchronize(tensors: list[Tensor], world: World) -> None:
    """Gives every rank the first rank's tensors, one by one, in place."""
    with torch.no_grad():
        for tensor in tensors if world.size > 1 else ():
            world.broadcast(tensor)


def set_aside(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of a model by name, which stay though the model is moved to "meta"."""
    return {name: tensor.detach() for name, tensor in _named(model)}


def to_meta(model: nn.Module) -> None:
    """Moves a model to "meta", where tied weights stay tied (`Module.to` makes each of them anew)."""
    new: dict[int, Tensor] = {}
    for owned in (owned for part in model.modules() for owned in (part._parameters, part._buffers)):
        for name, tensor in owned.items():
            if tensor is not None and not tensor.is_meta:
                owned[name] = new.setdefault(id(tensor), _on_meta(tensor))


def _on_meta(tensor: Any) -> Any:
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def put_back(model: nn.Module, weights: dict[str, Tensor], world: World) -> None:
    """Fills a sharded model with weights that the first rank has, one by one."""
    with torch.no_grad():
        for name, target in _named(model):
            whole = torch.empty(target.shape, dtype=target.dtype, device=world.device)
            if world.rank == 0:
                whole.copy_(weights.pop(name))
            fill(target, world.broadcast(whole))


def fill(target: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor into this rank's part of another."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    target._local_tensor.copy_(whole[within(rectangle(target), (0,) * whole.dim())])


def initialize(module: nn.Module, function: Initialize | None) -> None:
    """Gives the own parameters of one module on real memory their values.

    Raises:
        ValueError: nobody knows how; the message names the module's class.
    """
    function = function or getattr(type(module), "reset_parameters", None)
    if function is None:
        raise ValueError(
            f"Expected reset_parameters in {type(module).__name__}, whose weights are on 'meta'. Received: none. "
            "Write it, or pass param_init_fn to FullyShardedDataParallelPlugin."
        )
    function(module)


def materialize(model: nn.Module, device: torch.device, function: Initialize | None) -> None:
    """Gives values to the modules of a model whose parameters or buffers lie on "meta", one by one."""
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                initialize(module, function)


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
