"""Validation, test and prediction: each sample once, without a trace in training."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from torch import nn

from ..strategies.random import preserved
from .extra_passes import forgotten, in_step
from .hooks import overrides
from .module import TrainModule

if TYPE_CHECKING:
    from .session import Session

_EVENT = {"validate": "validation", "sanity_check": "validation", "test": "test", "predict": "predict"}


class Abandoned(RuntimeError):
    """An evaluation was left before its end, by all ranks."""


def evaluate(session: Session, stage: str, *, undo: Callable[[], None] = lambda: None) -> list[dict[str, float]]:
    """Run a stage over its loaders and return one row of metrics per loader ("predict": an empty list).

    ``stage`` is "validate", "sanity_check", "test" or "predict". Modes of all submodules, random states and
    gradients are afterwards as they were before. Outputs of "predict" are collected in ``session.predictions``.

    When a signal came (``trainer.interrupted``) it is left between two batches, unless an accumulation window is open,
    and ``on_stop`` ends the run. After that, as after an error, metrics are as if it had not begun, and ``undo`` is
    called.
    """
    trainer, metrics = session.trainer, session.metrics
    outer, states = trainer.stage, metrics.metric_states()
    trainer.stage = stage
    try:
        return _evaluated(session, stage)
    except BaseException as error:
        metrics.forget(stage, states)
        trainer.stage = outer
        undo()
        if isinstance(error, Abandoned):
            session.abandoned = True
            session.hooks.fire("on_stop")
        raise
    finally:
        trainer.stage = outer


def _evaluated(session: Session, stage: str) -> list[dict[str, float]]:
    trainer, hooks, metrics, event = session.trainer, session.hooks, session.metrics, _EVENT[stage]
    with (
        preserved(trainer.device),
        evaluation_mode(session, event),
        torch.inference_mode(trainer.inference_mode and trainer.strategy.inference_mode),
        torch.no_grad(),
    ):
        trainer.accelerator.strategy.before_evaluation(session.model)
        metrics.begin(stage, batchwise=False)
        metrics.without_batch = False
        hooks.fire(f"on_{event}_start")
        hooks.fire(f"on_{event}_epoch_start")
        complete = all(
            run_loader(session, stage, event, loader, index) for index, loader in enumerate(session.loaders[stage])
        )
        if not trainer.accelerator.world.agree(complete, how="all"):
            raise Abandoned(f"Expected somebody to end the run after a signal in stage {stage!r}. Received: nobody.")
        metrics.begin(stage, batchwise=False)
        hooks.fire(f"on_{event}_epoch_end")
        rows = _reduced(session, stage)
        metrics.close()
        hooks.fire(f"on_{event}_end")
    return rows


def run_loader(session: Session, stage: str, event: str, loader: Any, loader_index: int) -> bool:
    """Run the step of a stage on every batch of one loader; return False where a signal has ended that early."""
    several = len(session.loaders[stage]) > 1
    hooks, metrics, accelerator = session.hooks, session.metrics, session.trainer.accelerator
    on_start, on_end = (getattr(hooks, f"on_{event}_batch_{when}") for when in ("start", "end"))
    step = session.entry(f"{event}_step")
    rest = (loader_index,) if several else ()
    metrics.begin(stage, batchwise=True, loader_index=loader_index if several else None)
    keep = session.predictions[loader_index].append if stage == "predict" else None
    leaves = _leaving(session, loader)
    if session.stage == "fit":  # not the loader's own count, which an interruption would set back
        loader.set_epoch(session.trainer.progress.validations)
    index, equal = -1, accelerator.strategy.equal_forwards
    for batch, real in in_step(loader, accelerator.world, equal=equal):
        if real:
            index += 1
            metrics.samples = loader.measure if loader.counted else None
            for hook in on_start:
                hook(batch, index, loader_index)
            with accelerator.autocast():
                outputs = step(batch, index, *rest)
            for hook in on_end:
                hook(outputs, batch, index, loader_index)
            if keep is not None and session.trainer.return_predictions:
                keep(outputs)
        else:
            drop(session, step, batch, max(index, 0), *rest)
        if leaves() and (equal or not loader.end_of_dataloader):
            return False
    metrics.without_batch |= index < 0
    return True


def drop(session: Session, step: Callable[..., Any], *arguments: Any) -> None:
    """Pass a batch once more, for the ranks that have more of them, and leave no trace of it."""
    with forgotten(session.module), session.trainer.accelerator.autocast():
        step(*arguments)


def _leaving(session: Session, loader: Any) -> Callable[[], bool]:
    """Return what tells between two batches whether to leave.

    Ranks of an engine that needs equal numbers of forward passes (``equal_forwards``) agree on the batch; others leave
    one by one, as they hear of it, and meet after the last loader.
    """
    trainer, loop = session.trainer, session.loop
    if loop is not None and not loop.at_edge:
        return lambda: False
    if trainer.accelerator.strategy.equal_forwards and trainer.world_size > 1:
        return lambda: trainer.accelerator.world.agree(trainer.interrupted)
    return lambda: trainer.interrupted


@contextmanager
def evaluation_mode(session: Session, event: str) -> Iterator[None]:
    """Put the module into evaluation mode, and every submodule back into the mode that it had."""
    module, hooks = session.module, session.hooks
    modes = [(m, m.training) for m in module.modules()]
    if overrides(module, f"on_{event}_model_eval", TrainModule):
        hooks.fire(f"on_{event}_model_eval")
    else:
        module.eval()
    try:
        yield
    finally:
        restore_modes(modes)
        hooks.fire(f"on_{event}_model_train")


def restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Set ``training`` of each module as recorded."""
    for module, training in modes:
        if module.training != training:
            module.training = training


def _reduced(session: Session, stage: str) -> list[dict[str, float]]:
    metrics, step = session.metrics, session.trainer.global_step
    if stage == "predict":
        return []
    published = stage != "sanity_check"
    row = metrics.reduce_epoch(stage, step, publish=published)
    if published:
        row |= metrics.take_pending()
        if row:
            session.hooks.fire("on_log", row, step)
    metrics.tables.pop("sanity_check", None)
    return split_by_loader(row, len(session.loaders[stage]))


def split_by_loader(row: dict[str, float], count: int) -> list[dict[str, float]]:
    """Return one dict per loader: the values under its suffix, and those without any suffix in each."""
    ends = [f"/dataloader_idx_{index}" for index in range(count)]
    shared = {name: value for name, value in row.items() if not any(name.endswith(end) for end in ends)}
    return [shared | {name: value for name, value in row.items() if name.endswith(end)} for end in ends]
