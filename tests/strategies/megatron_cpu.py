"""Runs megatron-core on the CPU, which it never asks for: for tests of the Megatron engine alone.

    with OnCPU():
        ...  # what megatron-core sends to "cuda" stays on the CPU

It shows that the numbers and the messages between ranks are right, and nothing about streams or kernels. The library
itself never patches torch: with a GPU there is nothing to patch.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

_CPU = "cpu"
_RUN_BACKWARD = torch.autograd._engine_run_backward
_MOVES = ("cuda", "pin_memory", "record_stream")  # methods that leave a tensor where it is


class OnCPU(TorchFunctionMode):
    """Sends `device="cuda"` to the CPU, and what is asked of torch.cuda to the CPU's own functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _MOVES and len(args) and isinstance(args[0], torch.Tensor):
            return args[0]
        found = func(*(_here(arg) for arg in args), **{key: _here(value) for key, value in (kwargs or {}).items()})
        if name == "type" and len(args) == 1 and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    def __enter__(self) -> Any:
        self._patches = contextlib.ExitStack()
        for name, value in _REPLACED.items():
            self._patches.enter_context(patch.object(torch.cuda, name, value))
        random: Any = import_module("megatron.core.tensor_parallel.random")
        self._patches.enter_context(patch.object(random, "_set_cuda_rng_state", _set_rng_state))
        self._patches.enter_context(patch.object(random, "_get_cuda_rng_state", _get_rng_state))
        self._patches.enter_context(patch.object(torch.autograd, "_engine_run_backward", self._backward))
        return super().__enter__()

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        """A backward pass, in which activations are computed again: torch leaves the mode for its calls."""
        TorchFunctionMode.__enter__(self)
        try:
            return _RUN_BACKWARD(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._patches.close()


def _here(value: Any) -> Any:
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    return torch.device(_CPU) if isinstance(value, torch.device) and value.type == "cuda" else value


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


class _Stream:
    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> None: ...


_REPLACED: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *args, **kwargs: None,
    "empty_cache": lambda: None,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.default_generator.manual_seed,
    "Stream": lambda *args, **kwargs: _Stream(),
    "current_stream": lambda *args: _Stream(),
    "default_stream": lambda *args: _Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
}
