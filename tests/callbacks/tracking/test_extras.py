"""What runs hand to trackers beside rows: provenance, checkpoints, the model's graph, and how they ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, GeneralTracker, ModelCheckpoint, Tracking, Trainer, TrainModule
from drivetrain.callbacks.tracking import provenance
from drivetrain.callbacks.tracking.trackers import finish_trackers, start_trackers


class Small(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        self.net[1].eval()
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Files(GeneralTracker):
    """Takes files: notes what it gets, and reads it at once."""

    name = "files"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.checkpoints, self.provenance, self.ended = [], None, []
        self.run_id = "files-1"

    @property
    def tracker(self):
        return self

    def log_checkpoint(self, path, aliases=(), step=None):
        manifest = json.loads(open(os.path.join(path, "manifest.json")).read())
        self.checkpoints.append((manifest["step"], tuple(aliases), step))

    def store_provenance(self, values, files=()):
        self.provenance = values, files

    def fail(self, error):
        self.ended.append(("failed", error))

    def preempt(self, reason):
        self.ended.append(("preempted", reason))

    def finish(self):
        self.ended.append("finish")


def loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(24, 4, generator=generator), torch.randint(0, 2, (24,), generator=generator)),
        batch_size=4,
    )


def fit(folder, *callbacks, **options):
    torch.manual_seed(1)
    module = Small()
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, max_epochs=2, log_every_n_steps=2, seed=3,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **options,
    )
    trainer.fit(module, loader(), ckpt_path=options.pop("ckpt_path", None))
    return trainer, module


def test_best_and_last_checkpoints_become_artifacts(tmp_path):
    tracker = Files()
    save = ModelCheckpoint(monitor="loss", every_n_train_steps=4, save_top_k=1, save_last=True)
    trainer, _ = fit(tmp_path, save, logger=Tracking(tracker, log_checkpoints=True))
    best = int(save.best_model_path[-6:])
    aliases = {step: names for step, names, _ in tracker.checkpoints}
    assert aliases == ({12: ("best", "last")} if best == 12 else {best: ("best",), 12: ("last",)})
    assert tracker.ended == ["finish"]


def test_all_checkpoints_become_artifacts_though_they_are_removed_meanwhile(tmp_path):
    tracker = Files()
    save = ModelCheckpoint(every_n_train_steps=2, save_top_k=1, asynchronous=False)
    trainer, _ = fit(tmp_path, save, logger=Tracking(tracker, log_checkpoints="all"))
    steps = [(step, names) for step, names, _ in tracker.checkpoints if names[0].startswith("step")]
    assert steps[-1] == (12, ("step-12",)) and [step for step, _ in steps] == sorted({step for step, _ in steps})
    assert len(steps) >= 5 and (12, ("best", "last"), 12) in tracker.checkpoints
    assert len(list((trainer.log_dir / "checkpoints").iterdir())) == 1 and not (trainer.log_dir / "uploads").exists()


def test_the_graph_is_drawn_and_training_is_the_same(tmp_path):
    plain, other = fit(tmp_path / "plain", logger=False)[1], None
    trainer, other = fit(tmp_path / "drawn", logger=Tracking("tensorboard", log_graph=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), other.state_dict().values()))
    graph = EventAccumulator(str(trainer.log_dir)).Reload().Graph()
    assert {"Linear", "BatchNorm1d"} <= {part.split("[")[0] for node in graph.node for part in node.name.split("/")}


def test_hyperparameters_and_their_metrics_are_what_tensorboard_shows(tmp_path):
    """The tab lists every scalar of the run as a metric, its last value, and the run's fate."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    (tracker,) = start_trackers("tensorboard", "a", {"lr": 0.5, "net": {"width": 4}}, logging_dir=tmp_path)
    for step in (1, 2):
        tracker.log({"val_loss": step / 4}, step=step)
    finish_trackers([tracker])
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = RequestContext()
    metadata = context.hparams_metadata(request, "1")
    experiment = context.experiment_from_metadata(request, "1", True, metadata, context.hparams_from_data_provider(request, "1", 100))
    assert [metric.name.tag for metric in experiment.metric_infos] == ["val_loss"]
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=10, allowed_statuses=[api_pb2.STATUS_SUCCESS],
        col_params=[api_pb2.ColParams(metric=metric.name) for metric in experiment.metric_infos],
    )
    handler = list_session_groups.Handler(request, context, "1", asked)
    (group,) = handler.run().session_groups
    assert {name: value.number_value for name, value in group.hparams.items()} == {"lr": 0.5, "net/width": 4.0}
    assert [(value.name.tag, value.value) for value in group.metric_values] == [("val_loss", 0.5)]


@pytest.mark.timeout(400)
def test_what_a_run_was_made_from_is_recorded(tmp_path):
    program = tmp_path / "code" / "train.py"
    program.parent.mkdir()
    program.write_text(
        "import json, sys\nfrom drivetrain.callbacks.tracking.provenance import record\n"
        "from pathlib import Path\nprint(json.dumps(record(Path(sys.argv[1]))))\n"
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(program.parent)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    with open(program, "a") as file:
        file.write("# changed\n")
    for number in (1, 2):
        command = [sys.executable, str(program), str(tmp_path / "run"), "--lr", "0.1 x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
        values, files = json.loads(done.stdout)
        assert values["git"]["commit"] == commit and values["git"]["dirty"] is True and "packages" not in values
        assert values["command"].endswith("--lr '0.1 x'") and values["git"]["diff"] == f"changes-{number}.diff"
        assert [os.path.basename(path) for path in files] == ["provenance.json", f"changes-{number}.diff"]
    assert "+# changed\n" in (tmp_path / "run" / "changes-2.diff").read_text()
    recorded = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert len(recorded) == 2 and recorded[0]["packages"]["torch"] == torch.__version__


def test_a_run_hands_its_provenance_over_and_notes_it(tmp_path):
    tracker = Files()
    trainer, _ = fit(tmp_path, logger=Tracking(tracker))
    values, files = tracker.provenance
    assert files == [str(trainer.log_dir / "provenance.json")] and values["python"] and "packages" not in values
    (recorded,) = json.loads((trainer.log_dir / "provenance.json").read_text())
    assert recorded["command"] == values["command"] and recorded["packages"] == provenance.packages()
    other = fit(tmp_path, logger=Tracking("csv", provenance=False))[0]
    assert not (other.log_dir / "provenance.json").exists()


class Signal(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_preempted_run_says_so_and_goes_on_in_the_same_run_of_its_tracker(tmp_path):
    first, again = Files(), Files()
    with pytest.raises(SystemExit):
        fit(tmp_path, Signal(), logger=Tracking(first))
    status = json.loads((tmp_path / "runs" / "run-0001" / "status.json").read_text())
    assert status["status"] == "preempted" and first.ended == [("preempted", "stopped by SIGTERM"), "finish"]
    again.run_id = None
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", devices=1, max_epochs=2, logger=Tracking(again),
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Small(), loader(), ckpt_path="last")
    assert again.run_id == "files-1" and (again.resume_step, again.run_title) == (5, "run-0001")
    assert again.ended == ["finish"] and os.listdir(tmp_path / "runs") == ["run-0001"]
