"""Settings of computing in 8-bit floats, for each library that can: names, fields and defaults are Accelerate's.

`None` means that nothing was said: the library's own default holds. drivetrain trains in 8-bit floats by torchao
(`AORecipeKwargs`, see float8.py); the other classes are here so that scripts that name them get an exact answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .settings import FP8BackendType, KwargsHandler


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao computes in 8-bit floats.

    `config` is a `torchao.float8.Float8LinearConfig`; without one the two switches make it. `pad_inner_dim` (True)
    lets batches be of any size; `enable_fsdp_float8_all_gather` gathers sharded weights in 8 bits.
    `module_filter_func(module, name)` tells which layers are converted: all linear ones but the first and the last.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    backend = FP8BackendType.AO

    def __post_init__(self) -> None:
        function = self.module_filter_func
        if function is not None and not callable(function):
            raise TypeError(
                f"Expected module_filter_func(module, name). Received: {function!r}. Pass a function that tells "
                "whether a layer is to be converted."
            )
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather") if self.config is not None else ():
            here, there = getattr(self, name), getattr(self.config, name)
            if here not in (None, there):
                raise ValueError(
                    f"Expected {name} once. Received: {name}={here} and {there} in config. Set it in the config."
                )


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Transformer Engine's settings; checked, and answered by what to use instead."""

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    backend = FP8BackendType.TE

    def __post_init__(self) -> None:
        self.fp8_format = _word("fp8_format", self.fp8_format, ("E4M3", "E5M2", "HYBRID"))
        self.amax_compute_algo = _word("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """MS-AMP's settings; checked, and answered by what to use instead."""

    opt_level: str | None = None

    backend = FP8BackendType.MSAMP

    def __post_init__(self) -> None:
        self.opt_level = _word("opt_level", self.opt_level, ("O1", "O2"))


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older settings for every library at once, of which `backend` ("AO", "TE", "MSAMP") names one.

    None is torchao. New code takes `AORecipeKwargs`.
    """

    backend: Any = None

    def __post_init__(self) -> None:
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)
        word = _word("backend", self.backend, ("AO", "TE", "MSAMP"))
        self.backend = None if word is None else FP8BackendType(word)


RECIPES = (AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)  # a class before those it is made of


def _word(name: str, value: Any, known: tuple[str, ...]) -> Any:
    if value is None:
        return None
    text = str(getattr(value, "value", value))
    for word in known:
        if text.lower() == word.lower():
            return word
    raise ValueError(f"Expected {name} to be one of {', '.join(known)}. Received: {name}={value!r}. Choose one.")
