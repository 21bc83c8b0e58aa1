"""What a trainer tells about its run: read-only views for modules, callbacks and users."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..callbacks.accumulation import GradientAccumulation
from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.progress import Progress as ProgressCallback
from ..callbacks.tracking import Tracking
from .loaders import length, samples_of

if TYPE_CHECKING:
    from .arguments import Plan
    from .metrics import Metrics
    from .module import TrainModule
    from .progress import Progress
    from .run_folder import RunFolder
    from .schedule import Schedule
    from .session import Session


class TrainerState:
    """The properties of a ``Trainer``; everything here can be read at any time and changes nothing."""

    accelerator: Any
    callbacks: list[Any]
    launcher: Any
    limits: dict[str, int | float | None]
    metrics: Metrics | None
    module: TrainModule | None
    optimizers: list[Any]
    plan: Plan
    progress: Progress
    run_folder: RunFolder
    schedule: Schedule
    session: Session | None
    stage: str | None

    # Where

    @property
    def strategy(self) -> Any:
        """The strategy that the run uses."""
        return self.accelerator.strategy

    @property
    def precision(self) -> Any:
        """The precision that the run computes in."""
        return self.accelerator.precision

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.accelerator.device

    @property
    def world_size(self) -> int:
        """Number of processes: of those that train, where each ``fit`` starts its own."""
        return self.plan.processes * self.plan.nodes if self.launcher.later else self.accelerator.num_processes

    @property
    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return self.accelerator.world.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return max(1, self.world_size // max(1, self.num_devices))

    @property
    def num_devices(self) -> int:
        """Number of processes on this machine."""
        return self.plan.processes if self.launcher.later else self.accelerator.world.local_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    @property
    def scaler(self) -> Any:
        """The gradient scaler of 16-bit precision, or None."""
        return self.accelerator.scaler

    # When

    @property
    def global_step(self) -> int:
        """Number of optimizer steps done; skipped ones do not count."""
        return self.progress.step

    @property
    def current_epoch(self) -> int:
        """Number of finished epochs, which is the index of the running one."""
        return self.progress.epoch

    @property
    def batch_idx(self) -> int:
        """Number of batches done in the running epoch."""
        return self.progress.batch

    @property
    def training(self) -> bool:
        """Whether a training batch or epoch is under way."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is under way."""
        return self.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether a test is under way."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is under way."""
        return self.stage == "predict"

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check is under way."""
        return self.stage == "sanity_check"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test is under way."""
        return self.stage in ("validate", "test")

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch being trained is the last of its epoch."""
        return self.session is not None and self.session.train_loader.end_of_dataloader

    @property
    def validation_due(self) -> bool:
        """Whether a validation follows the batch just trained."""
        return self.session is not None and self.session.loop is not None and self.session.loop.validation_due

    @property
    def enable_validation(self) -> bool:
        """Whether ``fit`` validates."""
        return self.schedule.validates

    # How much

    @property
    def num_training_batches(self) -> float:
        """Batches of a training epoch on each rank; math.inf where the loader has no length."""
        return self.session.num_training_batches if self.session is not None else 0

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader."""
        return self._counts("validate")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each validation loader in the sanity check."""
        most = self.plan.sanity_batches
        return [count if most < 0 else min(most, count) for count in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[float]:
        """Batches of each test loader."""
        return self._counts("test")

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches of each prediction loader."""
        return self._counts("predict")

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps that ``fit`` takes in all; math.inf where nothing limits it."""
        if self.session is None:
            raise RuntimeError(
                "Expected a fit. Received: none. Read estimated_stepping_batches in configure_optimizers or later."
            )
        self.schedule.num_batches = self.num_training_batches
        batch, samples = samples_of(self.train_dataloader)
        return self.schedule.total_steps(self.accumulation, global_batch=batch, samples=samples)

    @property
    def accumulation(self) -> Any:
        """Micro-batches per optimizer step, as a function of the epoch."""
        found = self._first(GradientAccumulation)
        return found.steps if found is not None else lambda epoch: self.accelerator.gradient_accumulation_steps

    def limit(self, stage: str) -> int | float | None:
        """Return how many batches, or which fraction, of a stage's loaders to use; None for all."""
        return self.limits[stage]

    def _counts(self, stage: str) -> list[float]:
        loaders = self.session.loaders.get(stage, []) if self.session is not None else []
        return [length(loader) for loader in loaders]

    # What

    @property
    def lightning_module(self) -> TrainModule | None:
        """The module, under the name that Lightning has for it."""
        return self.module

    @property
    def model(self) -> Any:
        """The module as the strategy wraps it."""
        return self.session.model if self.session is not None else None

    @property
    def datamodule(self) -> Any:
        """The data module of the run, or None."""
        return self.session.datamodule if self.session is not None else None

    @property
    def train_dataloader(self) -> Any:
        """The prepared training loader."""
        return self.session.train_loader if self.session is not None else None

    @property
    def val_dataloaders(self) -> list[Any]:
        """The prepared validation loaders."""
        return self.session.loaders.get("validate", []) if self.session is not None else []

    @property
    def test_dataloaders(self) -> list[Any]:
        """The prepared test loaders."""
        return self.session.loaders.get("test", []) if self.session is not None else []

    @property
    def predict_dataloaders(self) -> list[Any]:
        """The prepared prediction loaders."""
        return self.session.loaders.get("predict", []) if self.session is not None else []

    @property
    def callback_metrics(self) -> dict[str, float]:
        """Last reduced value of everything logged, by name; the same on every rank."""
        return self.metrics.callback if self.metrics is not None else {}

    @property
    def logged_metrics(self) -> dict[str, float]:
        """Last reduced value of everything that went to trackers."""
        return self.metrics.logged if self.metrics is not None else {}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Last reduced value of everything logged with ``prog_bar=True``."""
        return self.metrics.progress_bar if self.metrics is not None else {}

    @property
    def metric_steps(self) -> dict[str, int]:
        """``global_step`` at which each name was last reduced."""
        return self.metrics.steps if self.metrics is not None else {}

    @property
    def gradient_norm(self) -> Any:
        """Norm of the gradients before they were last clipped (a tensor, or None)."""
        return self.accelerator.grad_norm

    # The run's folder and callbacks

    @property
    def run_id(self) -> str | None:
        """Name of the run; a resumed run keeps it."""
        return self.run_folder.run_id

    @property
    def log_dir(self) -> Path:
        """Folder of the run; it exists once something is written."""
        return self.run_folder.path

    @property
    def trackers(self) -> list[Any]:
        """Running trackers."""
        return [
            tracker for callback in self.callbacks if isinstance(callback, Tracking) for tracker in callback.trackers
        ]

    @property
    def loggers(self) -> list[Any]:
        """Running trackers, under the name that Lightning has for them."""
        return self.trackers

    @property
    def logger(self) -> Any:
        """The first running tracker, or None."""
        return next(iter(self.trackers), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first callback that saves checkpoints."""
        return self._first(ModelCheckpoint)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All callbacks that stop early."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first callback that stops early."""
        return self._first(EarlyStopping)

    @property
    def progress_bar_callback(self) -> ProgressCallback | None:
        """The callback that shows progress."""
        return self._first(ProgressCallback)

    def _first(self, kind: type) -> Any:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)
