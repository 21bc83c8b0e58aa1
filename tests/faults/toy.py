"""A run to be stopped, small enough to know every number beforehand: each step takes 1 from the weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # comes with the first optimizer and takes seconds: here for all processes that are forked later
from torch.utils.data import DataLoader

from drivetrain import Callback, Trainer, TrainModule
from drivetrain.strategies.checkpoint import Checkpoint

STEPS = 12


class Falling(TrainModule):
    """One weight from 0 whose gradient is 1; ``act(module, batch_idx)`` happens in every training step."""

    def __init__(self, act: Any = lambda module, index: None, slope: Any = lambda index: 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.act, self.slope = act, slope
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(int(batch[0]))
        self.act(self, batch_idx)
        return self.weight * self.slope(batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Noted(Callback):
    """Keeps what was raised."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.torn_down = 0

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.errors.append(exception)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.torn_down += 1


def loader(ranks: int = 1) -> DataLoader:
    """Return ``STEPS`` batches of one number for each rank, in order."""
    return DataLoader(torch.arange(float(STEPS * ranks)), batch_size=1)


def trainer(root: Path | str, **options: Any) -> Trainer:
    """Return a quiet trainer of one epoch."""
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
                "num_sanity_val_steps": 0, "max_epochs": 1, "default_root_dir": str(root)}  # fmt: skip
    return Trainer(**{**defaults, **options})


def weight_in(checkpoint: Any) -> float:
    """Return the weight that a checkpoint holds, every byte of it verified."""
    return float(Checkpoint.open(checkpoint).tensors("model.safetensors")["weight"])


def step_of(checkpoint: Any) -> int:
    """Return the step that a checkpoint was saved at."""
    return Checkpoint.open(checkpoint).manifest["step"]
