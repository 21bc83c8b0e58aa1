"""The training loop. What it does, with every hook in its place::

    on_train_start
    for each epoch:
        on_train_epoch_start
        for each batch of the loader:
            on_train_batch_start                     # -1 ends the epoch here
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = training_step(batch, batch_idx)
                on_before_backward;  accelerator.backward(loss);  on_after_backward
                if accelerator.sync_gradients:       # the edge of an accumulation window
                    on_before_optimizer_step         # clipping happens here
                    optimizer.step()
                    on_before_zero_grad;  optimizer.zero_grad()
                    schedulers of interval "step";  global_step += 1
            on_train_batch_end;  on_log where a row is due;  on_train_batch_end of late callbacks (checkpoints)
            validation where it is due
        schedulers of interval "epoch";  validation where it is due
        on_train_epoch_end;  the epoch's means, on_log;  plateau schedulers;  on_train_epoch_end of late callbacks
    on_train_end

In manual optimization ``training_step`` does what stands between ``autocast`` and the edge; each ``optimizer.step()``
fires ``on_before_optimizer_step`` and counts as a step. A run that was interrupted goes on at the very place that its
counters name.
"""

from __future__ import annotations

import logging
from traceback import walk_tb
from typing import TYPE_CHECKING, Callable

from ..callbacks.base import Callback
from ..strategies.optimizer import AcceleratedOptimizer
from .evaluation import evaluate
from .hooks import overrides
from .module import TrainModule
from .steps import AutomaticStep, choose_step

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger(__name__)

_OWN = f"{Callback.__module__.rpartition('.')[0]}."  # whose callbacks never end an epoch
STEPPING = {AcceleratedOptimizer.step.__code__, AutomaticStep.after_update.__code__}  # in which weights change


