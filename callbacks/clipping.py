"""Gradient clipping, by the norm of an optimizer's gradients or value by value."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Callback
from .checks import check_choice


class GradientClipping(Callback):
    """Clip the gradients of each optimizer before it steps, when its window is complete and they are unscaled.

    ``algorithm`` is "norm" (the 2-norm over all parameters of the optimizer, over all ranks, is at most ``value``) or
    "value" (each entry lies within ±``value``). ``norm`` holds the last norm before clipping as a 0-dim tensor, None
    until then and with "value"; ``log_norm=True`` logs it as "grad_norm" ("grad_norm/0", … with several optimizers).
    An infinite ``value`` clips nothing and still measures. Raises ValueError unless ``value`` is a number above zero
    and the algorithm is known.
    """

    def __init__(self, value: float, algorithm: str = "norm", *, log_norm: bool = False) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(
                f"Expected a number above zero. Received: value={value!r}. Write e.g. GradientClipping(1.0)."
            )
        algorithm = getattr(algorithm, "value", algorithm)  # an enumeration's member is as good as its word
        check_choice("algorithm", algorithm, ("norm", "value"))
        if log_norm and algorithm == "value":
            raise ValueError(
                "Expected the norm to be logged only where it is computed. Received: algorithm='value', log_norm=True. "
                'Use algorithm="norm", or add GradientClipping(float("inf"), log_norm=True) to the callbacks.'
            )
        self.value, self.algorithm, self.log_norm = float(value), algorithm, log_norm
        self.norm: Tensor | None = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self.algorithm == "value":
            trainer.accelerator.clip_grad_value_(parameters, self.value)
            return
        self.norm = trainer.accelerator.clip_grad_norm_(parameters, self.value)
        if self.log_norm:
            several = len(trainer.optimizers) > 1
            name = f"grad_norm/{trainer.optimizers.index(optimizer)}" if several else "grad_norm"
            module.log(name, self.norm, on_step=True, on_epoch=False)
