"""What a run leaves for its report: run.json, timeline.csv, report.html."""

from __future__ import annotations

import csv
import json
import logging
import os
from pathlib import Path

import pytest
import torch

from drivetrain import Callback, ModelCheckpoint, Report
from drivetrain.callbacks.report.runs import find, rates, read, step_times
from drivetrain.tests.callbacks.toy import Line, loader, quiet
from drivetrain.tests.distributed import run


def trainer(*callbacks, **options):
    return quiet(callbacks=list(callbacks), **{"logger": "csv", "log_every_n_steps": 2, **options})


def timeline(folder):
    with open(Path(folder) / "timeline.csv", newline="") as file:
        return list(csv.DictReader(file))


def record(folder):
    return json.loads((Path(folder) / "run.json").read_text())


class Fails(Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            raise self.error


def test_a_run_leaves_its_clock_its_settings_and_its_page():
    """6 batches of 2 at a rate of 0.25, a row at each second step."""
    run = trainer(Report())
    run.fit(Line(lr=0.25), loader(12, batch_size=2))
    rows = timeline(run.log_dir)
    assert [(row["step"], row["samples"], row["lr"]) for row in rows] == [("2", "4", "0.25"), ("4", "8", "0.25"), ("6", "12", "0.25")]
    seconds = [float(row["elapsed"]) for row in rows]
    assert seconds == sorted(seconds) and 0 < float(rows[0]["memory_gib"]) < 100
    kept = record(run.log_dir)
    assert kept["strategy"] == "single" and kept["world_size"] == 1 and kept["parameters"] == 2
    (start,) = kept["starts"]
    assert (start["status"], start["from_step"], start["to_step"], start["error"]) == ("finished", 0, 6, None)
    assert kept["environment"]["torch"] == torch.__version__
    assert "train_loss" in (Path(run.log_dir) / "report.html").read_text()


def test_it_comes_with_the_trackers_and_not_without():
    with_trackers = trainer()
    assert [type(c) for c in with_trackers.callbacks if isinstance(c, Report)] == [Report]
    assert not any(isinstance(c, Report) for c in quiet().callbacks)
    without = trainer(Report(page=False))
    without.fit(Line(), loader(4))
    names = {path.name for path in Path(without.log_dir).iterdir()}
    assert {"run.json", "timeline.csv"} <= names and "report.html" not in names


def test_a_resumed_run_goes_on_with_its_clock():
    """Stopped after 4 steps and resumed: each step once, and the clock does not go back."""
    first = trainer(ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), max_steps=4)
    first.fit(Line(), loader(8))
    again = trainer(ModelCheckpoint(every_n_train_steps=2, save_top_k=-1))
    again.fit(Line(), loader(8), resume="last")
    assert again.log_dir == first.log_dir
    rows = timeline(again.log_dir)
    assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
    assert [float(row["elapsed"]) for row in rows] == sorted(float(row["elapsed"]) for row in rows)
    assert [(s["from_step"], s["to_step"]) for s in record(again.log_dir)["starts"]] == [(0, 4), (4, 8)]


def test_steps_after_the_checkpoint_come_again_and_are_there_once():
    """A run that failed at step 7 goes on from the checkpoint of step 4; a torn last line is dropped."""
    first = trainer(ModelCheckpoint(every_n_train_steps=4, save_top_k=-1))
    first.fit(Line(), loader(8), resume=None)
    path = Path(first.log_dir)
    with open(path / "timeline.csv", "a") as file:
        file.write("10,1.0,1")  # torn
    again = trainer(ModelCheckpoint(every_n_train_steps=4, save_top_k=-1))
    again.fit(Line(), loader(8), ckpt_path=path / "checkpoints" / "checkpoint-000004")
    assert [row["step"] for row in timeline(again.log_dir)] == ["2", "4", "6", "8"]


@pytest.mark.parametrize(
    ("error", "status", "page"),
    [(RuntimeError("no luck"), "failed", True), (KeyboardInterrupt(), "interrupted", False)],
)
def test_a_run_that_fails_says_so(error, status, page):
    run = trainer(Fails(error))
    with pytest.raises(type(error)):
        run.fit(Line(), loader(8))
    (start,) = record(run.log_dir)["starts"]
    assert start["status"] == status and start["to_step"] == 3
    assert start["error"] == ("RuntimeError: no luck" if page else "KeyboardInterrupt")
    assert (Path(run.log_dir) / "report.html").exists() == page


def test_warnings_are_kept_once_each():
    class Warns(Callback):
        def on_train_batch_end(self, *_):
            logging.getLogger("drivetrain.somewhere").warning("Expected %s.", "less")

    run = trainer(Warns())
    run.fit(Line(), loader(3))
    (kept,) = [entry for entry in record(run.log_dir)["warnings"] if entry["message"] == "Expected less."]
    assert kept["count"] == 3
    assert logging.getLogger("drivetrain").handlers == [h for h in logging.getLogger("drivetrain").handlers if type(h).__name__ != "_Warnings"]


def test_a_disk_that_refuses_costs_the_report_not_the_run(caplog):
    run = trainer()

    class Blocks(Callback):
        priority = -1000

        def on_train_start(self, trainer, module):
            (Path(trainer.log_dir) / "timeline.csv").mkdir(parents=True)

    run = trainer(Blocks())
    run.fit(Line(), loader(4))
    assert run.global_step == 4
    assert "The run goes on without" in caplog.text


def test_an_older_record_that_is_damaged_is_begun_anew():
    first = trainer(ModelCheckpoint(every_n_train_steps=2), max_steps=2)
    first.fit(Line(), loader(4))
    (Path(first.log_dir) / "run.json").write_text("{")
    again = trainer(ModelCheckpoint(every_n_train_steps=2))
    again.fit(Line(), loader(4), resume="last")
    assert [s["from_step"] for s in record(again.log_dir)["starts"]] == [2]


def test_two_ranks_leave_one_record():
    def rank(index):
        fitted = trainer()
        fitted.fit(Line(), loader(8, batch_size=2))
        return str(Path(fitted.log_dir).resolve())

    first, second = run(rank, 2)
    assert first == second and record(first)["world_size"] == 2
    assert [row["samples"] for row in timeline(first)] == ["8"]


def test_what_is_read_back_is_what_was_trained():
    run = trainer(log_every_n_steps=1, max_epochs=2)
    run.fit(Line([3.0, 1.0], lr=0.5), loader(4), loader(2))
    (path,) = find([Path(run.log_dir).parent.parent])
    assert os.path.samefile(path, run.log_dir)
    found = read(path)
    assert found.status == "finished" and found.step == 8 and found.problems == []
    assert found.metrics["val_loss"] == ([4.0, 8.0], [3.0, 1.0])
    assert found.metrics["train_loss"][0] == [float(step) for step in range(1, 9)]
    assert sum(count for _, count in step_times(found)) == 7  # between 8 rows
    assert len(rates(found)[0]) == 7
