"""Trackers in whole runs: Trainer and Accelerator, killed, failed, resumed, on two ranks."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
import traceback

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from drivetrain import Accelerator, Callback, ModelCheckpoint, Tracking, Trainer, TrainModule
from drivetrain.callbacks.tracking import journal
from drivetrain.callbacks.tracking.base import GeneralTracker, on_main_process
from drivetrain.tests.distributed import run


class Small(TrainModule):
    def __init__(self, lr=0.1, layers=({"width": 4}, {"width": 2})):
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.linear(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.linear(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self.linear(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Rows(Callback):
    """Notes what every tracker should have got: name -> [(step, value)]."""

    def __init__(self):
        self.values = {}

    def on_log(self, trainer, module, metrics, step):
        for name, value in metrics.items():
            self.values.setdefault(name, []).append((step, value))


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(48, 4, generator=generator), torch.randint(0, 2, (48,), generator=generator))


def loaders():
    return DataLoader(data(), batch_size=8, shuffle=True), DataLoader(data(1), batch_size=16)


def trainer(folder, **options):
    defaults = dict(devices=1, max_epochs=3, log_every_n_steps=2, seed=3, enable_progress_bar=False, enable_model_summary=False)
    return Trainer(default_root_dir=folder, accelerator="cpu", **{**defaults, **options})


def module():
    torch.manual_seed(5)
    return Small()


def columns(folder):
    """Return the CSV's values: name -> [(step, value)]."""
    found = {}
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if cell and name not in ("step", "epoch"):
                    found.setdefault(name, []).append((int(row["step"]), float(cell)))
    return found


