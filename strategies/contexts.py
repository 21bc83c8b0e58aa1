"""Contexts that cost next to nothing to enter, again and again: one that does nothing, and reusable ones."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class Reentrant:
    """A context that can be entered again and again, also inside itself, at the price of one `torch.autocast`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        context = self._free.pop() if self._free else self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context = self._entered.pop()
        context.__exit__(kind, error, trace)
        self._free.append(context)


class Nothing:
    """The context that does nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *details: Any) -> None:
        return None


NOTHING = Nothing()


class DefaultDtype:
    """Makes new floating-point tensors of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *details: Any) -> None:
        torch.set_default_dtype(self._before)
