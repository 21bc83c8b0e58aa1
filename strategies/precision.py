"""Precision: in which number formats a model computes, and what that asks of losses, gradients and optimizers.

Each precision is one object with the same methods. `Full` does nothing at every one of them, so that nobody asks
whether mixed precision is on. Words, in the Trainer's spelling and in Accelerate's:

    32-true 32 no          float32                          64-true 64       float64
    bf16-mixed bf16        autocast to bfloat16             bf16-true        parameters and inputs in bfloat16
    16-mixed 16 fp16       autocast to float16, scaled loss 16-true          parameters and inputs in float16
    fp8-mixed fp8          autocast to bfloat16, products of linear layers in 8-bit floats (torchao)
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any

import torch

from .contexts import NOTHING, DefaultDtype, Reentrant
from .float8 import configuration, convert_model_to_fp8_ao, has_ao_layers, require_float8
from .forwards import replace_forward, restore_forward
from .fp8_recipes import AORecipeKwargs
from .nested import convert_to_fp32, recursively_apply
from .settings import AutocastKwargs, FP8BackendType, GradScalerKwargs, not_in_this_version

_WORDS = {
    "no": "32-true", "32": "32-true", "32-true": "32-true", "64": "64-true", "64-true": "64-true",
    "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed", "fp16": "16-mixed", "16": "16-mixed", "16-mixed": "16-mixed",
    "bf16-true": "bf16-true", "16-true": "16-true", "fp8": "fp8-mixed", "fp8-mixed": "fp8-mixed",
}  # fmt: skip
_TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def create(
    name: str | int | None,
    device: torch.device,
    *,
    autocast: AutocastKwargs | None = None,
    scaler: GradScalerKwargs | None = None,
    fp8: AORecipeKwargs | None = None,
) -> Precision:
    """Returns the precision that a word names, on a device; `None` is full precision.

    Raises:
        ValueError: the word is unknown, or the device cannot compute in that format.
        ImportError: the word is fp8, and torchao is missing.
    """
    word = canonical_name(name)
    if device.type == "cuda" and word.startswith("bf16") and not torch.cuda.is_bf16_supported():
        raise ValueError(f"Expected a GPU with bfloat16. Received: precision={name!r}, {device}. Use '16-mixed'.")
    if word == "32-true":
        return Full()
    if word in _TRUE:
        return TruePrecision(word, _TRUE[word])
    if word == "bf16-mixed":
        return Autocast(word, torch.bfloat16, device, autocast)
    if word == "fp8-mixed":
        return Float8(word, torch.bfloat16, device, autocast, fp8)
    return Scaled(word, torch.float16, device, autocast, scaler)


def canonical_name(name: str | int | None) -> str:
    """Returns the full spelling of a precision: `canonical_name("bf16")` is `"bf16-mixed"`."""
    word = "no" if name is None else str(getattr(name, "value", name)).lower()
    if word.startswith("transformer-engine"):
        raise not_in_this_version(f"Transformer Engine ({word})", "precision='fp8-mixed' (torchao)")
    if word not in _WORDS:
        near = difflib.get_close_matches(word, _WORDS, n=1)
        advice = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
        raise ValueError(f"Expected precision to be one of {', '.join(_WORDS)}. Received: precision={name!r}. {advice}")
    return _WORDS[word]


class Precision:
    """Full float32, and the interface of every precision: each method does what float32 needs, which is nothing.

    Attributes: `name` (the Trainer's word), `mixed_precision` (Accelerate's word), `dtype` (of the computation),
    `scaler` (a `torch.amp.GradScaler` or None), `skipped_steps` (optimizer steps left out for an overflow).
    """

    name = "32-true"
    mixed_precision = "no"
    dtype = torch.float32
    scaler: Any = None
    skipped_steps = 0
    skips_steps = False  # an overflow may leave a step of an optimizer out
    fp8_backend = FP8BackendType.NO
    sharded = False  # settable: the engine shards weights, and may gather them in 8 bits

    def prepare_model(self, model: torch.nn.Module, *, evaluation: bool = False) -> torch.nn.Module:
        """Makes the model's own forward compute in this precision; the model stays the same object."""
        return model

    def restore_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Takes back what `prepare_model` did to the forward."""
        return model

    def entry(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method of the model that takes inputs as the user's data has them."""
        return method

    def autocast(self, handler: AutocastKwargs | None = None) -> Any:
        """Returns the context to compute in."""
        return NOTHING

    def init_context(self) -> Any:
        """Returns the context in which new modules get parameters of the right dtype."""
        return NOTHING

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to differentiate."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings an optimizer's gradients to their true scale; a second call before its step does nothing."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> tuple[bool, Any]:
        """Steps the optimizer; returns whether the step was skipped, and what the optimizer returned."""
        return False, optimizer.step() if closure is None else optimizer.step(closure)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells the precision of an optimizer that was prepared."""

    def release(self) -> None:
        """Forgets the optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive an interruption."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""


class Full(Precision):
    """float32 throughout: the null object."""


