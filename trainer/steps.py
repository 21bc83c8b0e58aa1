"""What happens with one batch: the automatic step, the one for optimizers that need a closure, and the manual one."""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from .hooks import overrides
from .module import TrainModule
from .optimization import ManualOptimizer

if TYPE_CHECKING:
    from .loop import FitLoop

logger = logging.getLogger(__name__)


def choose_step(loop: FitLoop) -> AutomaticStep:
    """Return the function that trains a batch, decided once per fit."""
    session = loop.session
    module, optimizers = session.module, session.trainer.optimizers
    if not module.automatic_optimization:
        return ManualStep(loop)
    if len(optimizers) > 1:
        raise ValueError(
            f"Expected one optimizer in automatic optimization. Received: {len(optimizers)}. "
            "Set self.automatic_optimization = False in __init__ and step them in training_step."
        )
    if not optimizers:
        return WithoutOptimizer(loop)
    step = getattr(optimizers[0], "optimizer", optimizers[0]).step
    if overrides(module, "optimizer_step", TrainModule) or needs_closure(step):
        return ClosureStep(loop)
    return AutomaticStep(loop)


def needs_closure(step: Callable[..., Any]) -> bool:
    """Tell whether an optimizer's ``step`` cannot be called without a closure (LBFGS)."""
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class AutomaticStep:
    """Forward, backward and, at the edge of an accumulation window, the update."""

    def __init__(self, loop: FitLoop) -> None:
        session = loop.session
        self.loop, self.session, self.hooks, self.progress = loop, session, session.hooks, loop.progress
        self.accelerator, self.model, self.module = session.trainer.accelerator, session.model, session.module
        self.training_step = session.entry("training_step", manual=not session.module.automatic_optimization)
        self.optimizer: Any = session.trainer.optimizers[0] if session.trainer.optimizers else None
        self.scaled = self.accelerator.precision.skips_steps
        self.step_schedulers = [c for c in session.trainer.lr_scheduler_configs if c.interval == "step"]
        self.zero_grad = self._zero_grad if overrides(self.module, "optimizer_zero_grad", TrainModule) else None
        via = self.module.backward if overrides(self.module, "backward", TrainModule) else None
        self.backward_options = {"via": via} if via else {}
        self.told = False  # that there are batches without a loss

    def __call__(self, batch: Any, index: int) -> Any:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            with accelerator.autocast():
                outputs = self.training_step(batch, index)
            self.backward(outputs)
            if accelerator.sync_gradients:
                if outputs is not None or self._window_has_gradients():
                    self.update()
                self.loop.at_edge = True
        return outputs

    def backward(self, outputs: Any) -> None:
        """Compute the gradients of the loss in what ``training_step`` returned."""
        accelerator, hooks = self.accelerator, self.hooks
        loss, options = (outputs, self.backward_options) if type(outputs) is Tensor else self._loss(outputs)
        if loss is None:
            return
        for hook in hooks.on_before_backward:
            hook(loss)
        accelerator.backward(loss, **options)
        for hook in hooks.on_after_backward:
            hook()

    def update(self) -> None:
        """Step the optimizer and what follows it."""
        optimizer, hooks = self.optimizer, self.hooks
        for hook in hooks.on_before_optimizer_step:
            if hook(optimizer) == -1:
                return optimizer.zero_grad()
        optimizer.step()
        self.after_update()

    def after_update(self) -> None:
        """Clear the gradients, count the step and step the schedulers that follow it, unless the scaler skipped it."""
        for hook in self.hooks.on_before_zero_grad:
            hook(self.optimizer)
        if self.zero_grad is None:
            self.optimizer.zero_grad()
        else:
            self.zero_grad()
        if self.scaled and self.accelerator.optimizer_step_was_skipped:
            return
        self.progress.step += 1
        if self.step_schedulers:
            self.session.step_schedulers("step", self.progress.step)

    def abandon(self) -> None:
        """Drop the gradients of a window that is open, which will not be finished."""
        count = self.accelerator.step
        if count and not self.accelerator.sync_gradients:
            logger.warning(
                "Epoch %d ended inside an accumulation window, which is not finished: the gradients of its %d "
                "micro-batches are dropped.", self.progress.epoch, count,
            )  # fmt: skip
            self.accelerator.abandon_window()

    def _zero_grad(self) -> None:
        self.module.optimizer_zero_grad(self.progress.epoch, self.progress.batch, self.optimizer)

    def _loss(self, outputs: Any) -> tuple[Tensor | None, dict[str, Any]]:
        if isinstance(outputs, Tensor):
            return outputs, self.backward_options
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
            weight = outputs.get("weight")
            return outputs["loss"], self.backward_options | ({} if weight is None else {"weight": weight})
        if outputs is not None:
            raise TypeError(
                f"Expected training_step to return a 0-dim tensor, a dict with 'loss', or None. "
                f"Received: {_described(outputs)}. Return the loss."
            )
        if self.accelerator.num_processes > 1:
            raise ValueError(
                f"Expected a loss on every rank, since all of them average their gradients. Received: None on rank "
                f"{self.accelerator.process_index}. Return a loss of zero that depends on the parameters instead."
            )
        if not self.told:
            self.told = True
            warnings.warn(
                f"Expected {type(self.module).__name__}.training_step to return a loss. Received: None. Batches "
                "without one are left out, and no step follows a window of them. Return the loss.",
                stacklevel=2,
            )
        return None, {}

    def _window_has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])


