"""Handwritten digits: train a small convolutional network, keep the best of it, test that.

    python examples/digits.py          about ten seconds on a laptop; needs `pip install scikit-learn`
"""

from __future__ import annotations

import os
import shutil
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import DataModule, LearningRateMonitor, ModelCheckpoint, Trainer, TrainModule


class Digits(DataModule):
    """1797 images of 8 × 8 pixels that come with scikit-learn: 1200 to train, 297 to validate, 300 to test."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        parts = order.split([1200, 297, 300])
        self.train, self.val, self.test = (TensorDataset(images[i], torch.tensor(labels)[i]) for i in parts)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 256)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 256)


class ConvNet(TrainModule):
    """Two convolutions and two linear layers."""

    def __init__(self, width: int = 16, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(32 * width, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def evaluate(self, batch, stage: str) -> None:
        images, labels = batch
        scores = self(images)
        self.accuracy.update(scores, labels)
        self.log(f"{stage}_loss", F.cross_entropy(scores, labels))
        self.log(f"{stage}_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(**options) -> Trainer:
    best = ModelCheckpoint(monitor="val_accuracy", mode="max", save_top_k=1)
    options = {"max_epochs": 15, "seed": 1, "log_every_n_steps": 10} | options
    trainer = Trainer(callbacks=[best, LearningRateMonitor()], **options)
    model, data = ConvNet(), Digits()

    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data, ckpt_path="best")

    programs = "" if shutil.which("drivetrain") else os.path.relpath(os.path.dirname(sys.executable)) + os.sep
    trainer.print(f"""
{result["test_accuracy"]:.1%} of 300 test images recognised.

The run           {trainer.log_dir}
  its numbers     metrics.csv; as curves: tensorboard --logdir {trainer.log_dir.parent}
  best weights    {best.best_model_path}/model.safetensors

Try next
  the same from a config file     {programs}drivetrain fit --config examples/digits.yaml
  a language model                {programs}python examples/char_transformer.py
  how it works                    docs/getting-started.md, trainer/loop.py""")
    return trainer


if __name__ == "__main__":
    main()