class TruePrecision(Precision):
    """Parameters, buffers, inputs and results all in one dtype: 64-true, bf16-true, 16-true."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self._context = Reentrant(lambda: DefaultDtype(dtype))

    def prepare_model(self, model: torch.nn.Module, *, evaluation: bool = False) -> torch.nn.Module:
        return replace_forward(model.to(self.dtype), self.entry)

    def restore_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return restore_forward(model)

    def entry(self, method: Callable[..., Any]) -> Callable[..., Any]:
        dtype = self.dtype

        @functools.wraps(method)
        def with_converted_inputs(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _cast((args, kwargs), dtype)
            return method(*args, **kwargs)

        return with_converted_inputs

    def autocast(self, handler: AutocastKwargs | None = None) -> Any:
        return self._context

    def init_context(self) -> Any:
        return self._context


class Autocast(Precision):
    """Parameters in float32, operations in a 16-bit format where torch's autocast finds that safe: bf16-mixed."""

    def __init__(
        self, name: str, dtype: torch.dtype, device: torch.device, options: AutocastKwargs | None = None
    ) -> None:
        self.name = name
        self.mixed_precision = {"bf16-mixed": "bf16", "16-mixed": "fp16", "fp8-mixed": "fp8"}[name]
        self.dtype = dtype
        self.device = device
        self._context = self._reentrant(options or AutocastKwargs())

    def _reentrant(self, options: AutocastKwargs) -> Reentrant:
        kind, dtype = self.device.type, self.dtype
        enabled, cached = options.enabled, options.cache_enabled
        return Reentrant(lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))

    def prepare_model(self, model: torch.nn.Module, *, evaluation: bool = False) -> torch.nn.Module:
        return replace_forward(model, self._mixed)

    def restore_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return restore_forward(model)

    def _mixed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward under autocast, its results in float32 so that a loss on them is computed in float32."""
        kind, dtype, context = self.device.type, self.dtype, self._context

        @functools.wraps(forward)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            # A compiler follows torch's own context only.
            compiling = torch.compiler.is_compiling()
            with torch.autocast(kind, dtype=dtype) if compiling else context:
                outputs = forward(*args, **kwargs)
            return convert_to_fp32(outputs)

        return mixed

    def autocast(self, handler: AutocastKwargs | None = None) -> Any:
        return self._context if handler is None else self._reentrant(handler)


class Float8(Autocast):
    """Autocast to bfloat16, and the linear layers of each prepared model multiply in 8-bit floats: fp8-mixed."""

    fp8_backend = FP8BackendType.AO

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device, options: AutocastKwargs | None = None,
                 recipe: AORecipeKwargs | None = None) -> None:
        require_float8(device)
        super().__init__(name, dtype, device, options)
        self.recipe = recipe or AORecipeKwargs()

    def prepare_model(self, model: torch.nn.Module, *, evaluation: bool = False) -> torch.nn.Module:
        if not has_ao_layers(model):
            config = configuration(self.recipe, sharded=self.sharded)
            model = convert_model_to_fp8_ao(model, config, self.recipe.module_filter_func)
        return super().prepare_model(model, evaluation=evaluation)


class Scaled(Autocast):
    """Autocast to float16 with a scaled loss, as small float16 gradients would vanish: 16-mixed.

    A step whose gradients hold an infinity or NaN is skipped and the scale halved. Gradients are unscaled once per
    step, before clipping or by the step itself. The scale changes only when every optimizer that shares a backward
    pass has stepped, so that none is unscaled by a scale that its loss did not have.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        options: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
    ) -> None:
        super().__init__(name, dtype, device, options)
        self.scaler: Any = torch.amp.GradScaler(device.type, **(scaler or GradScalerKwargs()).to_kwargs())
        self.scaler.scale(torch.zeros((), device=device))  # which makes its state, else made by the first loss
        self.skips_steps = True
        self.skipped_steps = 0
        self._optimizers: set[int] = set()
        self._unscaled: set[int] = set()
        self._stepped = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self._update()
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._unscaled and self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> tuple[bool, Any]:
        if closure is not None:
            raise ValueError(f"Expected no closure under {self.name}. Received: closure={closure!r}. Use 'bf16-mixed'.")
        self.unscale(optimizer)
        self._unscaled.discard(id(optimizer))
        found = self._infinities(optimizer)
        skipped = any(bool(value) for value in found.values())
        self.skipped_steps += skipped
        result = None if skipped else optimizer.step()
        self._stepped = self._stepped or bool(found)
        if len(self._optimizers) <= 1:
            self._update()
        return skipped, result

    def _infinities(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.scaler.is_enabled():
            return {}
        found = self.scaler._found_inf_per_device(optimizer)
        if not found:  # no parameter has a gradient: nothing to check, and nothing that the scale could learn from
            self.scaler._per_optimizer_states.pop(id(optimizer), None)
        return found

    def _update(self) -> None:
        if self._stepped:
            self.scaler.update()
            self._unscaled.clear()
            self._stepped = False

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(id(optimizer))

    def release(self) -> None:
        self._optimizers.clear()

    def state_dict(self) -> dict[str, Any]:
        self._update()
        return {**self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state.get("skipped_steps", 0)
        if "scale" in state:
            self.scaler.load_state_dict({key: value for key, value in state.items() if key != "skipped_steps"})


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(lambda tensor: tensor.to(dtype), data, test_type=_is_floating)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
