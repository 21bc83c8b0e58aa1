"""Which functions an event calls: resolved once per run into tuples, so that the loop only walks over them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Callable, Sequence

from ..callbacks.base import AFTER_MODULE, HOOKS, Callback
from .module import STEPS, TrainModule
from .module_hooks import MODULE_HOOKS

Functions = tuple[Callable[..., Any], ...]
APART = ("on_train_batch_end", "on_train_epoch_end")


class Hooks:
    """One tuple of functions per event: callbacks' overridden methods, then the module's, then late callbacks'.

    Callbacks come by (priority, position), already bound to the trainer and the module; the order is the same on every
    rank. After a training batch and epoch something comes before the late ones (a row is reduced and logged), so they
    stand apart, in ``late``.
    """

    def __init__(self, trainer: Any, module: TrainModule, callbacks: Sequence[Callback]) -> None:
        ordered = sorted(callbacks, key=lambda callback: callback.priority)
        self.late: dict[str, Functions] = {}
        for name in HOOKS + MODULE_HOOKS:
            listeners = [callback for callback in ordered if name in HOOKS and overrides(callback, name, Callback)]
            early = [c for c in listeners if c.priority < AFTER_MODULE]
            late = [c for c in listeners if c.priority >= AFTER_MODULE]
            own = [getattr(module, name)] if overrides(module, name, TrainModule) else []
            bound = [partial(getattr(callback, name), trainer, module) for callback in early]
            first = tuple(fitting(function, name) for function in bound + own)
            last = tuple(fitting(partial(getattr(c, name), trainer, module), name) for c in late)
            if name in APART:
                self.late[name] = last
            setattr(self, name, first if name in APART else first + last)

    def __getattr__(self, name: str) -> Functions:
        raise AttributeError(f"Expected the name of a hook. Received: {name}. Use one of {', '.join(HOOKS)}.")

    def fire(self, name: str, *arguments: Any) -> None:
        """Call all functions of an event."""
        for function in getattr(self, name):
            function(*arguments)


def overrides(thing: Any, name: str, base: type) -> bool:
    """Tell whether ``thing`` has its own version of a method of ``base`` (in its class or set on the object)."""
    if name in vars(thing):
        return True
    own = getattr(type(thing), name, None)
    return own is not None and own is not getattr(base, name, None)


def fitting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function``, or one that drops trailing arguments that it does not take.

    Those may be ``batch_idx`` and ``dataloader_idx``.
    """
    if "_batch_" not in name and name not in STEPS:
        return function
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return function
    count = sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
    if count >= full_count(name):
        return function
    return lambda *arguments: function(*arguments[:count])


def full_count(name: str) -> int:
    """Return how many arguments the loop gives to a step or a batch hook."""
    if name in STEPS:
        return 2 if name == "training_step" else 3
    return 2 + (not name.startswith("on_train_")) + name.endswith("_end")
