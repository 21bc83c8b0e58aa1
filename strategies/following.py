"""Optimizers that follow their parameters, where an engine puts others in their places."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .optimizer import unwrap_optimizer


class Replacements:
    """Which parameters have taken the places of which; holds none of the old ones in memory."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def names(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Returns a model's parameters by their names, to be given to `note` once they have been replaced."""
        return dict(model.named_parameters(remove_duplicate=False))

    def note(self, before: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
        """Compares a model with what it held before; a parameter that is gone is replaced by None."""
        after = self.names(model)
        for name, old in before.items():
            new = after.get(name)
            if new is not old:
                self._new[id(old)] = (weakref.ref(old), None if new is None else weakref.ref(new))

    def follow(self, optimizer: Any) -> None:
        """Lets an optimizer hold the parameters that have taken the places of its own; those that are gone leave it.

        Parameters that torch's fused loops cannot take together (on several meshes, or beside plain tensors) are then
        updated one by one.
        """
        optimizer = unwrap_optimizer(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [new for old in group["params"] for new in self._followed(old, optimizer)]
            if len(set(map(_kind, group["params"]))) > 1:
                group.update({name: False for name in ("foreach", "fused") if name in group})

    def _followed(self, old: Any, optimizer: Any) -> Iterable[Any]:
        reference, new = self._new.get(id(old), (None, None))
        if reference is None or reference() is not old:
            return [old]
        found = None if new is None else new()
        state = optimizer.state.pop(old, None)
        if state and found is not None:
            raise ValueError(
                "Expected an optimizer that has not stepped yet, as the engine shares out its parameters. Received: "
                f"one with state for {len(optimizer.state) + 1} of them. Prepare it before its first step."
            )
        return [] if found is None else [found]


def _kind(parameter: Any) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
