"""Everything that knows there is more than one process, device or precision.

A strategy is asked for by name or given as an object; its module is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "Strategy": "base", "SingleDeviceStrategy": "base", "DDPStrategy": "ddp", "create": "choice", "registry": "choice",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(f".{_NAMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
