"""ModelCheckpoint in real runs: when it saves, what it keeps, what it says."""

from __future__ import annotations

import math
import os
import resource
import signal
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from drivetrain import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.callbacks import checkpoint
from drivetrain.strategies.checkpoint import Checkpoint, complete
from drivetrain.tests import distributed
from drivetrain.tests.callbacks.toy import Line, loader, quiet


def names(folder) -> list[str]:
    """The visible entries of a folder."""
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))


def fitted(callback, *, values=None, batches=4, validate=True, others=(), ckpt_path=None, **options):
    trainer = quiet(callbacks=[callback, *others], **options)
    model = Line(values)
    trainer.fit(model, loader(batches), loader(1) if validate else None, ckpt_path=ckpt_path)
    return trainer


class Saves(Callback):
    """Counts checkpoints by the step of each."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.steps.append(trainer.global_step)


# When


def test_by_default_the_newest_epoch_is_kept_in_the_runs_folder():
    saves, callback = Saves(), ModelCheckpoint()
    trainer = fitted(callback, others=[saves], max_epochs=3)
    assert saves.steps == [4, 8, 12]
    assert names(Path(trainer.log_dir) / "checkpoints") == ["checkpoint-000012"]
    assert callback.best_model_path == str(Path(trainer.log_dir).absolute() / "checkpoints" / "checkpoint-000012")
    assert complete(callback.best_model_path)
    assert (callback.best_model_score, callback.best_k_models, callback.last_model_path) == (None, {}, "")


def test_every_n_steps_counts_optimizer_steps(tmp_path):
    saves = Saves()
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fitted(callback, others=[saves], batches=12, accumulate_grad_batches=2, max_epochs=1)
    assert saves.steps == [2, 4, 6]
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000004", "checkpoint-000006"]


def test_steps_go_on_over_epochs(tmp_path):
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path, every_n_train_steps=3), others=[saves], batches=4, max_epochs=2)
    assert saves.steps == [3, 6]


def test_steps_and_epochs_together_save_a_step_once(tmp_path):
    saves = Saves()
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, every_n_epochs=1)
    fitted(callback, others=[saves], batches=4, max_epochs=2)
    assert saves.steps == [2, 4, 6, 8]


def test_every_n_epochs(tmp_path):
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path, every_n_epochs=2), others=[saves], max_epochs=5)
    assert saves.steps == [8, 16]


@pytest.mark.parametrize("interval", [1e-9, timedelta(microseconds=1)])
def test_every_interval_of_time(tmp_path, interval):
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path, train_time_interval=interval), others=[saves], batches=3)
    assert saves.steps == [1, 2, 3]


def test_no_time_has_passed(tmp_path):
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path, train_time_interval="2h"), others=[saves], batches=3)
    assert saves.steps == []


def test_a_training_that_is_left_early_is_saved_too(tmp_path):
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path), others=[saves], max_epochs=-1, max_steps=6)
    assert saves.steps == [4, 6]


def test_validations_within_an_epoch_save(tmp_path):
    saves, callback = Saves(), ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1)
    fitted(callback, values=[4, 3, 2, 1], others=[saves], val_check_interval=2, max_epochs=2)
    assert saves.steps == [2, 4, 6, 8]
    assert list(callback.best_k_models.values()) == [4, 3, 2, 1]


@pytest.mark.parametrize(("at_end", "steps"), [(True, [4, 8]), (False, [2, 4, 6, 8])])
def test_save_on_train_epoch_end(tmp_path, at_end, steps):
    saves = Saves()
    callback = ModelCheckpoint(tmp_path, save_on_train_epoch_end=at_end)
    fitted(callback, others=[saves], val_check_interval=2, max_epochs=2)
    assert saves.steps == steps


def test_only_after_validation_without_validation_is_said(tmp_path):
    with pytest.warns(UserWarning, match="save_on_train_epoch_end=False, nothing to validate on"):
        fitted(ModelCheckpoint(tmp_path, save_on_train_epoch_end=False), validate=False)


def test_what_other_callbacks_did_at_the_same_event_is_in_the_checkpoint(tmp_path):
    class Counter(Callback):
        priority, count = 100, 0

        def on_train_epoch_end(self, trainer, module):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

    callback = ModelCheckpoint(tmp_path)
    fitted(callback, others=[Counter()], max_epochs=2)
    loaded = Counter()
    loaded.load_state_dict = lambda state: setattr(loaded, "count", state["count"])
    fitted(ModelCheckpoint(tmp_path), others=[loaded], max_epochs=2, ckpt_path=callback.best_model_path)
    assert loaded.count == 2


# What stays


@pytest.mark.parametrize(
    ("values", "mode", "keep", "kept", "best"),
    [
        ([3, 1, 2], "min", 1, {8: 1}, 1),
        ([3, 1, 2], "min", 2, {8: 1, 12: 2}, 1),
        ([3, 1, 2], "max", 2, {4: 3, 12: 2}, 3),
        ([3, 1, 2], "min", -1, {4: 3, 8: 1, 12: 2}, 1),
        ([3, math.nan, 4], "min", 2, {4: 3, 12: 4}, 3),
    ],
)
def test_the_best_are_kept(tmp_path, values, mode, keep, kept, best):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", mode=mode, save_top_k=keep)
    fitted(callback, values=values, max_epochs=3)
    expected = {str(tmp_path / f"checkpoint-{step:06d}"): value for step, value in kept.items()}
    assert callback.best_k_models == expected
    assert callback.best_model_score == best and callback.best_k_models[callback.best_model_path] == best
    assert names(tmp_path) == sorted(Path(path).name for path in expected)
    assert all(complete(path) for path in expected)


def test_the_worst_is_the_next_to_go(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2)
    fitted(callback, values=[3, 1, 2], max_epochs=3)
    assert callback.kth_best_model_path == str(tmp_path / "checkpoint-000012")
    assert callback.kth_value == 2


def test_not_a_number_is_saved_when_there_is_nothing_better_but_is_never_the_best(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss")
    fitted(callback, values=[math.nan], max_epochs=1)
    assert names(tmp_path) == ["checkpoint-000004"]
    assert (callback.best_model_path, callback.best_model_score) == ("", None)


def test_without_monitor_the_newest_are_kept(tmp_path):
    fitted(ModelCheckpoint(tmp_path, save_top_k=2), max_epochs=3)
    assert names(tmp_path) == ["checkpoint-000008", "checkpoint-000012"]


def test_nothing_is_saved_with_top_0(tmp_path):
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path, save_top_k=0), others=[saves])
    assert saves.steps == []


@pytest.mark.parametrize("word", [True, "link"])
def test_last_is_a_link_to_the_newest(tmp_path, word):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=word)
    fitted(callback, values=[1, 2, 3], max_epochs=3)
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000012", "last"]  # the best, the newest, the link
    assert os.readlink(tmp_path / "last") == "checkpoint-000012"
    assert callback.last_model_path == str(tmp_path / "checkpoint-000012")
    assert Checkpoint.open(tmp_path / "last").manifest["step"] == 12


def test_last_without_top_k(tmp_path):
    fitted(ModelCheckpoint(tmp_path, save_top_k=0, save_last=True), max_epochs=3)
    assert names(tmp_path) == ["checkpoint-000012", "last"]


def test_last_is_the_end_of_the_training(tmp_path):
    fitted(ModelCheckpoint(tmp_path, every_n_train_steps=3, save_last=True), batches=4)
    assert os.readlink(tmp_path / "last") == "checkpoint-000004"


def test_C5_two_runs_into_one_folder_leave_one_last(tmp_path):
    for _ in range(2):
        callback = ModelCheckpoint(tmp_path, save_last=True)
        fitted(callback, max_epochs=2)
    assert names(tmp_path) == ["checkpoint-000008", "checkpoint-000008-v1", "last"]
    assert os.readlink(tmp_path / "last") == "checkpoint-000008-v1"
    assert callback.last_model_path == str(tmp_path / "checkpoint-000008-v1")


def test_something_that_is_called_last_is_not_touched(tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.raises(ValueError, match="Expected a link or nothing at .*last"):
        fitted(ModelCheckpoint(tmp_path, save_last=True))
    assert names(tmp_path) == ["last"]


def test_a_fixed_name_is_replaced_by_what_is_better(tmp_path):
    callback = ModelCheckpoint(tmp_path, "best", monitor="val_loss")
    fitted(callback, values=[3, 1, 2], max_epochs=3)
    assert names(tmp_path) == ["best"]
    assert Checkpoint.open(tmp_path / "best").manifest["step"] == 8


def test_without_version_counter_a_name_is_replaced(tmp_path):
    for _ in range(2):
        fitted(ModelCheckpoint(tmp_path, "model", enable_version_counter=False, save_top_k=-1), max_epochs=2)
    assert names(tmp_path) == ["model"]


def test_what_it_did_not_write_is_left_alone(tmp_path):
    first = ModelCheckpoint(tmp_path, monitor="val_loss")
    fitted(first, values=[5])
    second = ModelCheckpoint(tmp_path, monitor="val_loss")
    fitted(second, values=[4, 3], max_epochs=2)
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000008"]
    assert list(second.best_k_models.values()) == [3]


def test_a_second_fit_is_another_run(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = quiet(callbacks=[callback])
    for value in (1.0, 2.0):
        trainer.fit(Line([value]), loader(4), loader(1))
        assert callback.best_model_score == value
    assert names(tmp_path) == ["checkpoint-000004", "checkpoint-000004-v1"]


def test_a_callback_in_two_trainers_saves_into_each_ones_folder():
    callback = ModelCheckpoint()
    for _ in range(2):
        trainer = fitted(callback)
        assert Path(callback.best_model_path).parent == Path(trainer.log_dir).absolute() / "checkpoints"
    assert trainer.run_id == "run-0002"


def test_weights_only(tmp_path):
    fitted(ModelCheckpoint(tmp_path, save_weights_only=True))
    opened = Checkpoint.open(tmp_path / "checkpoint-000004")
    assert opened.has("model.safetensors")
    assert not [name for name in opened.files if "optimizer" in name]


# The metric


def test_names_show_the_metric_of_the_validation_that_follows(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}-{step}-{val_loss:.1f}", monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    fitted(callback, values=[0.5, 0.25], val_check_interval=2)
    assert names(tmp_path) == ["epoch=0-step=2-val_loss=0.5", "epoch=0-step=4-val_loss=0.2"]


def test_a_value_is_used_once(tmp_path):
    """Saves are due every 2 steps, the metric comes every 4: a save waits for the next value rather than take the old one."""
    saves, callback = Saves(), ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=2, save_top_k=3)
    with pytest.warns(UserWarning) as caught:
        fitted(callback, values=[3, 2], batches=8, val_check_interval=4, others=[saves])
    said = [str(w.message) for w in caught if "val_loss" in str(w.message)]
    assert len(said) == 2  # before the first validation, and between two
    assert "nothing" in said[0] or "train_loss" in said[0]
    assert "Received: no new value" in said[1]
    assert saves.steps == [4, 8]
    assert list(callback.best_k_models.values()) == [3, 2]


def test_waiting_keeps_last_fresh(tmp_path):
    saves, callback = Saves(), ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=2, save_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted(callback, values=[3, 2], batches=8, val_check_interval=4, others=[saves])
    assert saves.steps == [2, 4, 6, 8]
    assert list(callback.best_k_models.values()) == [2]
    assert names(tmp_path) == ["checkpoint-000008", "last"]


def test_all_are_saved_even_without_a_value(tmp_path):
    saves, callback = Saves(), ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted(callback, values=[3, 2], batches=8, val_check_interval=4, others=[saves])
    assert saves.steps == [2, 4, 6, 8]
    assert [value for value in callback.best_k_models.values() if not math.isnan(value)] == [3, 2]


def test_a_mean_of_the_training_epoch(tmp_path):
    class Falling(Line):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(3 - self.current_epoch), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(tmp_path, monitor="mean", save_top_k=2)
    trainer = quiet(callbacks=[callback], max_epochs=3)
    trainer.fit(Falling([1, 1, 1]), loader(4), loader(1))
    assert list(callback.best_k_models.values()) == [2, 1]


def test_monitor_that_is_not_logged(tmp_path):
    with pytest.raises(ValueError) as caught:
        fitted(ModelCheckpoint(tmp_path, monitor="val_los"), values=[1])
    assert "Received: ModelCheckpoint(monitor='val_los')" in str(caught.value)
    assert "'train_loss', 'val_loss'" in str(caught.value)
    assert "Did you mean 'val_loss'?" in str(caught.value)


def test_validation_that_comes_in_later_epochs_is_waited_for(tmp_path):
    callback = ModelCheckpoint(tmp_path, monitor="val_loss")
    with pytest.warns(UserWarning, match="waits until then"):
        fitted(callback, values=[1], max_epochs=2, check_val_every_n_epoch=2)
    assert names(tmp_path) == ["checkpoint-000008"]


def test_sanity_check_and_validate_save_nothing(tmp_path):
    saves = Saves()
    trainer = fitted(ModelCheckpoint(tmp_path, monitor="val_loss"), values=[1, 1], others=[saves], num_sanity_val_steps=1)
    trainer.validate(dataloaders=loader(1), verbose=False)
    assert saves.steps == [4]


# Interruptions


def test_the_list_survives_an_interruption(tmp_path):
    first = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    fitted(first, values=[3, 1, 2], max_epochs=3)
    second = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    fitted(second, values=[9, 0.5], max_epochs=5, ckpt_path=str(tmp_path / "last"))
    assert list(second.best_k_models.values()) == [1, 0.5]
    assert second.best_model_path == str(tmp_path / "checkpoint-000020")
    assert names(tmp_path) == ["checkpoint-000008", "checkpoint-000020", "last"]


def test_a_run_that_is_over_is_not_saved_again(tmp_path):
    first = ModelCheckpoint(tmp_path, save_last=True)
    fitted(first, max_epochs=2)
    saves = Saves()
    fitted(ModelCheckpoint(tmp_path, save_last=True), max_epochs=2, others=[saves], ckpt_path=first.best_model_path)
    assert saves.steps == []
    assert names(tmp_path) == ["checkpoint-000008", "last"]


def test_a_branch_into_another_folder_leaves_the_first_alone(tmp_path):
    first = ModelCheckpoint(tmp_path / "first", monitor="val_loss")
    fitted(first, values=[3])
    second = ModelCheckpoint(tmp_path / "second", monitor="val_loss")
    fitted(second, values=[2], max_epochs=2, ckpt_path=first.best_model_path)
    assert names(tmp_path / "first") == ["checkpoint-000004"]
    assert names(tmp_path / "second") == ["checkpoint-000008"]


def test_C1_a_save_that_fails_leaves_the_one_before(tmp_path):
    def run(rank):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        callback = ModelCheckpoint(tmp_path)

        def limit(trainer, module):
            if trainer.current_epoch == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

        trainer = quiet(callbacks=[callback, LambdaCallback(on_train_epoch_start=limit)], max_epochs=2)
        try:
            trainer.fit(Line(), loader(4), loader(1))
        except Exception as error:
            return type(error).__name__, callback.best_model_path
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return "no error", ""

    error, best = distributed.run(run, 1)[0]
    assert error != "no error"
    assert names(tmp_path) == ["checkpoint-000004"]
    assert best == str(tmp_path / "checkpoint-000004") and complete(best)
    fitted(ModelCheckpoint(tmp_path), max_epochs=2, ckpt_path=best)
    assert names(tmp_path) == ["checkpoint-000008"]


def failing_at(batch, kind=RuntimeError):
    def fail(trainer, module, batch_, batch_idx):
        if batch_idx == batch:
            raise kind("on purpose")

    return LambdaCallback(on_train_batch_start=fail)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_save_on_exception(tmp_path, kind):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(kind, match="on purpose"):
        fitted(callback, others=[failing_at(3, kind)], batches=6)
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000003"]
    resumed = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_on_exception=True)
    trainer = fitted(resumed, batches=6, ckpt_path=str(tmp_path / "checkpoint-000003"))
    assert trainer.global_step == 6
    assert names(tmp_path) == ["checkpoint-000006"]


def test_no_exception_no_checkpoint(tmp_path):
    saves = Saves()
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(callback, others=[saves, failing_at(3)], batches=6)
    assert saves.steps == [2]


def test_on_exception_checkpoint(tmp_path):
    callback = OnExceptionCheckpoint(tmp_path, "failed-{step}")
    trainer = quiet(callbacks=[callback, failing_at(3)])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Line(), loader(6))
    assert names(tmp_path) == ["failed-step=3"]
    assert Checkpoint.open(tmp_path / "failed-step=3").manifest["step"] == 3
    trainer = quiet()
    trainer.fit(Line(), loader(6), ckpt_path=str(tmp_path / "failed-step=3"))
    assert trainer.global_step == 6


@pytest.mark.parametrize(("moment", "call"), [("point", 2), ("discard", 3)])  # the first to discard is the start
def test_C2_killed_when_the_checkpoint_is_on_the_disk_and_the_old_ones_are_not_gone(tmp_path, monkeypatch, moment, call):
    """Epochs end at steps 4, 8, 12; killed after the second was written, before the link or the removal."""
    options = {"save_top_k": 1, "save_last": True, "monitor": "val_loss"}
    monkeypatch.setattr(f"drivetrain.callbacks.checkpoint.{moment}", killing_at(call, getattr(checkpoint, moment)))
    with pytest.raises(distributed.RankFailed, match="killed by SIGKILL"):
        distributed.run(lambda rank: fitted(ModelCheckpoint(tmp_path, **options), values=[3, 2], max_epochs=3), 1)
    monkeypatch.undo()
    assert all(complete(tmp_path / name) for name in ("checkpoint-000004", "checkpoint-000008", "last"))
    trainer = fitted(ModelCheckpoint(tmp_path, **options), values=[1, 0.5], max_epochs=3, ckpt_path="last")
    assert trainer.global_step == 12
    assert names(tmp_path) == ["checkpoint-000012", "last"]


def killing_at(number, function):
    """The function, whose call of this number ends the process instead."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        function(*arguments)

    return call


