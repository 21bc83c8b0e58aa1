"""The hooks of a module: a callback's without the arguments ``trainer`` and ``module``, and some of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class ModuleHooks:
    """Every event of a run that a module can listen to; the module's hook runs after those of the callbacks."""

    def setup(self, stage: str) -> None:
        """Called first, with stage "fit", "validate", "test" or "predict"; build here what needs data or a stage."""

    def teardown(self, stage: str) -> None:
        """Called last."""

    def on_fit_start(self) -> None:
        """Called when the model is prepared, before anything is restored from a checkpoint."""

    def on_fit_end(self) -> None:
        """Called when fitting is over."""

    def on_exception(self, exception: BaseException) -> None:
        """Called on every rank that raises."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; entries added to ``checkpoint`` are saved with it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the entries that ``on_save_checkpoint`` saved."""

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        """Called on every rank when a row of values is due, already reduced over ranks."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after restoring."""

    def on_stop(self) -> None:
        """Called when all ranks have agreed to stop, between two steps."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called at the start of an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of an epoch, after its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch is trained; returning -1 ends the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a batch is trained, with what ``training_step`` returned."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before ``loss.backward()``."""

    def on_after_backward(self) -> None:
        """Called after ``loss.backward()``."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before an optimizer steps, when the gradients of its window are complete."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after an optimizer stepped, before its gradients are set to zero."""

    def on_sanity_check_start(self) -> None:
        """Called before the few validation batches that are run ahead of training."""

    def on_sanity_check_end(self) -> None:
        """Called after the sanity check."""

    def on_validation_start(self) -> None:
        """Called when a validation begins."""

    def on_validation_end(self) -> None:
        """Called when a validation is over and its metrics are known."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of a validation."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last batch of a validation, before its metrics are reduced."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch."""

    def on_validation_model_zero_grad(self) -> None:
        """Called ahead of a validation in fit, outside of accumulation windows: frees gradients; they are zero here."""

    def on_validation_model_eval(self) -> None:
        """Puts the model into evaluation mode for a validation; override to do it in another way."""

    def on_validation_model_train(self) -> None:
        """Called when the model is back in its modes after a validation."""

    def on_test_start(self) -> None:
        """Called when a test begins."""

    def on_test_end(self) -> None:
        """Called when a test is over and its metrics are known."""

    def on_test_epoch_start(self) -> None:
        """Called before the first batch of a test."""

    def on_test_epoch_end(self) -> None:
        """Called after the last batch of a test, before its metrics are reduced."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch."""

    def on_test_model_eval(self) -> None:
        """Puts the model into evaluation mode for a test; override to do it in another way."""

    def on_test_model_train(self) -> None:
        """Called when the model is back in its modes after a test."""

    def on_predict_start(self) -> None:
        """Called when a prediction begins."""

    def on_predict_end(self) -> None:
        """Called when a prediction is over."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch of a prediction."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch of a prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a prediction batch, with what ``predict_step`` returned."""

    def on_predict_model_eval(self) -> None:
        """Puts the model into evaluation mode for a prediction; override to do it in another way."""

    def on_predict_model_train(self) -> None:
        """Called when the model is back in its modes after a prediction."""


MODULE_HOOKS = (
    "on_validation_model_zero_grad",
    *(f"on_{event}_model_{mode}" for event in ("validation", "test", "predict") for mode in ("eval", "train")),
)
"""Hooks that a module has and a callback has not."""
