"""The interface of a callback: every event of a run, each a method that does nothing until it is overridden.

Only overridden methods are ever called: the loop compiles them once per stage, so an event that nobody
listens to costs an empty loop. Callbacks run in the order of (``priority``, position in the list); the module's own
hook follows; callbacks with a priority of 100 or more run after the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..trainer.module import TrainModule
    from ..trainer.trainer import Trainer

AFTER_MODULE = 100
"""Callbacks with at least this priority see an event after the module has seen it."""


class Callback:
    """Base class of everything optional in a run; override the hooks that you need."""

    priority: int = 0

    @property
    def state_key(self) -> str:
        """Name under which this callback's state lies in a checkpoint: the class name, unless overridden.

        Two callbacks of one class in a run need different keys: include the arguments that tell them apart.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive an interruption: tensors, numbers, strings, lists, dicts."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned before the interruption."""

    # The whole run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called first, with stage "fit", "validate", "test" or "predict"; the model is not yet on its device."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called last."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when the model is prepared, before anything is restored from a checkpoint."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when fitting is over, before ``teardown``."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Called on every rank that raises, with what was raised (KeyboardInterrupt included)."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; entries added to ``checkpoint`` are saved with it."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Called with the entries that ``on_save_checkpoint`` saved."""

    def on_log(self, trainer: Trainer, module: TrainModule, metrics: dict[str, float], step: int) -> None:
        """Called on every rank when a row of values is due, already reduced over ranks."""

    # Training

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first epoch, after restoring."""

    def on_stop(self, trainer: Trainer, module: TrainModule) -> None:
        """Called on every rank when all have agreed to stop, between two steps."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of an epoch, after its validation."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch is trained; returning -1 ends the epoch here."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a batch is trained, with what ``training_step`` returned."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Called before ``loss.backward()``."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after ``loss.backward()``."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> int | None:
        """Called before an optimizer steps, when its window's gradients are complete; returning -1 drops them."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called after an optimizer stepped, before its gradients are set to zero."""

    # Validation, test and prediction

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the few validation batches that are run ahead of training."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the sanity check."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when a validation begins."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when a validation is over and its metrics are known."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of a validation."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of a validation, before its metrics are reduced."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch."""

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when a test begins."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when a test is over and its metrics are known."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of a test."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of a test, before its metrics are reduced."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch."""

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when a prediction begins."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when a prediction is over."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first batch of a prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a prediction batch, with what ``predict_step`` returned."""


class LambdaCallback(Callback):
    """A callback made of functions: ``LambdaCallback(on_train_start=lambda trainer, module: ...)``.

    Raises TypeError for a name that is no hook.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise TypeError(f"Expected names of hooks. Received: {name}. Use one of {', '.join(HOOKS)}.")
            setattr(self, name, function)


HOOKS = tuple(
    name
    for name in vars(Callback)
    if callable(getattr(Callback, name)) and (name.startswith("on_") or name in ("setup", "teardown"))
)
"""Names of all hooks, in the order of this file."""
