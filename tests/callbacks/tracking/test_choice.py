"""Trackers of other packages through Trainer and Accelerator."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, LoggerType, ModelCheckpoint, Tracking, Trainer, TrainModule
from drivetrain.callbacks.tracking.base import filter_trackers, get_available_trackers, tracker_class

NAMES = ["tensorboard", "csv", "jsonl", "mlflow", "comet_ml", "wandb", "trackio", "aim", "dvclive", "swanlab"]


def test_all_is_every_installed_one():
    assert get_available_trackers()[: len(NAMES)] == NAMES
    assert filter_trackers(LoggerType.ALL, "logs")[: len(NAMES)] == NAMES


def test_clearml_is_an_error_that_says_what_to_do():
    with pytest.raises(NotImplementedError, match="Received: ClearML, for which it has none. Derive a class"):
        filter_trackers(LoggerType.CLEARML)


def test_a_folder_of_runs_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"Expected the package wandb .* pip install 'drivetrain\[wandb\]'"):
        tracker_class("wandb")


@pytest.mark.timeout(400)
def test_names_of_accelerate_take_its_arguments():
    import drivetrain

    made = drivetrain.MLflowTracker("project", "artifacts", None, {"team": "a"}, False, "first", "what it is for")
    assert (made.run_name, made.tags) == ("first", {"team": "a", "mlflow.note.content": "what it is for"})
    for name in ("WandBTracker", "TrackioTracker", "CometMLTracker", "AimTracker", "DVCLiveTracker", "SwanLabTracker"):
        assert getattr(drivetrain, name)("project").run_name == "project"


class Failing(TrainModule):
    def __init__(self, fails=True):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        if self.hparams.fails and self.trainer.global_step == 5:
            raise ValueError("no more")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, uri, fails):
    loader = DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32, dtype=torch.long)), batch_size=4)
    tracking = Tracking(
        "mlflow", project_name="digits", timeout=100, log_checkpoints=True,
        init_kwargs={"mlflow": {"tracking_uri": uri, "logging_dir": folder / "artifacts"}},
    )
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, seed=1, logger=tracking,
        callbacks=[ModelCheckpoint(every_n_train_steps=2)], enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Failing(fails), loader, ckpt_path="last")
    return trainer


@pytest.mark.timeout(400)
def test_L3_L7_a_run_that_raises_is_failed_and_goes_on_as_the_same_run(tmp_path, database):
    from mlflow import MlflowClient

    shutil.copy(database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, uri, fails=True)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.status, run.data.tags["error"], run.info.run_name) == ("FAILED", "ValueError: no more", "run-0001")
    trainer = fit(tmp_path, uri, fails=False)
    (again,) = client.search_runs([run.info.experiment_id])
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == list(range(1, 9))
    assert again.data.params["fails"] == "True" and again.data.tags["changed.fails"] == "False"
    assert again.data.tags["checkpoint.last"] == "checkpoints/checkpoint-000008"
    stored = tmp_path / "artifacts" / run.info.run_id / "artifacts" / "checkpoints" / "checkpoint-000008"
    assert (stored / "model.safetensors").read_bytes() == (
        trainer.log_dir / "checkpoints" / "checkpoint-000008" / "model.safetensors"
    ).read_bytes()


@pytest.mark.timeout(400)
def test_a_raw_loop_tracks_by_accelerates_calls(tmp_path, database):
    from mlflow import MlflowClient

    shutil.copy(database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    accelerator = Accelerator(log_with=["mlflow", LoggerType.DVCLIVE], project_dir=tmp_path, cpu=True)
    accelerator.init_trackers(
        "digits", config={"lr": 0.5, "layers": [{"width": 4}]},
        init_kwargs={
            "mlflow": {"tracking_uri": uri, "run_name": "raw", "tags": {"team": "a"}},
            "dvclive": {"save_dvc_exp": False, "dvcyaml": None},
        },
    )  # fmt: skip
    for step in range(3):
        accelerator.log({"loss": torch.tensor(1 / (step + 1))}, step=step)
    accelerator.trackers[0].flush(100)
    run = accelerator.get_tracker("mlflow", unwrap=True)
    for tracker in accelerator.trackers:
        tracker.timeout = 100
    accelerator.end_training()
    found = MlflowClient(tracking_uri=uri).get_run(run.info.run_id)
    assert (found.info.status, found.info.run_name, found.data.tags["team"]) == ("FINISHED", "raw", "a")
    assert found.data.params == {"lr": "0.5", "layers/0/width": "4"}
    assert found.data.metrics == {"loss": torch.tensor(1 / 3).item()}
    rows = (tmp_path / "digits" / "dvclive" / "plots" / "metrics" / "loss.tsv").read_text().splitlines()
    assert rows == ["step\tloss", "0\t1.0", "1\t0.5", f"2\t{torch.tensor(1 / 3).item()}"]
