"""The runs that are killed: each a script that trains, goes on from its last checkpoint, and tells how it ended."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from drivetrain import Accelerator, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ProjectConfiguration
from drivetrain import Trainer, TrainModule
from drivetrain.strategies import random as randomness
from drivetrain.strategies.checkpoint import Checkpoint, encode
from drivetrain.tests.faults.killing import CLOCK, Early, Late

SAMPLES = 17  # in batches of 3: the last batch and the last window are short, also on 2 ranks


class Noisy(Dataset):
    """Sample i is i, with noise of torch's, numpy's and Python's generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        CLOCK.tick("fetch")
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([index / 10, *noise])


class Still(Noisy):
    """Shorter, for validation; with a little noise, which has to be the same in each validation of a run."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 7) + torch.rand(()) / 50 + np.random.rand() / 50


class Flow(IterableDataset):
    """The samples in an order that is drawn anew each time, shared among workers; tells its place, and goes on there."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __iter__(self) -> Any:
        worker = get_worker_info()
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        order = order[worker.id :: worker.num_workers] if worker else order
        while self.position < len(order):
            CLOCK.tick("fetch")
            self.position += 1
            yield torch.tensor([order[self.position - 1] / 10, torch.rand(()).item(), np.random.rand(), 1.0])
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Net(TrainModule):
    """Dropout, batch normalization, Adam, two schedulers, a metric of torchmetrics and values of all kinds."""

    plateau = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 1)
        self.error = torchmetrics.MeanSquaredError()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(functional.dropout(self.body(batch), 0.2, training=self.training)).squeeze(1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        CLOCK.tick("training_step")
        found, wanted = self(batch), batch[:, 0].sin()
        loss = functional.mse_loss(found, wanted)
        self.error(found, wanted)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("middle", found.detach().mean(), reduce_fx=torch.median, on_step=False, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        CLOCK.tick("training_step")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        CLOCK.tick("validation_step")
        self.log("val", (self(batch) - batch[:, 0].sin()).square().mean(), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9)
        schedules: list[Any] = [{"scheduler": warmup, "interval": "step"}]
        if self.plateau:
            falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
            schedules.append({"scheduler": falling, "monitor": "val"})
        return [optimizer], schedules


class Watched(Net):
    """The same with a scheduler that follows the validation."""

    plateau = True


class Overflowing(Net):
    """The same under a loss scaler, with gradients that overflow now and then: such steps are skipped."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1e30 if batch_idx % 5 == 2 else 1.0)


class Duel(Net):
    """Two optimizers, stepped by hand and not equally often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = functional.mse_loss(self(batch), batch[:, 0].sin())
        CLOCK.tick("training_step")
        self.manual_backward(loss)
        first.step()
        CLOCK.tick("training_step")
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
        self.lr_schedulers().step()
        self.log("loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.body.parameters(), lr=0.02)
        second = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 4, 0.8)]


def train(
    kind: type[TrainModule] = Net,
    *,
    data: Callable[[], Any] = Noisy,
    workers: int = 0,
    callbacks: Callable[[], list[Any]] = lambda: [ModelCheckpoint(every_n_train_steps=2)],
    **options: Any,
) -> dict[str, Any]:
    """Train in the current folder, going on from what lies there, and return how it ended."""
    source = data()
    shuffle = None if isinstance(source, IterableDataset) else True
    loader = DataLoader(source, batch_size=3, shuffle=shuffle, num_workers=workers)
    settings = {"max_epochs": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1, "logger": "csv", **options}
    trainer = Trainer(accelerator="cpu", seed=5, callbacks=[Early(), *callbacks(), Late()], enable_progress_bar=False,
                      enable_model_summary=False, **settings)  # fmt: skip
    module = kind()
    trainer.fit(module, loader, [DataLoader(Still(5), 2), DataLoader(Still(3), 2)], resume="last")
    assert kind is not Overflowing or trainer.accelerator.skipped_steps
    return ended(trainer, module) if trainer.is_global_zero else {"weights": _copied(module.state_dict())}


def ended(trainer: Trainer, module: TrainModule) -> dict[str, Any]:
    """Return everything about a run that has to be the same however often it was killed."""
    progress = {key: value for key, value in trainer.progress.state_dict().items() if key != "elapsed"}
    folder = Path(trainer.log_dir)
    return {
        "weights": _copied(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "random": randomness.capture(),
        "progress": progress,
        "metrics": [dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.metric_steps)],
        "callbacks": _local([callback.state_dict() for callback in trainer.callbacks]),
        "rows": (folder / "metrics.csv").read_text().splitlines(),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
        "checkpoints": {path.name: _content(path) for path in sorted((folder / "checkpoints").iterdir())},
    }


def raw(*, workers: int = 0, accumulation: int = 1, precision: str = "no", loaders: int = 1) -> dict[str, Any]:
    """The same by a loop of one's own: save_state, load_state, skip_first_batches; with several loaders side by side."""
    randomness.set_seed(5)
    project = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=accumulation,
                              mixed_precision=precision)  # fmt: skip
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
    data = [DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers) for _ in range(loaders)]
    model, optimizer, scheduler, *data = accelerator.prepare(net, optimizer, scheduler, *data)
    place = {"epoch": 0, "batch": 0}
    if any(Path("checkpoints").glob("checkpoint_*")):
        place = accelerator.load_state()["place"]
    for epoch in range(place["epoch"], 2):
        skipped = place["batch"] if epoch == place["epoch"] else 0
        for loader in data:
            loader.set_epoch(epoch)
        rest = [accelerator.skip_first_batches(loader, skipped) if skipped else loader for loader in data]
        for index, batches in enumerate(zip(*rest), start=skipped):
            CLOCK.tick("training_step")
            with accelerator.accumulate(model):
                losses = [functional.mse_loss(model(batch), batch[:, 0].sin()) for batch in batches]
                accelerator.backward(sum(losses) * (1e30 if precision == "fp16" and index % 5 == 2 else 1.0))
                optimizer.step()
                CLOCK.tick("training_step")
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.save_state(metadata={"place": {"epoch": epoch, "batch": index + 1}})
    if not accelerator.is_main_process:  # whose own running statistics nobody needs: DDP brings the first rank's
        return {"weights": _copied(dict(net.named_parameters()))}
    return {
        "weights": _copied(net.state_dict()),
        "optimizers": optimizer.state_dict(),
        "schedulers": scheduler.state_dict(),
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "random": randomness.capture(),
        "files": sorted(str(path) for path in Path("checkpoints").rglob("*")),
        "checkpoints": {path.name: _content(path) for path in sorted(Path("checkpoints").iterdir())},
    }


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _content(path: Path) -> Any:
    """Return what a checkpoint holds, times apart; of a link, where it leads."""
    if path.is_symlink():
        return path.resolve().name
    checkpoint = Checkpoint.open(path)
    manifest = {key: value for key, value in checkpoint.manifest.items() if key not in ("time", "files", "checksum", "run_id")}
    states = {name: checkpoint.json(name) for name in checkpoint.files if name.endswith(".json")}
    tensors = {name: checkpoint.tensors(name) for name in checkpoint.files if name.endswith(".safetensors")}
    return _local({"manifest": manifest, "states": _timeless(states), "tensors": tensors})


