"""Megatron's precisions: float32, or 16-bit weights whose float32 copies its optimizer keeps."""

from __future__ import annotations

from typing import Any

import torch

from .precision import Precision, canonical_name
from .settings import GradScalerKwargs

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class MegatronPrecision(Precision):
    """Weights, activations and gradients in one format; losses in float32; float16 losses are scaled by Megatron.

    Args:
        name: "32-true", "bf16-mixed", "16-mixed", or another word for these.

    Raises:
        ValueError: Megatron's optimizers do not compute in that precision.
    """

    def __init__(self, name: str | int | None, scaler: GradScalerKwargs | None = None) -> None:
        word = canonical_name(name)
        if word not in DTYPES:
            raise ValueError(
                f"Expected precision of {', '.join(DTYPES)} for Megatron, whose 16-bit weights have float32 copies. "
                f"Received: precision={name!r}. Choose one of these."
            )
        self.name, self.dtype = word, DTYPES[word]
        self.mixed_precision = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(word, "no")
        self.skips_steps = word == "16-mixed"
        self.skipped_steps = 0
        self.loss_scale = _loss_scale(scaler) if self.skips_steps else {}
        self.optimizers: list[Any] = []  # Megatron's

    def state_dict(self) -> dict[str, Any]:
        """As a GradScaler keeps it, so that a checkpoint goes on under other strategies, and Megatron's counters."""
        found = next(self._scalers(), None)
        if found is None:
            return {"skipped_steps": self.skipped_steps} if self.skips_steps else {}
        own = {key: float(value) for key, value in found.state_dict().items()}
        return {
            "scale": float(found.scale), "growth_factor": 2.0, "backoff_factor": 0.5,
            "growth_interval": int(found.growth_interval), "_growth_tracker": int(own.get("growth_tracker", 0)),
            "skipped_steps": self.skipped_steps, "megatron": own,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state.get("skipped_steps", 0)
        own = state.get("megatron", {})
        for scaler in self._scalers() if "scale" in state else ():
            scaler._scale.fill_(state["scale"])
            scaler._growth_tracker = int(own.get("growth_tracker", state.get("_growth_tracker", 0)))
            scaler._hysteresis_tracker = int(own.get("hysteresis_tracker", scaler.hysteresis))

    def _scalers(self) -> Any:
        parts = (part for optimizer in self.optimizers for part in optimizer.chained_optimizers)
        return (found for part in parts if (found := getattr(part, "grad_scaler", None)) is not None)

    def release(self) -> None:
        self.optimizers.clear()


def _loss_scale(scaler: GradScalerKwargs | None) -> dict[str, Any]:
    """The fields of OptimizerConfig that say how losses are scaled: from torch's default scale on."""
    options = (scaler or GradScalerKwargs()).to_kwargs()
    fixed = {"growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True}
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise ValueError(
                f"Expected {name}={value}, which Megatron's loss scale has. Received: {name}={options[name]}. Leave it."
            )
    return {
        "initial_loss_scale": float(options.get("init_scale", 65536.0)),
        "loss_scale_window": int(options.get("growth_interval", 2000)), "hysteresis": 1,
    }  # fmt: skip
