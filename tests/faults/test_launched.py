"""The same under real launchers: what a rank's failure, and a signal to the launcher, come to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.tests import distributed
from drivetrain.tests.faults.toy import Falling, loader, trainer

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import os, signal, sys, time, torch
from drivetrain import Callback, ModelCheckpoint, Trainer, TrainModule
from drivetrain.strategies import launch

what, bad = sys.argv[1], int(sys.argv[2])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        open(f"step-{self.trainer.global_rank}", "w").write(str(os.getpid()))
        if what == "pause":
            time.sleep(0.1)
        elif what == "restart":
            open(f"seen-{attempt}-{self.trainer.global_rank}", "a").write(f"{int(batch)}\\n")
            if attempt == "0" and batch_idx == 5 and self.trainer.global_rank == bad:
                os.kill(os.getpid(), signal.SIGKILL)
        elif batch_idx == 2 and self.trainer.global_rank != bad:
            time.sleep(1000)
        elif batch_idx == 2 and what == "raise":
            raise ValueError("a broken sample")
        elif batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Told(Callback):
    def on_exception(self, trainer, module, exception):
        open(f"told-{trainer.global_rank}", "w").write(f"{type(exception).__name__}: {exception}")


if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.arange(20.0 if what == "restart" else 2000.0))
    saves = ModelCheckpoint(every_n_train_steps=2)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=1, callbacks=[Told(), saves])
    trainer.fit(Line(), data)
"""
LAUNCH = """
import sys
from drivetrain.strategies.launch import run_script
sys.exit(run_script(sys.argv[2:], 2, max_restarts=int(sys.argv[1])))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PATIENCE = 280  # seconds for a loaded machine; a rank that nobody ends sleeps longer
LAUNCHERS = {"torchrun": TORCHRUN, "drivetrain": [sys.executable, "-c", LAUNCH, "0"]}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("launcher, what, bad", [("torchrun", "raise", 0), ("drivetrain", "kill", 1)])
def test_D2_a_rank_fails_while_the_other_sleeps(launcher, what, bad, script, tmp_path):
    done = distributed.execute([*LAUNCHERS[launcher], script, what, str(bad)], cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode != 0
    told = {path.name: path.read_text() for path in tmp_path.glob("told-*")}
    assert told[f"told-{1 - bad}"].startswith(f"PeerFailed: Expected all ranks to go on. Received: rank {bad}: ")
    if what == "raise":
        assert told[f"told-{bad}"] == "ValueError: a broken sample"
        report = {"torchrun": "Root Cause", "drivetrain": "failed first"}[launcher]  # written after all ranks have ended
        assert "ValueError: a broken sample" in done.stderr[done.stderr.rindex(report) :]
    if launcher == "drivetrain":
        end = done.stderr[done.stderr.rindex(f"Rank {bad} of 2 failed first: it ") :]
        assert ("a broken sample" in end) is (what == "raise") and ("SIGKILL" in end) is (what == "kill")


@pytest.mark.parametrize("launcher, code", [("torchrun", 1), ("drivetrain", 143)])
def test_S2_a_signal_to_the_launcher_reaches_all_ranks(launcher, code, script, tmp_path):
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*LAUNCHERS[launcher], script, "pause", "0"], cwd=tmp_path, env=variables,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    try:
        while len(list(tmp_path.glob("step-*"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, errors
    (line,) = re.findall(r"SIGTERM: training stops at step (\d+), saved in (\S+). Exit code 143.", output)
    assert sorted(path.name for path in Path(line[1]).parent.iterdir()) == [f"checkpoint-{int(line[0]):06d}"]
    assert {path.read_text() for path in tmp_path.glob("told-*")} == {"Interrupted: 143"}


def test_a_restart_goes_on_from_its_last_checkpoint_without_being_told(script, tmp_path):
    """The checkpoints of another run, which lie there too, are not its own."""
    trainer(tmp_path, max_steps=7).fit(Falling(), loader())
    command = [sys.executable, "-c", LAUNCH, "1", script, "restart", "1"]
    done = distributed.execute(command, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    seen = {path.name: [int(line) for line in path.read_text().split()] for path in tmp_path.glob("seen-*")}
    assert seen["seen-0-1"] == [1, 3, 5, 7, 9, 11]  # killed in its 6th step; the checkpoint of step 4 is there
    assert (seen["seen-1-0"], seen["seen-1-1"]) == ([8, 10, 12, 14, 16, 18], [9, 11, 13, 15, 17, 19])
    assert "The launch was started again: the run goes on from " in done.stderr
    assert [path.name for path in (tmp_path / "runs").glob("*/checkpoints/*")].count("checkpoint-000010") == 1
