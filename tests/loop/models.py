"""Small modules and data for tests of the loop: item i is the number i."""

from __future__ import annotations

from typing import Any

import torch
from drivetrain import Trainer, TrainModule
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    """Item i is the number i, as a tensor of shape (1,)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Line(TrainModule):
    """Linear(1, 1) with SGD; keeps the ids of the items that it saw in training."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.1)
        self.lr = lr
        self.seen: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.flatten().int().tolist())
        loss = (self.layer(batch / 10) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Validated(Line):
    """The same with a validation step that logs the mean of the items."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())


class Slope(TrainModule):
    """One weight, from 0, whose gradient in micro-batch i is ``slope(i)``; SGD with lr 1."""

    def __init__(self, slope: Any = lambda index: 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.slope = slope
        self.index = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight * self.slope(batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def loader(length: int, batch_size: int = 2, **options: Any) -> DataLoader:
    """Return a loader of numbers."""
    return DataLoader(Numbers(length), batch_size=batch_size, **options)


def quiet(**options: Any) -> Trainer:
    """Return a trainer on the CPU without anything optional."""
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
                "enable_checkpointing": False, "num_sanity_val_steps": 0}  # fmt: skip
    return Trainer(**{**defaults, **options})
