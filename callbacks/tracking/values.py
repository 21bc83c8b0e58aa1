"""What trackers can take: plain copies of values, and nested values made flat."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy
import torch

_SIMPLE = (float, int, str, bool, type(None))
_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_LONGEST_LIST = 1000  # elements of a tensor or an array that are written out


def snapshot(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that later changes in place of a tensor, an array or a dict do not reach.

    A value on an accelerator is copied there, without waiting for it; `settle` reads it when there is time. A figure of
    matplotlib, which no other thread may draw, becomes its picture.
    """
    return {str(name): value if type(value) in _SIMPLE else _copied(value) for name, value in values.items()}


def settle(value: Any) -> Any:
    """Return `value` with each scalar tensor or array as a Python number; waits for accelerators."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, dict):
        return {name: settle(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(settle(item) for item in value)
    if isinstance(value, _Pending):
        return settle(value.tensor())
    return value.item() if _is_scalar(value) else value


def plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None, as JSON and YAML hold them.

    Numbers keep their value. What has no such form becomes its text: a path, a dtype, a class, a function, an object.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return _written(value)


def array_of(value: Any) -> Any:
    """Return a tensor, an array or a PIL image as a NumPy array; None for anything else."""
    if isinstance(value, _Pending):
        value = value.tensor()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype in _NOT_IN_NUMPY else value).numpy()
    if type(value).__module__.partition(".")[0] == "PIL":
        return numpy.asarray(value)
    return value if isinstance(value, numpy.ndarray) else None


def drawn(figure: Any) -> Any:
    """Return the picture of a matplotlib figure: a uint8 array (height, width, 4), at the figure's own size."""
    figure.canvas.draw()
    if hasattr(figure.canvas, "buffer_rgba"):
        return numpy.asarray(figure.canvas.buffer_rgba()).copy()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a window system without pictures of its own

    canvas, before = FigureCanvasAgg(figure), figure.canvas
    try:
        canvas.draw()
        return numpy.asarray(canvas.buffer_rgba()).copy()
    finally:
        figure.set_canvas(before)


def flatten(values: Mapping[str, Any], *, separator: str = "/") -> dict[str, Any]:
    """Return nested dicts and lists as one flat dict: `{"a": {"b": [5]}}` gives `{"a/b/0": 5}`.

    An empty dict or list stays as the text "{}" or "[]", so that its name is not lost.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        items: Any = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if not isinstance(items, Mapping):
            flat[str(name)] = value
        elif not items:
            flat[str(name)] = "[]" if isinstance(value, (list, tuple)) else "{}"
        else:
            inner = flatten(items, separator=separator)
            flat.update({f"{name}{separator}{key}": item for key, item in inner.items()})
    return flat


class _Pending:
    """A copy that an accelerator is still making."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach().clone()
        self._copied: Any = None
        try:
            self._copied = torch.Event(tensor.device)
            self._copied.record(torch.accelerator.current_stream(tensor.device))
        except (RuntimeError, ValueError, TypeError):  # a device without streams
            self._copied, self._tensor = None, self._tensor.cpu()

    def tensor(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.cpu()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.device.type in ("cpu", "meta") else _Pending(value)
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    origin = type(value).__module__.partition(".")[0]
    if origin == "matplotlib" and hasattr(value, "savefig"):
        return drawn(value)
    return value.copy() if origin in ("numpy", "PIL") and hasattr(value, "copy") else value


def _is_scalar(value: Any) -> bool:
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0


def _written(value: Any) -> Any:
    if isinstance(value, _Pending):
        return plain(value.tensor())
    if _is_scalar(value):
        return plain(value.item())
    if hasattr(value, "tolist") and getattr(value, "size", None) is not None:
        count = value.numel() if isinstance(value, torch.Tensor) else value.size
        return plain(value.tolist()) if count <= _LONGEST_LIST else f"{type(value).__name__}{tuple(value.shape)}"
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