class FitLoop:
    """The state of one ``fit``: what is called each step, resolved once, and when things are due."""

    def __init__(self, session: Session) -> None:
        self.session, self.trainer, self.hooks = session, session.trainer, session.hooks
        self.metrics, self.progress, self.loader = session.metrics, session.trainer.progress, session.train_loader
        self.at_edge = True  # no accumulation window is open and every batch that was fetched is done
        self.validation_due = self.stopping = False
        self.requests: list[Callable[[], None]] = []  # checkpoints to write at the next edge
        self.saves = session.trainer.accelerator.saves  # of which one may be written beside training
        self.edge = self._counters()  # as they were at the last edge
        self.edge_step = self.progress.step
        self.step = choose_step(self)
        self._schedule = session.trainer.schedule
        self._world = session.trainer.accelerator.world
        self._flush = session.trainer.accelerator.strategy.flush
        self._alone = self._world.size == 1
        self.votes = not self._alone and self._world.agree(may_leave(session))  # whether ranks do before each batch
        self._row_at: float = 0
        self._logged_at = 0
        self._set_next_row()

    def run(self) -> None:
        """Train until a limit is reached or somebody asks to stop."""
        if self.progress.phase == "ended":
            self._next_epoch()
        self.metrics.begin("train", batchwise=False)
        self.hooks.fire("on_train_start")
        if self.progress.batches and self.finished():
            reached = self._schedule.reached(self.progress)
            logger.warning("Nothing is left to train: the checkpoint stands at %s.", reached)
        while not self.finished() or self._unfinished_epoch():
            complete = self.progress.phase in ("full", "scheduled") if self.finished() else self.epoch()
            self.end_epoch(complete)
            if not complete:
                break
            self._next_epoch()
        self.saves.wait()
        self.metrics.close()
        self.hooks.fire("on_train_end")
        self.saves.wait()

    def epoch(self) -> bool:
        """Train the rest of the running epoch; return False when it was left before its end."""
        progress, metrics, step = self.progress, self.metrics, self.step
        hooks, late = self.hooks, self.hooks.late["on_train_batch_end"]
        last = self._start_epoch()
        if last or (progress.batch and self.finished()):  # the validation that came first may have ended the run
            return last
        loader, counted = self.loader, self.loader.counted
        for batch in loader:
            self.at_edge = False
            index = progress.batch
            metrics.samples = loader.measure if counted else None
            left = False
            for hook in hooks.on_train_batch_start:
                if hook(batch, index) == -1:
                    left = True
                    break
            if (left or self.votes) and self.leaves(left):
                return True
            outputs = step(batch, index)
            progress.batch = index + 1
            progress.batches += 1
            progress.samples += loader.global_samples or 0
            for hook in hooks.on_train_batch_end:
                hook(outputs, batch, index)
            if progress.step >= self._row_at:
                self.log_row()
            self.validation_due = self.due(last=loader.end_of_dataloader)
            for hook in late:
                hook(outputs, batch, index)
            if self.after_batch(last=loader.end_of_dataloader):
                return loader.end_of_dataloader
        return True

    def leaves(self, wish: bool) -> bool:
        """Tell whether the epoch ends here, as a hook of some rank wishes: all ranks end it together."""
        left = self._world.agree(wish) if self.votes else wish
        if left:
            self.step.abandon()
            self.at_edge = True
        return left

    def after_batch(self, *, last: bool) -> bool:
        """Do what is due between two batches; return whether training has to stop here."""
        if self.at_edge:
            self.edge, self.edge_step = self._counters(), self.progress.step
        if self.validation_due and not last:
            self.validate()
        if not self.at_edge:
            return False
        if self.saves.pending:
            self.saves.poll()
        if self.requests:
            self.write_requested()
        return self.finished()

    def end_epoch(self, complete: bool) -> None:
        """Do what follows the last batch; an epoch that was left early keeps what it has collected so far."""
        progress, hooks, metrics = self.progress, self.hooks, self.metrics
        if progress.step > self._logged_at:
            self.log_row()
        if complete and progress.phase in ("train", "full"):
            self.session.step_schedulers("epoch", progress.epoch + 1)
            progress.phase = "scheduled"
        if complete and self.due(last=True) and progress.validated != progress.batches:
            self.validate()
        metrics.begin("train", batchwise=False)
        for hook in hooks.on_train_epoch_end:
            hook()
        self.publish(metrics.reduce_epoch("train", progress.step, clear=complete))
        progress.phase = "ended" if complete else "left"
        if complete:
            self.session.step_schedulers("epoch", progress.epoch + 1, plateau=True)
        for hook in hooks.late["on_train_epoch_end"]:
            hook()
        self.write_requested()

    def validate(self) -> None:
        """Evaluate on the validation loaders in the middle of training; leaves no trace in it."""
        progress = self.progress
        before = progress.validated, progress.validations, progress.mark
        progress.validated, progress.validations = progress.batches, progress.validations + 1
        progress.mark = self._schedule.intervals(progress)
        self.validation_due = False
        if self.at_edge:
            self.hooks.fire("on_validation_model_zero_grad")

        def undo() -> None:  # the run that goes on begins this validation anew
            progress.validated, progress.validations, progress.mark = before

        evaluate(self.session, "validate", undo=undo)
        self.metrics.begin("train", batchwise=True)

    def finished(self) -> bool:
        """Tell whether a limit is reached, or a wish to stop can be granted; all ranks agree.

        They have to, as their clocks and wishes differ.
        """
        trainer = self.trainer
        finished = trainer.interrupted or self._schedule.finished(self.progress, wish=trainer.should_stop)
        if not self._alone:
            finished = self._world.agree(finished)
        if finished and not self.stopping:
            self.stopping = True
            self.hooks.fire("on_stop")
        return finished

    def due(self, *, last: bool) -> bool:
        """Tell whether a validation follows the batch just done; all ranks agree where a clock decides."""
        due = self._schedule.validation_due(self.progress, last=last)
        return self._world.agree(due) if self._schedule.by_clock and not self._alone else due

    def log_row(self) -> None:
        """Reduce and hand out the values of the last step."""
        self._logged_at = self.progress.step
        self._set_next_row()
        self._flush()
        self.publish(self.metrics.reduce_step("train", self.progress.step))

    def publish(self, row: dict[str, float]) -> None:
        """Hand a row of reduced values, and what callbacks added to it, to everybody who listens."""
        row |= self.metrics.take_pending()
        if row:
            self.metrics.logged.update(row)
            self.hooks.fire("on_log", row, self.progress.step)

    def write_requested(self) -> None:
        """Write the checkpoints that were asked for while a window was open."""
        while self.requests:
            self.requests.pop(0)()

    def between_steps(self, error: BaseException) -> bool:
        """Tell whether weights and optimizers are those of a step, after an error: not where it came within one."""
        codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
        return self.at_edge or (self.edge_step == self.progress.step and not codes & STEPPING)

    def _counters(self) -> tuple[int, int, int, int]:
        progress = self.progress
        return progress.batch, progress.batches, progress.samples, self.loader.position

    def _start_epoch(self) -> bool:
        """Begin or resume an epoch; return True when it turns out to have no batch left."""
        progress = self.progress
        if progress.batch == 0:
            self.loader = self.session.loader_of_epoch(progress.epoch)
            self.loader.set_epoch(progress.epoch)
            self.metrics.begin("train", batchwise=False)
            self.hooks.fire("on_train_epoch_start")
        known = progress.batch >= self.trainer.num_training_batches
        last = known or progress.phase in ("full", "scheduled")
        progress.phase = "train" if progress.phase == "left" else progress.phase
        due = progress.batch > 0 and self.due(last=last)
        if due and not last and progress.validated != progress.batches:
            self.validate()
        self.metrics.begin("train", batchwise=True)
        if known and progress.batch:
            self.loader.set_epoch(progress.epoch + 1)  # as an iteration leaves it that comes to its end
        return known  # of an iterable only the loader knows, and its data set has to come to its end

    def _unfinished_epoch(self) -> bool:
        """Tell whether an interruption came after the last batch to train, and before what follows it."""
        return self.progress.batch > 0 and self.progress.phase not in ("ended", "left")

    def _next_epoch(self) -> None:
        self.progress.epoch += 1
        self.progress.batch = 0
        self.progress.phase = "train"

    def _set_next_row(self) -> None:
        every = self.trainer.log_every_n_steps
        self._row_at = (self.progress.step // every + 1) * every if every else float("inf")


def may_leave(session: Session) -> bool:
    """Tell whether a hook of the user's own is asked before each batch, which may answer that the epoch ends there."""
    name = "on_train_batch_start"
    theirs = [c for c in session.callbacks if name in vars(c) or not type(c).__module__.startswith(_OWN)]
    return overrides(session.module, name, TrainModule) or any(overrides(c, name, Callback) for c in theirs)
