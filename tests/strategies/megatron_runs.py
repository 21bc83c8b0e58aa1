"""The tiny GPT trained by the Trainer, and by a plain loop of torch over the whole model: for tests of Megatron."""

from __future__ import annotations

import dataclasses
import warnings
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import MegatronModel, MegatronStrategy, Trainer, TrainModule
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.strategies import megatron_gpt as tiny
from drivetrain.tests.strategies.megatron_cpu import OnCPU

QUIET: dict[str, Any] = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                             enable_checkpointing=False)  # fmt: skip
TRAINING, VALIDATION, BATCH = 45, 10, 8  # samples: the last batches are short
LR = 1e-2


@dataclasses.dataclass
class Found:
    """What a run gives: the loss and the gradients' norm of each step, and the loss of the validation after it."""

    losses: list[float]
    norms: list[float]
    validation: float


def preload() -> None:
    """Imports in the process that forks what every rank would import for itself."""
    warnings.filterwarnings("ignore", module="megatron")
    for name in ("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.distributed",
                 "megatron.core.pipeline_parallel.schedules", "drivetrain.strategies.megatron"):  # fmt: skip
        import_module(name)


class Module(TrainModule):
    """A GPT whose losses count by their tokens; `mean` makes every batch count the same."""

    def __init__(self, *, mean: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.mean, self.frozen = mean, frozen
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        self.model = MegatronModel(tiny.Tiny())
        for name, parameter in self.model.named_parameters() if self.frozen else ():
            parameter.requires_grad = "embedding" not in name

    def training_step(self, batch: Any, index: int) -> Any:
        found = self.model.loss(batch)
        self.log("loss", found["loss"])
        return found["loss"] if self.mean else found

    def validation_step(self, batch: Any, index: int) -> None:
        total, count = self.model.batch(batch).loss(self.model(batch))
        self.log("total", total, reduce_fx="sum")
        self.log("count", count, reduce_fx="sum")

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2 * LR}]
        optimizer = torch.optim.AdamW(groups, lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        accelerator = self.trainer.accelerator
        weight = outputs["weight"] if isinstance(outputs, dict) else 1.0
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        both = torch.tensor([float(loss) * float(weight), float(weight)])
        world = accelerator.strategy.loss_world
        both = world.all_reduce(both) if world.size > 1 else both
        self.losses.append(float(both[0] / both[1]))
        if accelerator.sync_gradients and accelerator.grad_norm is not None:
            self.norms.append(float(accelerator.grad_norm))


def fit(options: dict[str, Any], *, module: dict[str, Any] | None = None, batch: int = BATCH, **arguments: Any) -> Found:
    """Trains an epoch on the samples; `batch` is that of all ranks."""
    GradientState._reset_state()
    PartialState._reset_state()
    with OnCPU():
        trainer = Trainer(strategy=MegatronStrategy(**options), max_epochs=1, gradient_clip_val=0.05,
                          **{**QUIET, **arguments})  # fmt: skip
        own, each = Module(**(module or {})), batch // trainer.accelerator.strategy.data_world.size
        held = DataLoader(tiny.tokens(VALIDATION, 1), batch_size=4)
        trainer.fit(own, DataLoader(tiny.tokens(TRAINING), batch_size=each), held)
        metrics = trainer.callback_metrics
        return Found(own.losses, own.norms, float(metrics["total"] / metrics["count"]))


def plain(rank: int, *, batch: int = BATCH, window: int = 1, mean: bool = False, frozen: bool = False) -> Found:
    """The same by torch alone: the whole model on one process, a window of batches at once."""
    from megatron.core import parallel_state, tensor_parallel

    with OnCPU():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        own = Module(frozen=frozen)
        own.model = tiny.Tiny().build(tiny.config(), pre_process=True, post_process=True, vp_stage=None)
        for name, parameter in own.named_parameters() if frozen else ():
            parameter.requires_grad = "embedding" not in name
        configured = own.configure_optimizers()
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        found = Found([], [], 0.0)
        batches = tiny.tokens(TRAINING).split(batch)
        for first in range(0, len(batches), window):
            parts = batches[first : first + window]
            sums = [tiny.Batch(part).loss(own.model(**tiny.inputs(part))) for part in parts]
            found.losses += [float(total / count) for total, count in sums]
            if mean:
                loss = torch.stack([total / count for total, count in sums]).mean()
            else:
                loss = torch.stack([total for total, _ in sums]).sum() / sum(count for _, count in sums)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(own.parameters(), 0.05)
            found.norms.append(float(norm))
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            held = tiny.tokens(VALIDATION, 1)
            total, count = tiny.Batch(held).loss(own.model(**tiny.inputs(held)))
        found.validation = float(total / count)
        return found
