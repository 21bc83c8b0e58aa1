"""Everything that knows there is more than one process, device or precision.

A strategy is asked for by name or given as an object; its module is imported when it is first used.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Strategy

_CLASSES = {"Strategy": "base", "SingleDeviceStrategy": "base", "DDPStrategy": "ddp"}
_STARTS = {"ddp": None, "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
_LATER = ("fsdp", "fsdp2", "hsdp", "deepspeed", "tensor_parallel", "context_parallel", "pipeline", "xla", "megatron")


def registry() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns every name of a strategy with the class that it stands for and that class's arguments."""
    names: dict[str, tuple[str, dict[str, Any]]] = {"single": ("SingleDeviceStrategy", {})}
    for name, start in _STARTS.items():
        options = {} if start is None else {"start_method": start}
        names[name] = ("DDPStrategy", options)
        for unused in (True, False):
            suffix = f"_find_unused_parameters_{str(unused).lower()}"
            names[name + suffix] = ("DDPStrategy", {**options, "find_unused_parameters": unused})
    return names


def create(strategy: str | Strategy | None = None, *, size: int = 1) -> Strategy:
    """Returns the strategy that a name stands for; `None` and "auto" mean one device, or DDP for several processes.

    Raises:
        ValueError: no strategy has that name; the message names the nearest.
        NotImplementedError: the engine is not part of this version.
    """
    if strategy is not None and not isinstance(strategy, str):
        if not isinstance(strategy, __getattr__("Strategy")):
            raise TypeError(f"Expected a strategy or its name. Received: {strategy!r}. Use a name such as 'ddp'.")
        return strategy
    if strategy in (None, "auto"):
        strategy = "ddp" if size > 1 else "single"
    known = registry()
    if strategy not in known:
        raise _unknown(strategy, list(known))
    name, options = known[strategy]
    return __getattr__(name)(**options)


def _unknown(strategy: str, known: list[str]) -> Exception:
    if strategy.lower().startswith(_LATER):
        return NotImplementedError(
            f"The engine of strategy={strategy!r} is not part of this version of drivetrain. Use strategy='ddp'."
        )
    near = difflib.get_close_matches(strategy, [*known, "auto"], n=1)
    advice = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
    return ValueError(f"Expected strategy to be one of auto, {', '.join(known)}. Received: {strategy!r}. {advice}")


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return getattr(import_module(f".{_CLASSES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
