"""drivetrain: PyTorch training that is exact, durable, thin and plain.

All public names live here and load on first use: `import drivetrain` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBPACKAGES = ("callbacks", "strategies", "trainer")

_EXPORTS: dict[str, str] = {
    # Callbacks
    "Callback": "callbacks.base",
    "LambdaCallback": "callbacks.base",
}
"""Name → the module that defines it."""

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:  # the same names for editors and type checkers; a test compares both
    from .callbacks.base import Callback as Callback
    from .callbacks.base import LambdaCallback as LambdaCallback


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
