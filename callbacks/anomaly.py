"""What to do about a loss that is not finite, or far above what it was: end, leave the step out, or go back."""

from __future__ import annotations

import logging
import math
from collections import deque
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from ..strategies.checkpoint import Checkpoint, complete
from ..strategies.contents import Contents
from ..strategies.random import preserved
from .base import AFTER_MODULE, Callback
from .checkpoint import ModelCheckpoint
from .checks import check_choice, check_whole

logger = logging.getLogger(__name__)

_LEAST = 10  # losses without which nobody can say what is far above them


class AnomalyError(RuntimeError):
    """A loss was not finite, or far too large, and the policy does not let training go on."""


class AnomalyPolicy(Callback):
    """Look at the loss before each optimizer step, and keep a bad one out of the weights, on all ranks alike.

    A loss is bad when it is not finite on any rank, or, with ``spike``, when its mean over ranks lies more than
    ``spike`` standard deviations above the mean of the last ``window`` good ones (of at least 10). Its step is never
    made; then

    - "stop": the run ends by ``AnomalyError``, which names rank, step and value;
    - "skip": training goes on with the next batch; the step does not count, and no scheduler steps;
    - "rollback": weights and optimizer go back to the newest checkpoint that a good loss has followed (of the run's
      ``ModelCheckpoint``), every learning rate is multiplied by ``lr_factor``, and training goes on with the next
      batch: counters and data do not go back, so that what was bad is not met again.

    ``patience`` is how many bad losses in a row (for "rollback": in the whole run) are borne before the run ends all
    the same. Costs a read of the loss, and on several ranks a small message, in each optimizer step. Raises ValueError
    for unknown words and numbers out of range, and in manual optimization, where losses are not seen.
    """

    priority = -100  # before gradients are unscaled and clipped

    def __init__(
        self,
        action: str = "stop",
        *,
        spike: float | None = None,
        window: int = 100,
        patience: int = 10,
        lr_factor: float = 0.5,
    ) -> None:
        check_choice("action", action, ("stop", "skip", "rollback"))
        check_whole("window", window, least=_LEAST)
        check_whole("patience", patience, least=0)
        if spike is not None and not spike > 0 or not 0 < lr_factor <= 1:
            raise ValueError(
                f"Expected spike above 0 and lr_factor above 0, up to 1. Received: {spike=}, {lr_factor=}. "
                "Use e.g. spike=6, lr_factor=0.5."
            )
        self.action, self.spike, self.patience, self.lr_factor = action, spike, patience, lr_factor
        self.history: deque[float] = deque(maxlen=window)
        self.borne = 0  # bad losses: in a row, for "rollback" in all
        self._total: Any = None
        self._count = 0
        self._back = False
        self._good = -1  # the newest step whose weights a good loss was computed with

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history), "borne": self.borne, "good": self._good}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.clear()
        self.history.extend(state_dict["history"])
        self.borne, self._good = state_dict["borne"], state_dict["good"]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if not module.automatic_optimization:
            raise ValueError(
                "Expected automatic optimization, where the loss is seen. Received: automatic_optimization=False and "
                "an AnomalyPolicy. Look at the loss in training_step, and drop the policy."
            )
        self._total, self._count, self._back = None, 0, False

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        value = loss.detach()
        self._total = value if self._total is None else self._total + value
        self._count += 1

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> int | None:
        if not self._count:
            return None
        own = (self._total / self._count).float().reshape(1)
        self._total, self._count = None, 0
        losses = [float(one) for one in trainer.accelerator.world.all_gather(own)]
        complaint = self._complaint(losses)
        if complaint is None:
            self._good = trainer.global_step
            self.history.append(fmean(losses))
            self.borne = self.borne if self.action == "rollback" else 0
            return None
        self._bear(trainer, complaint)
        self._back = self.action == "rollback"
        return -1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._back:  # now the window is closed
            self._back = False
            self._roll_back(trainer)

    def _complaint(self, losses: list[float]) -> str | None:
        bad = [f"{loss} on rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            return f"Expected a finite loss. Received: {', '.join(bad)}"
        if self.spike is None or len(self.history) < _LEAST:
            return None
        mean, usual = fmean(losses), fmean(self.history)
        limit = usual + self.spike * pstdev(self.history)
        if mean <= limit:
            return None
        highest = max(range(len(losses)), key=losses.__getitem__)
        return (
            f"Expected a loss of at most {limit:.6g}, as {len(self.history)} before it had a mean of {usual:.6g}. "
            f"Received: {mean:.6g}, the highest {losses[highest]:.6g} on rank {highest}"
        )

    def _bear(self, trainer: Any, complaint: str) -> None:
        place = f"at step {trainer.global_step}, batch {trainer.batch_idx} of epoch {trainer.current_epoch}"
        where = f"{complaint}, {place}."
        self.borne += 1
        if self.action == "stop":
            raise AnomalyError(f"{where} The step was not made.")
        if self.borne > self.patience:
            number = f"bad loss number {self.borne}; {self.patience} are borne"
            raise AnomalyError(f"{where} That was {number} ({self.action}).")
        if trainer.is_global_zero:
            logger.warning("%s The step is left out.", where)

    # Going back

    def _roll_back(self, trainer: Any) -> None:
        trainer.accelerator.wait_for_saves()  # one that is written in the background
        path = trainer.accelerator.world.broadcast_object(str(self._target(trainer) or ""))
        if not path:
            raise AnomalyError(
                "Expected a checkpoint that a good loss has followed. Received: none. Save more often, and keep two: "
                "ModelCheckpoint(every_n_train_steps=100, save_top_k=2)."
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        restore(trainer, path)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.lr_factor
        for config in trainer.lr_scheduler_configs:
            base: list[Any] = getattr(config.scheduler, "base_lrs", [])
            base[:] = [rate * self.lr_factor for rate in base]
        if trainer.is_global_zero:
            logger.warning("Weights and optimizer go back to %s; learning rates: ×%g.", path, self.lr_factor)

    def _target(self, trainer: Any) -> Path | None:
        if not trainer.is_global_zero:
            return None
        folders = [
            Path(callback.dirpath)
            for callback in trainer.session.callbacks
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and not callback.save_weights_only
        ]
        found: list[tuple[int, Path]] = []
        for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
            if not path.is_symlink() and complete(path):
                manifest = Checkpoint.open(path, verify=False).manifest
                if manifest.get("run_id") == trainer.run_id and manifest["step"] <= self._good:
                    found.append((manifest["step"], path))
        return max(found)[1] if found else None


class _Ignored:
    """Stands for what a checkpoint holds and a rollback leaves as it is."""

    def load_state_dict(self, state: Any) -> None:
        pass


def restore(trainer: Any, path: str) -> None:
    """Load weights, optimizers and the loss scaler from a checkpoint, and nothing else; every rank has to call it."""
    checkpoint = Checkpoint.open(path)
    saved = checkpoint.state("training")
    contents = Contents()
    contents.models, contents.optimizers = [trainer.model], list(trainer.optimizers)
    contents.schedulers = [_Ignored() for _ in saved["schedulers"]]
    contents.loaders = [_Ignored() for _ in saved["loaders"] or ()]
    contents.objects = [_Ignored() for _ in saved["objects"]]
    with preserved():
        trainer.strategy.load(checkpoint, contents, precision=trainer.precision, models=contents.models)
