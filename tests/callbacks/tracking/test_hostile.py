"""Logs that somebody else wrote: a run that goes on reads them, and runs nothing of them. Each would leave `ran`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from drivetrain.callbacks.tracking.csv import CSVTracker
from drivetrain.callbacks.tracking.jsonl import JSONLinesTracker
from drivetrain.callbacks.tracking.tensorboard import TensorBoardTracker


class Attack:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


CONTENTS = {
    "a pickle": pickle.dumps(Attack()),
    "a pickle of text": pickle.dumps(Attack(), 0),
    "python": b"__import__('pathlib').Path('ran').touch()\n",
    "yaml": b"!!python/object/apply:os.system ['touch ran']\n",
    "a formula": b"step,loss\n1,=cmd|' /C touch ran'!A0\n",
    "no step": b"step,loss\n__import__('os').system('touch ran'),1\n",
    "depth": b"[" * 20_000 + b"\n",
    "digits": b'{"step": ' + b"9" * 5_000 + b"}\n",
    "zeros": b"\0" * 1000,
    "noise": bytes(range(256)) * 8,
    "a long field": b"step,loss\n1," + b"x" * 200_000 + b"\n",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize(
    "kind, name",
    [(CSVTracker, "metrics.csv"), (JSONLinesTracker, "metrics.jsonl"),
     (TensorBoardTracker, "events.out.tfevents.1700000000.host.1.0")],
)  # fmt: skip
def test_a_run_that_goes_on_runs_nothing_of_its_logs(tmp_path, monkeypatch, kind, name, content):
    """It goes on, or says that this is no log of its own."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", name).write_bytes(content)
    tracker = kind("run", ".")
    tracker.resume_step = 3
    try:
        tracker.start()
        tracker.log({"loss": 0.5}, step=4)
        tracker.finish()
    except Exception as error:
        assert not isinstance(error, (MemoryError, AssertionError)), error
    assert not Path("ran").exists()


@pytest.mark.parametrize("kind, name", [(CSVTracker, "metrics.csv"), (JSONLinesTracker, "metrics.jsonl")])
def test_a_link_in_the_place_of_a_log_is_not_written_through(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("precious").write_text("step,loss\n")
    Path("run", name).symlink_to(Path("precious").absolute())
    tracker = kind("run", ".", resume_step=3)
    try:
        tracker.start()
        tracker.log({"loss": 0.5}, step=4)
    except Exception as error:
        assert not isinstance(error, AssertionError), error
    tracker.finish()
    assert Path("precious").read_text() == "step,loss\n"
