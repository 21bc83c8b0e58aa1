"""Optimizers that were made before their model was sharded, which has put other parameters in the place of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from .checkpoint.pieces import rectangle, within


class Replaced:
    """The parameters that took the places of others, for as long as somebody still holds those."""

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> Any:
        """What goes to processes that are started: nothing, as no parameters are known there."""
        return type(self), ()

    def note(self, before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Remembers which parameter of a model has the name of each one before."""
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if parameter is not after[name]:
                self._successors[parameter] = after[name]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives an optimizer the parameters that took its own ones' places, in all groups, and their state."""
        for group in optimizer.param_groups:
            group["params"] = [self._successors.get(parameter, parameter) for parameter in group["params"]]
        state, old = optimizer.state, list(optimizer.state)
        for parameter in old:
            successor = self._successors.get(parameter) if isinstance(parameter, Tensor) else None
            if successor is not None:
                state[successor] = {key: part_like(value, successor) for key, value in state.pop(parameter).items()}


def switch(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, nn.Parameter]) -> None:
    """Gives an optimizer other parameters, by the data pointers or the identities of those that it has.

    Raises:
        KeyError: one of its parameters is not in the mapping.
    """
    for group in optimizer.param_groups:
        group["params"] = [mapping[_key(parameter, mapping)] for parameter in group["params"]]


def part_like(value: Any, like: Tensor) -> Any:
    """Returns a whole tensor shared out as another of its shape is; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    if value.shape != like.shape or not value.dim():
        return value
    part = value[within(rectangle(like), (0,) * value.dim())].to(like.device).clone()
    return sharded_like(part, like)


def sharded_like(part: Tensor, like: DTensor) -> DTensor:
    """Returns this rank's part of a tensor as the DTensor that it is a part of, shared out as another one is."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def named(models: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters of modules by all their names."""
    return {name: parameter for model in models for name, parameter in model.named_parameters(remove_duplicate=False)}


def _key(parameter: Tensor, mapping: Mapping[Any, Any]) -> Any:
    return next((key for key in (parameter, id(parameter), parameter.data_ptr()) if key in mapping), parameter)
