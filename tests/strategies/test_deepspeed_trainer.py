"""Modules trained by the Trainer on two ranks of DeepSpeed: the same numbers as on one process of torch."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import DeepSpeedStrategy, ModelCheckpoint, Trainer, TrainModule
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.strategies import deepspeed_runs as runs

pytestmark = pytest.mark.timeout(600)  # seconds on a machine of its own, minutes on a loaded one
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
QUIET = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


class Classifier(TrainModule):
    """`lazy`: made in configure_model, where ZeRO-3 partitions weights at once; `parts`: it has no forward."""

    def __init__(self, manual=False, weighted=False, lazy=False, parts=False):
        super().__init__()
        self.automatic_optimization = not manual
        self.weighted, self.parts = weighted, parts
        self.net = None if lazy else runs.mlp()

    def configure_model(self):
        self.net = self.net or runs.mlp()

    def forward(self, x):
        return self.net(x)

    def compute(self, batch):
        x, y = batch
        return F.cross_entropy(self.net[2](self.net[1](self.net[0](x))) if self.parts else self(x), y)

    def training_step(self, batch, index):
        loss = self.compute(batch)
        if self.automatic_optimization:
            return {"loss": loss, "weight": len(batch[1])} if self.weighted else loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch, index):
        self.log("val_loss", self.compute(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


CASES = {
    "plain": ({}, {}),
    "made in configure_model": (dict(lazy=True), {}),
    "without a forward": (dict(parts=True), {}),
    "clipped": ({}, dict(gradient_clip_val=0.3)),
    "accumulated, the last window short": ({}, dict(accumulate_grad_batches=5)),
    "accumulated by weights": (dict(weighted=True), dict(accumulate_grad_batches=5)),
    "by hand": (dict(manual=True), {}),
}


def fit(strategy, batch, module, arguments, count=90, **more):
    """90 samples for training and 37 for validation: the ranks' last batches are short, or missing."""
    GradientState._reset_state()
    PartialState._reset_state()
    arguments = {"max_epochs": 1, "enable_checkpointing": False, **QUIET, **arguments, **more}
    trainer = Trainer(strategy=strategy, accelerator="cpu", **arguments)
    trainer.fit(
        Classifier(**module), DataLoader(runs.data(count), batch_size=batch), DataLoader(runs.data(37), batch_size=5)
    )
    weights = runs.vector(trainer.accelerator.get_state_dict(trainer.model))
    return weights, trainer.callback_metrics.get("val_loss"), trainer.global_step


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    os.chdir(tmp_path_factory.mktemp("expected"))
    (found,) = run(lambda rank: {n: fit("single", 8, *case) for n, case in CASES.items()}, 1, group=False)
    return found


@STAGES
def test_trainer_computes_what_one_process_does_and_evaluates_each_sample_once(stage, expected):
    def work(rank):
        return {name: fit(DeepSpeedStrategy(zero_stage=stage), 4, *case) for name, case in CASES.items()}

    for found in run(work, 2, timeout=200):
        for name, (weights, loss, steps) in expected.items():
            assert runs.far(found[name][0], weights) <= 1e-5, name
            assert found[name][1] == pytest.approx(loss, rel=1e-5), name
            assert found[name][2] == steps, name


