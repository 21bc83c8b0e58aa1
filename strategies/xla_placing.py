"""Moving a model to an XLA device such that its parameters stay the same objects.

torch gives a module new parameters when it goes to a device of another kind: optimizers that were made before would
train the old ones, and shared weights would be shared no more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .replaced_parameters import Replaced, named


def move(model: nn.Module, function: Callable[[Tensor], Tensor], replaced: Replaced) -> None:
    """Applies a function to all tensors of a model, in place where torch can do that.

    Where it cannot (something else holds on to a parameter), the module gets new ones, which `replaced` remembers.
    """
    before, found = torch.__future__.get_swap_module_params_on_conversion(), named([model])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(function)
    except RuntimeError as error:
        if "swap" not in str(error):
            raise
        torch.__future__.set_swap_module_params_on_conversion(False)
        _anew(model, function)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    replaced.note(found, model)


def _anew(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Gives a model new parameters, those that were shared once."""
    names: dict[int, list[str]] = {}
    for name, parameter in named([model]).items():
        names.setdefault(id(parameter), []).append(name)
    model._apply(function)
    for first, *others in names.values():
        kept = model.get_parameter(first)
        for other in others:
            owner, _, own = other.rpartition(".")
            setattr(model.get_submodule(owner), own, kept)
