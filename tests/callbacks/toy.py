"""A run small enough to know every number beforehand: item i is the number i, the model a line, the optimizer SGD."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # comes with the first optimizer and takes seconds: here for all processes that are forked later
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import ModelCheckpoint, ModelSummary, Progress, Trainer, TrainModule


class Numbers(Dataset):
    """Item i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Line(TrainModule):
    """One weight; logs "train_loss" each step and, in validation number n, "val_loss" as ``values[n]`` (in a circle)."""

    def __init__(self, values: list[float] | None = None, lr: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.values, self.lr = values, lr
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.values is not None and not self.trainer.sanity_checking:
            self.log("val_loss", self.values[self.validations % len(self.values)])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).mean())

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(count: int, **options: Any) -> DataLoader:
    """A loader of numbers, one a batch."""
    return DataLoader(Numbers(count), **options)


def quiet(**options: Any) -> Trainer:
    """A trainer on the CPU with nothing optional but what is asked for."""
    defaults = {"accelerator": "cpu", "logger": False, "num_sanity_val_steps": 0, "max_epochs": 1}
    kinds = {"enable_progress_bar": Progress, "enable_model_summary": ModelSummary, "enable_checkpointing": ModelCheckpoint}
    given = options.get("callbacks", [])
    switches = {name: False for name, kind in kinds.items() if not any(isinstance(c, kind) for c in given)}
    return Trainer(**{**defaults, **switches, **options})
