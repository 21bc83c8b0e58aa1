"""Norms of gradients and weights, as a whole and layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from .base import Callback
from .checks import check_choice, check_number, check_whole


class NormMonitor(Callback):
    """Log, with each row of training, the norms of gradients before they are clipped, and of weights.

    "grad_norm/…" and "weight_norm/…" end in the name of a module with parameters of its own ("encoder.0"; cut to
    ``depth`` parts if that is given), or in "total" for all of them. The norm is that of all its parameters together,
    over all ranks where they are sharded. ``gradients=False`` or ``weights=False`` leaves one out, ``per_layer=False``
    keeps the totals only. Computed once a row, from the gradients of its last step, and read from the device at once.
    Raises ValueError for arguments that mean nothing.
    """

    priority = -1  # before gradients are clipped

    def __init__(
        self,
        norm_type: float = 2.0,
        *,
        gradients: bool = True,
        weights: bool = True,
        per_layer: bool = True,
        depth: int | None = None,
    ) -> None:
        check_number("norm_type", norm_type)
        check_whole("depth", depth, least=1)
        check_choice("gradients or weights", bool(gradients or weights), (True,))
        self.norm_type, self.depth = float(norm_type), depth
        self.gradients, self.weights, self.per_layer = gradients, weights, per_layer
        self._row = 0
        self._layers: dict[str, list[torch.nn.Parameter]] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.gradients and not trainer.strategy.shows_gradients:
            raise ValueError(
                f"Expected a strategy that shows the gradients of parameters. Received: strategy="
                f"{trainer.strategy.name!r}, which keeps them to itself. Use NormMonitor(gradients=False), and "
                "GradientClipping(log_norm=True) for the norm of all."
            )
        self._row = trainer.global_step // (trainer.log_every_n_steps or 1)
        self._layers = {}
        for name, parameter in module.named_parameters():  # names a shared one once
            if parameter.requires_grad:
                layer = ".".join(name.split(".")[:-1][: self.depth]) or name
                self._layers.setdefault(layer, []).append(parameter)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        every = trainer.log_every_n_steps
        if not every or (trainer.global_step + 1) // every <= self._row:
            return
        if optimizer is trainer.optimizers[-1]:
            self._row += 1
        trainer.accelerator.unscale_gradients(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        layers = {name: [p for p in own if id(p) in held] for name, own in self._layers.items()}
        names = [name for name, own in layers.items() if own]
        suffix = f"/{trainer.optimizers.index(optimizer)}" if len(trainer.optimizers) > 1 else ""
        norms: dict[str, torch.Tensor] = {}
        for kind, wanted, value in (("grad_norm", self.gradients, _gradient), ("weight_norm", self.weights, _weight)):
            if wanted:
                each = torch.stack([self._norm([value(p) for p in layers[name]]) for name in names])
                if self.per_layer:
                    norms |= {f"{kind}/{name}": norm for name, norm in zip(names, each)}
                norms[f"{kind}/total{suffix}"] = torch.linalg.vector_norm(each, self.norm_type)
        values = torch.stack(list(norms.values())).tolist()  # the only time that the device is waited for
        trainer.log_dict(dict(zip(norms, values)))

    def _norm(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """The norm of several tensors together; sharded ones count whole."""
        each = [torch.linalg.vector_norm(t.detach().float(), self.norm_type) for t in tensors if t is not None]
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in each]
        return torch.linalg.vector_norm(torch.stack(whole), self.norm_type) if whole else torch.zeros(())


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return parameter.grad


def _weight(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    return parameter
