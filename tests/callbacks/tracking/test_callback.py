"""The Tracking callback, driven hook by hook."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain.callbacks.tracking.base import GeneralTracker
from drivetrain.callbacks.tracking.callback import Tracking
from drivetrain.tests.distributed import run


def stage(folder, **changes):
    state = dict(log_dir=folder, global_step=0, current_epoch=0, sanity_checking=False, stop_reason=None)
    return SimpleNamespace(**{**state, **changes})


def module(**hparams):
    return SimpleNamespace(hparams=hparams, logs_hparams=True)


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder, tag):
    return [(e.step, e.value) for e in EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload().Scalars(tag)]


def status(folder):
    return json.loads((folder / "status.json").read_text())


def fit(callback, trainer, owner, steps):
    callback.setup(trainer, owner, "fit")
    callback.on_fit_start(trainer, owner)
    callback.on_train_start(trainer, owner)
    for step in steps:
        trainer.global_step = step
        callback.on_log(trainer, owner, {"loss": step / 8}, step)
    callback.on_fit_end(trainer, owner)
    callback.teardown(trainer, owner, "fit")


def test_a_fit_is_tracked(tmp_path):
    callback, trainer = Tracking(config={"note": "x"}), stage(tmp_path / "run")
    fit(callback, trainer, module(lr=0.1, sizes=[4, {"hidden": 2}]), (1, 2))
    assert rows(trainer.log_dir) == [
        {"step": "1", "epoch": "0", "loss": "0.125"}, {"step": "2", "epoch": "0", "loss": "0.25"}
    ]
    assert scalars(trainer.log_dir, "loss") == [(1, 0.125), (2, 0.25)]
    assert yaml.safe_load((trainer.log_dir / "hparams.yaml").read_text()) == {
        "lr": 0.1, "sizes": [4, {"hidden": 2}], "note": "x"
    }
    assert status(trainer.log_dir) == {"status": "finished", "step": 2, "stop_reason": None}
    assert [tracker.name for tracker in callback.trackers] == ["tensorboard", "csv"]


def test_L3_an_interrupted_fit_goes_on_in_the_same_files(tmp_path):
    fit(Tracking(), stage(tmp_path), module(), range(1, 9))
    fit(Tracking(), stage(tmp_path, global_step=5), module(), range(6, 11))
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(1, 11))
    assert scalars(tmp_path, "loss") == [(step, step / 8) for step in range(1, 11)]


def test_rows_are_on_disk_before_a_checkpoint_is_written(tmp_path):
    callback, trainer = Tracking(), stage(tmp_path)
    callback.on_train_start(trainer, module())
    for step in range(1, 31):
        callback.on_log(trainer, module(), {"loss": step / 8}, step)
    callback.on_save_checkpoint(trainer, module(), {})
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(1, 31))
    assert scalars(tmp_path, "loss") == [(step, step / 8) for step in range(1, 31)]
    callback.teardown(trainer, module(), "fit")


def test_a_failed_and_an_interrupted_run_are_marked(tmp_path):
    for error, word in ((ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted")):
        callback, trainer = Tracking("jsonl"), stage(tmp_path / word)
        callback.on_train_start(trainer, module())
        assert status(trainer.log_dir)["status"] == "running"
        callback.on_log(trainer, module(), {"loss": 1.0}, 1)
        callback.on_exception(trainer, module(), error)
        callback.teardown(trainer, module(), "fit")
        last = (trainer.log_dir / "metrics.jsonl").read_text().splitlines()[-1]
        assert status(trainer.log_dir)["status"] == word
        assert json.loads(last) == {"error": status(trainer.log_dir)["error"]}
    assert status(tmp_path / "failed")["error"] == "ValueError: no"


def test_a_test_after_a_fit_adds_to_the_files(tmp_path):
    callback, trainer = Tracking(), stage(tmp_path)
    fit(callback, trainer, module(), (1, 2))
    callback.setup(trainer, module(), "test")
    callback.on_test_start(trainer, module())
    callback.on_log(trainer, module(), {"test_loss": 0.5}, 2)
    callback.teardown(trainer, module(), "test")
    assert [list(row.values()) for row in rows(tmp_path)] == [["1", "0", "0.125", ""], ["2", "0", "0.25", "0.5"]]
    assert scalars(tmp_path, "loss") == [(1, 0.125), (2, 0.25)] and scalars(tmp_path, "test_loss") == [(2, 0.5)]


def test_a_validation_alone_is_tracked_and_a_sanity_check_is_not(tmp_path):
    callback, trainer = Tracking("csv"), stage(tmp_path, sanity_checking=True)
    callback.on_validation_start(trainer, module())
    assert callback.trackers == [] and list(tmp_path.iterdir()) == []
    trainer.sanity_checking = False
    callback.on_validation_start(trainer, module())
    callback.on_log(trainer, module(), {"val_loss": 1.0}, 0)
    callback.teardown(trainer, module(), "validate")
    assert rows(tmp_path) == [{"step": "0", "epoch": "0", "val_loss": "1.0"}]


def test_hyperparameters_of_module_and_data_module_meet(tmp_path):
    callback = Tracking("csv")
    trainer = stage(tmp_path, datamodule=module(batch_size=4, seed=1))
    callback.on_train_start(trainer, module(seed=2, lr=0.5))
    callback.teardown(trainer, module(), "fit")
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {
        "batch_size": 4, "seed": 2, "lr": 0.5, "datamodule": {"seed": 1}
    }


def test_hyperparameters_that_are_kept_from_trackers(tmp_path):
    callback, owner = Tracking("csv"), module(secret=1)
    owner.logs_hparams = False
    callback.on_train_start(stage(tmp_path), owner)
    callback.teardown(stage(tmp_path), owner, "fit")
    assert not (tmp_path / "hparams.yaml").exists()


def test_only_rank_0_writes(tmp_path):
    def work(rank):
        callback = Tracking("csv")
        fit(callback, stage(tmp_path), module(), (1, 2))
        return len(callback.trackers)

    assert run(work, 2) == [1, 0]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]


def test_own_trackers_and_state_keys(tmp_path):
    class Mine(GeneralTracker):
        name = "mine"
        requires_logging_directory = False
        tracker = property(lambda self: self.seen)

        def __init__(self):
            super().__init__()
            self.seen = []

        def log(self, values, step=None, **kwargs):
            self.seen.append((step, values))

    mine = Mine()
    callback = Tracking([mine, "csv"])
    fit(callback, stage(tmp_path), module(), (1,))
    assert mine.seen == [(1, {"epoch": 0, "loss": 0.125})]
    assert callback.state_key == "Tracking[mine,csv]" != Tracking("csv").state_key == "Tracking[csv]"