class Killed(Classifier):
    """Kills its process, on every rank, in the batch of this number."""

    def __init__(self, batch=None):
        super().__init__()
        self.batch = batch

    def training_step(self, batch, index):
        if self.trainer.progress.batches == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def long_run(folder, stage, **arguments):
    """Two epochs of 12 batches in windows of 2, with a checkpoint every second step; returns weights and losses."""
    GradientState._reset_state()
    PartialState._reset_state()
    batch = arguments.pop("batch", None)
    trainer = Trainer(
        strategy=DeepSpeedStrategy(zero_stage=stage), accelerator="cpu", max_epochs=2, default_root_dir=folder, seed=1,
        callbacks=[ModelCheckpoint(every_n_train_steps=2)], accumulate_grad_batches=2, gradient_clip_val=0.5, **QUIET,
    )  # fmt: skip
    loader = DataLoader(runs.data(90), batch_size=4, shuffle=True)
    trainer.fit(Killed(batch), loader, DataLoader(runs.data(37), batch_size=5), **arguments)
    return runs.vector(trainer.accelerator.get_state_dict(trainer.model)), trainer.callback_metrics["val_loss"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_run_goes_on_bit_for_bit(stage, tmp_path):
    whole = run(lambda rank: long_run(tmp_path / "whole", stage), 2, timeout=200)
    with pytest.raises(RankFailed, match="killed by SIGKILL"):
        run(lambda rank: long_run(tmp_path / "killed", stage, batch=17), 2, timeout=200)
    resumed = run(lambda rank: long_run(tmp_path / "killed", stage, ckpt_path="last"), 2, timeout=200)
    for (weights, loss), (again, its_loss) in zip(whole, resumed):
        assert torch.equal(weights, again) and loss == its_loss


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_dies_ends_the_other_in_time(stage, tmp_path):
    def work(rank):
        return long_run(tmp_path, stage, batch=5 if rank else None)

    with pytest.raises(RankFailed, match="Rank 1 of 2 was killed by SIGKILL") as error:
        run(work, 2, timeout=200, patience=120)
    assert "Then rank 0 raised" in str(error.value)


def test_module_is_evaluated_without_training_it(tmp_path):
    """ZeRO-3 needs an engine for that too; the ranks have 4 and 4 batches of 5, the last one short or empty."""

    def work(rank):
        found = []
        for stage in (2, 3):
            GradientState._reset_state()
            PartialState._reset_state()
            trainer = Trainer(strategy=DeepSpeedStrategy(zero_stage=stage), accelerator="cpu", **QUIET)
            (row,) = trainer.validate(Classifier(), DataLoader(runs.data(37), batch_size=5))
            found.append(row["val_loss"])
        return found

    x, y = runs.data(37).tensors
    expected = float(F.cross_entropy(runs.mlp()(x), y).detach())
    for found in run(work, 2, timeout=200):
        assert found == pytest.approx([expected] * 2, rel=1e-5)


def test_one_module_is_fitted_evaluated_and_fitted_again():
    """Engines are taken off a module before it is prepared anew: two fits of one epoch, as on one process."""

    def work(rank, strategies, batch):
        found = []
        for strategy in strategies:
            GradientState._reset_state()
            PartialState._reset_state()
            trainer = Trainer(strategy=strategy(), accelerator="cpu", max_epochs=1, enable_checkpointing=False, **QUIET)
            module, loader = Classifier(), DataLoader(runs.data(32), batch_size=batch)
            trainer.fit(module, loader)
            (row,) = trainer.validate(module, DataLoader(runs.data(37), batch_size=5))
            trainer.fit(module, loader)
            found.append((row["val_loss"], runs.vector(trainer.accelerator.get_state_dict(trainer.model))))
        return found

    (((loss, weights),),) = run(work, 1, [lambda: "single"], 8, group=False)
    stages = [lambda stage=stage: DeepSpeedStrategy(zero_stage=stage) for stage in range(4)]
    for rank in run(work, 2, stages, 4, timeout=200):
        for its_loss, its_weights in rank:
            assert its_loss == pytest.approx(loss, rel=1e-5) and runs.far(its_weights, weights) <= 1e-5


def test_batches_of_another_size_than_the_configuration_says_are_refused():
    """The loader is known to the engine when it trains on it."""

    def work(rank):
        with pytest.raises(ValueError, match="8 in the configuration, 4 in the loader's batch_size"):
            fit(DeepSpeedStrategy({"train_micro_batch_size_per_gpu": 8}), 4, {}, {})
        with pytest.raises(ValueError, match="gradient_accumulation_steps: 2 in the configuration, 4 in the script"):
            fit(DeepSpeedStrategy({"gradient_accumulation_steps": 2}), 4, {}, dict(accumulate_grad_batches=4))
        return fit(DeepSpeedStrategy({"gradient_accumulation_steps": 5}), 8, {}, {})

    ((_, _, steps),) = run(work, 1)
    assert steps == 3
