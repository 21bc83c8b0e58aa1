"""Counts of the work that drivetrain itself does in a step: the same on every machine."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Trainer, TrainModule

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(str(ROOT / name) for name in ("trainer", "callbacks", "strategies", "__init__.py"))
OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False},
    "everything": {"logger": ["tensorboard", "csv"], "enable_progress_bar": True, "enable_checkpointing": True},
}


class Small(TrainModule):
    """A network on random rows; ``logs`` is how often it logs its loss in a step."""

    def __init__(self, logs: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.logs = logs

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        for index in range(self.logs):
            self.log(f"loss{index}", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small_trainer(kind: str, **more: Any) -> Trainer:
    """Return a trainer with nothing optional ("bare") or with everything a run usually has ("everything")."""
    options = {"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False, **OPTIONS[kind], **more}
    return Trainer(**{"default_root_dir": tempfile.mkdtemp(), **options})


def small_loader(steps: int) -> DataLoader:
    """Return so many batches of 16 rows."""
    return DataLoader(TensorDataset(torch.randn(16 * steps, 32), torch.randint(10, (16 * steps,))), batch_size=16)


def own_calls(function: Callable[[], Any]) -> Counter[str]:
    """Call a function; return how often each function of drivetrain was entered, generators' resumptions included."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            calls[f"{path}:{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def calls_by_function(kind: str, **more: Any) -> dict[str, float]:
    """Return the calls per step of each own function, start and end of a run left out."""
    short, long = 100, 300

    def fit(steps: int) -> Counter[str]:
        trainer, module = small_trainer(kind, **more), Small(1 if kind == "everything" else 0)
        return own_calls(lambda: trainer.fit(module, small_loader(steps)))

    first, second = fit(short), fit(long)
    return {name: n / (long - short) for name, n in (second - first).most_common()}


def calls_per_step(kind: str, **more: Any) -> float:
    """Return how many own Python functions a training step enters."""
    return sum(calls_by_function(kind, **more).values())


def frames_to_training_step() -> int:
    """Return how many calls lead from `Trainer.fit` to the user's `training_step`."""
    found: list[int] = []

    class Deep(Small):
        def training_step(self, batch, batch_idx):
            frame, depth = sys._getframe(1), 1
            while frame.f_code.co_name != "fit":
                frame, depth = frame.f_back, depth + 1
            found.append(depth)
            return super().training_step(batch, batch_idx)

    small_trainer("everything").fit(Deep(1), small_loader(2))
    return max(found)
