"""Giving one module a wrapped forward, and taking it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def replace_forward(model: torch.nn.Module, wrap: Callable[[Callable], Callable]) -> torch.nn.Module:
    """Gives one model a wrapped forward, as a bound method: a deep copy of the model then runs its own parameters."""
    own = vars(model).get("forward")
    bound: Any = model.forward
    wrapped: Any = wrap(bound.__func__ if getattr(bound, "__self__", None) is model else _without_self(bound))
    wrapped._replaced = own
    model.forward = MethodType(wrapped, model)  # type: ignore[method-assign]
    return model


def restore_forward(model: torch.nn.Module) -> torch.nn.Module:
    """Takes back what `replace_forward` did, if it did."""
    wrapped: Any = getattr(vars(model).get("forward"), "__func__", None)
    if hasattr(wrapped, "_replaced"):
        del model.forward
        if wrapped._replaced is not None:
            model.forward = wrapped._replaced
    return model


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method
