"""Local SGD: processes train apart for some steps, and then average their weights (Stich 2019, arXiv 1805.09767)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from .accelerator import Accelerator


class LocalSGD:
    """A context in which gradients stay on their process, and weights are averaged every `local_sgd_steps` steps.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    Args:
        accelerator: the one that prepared the model.
        model: the prepared model.
        local_sgd_steps: optimizer steps between two averages; what is left at the end of the block is averaged too.
        enabled: False: the block is as if it were not there. It is so with one process, too.

    Raises:
        ValueError: `local_sgd_steps` is below 1.
        NotImplementedError: the model's weights are sharded, so that no process has a whole copy of its own.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"Expected at least 1 step. Received: {local_sgd_steps=}. Choose how many to train apart.")
        if accelerator.strategy.name not in ("single", "ddp"):
            raise NotImplementedError(
                f"Expected a copy of the model on every process. Received: strategy {accelerator.strategy.name!r}. "
                'Use strategy="ddp" for local SGD.'
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._apart = ExitStack()

    def __enter__(self) -> LocalSGD:
        self.num_steps = 0
        if self.enabled:
            self._apart.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, *error: Any) -> None:
        self._apart.close()
        if self.enabled and error[0] is None:
            self._average()

    def step(self) -> None:
        """Counts an optimizer step, and averages the weights when it is their turn; call it after each batch."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        self.accelerator.wait_for_everyone()
        for parameter in self.model.parameters():
            self.accelerator.strategy.loss_world.all_reduce(parameter.data, "mean")
