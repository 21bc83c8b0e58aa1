"""`drivetrain report` and `drivetrain runs`."""

from __future__ import annotations

import json

import pytest

from drivetrain.trainer.cli.main import main


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, loss in (("run-0001", 3.0), ("run-0002", 2.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(f"step,epoch,val_loss\n1,0,9\n7,1,{loss}\n")
        (folder / "status.json").write_text('{"status": "finished"}')
    return tmp_path


def test_runs_are_listed(place, capsys):
    assert main(["runs"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "status", "steps", "time", "started", "val_loss"]
    assert first.split() == ["run-0001", "finished", "7", "3"] and second.split()[-1] == "2"
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["val_loss"] == "2"


def test_a_run_is_shown(place, capsys):
    assert main(["runs", "show", "run-0002"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run-0002: finished, 7 steps\n") and "val_loss: 2 at step 7" in out and "9 ┤" in out
    assert main(["runs", "show", "run-0002", "--metric", "acc"]) == 2
    assert "metrics of run-0002: val_loss. Received: acc" in capsys.readouterr().err
    assert main(["runs", "show", "."]) == 2
    assert "holds 2" in capsys.readouterr().err


def test_a_report_of_one_and_of_several(place, capsys):
    assert main(["report", "run-0001"]) == 0
    assert capsys.readouterr().out.strip() == "runs/run-0001/report.html"
    assert main(["report", "runs/run-0001", "run-0002", "-o", "new/both.html"]) == 0
    assert "run-0001, run-0002" in (place / "new" / "both.html").read_text()
    assert main(["report", "nowhere"]) == 2
    assert "Received: 'nowhere'" in capsys.readouterr().err
