"""EarlyStopping in real runs."""

from __future__ import annotations

import math

import pytest

from drivetrain import EarlyStopping, ModelCheckpoint
from drivetrain.tests import distributed
from drivetrain.tests.callbacks.toy import Line, loader, quiet


def fitted(callback, values, *, model=None, others=(), ckpt_path=None, **options):
    trainer = quiet(**{"callbacks": [callback, *others], "max_epochs": len(values), **options})
    trainer.fit(model or Line(values), loader(4), loader(1), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("arguments", "values", "epochs"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 1], 4),  # 2 checks without improvement after epoch 2
        ({"patience": 2}, [5, 4, 3, 2, 1], 5),
        ({"patience": 1}, [1, 2, 3], 2),
        ({"patience": 0}, [1, 2, 3], 2),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 1, 5], 4),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.6, 1], 2),  # better by 0.4 only
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 2.3, 1], 3),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1, 1.4, 3], 2),
        ({"patience": 9}, [1, math.nan, 1], 2),
        ({"patience": 9}, [1, math.inf, 1], 2),
        ({"patience": 9, "check_finite": False}, [1, math.nan, 1], 3),
        ({"patience": 9, "stopping_threshold": 0.5}, [1, 0.4, 0.3], 2),
        ({"patience": 9, "stopping_threshold": 0.9, "mode": "max"}, [0.5, 0.95, 1], 2),
        ({"patience": 9, "divergence_threshold": 10}, [1, 11, 1], 2),
        ({"patience": 9, "divergence_threshold": 0.1, "mode": "max"}, [0.5, 0.05, 1], 2),
        ({"patience": 1, "check_on_train_epoch_end": True}, [1, 2, 3], 2),
        ({"patience": 1, "check_on_train_epoch_end": False}, [1, 2, 3], 2),
    ],
)
def test_epochs_until_it_stops(arguments, values, epochs):
    callback = EarlyStopping("val_loss", **arguments)
    trainer = fitted(callback, values)
    assert trainer.global_step == 4 * epochs
    assert (callback.stopped_epoch >= 0) == (epochs < len(values))


def test_says_why_and_where():
    callback = EarlyStopping("val_loss", patience=1)
    trainer = fitted(callback, [2, 3, 1])
    assert trainer.stop_reason == "val_loss did not improve in 1 checks (best: 2)"
    assert (callback.stopped_epoch, callback.wait_count, callback.best_score) == (1, 1, 2)


def test_each_validation_is_one_check():
    callback = EarlyStopping("val_loss", patience=3)
    trainer = fitted(callback, [1, 2, 3, 4, 0], val_check_interval=1, max_epochs=3)
    assert trainer.global_step == 4


def test_an_epoch_without_validation_is_no_check():
    callback = EarlyStopping("val_loss", patience=2)
    trainer = fitted(callback, [1, 2, 3], check_val_every_n_epoch=2, max_epochs=8)
    assert trainer.global_step == 4 * 6


def test_mean_of_the_training_epoch():
    class Rising(Line):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(self.current_epoch), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = fitted(EarlyStopping("mean", patience=2), [0] * 9, model=Rising([0] * 9))
    assert trainer.global_step == 4 * 3


def test_min_epochs_are_trained_anyway():
    trainer = fitted(EarlyStopping("val_loss", patience=1), [1, 2, 3, 4, 5], min_epochs=4)
    assert trainer.global_step == 4 * 4


def test_sanity_check_is_no_check():
    callback = EarlyStopping("val_loss", patience=1)
    fitted(callback, [3, 2, 1], num_sanity_val_steps=1)
    assert callback.best_score == 1


def test_monitor_that_is_not_logged():
    with pytest.raises(ValueError) as caught:
        fitted(EarlyStopping("val_los"), [1])
    assert "Received: EarlyStopping(monitor='val_los')" in str(caught.value)
    assert "Did you mean 'val_loss'?" in str(caught.value)


def test_monitor_that_is_not_logged_may_be_a_warning():
    with pytest.warns(UserWarning, match="monitor='other'"):
        trainer = fitted(EarlyStopping("other", strict=False), [1, 1])
    assert trainer.global_step == 8


def test_goes_on_after_an_interruption(tmp_path):
    """Values 3 1 2 | 2 2: the third check without improvement is the second after the interruption."""
    first = EarlyStopping("val_loss", patience=3)
    fitted(first, [3, 1, 2], others=[ModelCheckpoint(tmp_path, save_last=True)])
    assert (first.wait_count, first.best_score) == (1, 1)
    second = EarlyStopping("val_loss", patience=3)
    trainer = fitted(second, [2, 2, 2, 2], max_epochs=9, ckpt_path=str(tmp_path / "last"))
    assert trainer.global_step == 4 * 5
    assert (second.wait_count, second.best_score) == (3, 1)


def test_a_second_fit_begins_anew():
    callback = EarlyStopping("val_loss", patience=1)
    trainer = quiet(callbacks=[callback], max_epochs=3)
    for values, epochs in (([1, 2, 3], 2), ([3, 2, 1], 3)):
        trainer.fit(Line(values), loader(4), loader(1))
        assert trainer.global_step == 4 * epochs


def test_verbose(capfd):
    fitted(EarlyStopping("val_loss", patience=1, verbose=True), [1, 2])
    assert "did not improve in 1 checks" in capfd.readouterr().out


def test_D5_ranks_stop_together():
    class Ranks(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val_rank", float(self.global_rank) + self.current_epoch)

    def run(rank):
        callback = EarlyStopping("val_rank", patience=2)
        trainer = quiet(callbacks=[callback], max_epochs=9, devices=2, strategy="ddp")
        trainer.fit(Ranks(lr=0.1), loader(8), loader(2))
        return trainer.current_epoch, callback.best_score

    assert distributed.run(run, 2) == [(3, 0.5)] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": -1}, {"patience": 1.5}, {"mode": "auto"}, {"min_delta": "0.1"}, {"min_delta": math.nan},
        {"stopping_threshold": "low"}, {"divergence_threshold": True},
    ],
)  # fmt: skip
def test_bad_arguments(arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
        EarlyStopping("x", **arguments)


def test_monitor_has_to_be_a_name():
    with pytest.raises(TypeError, match="Received: EarlyStopping"):
        EarlyStopping("")
