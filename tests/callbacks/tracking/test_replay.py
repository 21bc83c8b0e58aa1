"""Replaying, by a command and by a call, what trackers did not take."""

from __future__ import annotations

import json

import pytest

from drivetrain.callbacks.tracking.journal import Entry, Journal
from drivetrain.callbacks.tracking.jsonl import JSONLinesTracker
from drivetrain.callbacks.tracking.replay import Replayed, journals_of, replay
from drivetrain.trainer.cli.main import main


def journal(folder, *calls, name="jsonl", **said):
    """Write the journal of a run's JSON Lines tracker."""
    header = {"name": name, "place": ["", str(folder)], "options": {}, "run_id": None, "title": None, **said}
    made = Journal(folder / f"journal-{name}.jsonl", header=lambda: header)
    for number, (call, values, step) in enumerate(calls):
        made.append(Entry(call, values, step, {}, float(number)).line())
    made.close()
    return made.path


ROWS = [("store_init_configuration", {"a": 1}, None), ("log", {"x": 0.5}, 1), ("log", {"x": 1.5}, 2)]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("status, last", [
    ({"status": "finished"}, None), ({"status": "failed", "error": "ValueError: no"}, {"error": "ValueError: no"}),
    ({"status": "preempted", "error": "stopped by SIGTERM"}, {"error": "stopped by SIGTERM"}),
    ({"status": "running"}, {"error": "the process ended without a word"}),
])  # fmt: skip
def test_a_folder_is_replayed_and_the_run_ended_as_it_did(tmp_path, capsys, status, last):
    folder = tmp_path / "runs" / "run-0001"
    folder.mkdir(parents=True)
    path = journal(folder, *ROWS)
    (folder / "status.json").write_text(json.dumps(status))
    assert main(["replay", "--list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{path}: jsonl took 3 entries, 0 are left.\n" and not path.exists()
    written = lines(folder)
    assert written[0] == {"config": {"a": 1}} and [(row["step"], row["time"]) for row in written[1:3]] == [(1, 1.0), (2, 2.0)]
    assert written[3:] == ([last] if last else [])
    assert main(["replay", str(tmp_path)]) == 0 and capsys.readouterr().out == f"{tmp_path}: nothing to replay\n"


def test_parts_that_a_killed_process_left_are_replayed_too(tmp_path):
    path = journal(tmp_path, *ROWS)
    path.rename(tmp_path / "journal-jsonl.pending.jsonl")
    assert journals_of(tmp_path) == [path]
    assert replay(path) == Replayed("jsonl", 3, 0, "") and list(tmp_path.glob("journal*")) == []


def test_what_is_refused_stays(tmp_path, capsys):
    path = journal(tmp_path, ("log", {"x": 0.5}, 1), ("log_audio", [{"a": [0.0]}], None), ("log", {"x": 1.5}, 2))
    assert main(["replay", str(path)]) == 1
    assert "jsonl took 2 entries, 1 are left. It raised in log_audio: AttributeError" in capsys.readouterr().out
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]


def test_a_tracker_of_the_programs_own_is_given(tmp_path, capsys):
    path = tmp_path / "journal-mine.jsonl"
    Journal(path, header=lambda: {"name": "mine"}).append(Entry("log", {"x": 0.5}, 1, {}, 0.0).line())
    assert main(["replay", str(path)]) == 1
    assert "of an object of the program, 'mine'. Make it, and call" in capsys.readouterr().err
    assert replay(path, JSONLinesTracker("", tmp_path)).taken == 1


def test_a_journal_calls_nothing_but_a_trackers_calls(tmp_path):
    calls = [("start", [], None), ("_write", [{"error": "mine"}], None), ("__class__", [], None)]
    path = journal(tmp_path, *calls)
    done = replay(path)
    assert (done.taken, done.left) == (0, 3) and "Expected a call of a tracker. Received: 'start'" in done.problem
    assert lines(tmp_path) == []
