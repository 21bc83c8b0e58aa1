"""Functions around engines of DeepSpeed that scripts call by Accelerate's names."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from .wrappers import has_repeated_blocks, is_repeated_blocks


class GatheredParameters:
    """A context in which parameters that ZeRO-3 has partitioned are whole; without ZeRO-3 it does nothing.

    Args:
        params: one parameter or several.
        modifier_rank: the rank whose changes count, which all get at the end; None: nothing is changed.
        fwd_module: a module whose forward uses them though they are not its own.
        enabled: False does nothing.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        found = [params] if isinstance(params, torch.Tensor) else list(params)
        self._context: Any = None
        if enabled and any(hasattr(one, "ds_id") for one in found):
            gather = import_module("deepspeed").zero.GatheredParameters
            self._context = gather(found, modifier_rank=modifier_rank, fwd_module=fwd_module)

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *details: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*details)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Returns the DeepSpeedPlugin in force, from an AcceleratorState or an Accelerator.

    Raises:
        ValueError: another engine runs.
    """
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        kind = getattr(state, "distributed_type", None)
        raise ValueError(f"Expected DeepSpeed to run. Received: {kind}. Pass a DeepSpeedPlugin to the Accelerator.")
    return plugin


def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """Compiles each of the repeated blocks of a module in place, as an engine keeps the module that it was made of."""
    for block in _regions(module):
        block.compile(**compile_kwargs)


def _regions(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    if is_repeated_blocks(module):
        yield from module.children()
    elif has_repeated_blocks(module):
        for child in module.children():
            yield from _regions(child)
    else:
        yield module
