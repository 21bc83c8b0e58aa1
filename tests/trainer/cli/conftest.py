"""A user's folder: modules of their own, a config file, no settings of the machine that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = '''
"""What a user has written."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, DataModule, TrainModule


class Net(TrainModule):
    """A linear model.

    Args:
        lr: learning rate of SGD
    """

    def __init__(self, lr: float = 0.1, width: int = 4, activation: torch.nn.Module | None = None):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(x), y))

    def test_step(self, batch, batch_idx):
        self.log("mean", batch[0].mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Plain(Net):
    """A model that does not say how it is optimized."""

    configure_optimizers = TrainModule.configure_optimizers


class Narrow(Net):
    def __init__(self, lr: float = 0.3):
        super().__init__(lr)


class Broken(Net):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no more room")


class Crashing(Net):
    def training_step(self, batch, batch_idx):
        raise ArithmeticError("in training")


class Data(DataModule):
    def __init__(self, batch_size: int = 4, size: int = 16):
        super().__init__()
        self.batch_size, self.size = batch_size, size

    def loader(self, shuffle=False):
        x = torch.arange(self.size * 4.0).reshape(self.size, 4) / self.size
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(shuffle=True)

    val_dataloader = test_dataloader = predict_dataloader = loader


class Patient(Callback):
    def __init__(self, patience: int = 3, monitor: str = "loss"):
        self.patience, self.monitor = patience, monitor
'''
CONFIG = """
trainer:
  max_epochs: 2
  accelerator: cpu
  logger: csv
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: nets.Net
  init_args: {lr: 1e-2}
data:
  class_path: nets.Data
"""


class Home:
    """The folder; ``cli`` starts `python -m drivetrain` in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine = path / "xdg" / "drivetrain" / "default.yaml"

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, *args: str, **variables: str) -> subprocess.CompletedProcess:
        environ = {**os.environ, "XDG_CONFIG_HOME": str(self.path / "xdg"), "OMP_NUM_THREADS": "1", **variables}
        environ.pop("PYTEST_CURRENT_TEST", None)  # these processes are no tests: they may start others
        return subprocess.run([sys.executable, *args], cwd=self.path, env=environ, capture_output=True, text=True, timeout=240)

    def cli(self, *args: str, **variables: str) -> subprocess.CompletedProcess:
        return self.python("-m", "drivetrain", *args, **variables)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Home:
    folder = Home(tmp_path)
    folder.write("nets.py", MODULES)
    folder.write("run.yaml", CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.syspath_prepend(str(tmp_path))  # put back afterwards, whatever the commands add
    yield folder
    for name in [name for name, module in sys.modules.items() if (getattr(module, "__file__", None) or "").startswith(str(tmp_path))]:
        del sys.modules[name]
