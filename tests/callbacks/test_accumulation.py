"""GradientAccumulation: a number, or a schedule by epoch."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Callback, GradientAccumulation, ModelCheckpoint
from drivetrain.callbacks.accumulation import GradientAccumulationScheduler
from drivetrain.tests.callbacks.toy import Line, loader, quiet


@pytest.mark.parametrize(
    ("scheduling", "steps"),
    [(4, [4, 4, 4, 4]), ({0: 1, 2: 3}, [1, 1, 3, 3]), ({1: 2}, [1, 2, 2, 2]), ({3: 5, 0: 2}, [2, 2, 2, 5])],
)
def test_steps_of_each_epoch(scheduling, steps):
    callback = GradientAccumulation(scheduling)
    assert [callback.steps(epoch) for epoch in range(4)] == steps


class Steps(Callback):
    """The number of optimizer steps at the end of each epoch."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, module):
        self.seen.append(trainer.global_step)


def test_schedule_in_a_run():
    steps = Steps()
    trainer = quiet(callbacks=[GradientAccumulation({0: 1, 1: 2, 2: 5}), steps], max_epochs=3)
    trainer.fit(Line(), loader(6))
    assert steps.seen == [6, 9, 11]  # 6, then 3, then a window of 5 and one of 1


def test_schedule_goes_on_in_the_middle_of_an_epoch(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=8)
    quiet(callbacks=[GradientAccumulation({1: 2}), checkpoint], max_epochs=2, limit_train_batches=6).fit(Line(), loader(6))
    steps = Steps()
    trainer = quiet(callbacks=[GradientAccumulation({1: 2}), steps], max_epochs=2)
    trainer.fit(Line(), loader(6), ckpt_path=checkpoint.best_model_path)
    assert steps.seen == [9]


def test_G1_a_short_last_window_is_a_mean_over_what_it_holds():
    """5 batches, accumulate 4, gradient 1, lr 1: -1, then -2."""

    class Slope(Line):
        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum()

    model = Slope(lr=1.0)
    torch.nn.init.zeros_(model.layer.weight)
    quiet(callbacks=[GradientAccumulation(4)]).fit(model, loader(5))
    assert model.layer.weight.item() == -2.0


def test_the_argument_is_the_callback():
    trainer = quiet(accumulate_grad_batches=3)
    (made,) = [c for c in trainer.callbacks if isinstance(c, GradientAccumulation)]
    assert made.scheduling == {0: 3}
    with pytest.raises(ValueError, match="accumulate_grad_batches=3.*\\{0: 2\\}"):
        quiet(accumulate_grad_batches=3, callbacks=[GradientAccumulation(2)])


def test_manual_optimization_accumulates_by_itself():
    model = Line()
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="no gradient accumulation with manual optimization"):
        quiet(callbacks=[GradientAccumulation(2)]).fit(model, loader(2))


@pytest.mark.parametrize("scheduling", [0, -1, 1.5, {}, {0: 0}, {-1: 2}, {0: 2.0}, {"0": 2}])
def test_bad_numbers(scheduling):
    with pytest.raises(ValueError, match="Received: scheduling="):
        GradientAccumulation(scheduling)


@pytest.mark.parametrize("scheduling", [None, "4", [1, 2]])
def test_bad_types(scheduling):
    with pytest.raises(TypeError, match="Received: scheduling="):
        GradientAccumulation(scheduling)


def test_lightnings_name():
    assert GradientAccumulationScheduler(scheduling={0: 1, 4: 2}).steps(5) == 2
