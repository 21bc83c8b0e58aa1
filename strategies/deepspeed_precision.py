"""float16 under DeepSpeed, whose engines scale losses, check gradients and skip steps themselves."""

from __future__ import annotations

from typing import Any

import torch

from .precision import Autocast, Precision, TruePrecision

_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class _ScaledByEngine(Precision):
    skips_steps = True
    engines: list[Any]  # the strategy's list, which grows as models are prepared

    def state_dict(self) -> dict[str, Any]:
        """As a GradScaler keeps it, so that a checkpoint goes on under other strategies, and the engine's counters."""
        scaler = next(self._scalers(), None)
        if scaler is None:
            return {"skipped_steps": self.skipped_steps}
        factor, window = float(getattr(scaler, "scale_factor", 2.0)), int(getattr(scaler, "scale_window", 1000))
        counted = int(getattr(scaler, "cur_iter", 0)) - int(getattr(scaler, "last_overflow_iter", -1)) - 1
        return {
            "scale": float(scaler.cur_scale), "growth_factor": factor, "backoff_factor": 1 / factor,
            "growth_interval": window, "_growth_tracker": max(0, counted) % window, "skipped_steps": self.skipped_steps,
            "engine": {name: getattr(scaler, name) for name in _COUNTERS if hasattr(scaler, name)},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state.get("skipped_steps", 0)
        known = state.get("engine", {"cur_scale": state["scale"]} if "scale" in state else {})
        for scaler in self._scalers():
            for name, value in known.items():
                setattr(scaler, name, value)

    def _scalers(self) -> Any:
        optimizers = (wrapper.engine.optimizer for wrapper in self.engines)
        return (found for one in optimizers if (found := getattr(one, "loss_scaler", None)) is not None)


class EngineMixed(_ScaledByEngine, Autocast):
    """16-mixed: weights in float16 beside float32 ones, operations under autocast."""


class EngineTrue(_ScaledByEngine, TruePrecision):
    """16-true: weights and inputs in float16."""


def float16(word: str, device: torch.device, autocast: Any, engines: list[Any]) -> Precision:
    """Returns the precision of a word for float16."""
    made: Any = (
        EngineTrue(word, torch.float16) if word == "16-true" else EngineMixed(word, torch.float16, device, autocast)
    )
    made.engines = engines
    return made
