"""Which model, optimizer and scheduler belong together, of those that are prepared in one call."""

from __future__ import annotations

from typing import Any

import torch

from .optimizer import unwrap_optimizer

TOGETHER = (
    "Expected the model and its optimizer in one prepare() call, as an engine of DeepSpeed is made of both. Received: "
    "{received}. Call prepare(model, optimizer, ...) with both."
)


def paired(optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> torch.nn.Module:
    """Returns the model whose parameters an optimizer holds.

    Raises:
        ValueError: there is none among these, or there are several.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [model for model in models if any(id(parameter) in held for parameter in model.parameters())]
    if not found:
        raise ValueError(TOGETHER.format(received="an optimizer without its model"))
    if len(found) > 1:
        raise ValueError(
            f"Expected an optimizer of one model. Received: {type(optimizer).__name__} with parameters of "
            f"{len(found)}. Make one for each model, or put the models into one module."
        )
    return found[0]


def is_of(scheduler: Any, optimizer: Any, count: int) -> bool:
    """Whether a scheduler changes the rates of an optimizer, which is so where there is one."""
    mine, inner = getattr(scheduler, "optimizer", None), unwrap_optimizer(optimizer)
    return count == 1 or unwrap_optimizer(mine) in (inner, getattr(inner, "given", inner))
