"""Moving a batch to a device, however its tensors are nested."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def send(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The same nest of tuples, lists, mappings and dataclasses with all tensors on `device`.

    Other objects move by their own `to` where they have one, and stay as they are otherwise.
    """

    def move(value: Any) -> Any:
        return send(value, device, non_blocking=non_blocking)

    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        try:
            return batch.to(device, non_blocking=non_blocking)
        except TypeError:  # an object's own `to` need not know of non_blocking
            return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(move, batch))
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps what the type holds besides its items
        moved.update({key: move(value) for key, value in batch.items()})
        return moved
    if isinstance(batch, Mapping):
        return type(batch)({key: move(value) for key, value in batch.items()})
    if is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(moved, field.name, move(getattr(batch, field.name)))
        return moved
    return batch
