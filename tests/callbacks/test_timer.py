"""Timer: the time of each stage, and the end of the training."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from drivetrain import LambdaCallback, ModelCheckpoint, Timer
from drivetrain.tests import distributed
from drivetrain.tests.callbacks.toy import Line, loader, quiet

NO_TIME = 1e-9


def fitted(timer, *, batches=4, others=(), ckpt_path=None, **options):
    trainer = quiet(**{"callbacks": [timer, *others], "max_epochs": 3, **options})
    trainer.fit(Line(), loader(batches), loader(1), ckpt_path=ckpt_path)
    return trainer


def test_no_duration_never_stops():
    assert fitted(Timer()).global_step == 12


def test_stops_after_a_step_or_after_an_epoch():
    late = LambdaCallback(on_train_start=lambda trainer, module: setattr(timer, "duration", NO_TIME))
    late.priority = 200
    timer = Timer(60)
    trainer = fitted(timer, others=[late])
    assert trainer.global_step == 1
    assert trainer.stop_reason == "the time of 1e-09 s is over"
    timer = Timer(60, interval="epoch")
    assert fitted(timer, others=[late]).global_step == 4


def test_time_that_is_over_before_the_first_step():
    assert fitted(Timer(NO_TIME), min_epochs=None).global_step <= 1


def test_the_argument_is_the_callback():
    trainer = quiet(max_time="00:00:01:30")
    (made,) = [c for c in trainer.callbacks if isinstance(c, Timer)]
    assert made.duration == 90


def test_times():
    timer = Timer(3600)
    assert (timer.start_time(), timer.end_time(), timer.time_elapsed()) == (None, None, 0.0)
    trainer = fitted(timer)
    assert timer.start_time("train") < timer.start_time("validate") < timer.end_time("validate") < timer.end_time("train")
    elapsed = timer.time_elapsed("train")
    assert 0 < timer.time_elapsed("validate") < elapsed == timer.time_elapsed("train")
    assert timer.time_remaining() == 3600 - elapsed
    assert timer.time_elapsed("test") == 0.0
    trainer.test(dataloaders=loader(1), verbose=False)
    assert timer.time_elapsed("test") > 0


def test_time_before_an_interruption_counts(tmp_path):
    wait = LambdaCallback(on_train_start=lambda trainer, module: time.sleep(0.3))
    fitted(Timer(), others=[wait, ModelCheckpoint(tmp_path)], max_epochs=1)
    second = Timer()
    seen = []
    begin = LambdaCallback(on_train_start=lambda trainer, module: seen.append(second.time_elapsed()))
    begin.priority = 300
    fitted(second, others=[begin], ckpt_path=str(tmp_path / "checkpoint-000004"))
    assert seen[0] >= 0.3


def test_ranks_stop_together():
    def run(rank):
        timer = Timer(timedelta(seconds=0.3 if rank == 0 else 1000))
        trainer = quiet(callbacks=[timer], max_epochs=-1, devices=2, strategy="ddp")
        trainer.fit(Line(lr=0.1), loader(8))
        return trainer.global_step

    first, second = distributed.run(run, 2)
    assert first == second > 0


@pytest.mark.parametrize("duration", [0, -5, "10ep", "soon"])
def test_bad_duration(duration):
    with pytest.raises(ValueError, match="Received: duration="):
        Timer(duration)


def test_bad_interval_and_stage():
    with pytest.raises(ValueError, match="Received: interval='batch'"):
        Timer(5, interval="batch")
    with pytest.raises(ValueError, match="Received: stage='fit'"):
        Timer(5).time_elapsed("fit")
