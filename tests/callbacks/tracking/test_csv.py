"""The CSV tracker, read back with the csv module."""

from __future__ import annotations

import csv
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import yaml

from drivetrain.callbacks.tracking.csv import CSVTracker


def opened(folder, **options):
    tracker = CSVTracker("", folder, **options)
    tracker.start()
    return tracker


def table(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_value_is_read_back_exactly(tmp_path):
    tracker = opened(tmp_path)
    values = {"loss": 1 / 3, "tiny": 5e-324, "count": 7, "text": 'a,"b"\nc', "nan": math.nan, "inf": -math.inf}
    tracker.log({**values, "tensor": torch.tensor(0.25), "flag": True, "nothing": None}, step=12)
    tracker.finish()
    (row,) = table(tmp_path)
    assert list(row) == ["step", "loss", "tiny", "count", "text", "nan", "inf", "tensor", "flag", "nothing"]
    assert row["step"] == "12" and float(row["loss"]) == 1 / 3 and float(row["tiny"]) == 5e-324
    assert row["count"] == "7" and row["text"] == 'a,"b"\nc' and math.isnan(float(row["nan"]))
    assert float(row["inf"]) == -math.inf and row["tensor"] == "0.25" and row["flag"] == "True" and row["nothing"] == ""
    assert tracker.tracker == tmp_path / "metrics.csv"


def test_L6_nested_values_and_configuration(tmp_path):
    tracker = opened(tmp_path)
    tracker.store_init_configuration({"optim": {"betas": [0.9, 0.999], "groups": [{"lr": 0.1}]}, "path": tmp_path})
    tracker.log({"loss": {"train": 1.0, "parts": [2.0, 3.0]}}, step=1)
    tracker.finish()
    assert table(tmp_path) == [{"step": "1", "loss/train": "1.0", "loss/parts/0": "2.0", "loss/parts/1": "3.0"}]
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {
        "optim": {"betas": [0.9, 0.999], "groups": [{"lr": 0.1}]}, "path": str(tmp_path)
    }


def test_later_columns_are_added_and_no_row_is_lost(tmp_path):
    tracker = opened(tmp_path)
    for step in range(5):
        tracker.log({"loss": float(step)}, step=step)
    tracker.log({"loss": 5.0, "accuracy": 0.5}, step=5)
    tracker.log({"accuracy": 0.75}, step=6)
    tracker.finish()
    rows = table(tmp_path)
    assert [row["step"] for row in rows] == list("0123456")
    assert [row["loss"] for row in rows] == ["0.0", "1.0", "2.0", "3.0", "4.0", "5.0", ""]
    assert [row["accuracy"] for row in rows] == [""] * 5 + ["0.5", "0.75"]
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv"]


def test_values_of_one_step_share_a_row(tmp_path):
    tracker = opened(tmp_path)
    tracker.log({"epoch": 0, "loss": 1.0}, step=1)
    tracker.log({"epoch": 0, "val_loss": 2.0}, step=1)
    tracker.log({"epoch": 0, "loss": 3.0}, step=2)
    tracker.log({"epoch": 0, "loss": 3.0, "val_loss": 4.0}, step=2)
    tracker.finish()
    assert [list(row.values()) for row in table(tmp_path)] == [["1", "0", "1.0", "2.0"], ["2", "0", "3.0", "4.0"]]


def test_different_values_of_one_step_are_both_kept(tmp_path):
    tracker = opened(tmp_path)
    tracker.log({"loss": 1.0}, step=1)
    tracker.log({"loss": 2.0}, step=1)
    tracker.log({"loss": 3.0})
    tracker.log({"loss": 4.0})
    tracker.finish()
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [("1", "1.0"), ("1", "2.0"), ("", "3.0"), ("", "4.0")]


def test_L3_rows_after_the_restored_step_are_dropped(tmp_path):
    first = opened(tmp_path)
    for step in range(1, 11):
        first.log({"loss": step * 1.5}, step=step)
    first.log({"val_loss": 9.0}, step=10)
    first.finish()
    second = opened(tmp_path, resume_step=6)
    for step in range(7, 12):
        second.log({"loss": step * 2.5}, step=step)
    second.finish()
    rows = table(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 12))
    assert [float(row["loss"]) for row in rows] == [step * 1.5 if step <= 6 else step * 2.5 for step in range(1, 12)]


