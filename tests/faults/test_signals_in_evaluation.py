"""A signal that comes while a run evaluates: acted on between two batches; the run that goes on validates anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

from drivetrain import Callback, Interrupted, ModelCheckpoint, Preemption
from drivetrain.tests import distributed
from drivetrain.tests.faults.toy import STEPS, Falling, loader, step_of, trainer, weight_in

BATCHES = 8  # of a validation


class Validated(Falling):
    """Means of a validation, one of them by torchmetrics; ``act(module, batch_idx)`` happens in its steps too."""

    def __init__(self, act=lambda module, index: None) -> None:
        super().__init__()
        self.error = torchmetrics.MeanMetric()
        self.in_validation, self.validated = act, []

    def validation_step(self, batch, batch_idx):
        self.validated.append(int(batch[0]))
        self.in_validation(self, batch_idx)
        self.error.update(batch + torch.rand(()))
        self.log("val", batch.mean() * self.weight + torch.rand(()))
        self.log("error", self.error)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.validated.append(int(batch[0]))
        self.in_validation(self, batch_idx)
        return batch


def sending(name: str, at: int, *, when=lambda trainer: True):
    """Return an action that sends this process a signal in batch ``at`` of an evaluation."""

    def act(module, index):
        if index == at and when(module.trainer):
            os.kill(os.getpid(), getattr(signal, name))

    return act


def data(ranks: int = 1) -> DataLoader:
    return DataLoader(torch.arange(float(BATCHES * ranks)), batch_size=1)


class Rows(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list = []

    def on_log(self, trainer, module, metrics, step):
        self.rows.append((step, metrics))


@pytest.mark.parametrize("saves", [{}, {"every_n_train_steps": 2}, {"monitor": "val", "save_top_k": 2}], ids=str)
@pytest.mark.parametrize("interval, at", [(4, 4), (4, 8), (None, STEPS), (None, 2 * STEPS)])
def test_the_validation_is_left_and_done_again(interval, at, saves, tmp_path):
    def run(place: Path, module, resume=None):
        rows, keep = Rows(), ModelCheckpoint(**saves)
        runner = trainer(place, callbacks=[rows, keep], val_check_interval=interval, max_epochs=2, seed=3)
        error = None
        try:
            runner.fit(module, loader(), data(), resume=resume)
        except Interrupted as interrupted:
            error = interrupted
        kept = sorted(path.name for path in place.glob("runs/*/checkpoints/*"))
        return rows.rows, dict(runner.callback_metrics), kept, error

    whole = run(tmp_path / "whole", Validated())
    module = Validated(sending("SIGTERM", 3, when=lambda runner: runner.global_step == at))
    first = run(tmp_path / "parts", module)
    assert first[3].code == 143 and module.validated[-1] == 3 and step_of(first[3].checkpoint) == at
    again = Validated()
    rest = run(tmp_path / "parts", again, resume="last")
    assert again.validated[:BATCHES] == list(range(BATCHES))
    assert first[0] + rest[0] == whole[0] and rest[1:3] == whole[1:3] and rest[3] is None


def test_within_a_window_of_accumulation_it_is_finished(tmp_path):
    module = Validated(sending("SIGTERM", 3))
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, val_check_interval=6, accumulate_grad_batches=4).fit(module, loader(), data())
    assert module.validated == list(range(BATCHES)) and step_of(caught.value.checkpoint) == 2


def test_in_the_sanity_check_there_is_nothing_to_save(tmp_path):
    module = Validated(sending("SIGTERM", 0))
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, num_sanity_val_steps=4).fit(module, loader(), data())
    assert module.validated == [0] and module.seen == [] and caught.value.checkpoint == ""
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


@pytest.mark.parametrize("at, seen", [(3, 4), (BATCHES - 1, BATCHES)])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_evaluations_of_their_own_end_by_the_code(name, code, stage, at, seen, tmp_path):
    module, before = Validated(sending(name, at)), signal.getsignal(getattr(signal, name))
    runner = trainer(tmp_path)
    with pytest.raises(Interrupted) as caught:
        getattr(runner, stage)(module, data())
    assert (caught.value.code, caught.value.checkpoint) == (code, "") and len(module.validated) == seen
    assert signal.getsignal(getattr(signal, name)) is before and not list(tmp_path.glob("runs/*/checkpoints/*"))
    module.in_validation = lambda module, index: None
    getattr(runner, stage)(module, data())  # the same trainer goes on
    assert len(module.validated) == seen + BATCHES


@pytest.mark.parametrize("stage", ["fit", "test"])
@pytest.mark.parametrize("signalled", [0, 1])
def test_S2_ranks_leave_together_though_one_is_signalled(signalled, stage, tmp_path):
    """The other hears of it while its own batches go on; it has more of them, and reaches no collective alone."""

    def work(rank):
        def act(module, index):
            if rank == signalled and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while rank != signalled and index == 2 and not runner.interrupted:  # until it has heard
                Preemption._listen(policy, runner)

        policy, module = Preemption(), Validated(act)
        runner = trainer(tmp_path, callbacks=[policy])
        loaders = (loader(ranks=2), data(ranks=2)) if stage == "fit" else (data(ranks=2),)
        with pytest.raises(Interrupted) as caught:
            getattr(runner, stage)(module, *loaders)
        assert len(module.validated) == (2 if rank == signalled else 3)
        return caught.value.code, caught.value.checkpoint

    (code, path), (code_1, path_1) = distributed.run(work, 2, group=False)
    assert code == code_1 == 143 and path == path_1
    assert path == "" if stage == "test" else (step_of(path), weight_in(path)) == (STEPS, -STEPS)
