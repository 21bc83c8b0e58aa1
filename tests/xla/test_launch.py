"""XLA's processes: one that torch_xla starts, one that `drivetrain launch` starts, and several, which the CPU has not.

Several processes on a real TPU are not tried here: no part of these tests replaces them.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.tests.distributed import execute
from drivetrain.tests.xla.running import run

pytestmark = pytest.mark.timeout(300)  # several interpreters import torch_xla, one after another

PROGRAM = '''
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Fit:
    """What a rank does: a short fit; it tells where that happened and what came of it."""

    def __call__(self, steps):
        from drivetrain import Trainer, TrainModule

        class Line(TrainModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Linear(2, 1)

            def training_step(self, batch, batch_idx):
                x, y = batch
                return nn.functional.mse_loss(self.net(x), y)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        x = torch.linspace(-1, 1, 32).view(16, 2)
        trainer = Trainer(strategy="auto", max_steps=steps, logger=False, enable_progress_bar=False)
        trainer.fit(Line(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
        weights = trainer.accelerator.get_state_dict(trainer.session.model)
        main = threading.current_thread() is threading.main_thread()
        return (trainer.accelerator.device.type, trainer.accelerator.num_processes, main,
                {name: value.tolist() for name, value in weights.items()})


def report(steps=3):
    print("came to:", Fit()(steps), flush=True)


def notebook():
    from drivetrain import notebook_launcher
    from drivetrain.strategies import xla_launch

    print("forked:", notebook_launcher(Fit(), (3,)), flush=True)
    print("spawned:", xla_launch.call(Fit(), 3), flush=True)
    print("here:", notebook_launcher(Fit(), (3,), num_processes=1), flush=True)


if __name__ == "__main__":
    notebook() if "notebook" in sys.argv else report()
'''


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "fits.py"
    path.write_text(PROGRAM)
    return path


def cli(*words: str, cwd: Path, **env: str):
    """Run `drivetrain …` as a shell does."""
    settings = {"HOME": str(cwd), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **env}
    return execute([sys.executable, "-m", "drivetrain", *words], cwd=cwd, env=settings, timeout=280)


def said(output: str) -> dict[str, object]:
    """Return what a program has printed as `name: value`."""
    names = ("came to", "forked", "spawned", "here")
    lines = (line.split(": ", 1) for line in output.splitlines() if line.split(":")[0] in names)
    return {name: ast.literal_eval(value) for name, value in lines}


def on_the_cpu(steps: int) -> dict[str, torch.Tensor]:
    """Return the weights that plain torch comes to."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    x = torch.linspace(-1, 1, 32).view(16, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for part in x.split(4)[:steps]:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(part), part.sum(1, keepdim=True)).backward()
        optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def assert_fitted(found, *, main: bool):
    device, processes, in_main_thread, weights = found
    assert (device, processes, in_main_thread) == ("xla", 1, main)
    expected = run(lambda: on_the_cpu(3))  # not here: a backward pass before the device would fail the forks to come
    torch.testing.assert_close({name: torch.tensor(value) for name, value in weights.items()}, expected)


def test_a_function_runs_in_the_process_that_torch_xla_starts(program):
    """torch_xla runs it beside the main thread, where signal handlers cannot be set."""
    told = {"PJRT_DEVICE": "CPU", "ACCELERATE_USE_XLA": "true"}
    done = execute([sys.executable, str(program), "notebook"], env=told, timeout=280)
    found = said(done.stdout)
    assert set(found) == {"forked", "spawned", "here"}, done.stderr
    for name, results in found.items():
        assert len(results) == 1
        assert_fitted(results[0], main=name == "here")


def test_launch_runs_a_script_on_xla(program):
    done = cli("launch", "--tpu", "--cpu", program.name, cwd=program.parent)
    assert done.returncode == 0, done.stderr
    assert_fitted(said(done.stdout)["came to"], main=True)


def test_launch_calls_a_function_of_a_script(program):
    done = cli("launch", "--tpu", "--cpu", "--main_training_function", "report", program.name, cwd=program.parent)
    assert done.returncode == 0, done.stderr
    assert_fitted(said(done.stdout)["came to"], main=True)


def test_several_processes_on_the_cpu_are_an_error_that_says_why(program):
    done = cli("launch", "--tpu", "--cpu", "--num_processes", "2", program.name, cwd=program.parent)
    assert done.returncode != 0
    assert "Expected one process for XLA on the CPU. Received: 2 processes" in done.stderr
    assert "each would train alone" in done.stderr and "xla_spmd" in done.stderr
    assert "came to" not in done.stdout


def test_several_processes_of_a_notebook_on_the_cpu_are_refused():
    def call():
        from drivetrain import notebook_launcher

        with pytest.raises(ValueError, match=r"one process for XLA on the CPU. Received: num_processes=2\."):
            notebook_launcher(print, num_processes=2)

    run(call)


def test_a_process_of_another_launcher_tells_torch_xla_its_place():
    """As far as one process goes: the device is there afterwards, and torch_xla has taken the numbers over."""

    def join():
        from dataclasses import replace

        from drivetrain.strategies import environment, xla_launch

        xla_launch.join(environment.detect())
        alone = dict(os.environ)
        xla_launch.join(replace(environment.detect(), rank=1, size=2, local_rank=1, local_size=2, launcher="torchrun"))
        names = ("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")
        return [alone.get(name) for name in names], [os.environ[name] for name in names], torch.ones(2).to("xla").sum().item()

    assert run(join) == ([None, None], ["1", "2"], 2.0)


def test_the_check_of_a_machine_passes(tmp_path):
    (tmp_path / "xla.yaml").write_text("distributed_type: XLA\nuse_cpu: true\n")
    done = cli("test", "--config_file", "xla.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Processes to check: 1" in done.stdout and "They run on xla" in done.stdout
    assert done.stdout.count("passed:") == 5 and "Everything passed." in done.stdout


def test_env_names_torch_xla():
    from drivetrain.trainer.cli.environment_report import facts

    assert facts()["torch_xla"] == "2.9.0"