class Wave(Line):
    """Its validation loss goes up and down with the step."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", math.sin(1.7 * self.global_step))


def waved(folder, *, kill_at=None, **options):
    """What callbacks hold at the end of 4 epochs of 6 steps, validated every 2, killed after a batch if asked for."""

    def kill(trainer, module, outputs, batch, batch_idx):
        if trainer.progress.batches == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=3, every_n_train_steps=3, save_last=True)
    newest = ModelCheckpoint(folder / "newest", "{epoch}-{step}", save_top_k=2, every_n_epochs=1)
    stopping, killer = EarlyStopping("val_loss", patience=50), LambdaCallback(on_train_batch_end=kill)
    killer.priority = 1000
    trainer = quiet(callbacks=[stopping, best, newest, killer], max_epochs=4, val_check_interval=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Wave(), loader(6), loader(1), **options)
    kept = [{Path(path).name: value for path, value in c.best_k_models.items()} for c in (best, newest)]
    return kept, Path(best.best_model_path).name, stopping.state_dict(), names(folder / "best"), names(folder / "newest")


@pytest.mark.parametrize("batch", [5, 6, 9, 13, 14, 22])
def test_killed_and_resumed_ends_as_if_it_had_not_been(tmp_path, batch):
    expected = waved(tmp_path / "whole")
    with pytest.raises(distributed.RankFailed, match="killed by SIGKILL"):
        distributed.run(lambda rank: waved(tmp_path / "killed", kill_at=batch), 1)
    assert waved(tmp_path / "killed", ckpt_path="last") == expected


def test_a_failing_save_does_not_hide_the_exception(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = quiet(callbacks=[OnExceptionCheckpoint(tmp_path / "file"), failing_at(3)])
    with pytest.warns(UserWarning, match="Expected to save a checkpoint after the exception"):
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(Line(), loader(6))


# Ranks


def test_D2_a_rank_that_fails_alone_does_not_wait_for_the_others(tmp_path):
    """It saves alone what it holds, when nobody has come for seconds."""

    def run(rank):
        callbacks = [ModelCheckpoint(tmp_path, save_on_exception=True), *([failing_at(1)] if rank == 1 else [])]
        trainer = quiet(callbacks=callbacks, devices=2, strategy="ddp")
        trainer.fit(Line(lr=0.1), loader(8))

    with pytest.raises(distributed.RankFailed, match="Rank 1 of 2 raised RuntimeError: on purpose"):
        distributed.run(run, 2)
    assert names(tmp_path) == ["checkpoint-000001"] and Checkpoint.open(tmp_path / "checkpoint-000001").has("rank-00001.json")


def test_D5_ranks_agree_on_names_and_on_what_stays(tmp_path):
    class Ranks(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val_rank", float(self.global_rank))

    def run(rank):
        callback = ModelCheckpoint(
            tmp_path, "{epoch}-{val_rank:.2f}", monitor="val_rank", save_top_k=-1, save_last=True, train_time_interval=1e-9
        )
        trainer = quiet(callbacks=[callback], max_epochs=2, devices=2, strategy="ddp")
        trainer.fit(Ranks(lr=0.1), loader(8), loader(2))
        return callback.best_model_path, callback.last_model_path, list(callback.best_k_models)

    first, second = distributed.run(run, 2)
    assert first == second
    assert Path(first[0]).name.startswith("epoch=0-val_rank=0.50")
    assert all(complete(path) for path in first[2])


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": 1.5}, "save_top_k=1.5"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_epochs": "1"}, "every_n_epochs='1'"),
        ({"train_time_interval": "10ep"}, "train_time_interval='10ep'"),
        ({"save_last": "copy"}, "save_last='copy'"),
        ({"mode": "auto", "monitor": "x"}, "mode='auto'"),
        ({"filename": "a/{epoch}"}, "filename='a/{epoch}'"),
        ({"dirpath": "s3://bucket/runs"}, "dirpath='s3://bucket/runs'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as caught:
        ModelCheckpoint(**arguments)
    assert "Expected" in str(caught.value) and message in str(caught.value)


def test_monitor_has_to_be_a_name():
    with pytest.raises(TypeError, match="Received: ModelCheckpoint"):
        ModelCheckpoint(monitor=3)


def test_training_is_the_same_with_and_without(tmp_path):
    weights = []
    for callbacks in ([], [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)]):
        torch.manual_seed(0)
        model = Line(lr=0.01)
        quiet(callbacks=callbacks, max_epochs=2, seed=1).fit(model, loader(6, shuffle=True))
        weights.append(model.layer.weight.item())
    assert weights[0] == weights[1]