class ClosureStep(AutomaticStep):
    """The same with forward and backward in a closure: for ``optimizer_step`` overrides, and optimizers like LBFGS.

    An optimizer may call the closure again, which then evaluates every micro-batch of the window anew. What it returns
    is the window's loss: the mean over its micro-batches, and for an optimizer that looks at it over all ranks, so that
    it decides the same on each of them.
    """

    def __init__(self, loop: FitLoop) -> None:
        super().__init__(loop)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        looks = needs_closure(optimizer.step)
        self.shares_loss = looks and self.accelerator.num_processes > 1
        self.evaluates_again = looks or not type(optimizer).__module__.startswith("torch.optim.")
        self.earlier: list[tuple[Any, int, float]] = []  # batch, its index and its weight: of the window until now
        self.losses: list[Tensor] = []
        self.outputs: Any = None

    def __call__(self, batch: Any, index: int) -> Any:
        with self.accelerator.accumulate(self.model):
            if not self.accelerator.sync_gradients:
                outputs = self.evaluate(batch, index)
                if self.evaluates_again:
                    self.earlier.append((batch, index, self.loop.loader.weight))
                return outputs
            self.outputs = None
            self.module.optimizer_step(self.progress.epoch, index, self.optimizer, lambda: self.closure(batch, index))
            self.after_update()
            self.forget()
            self.loop.at_edge = True
        return self.outputs

    def closure(self, batch: Any, index: int) -> Any:
        """Compute the gradients of the window that ends with a batch, and return its loss."""
        if self.outputs is not None:  # called again by the optimizer: as at the first call, there are no gradients
            self.optimizer.zero_grad()
            self.losses.clear()
            self.evaluate_earlier()
        self.outputs = self.evaluate(batch, index)
        for hook in self.hooks.on_before_optimizer_step:
            if hook(self.optimizer) == -1:
                self.optimizer.zero_grad()  # the optimizer is under way already, and finds nothing to do
                break
        if not self.losses:
            return None
        loss = torch.stack(self.losses).mean()
        return self.accelerator.reduce(loss, "mean") if self.shares_loss else loss

    def evaluate(self, batch: Any, index: int) -> Any:
        """Do forward and backward of one micro-batch, and keep its loss."""
        with self.accelerator.autocast():
            outputs = self.training_step(batch, index)
        self.backward(outputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.losses.append(loss.detach() * self.loop.loader.weight)
        return outputs

    def evaluate_earlier(self) -> None:
        """Do forward and backward of the window's micro-batches but the last, each with the weight that it had."""
        loader = self.loop.loader
        own = loader.weight
        for batch, index, weight in self.earlier:
            loader.weight = weight
            with self.accelerator.no_sync(self.model):
                outputs = self.evaluate(batch, index)
            if isinstance(outputs, dict) and outputs.get("weight") is not None:
                raise ValueError(
                    "Expected losses without weights under an optimizer that evaluates a window again. Received: "
                    f"weight={outputs['weight']}. Return the loss alone, or accumulate one micro-batch."
                )
        loader.weight = own

    def abandon(self) -> None:
        super().abandon()
        self.forget()

    def forget(self) -> None:
        """Let go of the window's batches and losses."""
        self.earlier.clear()
        self.losses.clear()


class WithoutOptimizer(AutomaticStep):
    """For modules whose ``configure_optimizers`` returns None: nothing is differentiated, batches count as steps."""

    def __call__(self, batch: Any, index: int) -> Any:
        with self.accelerator.autocast():
            outputs = self.training_step(batch, index)
        self.progress.step += 1
        self.loop.at_edge = True
        return outputs


class ManualStep(AutomaticStep):
    """``training_step`` does everything; every step of an optimizer is announced and counted."""

    def __init__(self, loop: FitLoop) -> None:
        super().__init__(loop)
        trainer = self.session.trainer
        trainer.manual_optimizers = [ManualOptimizer(optimizer, self.step) for optimizer in trainer.optimizers]

    def __call__(self, batch: Any, index: int) -> Any:
        with self.accelerator.autocast():
            outputs = self.training_step(batch, index)
        self.loop.at_edge = True
        return outputs

    def step(self, optimizer: Any, closure: Any = None, **kwargs: Any) -> Any:
        """Step one of the user's optimizers."""
        for hook in self.hooks.on_before_optimizer_step:
            if hook(optimizer) == -1:
                return None
        result = optimizer.step(closure, **kwargs) if closure is not None else optimizer.step(**kwargs)
        if not (self.scaled and self.accelerator.optimizer_step_was_skipped):
            self.progress.step += 1
        return result


def _described(outputs: Any) -> str:
    return f"a dict with {sorted(map(str, outputs))}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
