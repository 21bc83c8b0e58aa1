"""Letting go of memory, and finding a batch size that fits into it."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from . import xla_runtime

log = logging.getLogger(__name__)

_EXHAUSTED = (
    "out of memory", "cannot allocate memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator",
)  # fmt: skip


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives the accelerator's unused memory back to it; `garbage_collection` collects Python's cycles before."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def device_memory(device: torch.device) -> dict[str, float]:
    """Returns the bytes that are "allocated", "reserved" and "peak_allocated" on a device, as far as it tells.

    Nothing is waited for. The CPU tells none of them.
    """
    if device.type in ("cpu", "mps", "meta"):
        return {}
    if device.type == "xla":
        return xla_runtime.memory(device)
    found = torch.accelerator.memory_stats(device)
    names = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current",
             "peak_allocated": "allocated_bytes.all.peak"}  # fmt: skip
    return {name: found.get(key, 0) for name, key in names.items()}


def release_memory(*objects: Any) -> list[None]:
    """Collects garbage and empties the accelerator's cache; returns a None for each object, to put in its place.

    `model, optimizer = release_memory(model, optimizer)`: the caller's own names hold objects alive until then, so the
    cache is emptied of what nobody else holds.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an exception says that memory was exhausted, so that a smaller batch may fit."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception)
    return isinstance(exception, (RuntimeError, MemoryError)) and any(words in text for words in _EXHAUSTED)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """A function that is tried with smaller and smaller batch sizes until memory suffices; a decorator, too.

    The function takes the batch size as its first argument, and is called without it. After memory was exhausted the
    size becomes nine tenths of itself, or what `reduce_batch_size_fn()` returns.

    Raises:
        TypeError: the batch size was given by the caller.
        RuntimeError: not even one sample fits. Every other error of the function goes through.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def tried(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _check_call(function, args)
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            log.warning("Memory does not suffice for batches of %d.", size)
            clear_device_cache(garbage_collection=True)  # here, where the error no longer holds the frames alive
            size = size * 9 // 10 if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError(
            f"Expected some batch size that fits into memory. Received: {function.__name__} exhausted it with every "
            f"one from {starting_batch_size} down to 1. Make the model or its inputs smaller."
        )

    return tried


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if len(names) < len(args) + 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(names[1:], args[1:]))
        raise TypeError(
            f"Expected {function.__name__} without its batch size, which is filled in. Received: {len(args)} "
            f"arguments. Call {function.__name__}({shown})."
        )