def test_L3_what_the_restored_step_logs_again_is_not_doubled(tmp_path):
    first = opened(tmp_path)
    first.log({"loss": 1.0}, step=1)
    first.log({"loss": 22.25}, step=2)
    first.log({"val_loss": 0.123456}, step=2)
    first.log({"test_loss": 8.0}, step=2)
    first.finish()
    second = opened(tmp_path, resume_step=2)
    second.log({"val_loss": 0.5}, step=2)
    second.log({"loss": 3.0}, step=3)
    second.finish()
    assert table(tmp_path) == [
        {"step": "1", "loss": "1.0", "val_loss": "", "test_loss": ""},
        {"step": "2", "loss": "22.25", "val_loss": "0.5", "test_loss": "8.0"},
        {"step": "3", "loss": "3.0", "val_loss": "", "test_loss": ""},
    ]


def test_an_existing_file_is_continued(tmp_path):
    for step in (1, 2):
        tracker = opened(tmp_path)
        tracker.log({"loss": 0.5 * step}, step=step)
        tracker.finish()
    tracker = opened(tmp_path)
    tracker.log({"test_loss": 4.0}, step=2)
    tracker.finish()
    assert [list(row.values()) for row in table(tmp_path)] == [["1", "0.5", ""], ["2", "1.0", "4.0"]]


@pytest.mark.parametrize("torn", ["3,0.", "3", ""])
def test_a_torn_last_row_is_dropped(tmp_path, torn):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.25\n" + torn)
    tracker = opened(tmp_path)
    tracker.log({"loss": 0.125}, step=3)
    tracker.finish()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,0.5\n2,0.25\n3,0.125\n"


@pytest.mark.parametrize("content", ["", "step,lo", "step,loss\n"])
def test_an_empty_or_torn_header_is_no_obstacle(tmp_path, content):
    (tmp_path / "metrics.csv").write_text(content)
    tracker = opened(tmp_path, resume_step=4)
    tracker.log({"loss": 0.125}, step=5)
    tracker.finish()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n5,0.125\n"


def test_a_killed_process_keeps_its_rows(tmp_path):
    program = f"""
        import os, signal
        from drivetrain.callbacks.tracking.csv import CSVTracker
        tracker = CSVTracker("", {str(tmp_path)!r})
        tracker.start()
        for step in range(100):
            tracker.log({{"loss": step / 7, **({{"val": 1.0}} if step == 50 else {{}})}}, step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=240)
    assert done.returncode == -signal.SIGKILL
    rows = table(tmp_path)
    assert [float(row["loss"]) for row in rows] == [step / 7 for step in range(100)]
    assert [row["val"] for row in rows] == ["1.0" if step == 50 else "" for step in range(100)]


def test_a_full_disk_leaves_whole_rows(tmp_path):
    """A limit on the size of files stands for a full disk: part of a row is written, then the write fails."""
    tracker = opened(tmp_path)
    tracker.log({"text": "x" * 100}, step=1)
    size = (tmp_path / "metrics.csv").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
    try:
        with pytest.raises(OSError):
            tracker.log({"text": "y" * 100}, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    tracker.log({"text": "z"}, step=3)
    tracker.finish()
    assert [(row["step"], row["text"]) for row in table(tmp_path)] == [("1", "x" * 100), ("3", "z")]


def test_options_are_refused(tmp_path):
    with pytest.raises(TypeError, match="Received: walltime"):
        opened(tmp_path).log({"a": 1}, step=0, walltime=3)