def steps(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def curves(folder):
    """Return TensorBoard's values, which are of single precision: name -> [(step, value)]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if tag != "epoch"}


def single(values):
    return {
        name: [(step, torch.tensor(value, dtype=torch.float32).item()) for step, value in points]
        for name, points in values.items()
    }


def status(folder):
    return json.loads((folder / "status.json").read_text())


def test_every_value_of_a_run_reaches_its_trackers(tmp_path):
    rows = Rows()
    t = trainer(tmp_path, callbacks=[rows])
    t.fit(module(), *loaders())
    assert {name: [step for step, _ in points] for name, points in rows.values.items()} == {
        "loss_step": list(range(2, 19, 2)), "loss_epoch": [6, 12, 18], "val_loss": [6, 12, 18]
    }
    assert columns(t.log_dir) == rows.values and curves(t.log_dir) == single(rows.values)
    t.test(dataloaders=loaders()[1])
    assert columns(t.log_dir) == rows.values and curves(t.log_dir) == single(rows.values)
    assert steps(t.log_dir) == sorted(steps(t.log_dir))
    assert yaml.safe_load((t.log_dir / "hparams.yaml").read_text()) == {"lr": 0.1, "layers": [{"width": 4}, {"width": 2}]}
    assert status(t.log_dir)["status"] == "finished"


class Kill(Callback):
    priority = 200  # after a checkpoint of the same step

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_in_a_process(folder, kill, every):
    """Fit, or go on, in a process that kills itself after a step; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            save = ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)
            trainer(folder, callbacks=[save, Kill(kill)]).fit(module(), *loaders(), ckpt_path="last")
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("every, kills", [(1, (6, 7)), (2, (6, 12)), (4, (7, 13)), (5, (9, 17))])
def test_L3_killed_runs_have_the_rows_of_one_that_was_not(tmp_path, every, kills):
    """Epochs have 6 steps: some kills come between a checkpoint and the validation that follows it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit_in_a_process(whole, None, every) == 0
    for step in kills:
        assert fit_in_a_process(parts, step, every) == -signal.SIGKILL
    assert fit_in_a_process(parts, None, every) == 0
    assert os.listdir(parts / "runs") == os.listdir(whole / "runs") == ["run-0001"]
    expected, got = whole / "runs" / "run-0001", parts / "runs" / "run-0001"
    assert (got / "metrics.csv").read_text() == (expected / "metrics.csv").read_text()
    assert curves(got) == curves(expected) == single(columns(expected))
    assert steps(got) == sorted(set(steps(got)))


def test_a_run_that_raises_is_marked_and_keeps_its_rows(tmp_path):
    class Failing(Small):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 9:
                raise ValueError("no more")

    t = trainer(tmp_path)
    with pytest.raises(ValueError, match="no more"):
        t.fit(Failing(), *loaders())
    assert status(t.log_dir) == {"status": "failed", "step": 9, "error": "ValueError: no more"}
    assert [step for step, _ in columns(t.log_dir)["loss_step"]] == [2, 4, 6, 8]
    events = EventAccumulator(str(t.log_dir)).Reload()
    assert events.Tensors("error/text_summary")[0].tensor_proto.string_val == [b"ValueError: no more"]


class Hanging(GeneralTracker):
    name = "hanging"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def log(self, values, step=None, **kwargs):
        self.gate.wait()


class Dead(Hanging):
    name = "dead"

    def start(self):
        raise ConnectionError("no server")


def test_L6_trackers_that_hang_or_fail_change_nothing_but_a_journal(tmp_path):
    plain = module()
    trainer(tmp_path / "plain", logger=False).fit(plain, *loaders())
    hanging, tracked, rows = Hanging(), module(), Rows()
    tracking = Tracking([hanging, Dead(), "csv"], timeout=3.0)
    t = trainer(tmp_path / "tracked", logger=tracking, callbacks=[rows])
    with pytest.warns(RuntimeWarning) as caught:
        t.fit(tracked, *loaders())
    hanging.gate.set()
    assert torch.equal(plain.linear.weight, tracked.linear.weight)
    told = sorted(str(w.message).split(":")[0] for w in caught if "Tracker" in str(w.message))
    assert told == ["Tracker 'dead'", "Tracker 'hanging'"]
    assert columns(t.log_dir) == rows.values
    for name in ("hanging", "dead"):
        entries = [entry for entry in journal.read(t.log_dir / f"journal-{name}.jsonl") if entry.call == "log"]
        kept = {}
        for entry in entries:
            for key, value in entry.values.items():
                kept.setdefault(key, []).append((entry.step, value))
        assert {key: points for key, points in kept.items() if key != "epoch"} == rows.values


def test_the_module_reaches_the_native_object(tmp_path):
    class Drawing(Small):
        def on_train_start(self):
            assert isinstance(self.logger.tracker, SummaryWriter)
            self.logger.tracker.add_text("note", "hello", 0)
            self.logger.log_images({"picture": torch.zeros(1, 3, 4, 4)}, step=0)

    t = trainer(tmp_path, max_epochs=1)
    t.fit(Drawing(), *loaders())
    assert [tracker.name for tracker in t.trackers] == ["tensorboard", "csv"]
    events = EventAccumulator(str(t.log_dir)).Reload()
    assert events.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"hello"]
    assert [image.step for image in events.Images("picture")] == [0]


def test_two_ranks_write_one_set_of_files(tmp_path):
    def work(rank):
        t = trainer(tmp_path, devices="auto", max_epochs=2)
        t.fit(module(), *loaders())
        return len(t.trackers), str(t.log_dir)

    (main, folder), (other, same) = run(work, 2)
    assert (main, other) == (2, 0) and folder == same
    folder = tmp_path / "runs" / "run-0001"
    assert steps(folder) == sorted(set(steps(folder))) and curves(folder) == single(columns(folder))


class Mine(GeneralTracker):
    """As a user of Accelerate writes one."""

    name = "mine"
    requires_logging_directory = False

    def __init__(self, run_name):
        super().__init__()
        self.run_name, self.seen = run_name, []

    @property
    def tracker(self):
        return self.seen

    @on_main_process
    def store_init_configuration(self, values):
        self.seen.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.seen.append((values, step, kwargs))


def test_accelerator_trackers(tmp_path):
    mine = Mine("a run")
    accelerator = Accelerator(log_with=["tensorboard", mine, "csv"], project_dir=tmp_path, cpu=True)
    config = {"optim": {"betas": [0.9, 0.999]}, "layers": [{"width": 4}]}
    accelerator.init_trackers("digits", config, init_kwargs={"tensorboard": {"flush_secs": 5}})
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert isinstance(writer, SummaryWriter) and writer.flush_secs == 5
    assert accelerator.get_tracker("mine", unwrap=True) is mine.seen and accelerator.get_tracker("mine").run_name == "a run"
    loss = torch.tensor(0.5)
    for step in range(3):
        accelerator.log({"loss": loss, "lr": {"a": 0.25}}, step=step, log_kwargs={"mine": {"note": step}})
        loss.mul_(0.5)
    with pytest.raises(ValueError, match="Did you mean 'mine'"):
        accelerator.get_tracker("mime")
    accelerator.end_training()
    folder = tmp_path / "digits"
    assert mine.seen == [config, *(({"loss": 0.5 ** (n + 1), "lr": {"a": 0.25}}, n, {"note": n}) for n in range(3))]
    assert columns(folder) == {"loss": [(0, 0.5), (1, 0.25), (2, 0.125)], "lr/a": [(0, 0.25), (1, 0.25), (2, 0.25)]}
    assert curves(folder)["loss"] == [(0, 0.5), (1, 0.25), (2, 0.125)]
    assert yaml.safe_load((folder / "hparams.yaml").read_text()) == config
