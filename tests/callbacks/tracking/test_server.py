"""MLflow behind a real server of this machine that dies, hangs and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from drivetrain.callbacks.tracking import journal
from drivetrain.callbacks.tracking.trackers import finish_trackers, start_trackers
from drivetrain.tests.callbacks.tracking.test_feed import of_trackers
from drivetrain.tests.distributed import free_port
from drivetrain.trainer.cli.main import main


class Server:
    """`mlflow server` in a session of its own, so that all its processes get a signal together."""

    def __init__(self, folder, database):
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        shutil.copy(database, folder / "mlflow.db")

    def start(self):
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
            "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.wait()

    def wait(self):
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text())

    def send(self, number):
        os.killpg(self.process.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory, database):
    made = Server(tmp_path_factory.mktemp("server"), database)
    made.start()
    yield made
    made.send(signal.SIGCONT)
    made.kill()


def run_of(server, folder, **options):
    """Return a started tracker of a run in `folder`."""
    kwargs = {"mlflow": {"tracking_uri": server.uri}}
    return start_trackers("mlflow", "project", {"a": {"b": 1}}, run_dir=folder, init_kwargs=kwargs, **options)


def log(trackers, steps):
    for step in steps:
        trackers[0].log({"loss": step / 8}, step=step)


def points(server, tracker):
    from mlflow import MlflowClient

    return [(m.step, m.value) for m in MlflowClient(tracking_uri=server.uri).get_metric_history(tracker.run_id, "loss")]


def until(condition, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def expected(last):
    return [(step, step / 8) for step in range(1, last + 1)]


@pytest.mark.timeout(600)
def test_L6_L7_a_server_that_hangs_dies_and_comes_back_has_every_row_once(server, tmp_path):
    from mlflow import MlflowClient

    trackers = run_of(server, tmp_path, timeout=100)
    tracker = trackers[0].wrapped
    log(trackers, range(1, 101))
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    trackers[0].log_artifact(notes)  # a pathlib.Path
    trackers[0].flush(100)
    assert points(server, tracker) == expected(100)
    client = MlflowClient(tracking_uri=server.uri)
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["config.json", "notes.txt"]

    server.send(signal.SIGSTOP)
    log(trackers, range(101, 151))
    trackers[0].flush(0.2)  # a checkpoint: what the server has not got is on disk
    pending = tmp_path / "journal-mlflow.pending.jsonl"
    assert [entry.step for entry in journal.read(pending)] == list(range(101, 151))
    server.send(signal.SIGCONT)
    assert until(lambda: len(points(server, tracker)) == 150)

    server.kill()
    with pytest.warns(RuntimeWarning, match="Tracker 'mlflow': It raised in log: .*The run goes on") as caught:
        log(trackers, range(151, 201))
        assert until(trackers[0].journal.exists)
    assert len(of_trackers(caught)) == 1
    server.start()
    assert until(lambda: len(points(server, tracker)) == 200) and until(lambda: not trackers[0].journal.exists())

    server.send(signal.SIGSTOP)
    log(trackers, range(201, 221))
    trackers[0].timeout = 0.5
    finish_trackers(trackers)  # nobody waits for it any longer
    assert {entry.step for entry in journal.read(trackers[0].journal)} == set(range(201, 221))
    server.send(signal.SIGCONT)
    server.wait()
    trackers[0]._thread.join(100)  # whatever was under way comes to its end
    assert main(["replay", str(tmp_path)]) == 0
    assert points(server, tracker) == expected(220) and list(tmp_path.glob("journal*")) == []
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and run.data.params == {"a/b": "1"}


@pytest.mark.timeout(600)
def test_L6_a_server_that_was_never_there_gets_the_run_afterwards(server, tmp_path, capsys):
    """The port refuses connections during the run; the journal alone then makes the run."""
    away = Server.__new__(Server)
    away.uri = f"http://127.0.0.1:{free_port()}"
    with pytest.warns(RuntimeWarning, match="Tracker 'mlflow': It raised in start") as caught:
        trackers = run_of(away, tmp_path, timeout=60, title="run-0001")
        log(trackers, range(1, 21))
        trackers[0].fail("ValueError: no")
        finish_trackers(trackers)
    assert len(of_trackers(caught)) == 1
    assert main(["replay", str(tmp_path)]) == 1  # still nobody there
    path = trackers[0].journal
    path.write_text(path.read_text().replace(away.uri, server.uri))  # the server has another port now
    assert main(["replay", str(tmp_path)]) == 0
    assert "mlflow took 22 entries, 0 are left" in capsys.readouterr().out

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id], "attributes.status = 'FAILED'")
    assert run.info.run_name == "run-0001" and run.data.tags["error"] == "ValueError: no"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == expected(20)