def _timeless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _timeless(value) for key, value in tree.items() if key != "elapsed"}
    return [_timeless(value) for value in tree] if isinstance(tree, list) else tree


def _local(tree: Any) -> Any:
    """Leave out where the run lies: the folder, and its number where an earlier one died before its first save."""
    if isinstance(tree, str):
        return re.sub(r"\S*/runs/run-\d+", "<run>", tree)
    if isinstance(tree, dict):
        return {_local(key): _local(value) for key, value in tree.items()}
    return [_local(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def _stopping() -> list[Any]:
    return [
        EarlyStopping("val", patience=2, min_delta=0.002),
        ModelCheckpoint(monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{step}-{val:.3f}"),
        ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, filename="every-{step}"),
        LearningRateMonitor(),
    ]


def _each_step() -> list[Any]:
    return [ModelCheckpoint(every_n_train_steps=1)]


@dataclass(frozen=True)
class Run:
    """A run: its script, and how many ranks it has."""

    script: Callable[[], dict[str, Any]]
    ranks: int = 1


RUNS: dict[str, Run] = {
    "plain": Run(train),
    "workers": Run(partial(train, workers=2, log_every_n_steps=3)),
    "windows": Run(partial(train, callbacks=_each_step, accumulate_grad_batches=4)),
    "workers and windows": Run(partial(train, callbacks=_each_step, workers=2, accumulate_grad_batches=4)),
    "iterable": Run(partial(train, data=Flow)),
    "iterable and workers": Run(partial(train, data=Flow, workers=2)),
    "manual": Run(partial(train, Duel)),
    "stopping": Run(partial(train, Watched, callbacks=_stopping, val_check_interval=0.4, max_epochs=3)),
    "scaler": Run(partial(train, Overflowing, precision="16-mixed", callbacks=_each_step)),
    "loop": Run(raw),
    "loop with workers and windows": Run(partial(raw, workers=2, accumulation=4)),
    "loop with a scaler and two loaders": Run(partial(raw, precision="fp16", loaders=2)),
    "loop on two ranks": Run(raw, ranks=2),
    "two ranks": Run(train, ranks=2),
    "two ranks with windows": Run(partial(train, Watched, callbacks=_stopping, accumulate_grad_batches=2), ranks=2),
}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as path → something that is equal exactly when the bits are."""
    tree, tensors = encode(state, "end")
    bits = {name: (str(t.dtype), tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in tensors.items()}
    return {"tensors": bits, "tree": tree}
