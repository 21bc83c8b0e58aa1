"""What DeepSpeed builds in C++: its own Adam for the CPU beside torch's, and locks that a killed build leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DeepSpeedPlugin, DummyOptim, map_pytorch_optim_to_deepspeed
from drivetrain.strategies import deepspeed_builds
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs

COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is installed")
pytestmark = pytest.mark.timeout(1800)  # the first build takes minutes, more on a machine that is busy


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


@pytest.fixture(scope="module")
def cpu_adam():
    """The extension, built once for an environment; here and in the ranks the folder is named by the variable."""
    folder = runs.built("CPUAdamBuilder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        patch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
        yield folder


def fresh(**arguments):
    GradientState._reset_state()
    PartialState._reset_state()
    return Accelerator(cpu=True, **arguments)


# Locks

HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def builder(tmp_path):
    """A process that holds the lock of a build as torch does."""
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process, lock
    process.kill()
    process.wait()


def test_the_lock_of_a_killed_build_is_removed_and_that_of_a_living_one_stays(builder, tmp_path):
    process, lock = builder
    assert deepspeed_builds.clear_left_locks(tmp_path) == [] and lock.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert deepspeed_builds.clear_left_locks(tmp_path) == [lock] and not lock.exists()


def test_locks_of_other_extensions_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").touch()
    assert deepspeed_builds.clear_left_locks(tmp_path) == [] and (tmp_path / "mine" / "lock").exists()


@pytest.mark.parametrize(("kind", "age", "gone"), [("nfs4", 60, False), ("nfs4", 7200, True), ("ext4", 0, True)])
def test_on_a_shared_file_system_a_lock_has_to_be_old_with_the_kind_of_it_replaced(tmp_path, monkeypatch, kind, age, gone):
    monkeypatch.setattr(deepspeed_builds, "_kind_of_file_system", lambda path: kind)
    lock = tmp_path / "py311_cpu" / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for path in (lock, lock.parent):
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
    assert bool(deepspeed_builds.clear_left_locks(tmp_path)) == gone


def test_the_kind_of_a_file_system_is_that_of_its_innermost_mount():
    assert deepspeed_builds._kind_of_file_system(deepspeed_builds.Path("/proc/self/mounts")) == "proc"


# Adam


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)


@COMPILER
def test_offloaded_states_are_stepped_by_deepspeeds_own_adam_as_by_torchs(cpu_adam, tmp_path):
    """AdamW under stages 1 to 3, Adam (with L2) under 2; its checkpoint goes on in plain torch as here."""
    (cpu_adam / "cpu_adam" / "lock").touch()  # as a killed build leaves it: nobody waits for ever
    cases = [(1, runs.adamw), (2, runs.adamw), (3, runs.adamw), (2, adam)]

    def work(rank):
        found = []
        for number, (stage, optimizer) in enumerate(cases):
            accelerator = runs.accelerator(stage, offload_optimizer_device="cpu")
            first = runs.trained(accelerator, 4, max_norm=0.5, optimizer=optimizer)
            kind = type(first["prepared"][0].basic_optimizer).__name__
            accelerator.save_state(tmp_path / str(number))
            found.append((kind, runs.result(first)))
        return found

    for rank in run(work, 2, timeout=600):
        for (stage, optimizer), (kind, found) in zip(cases, rank):
            expected = runs.plain(8, max_norm=0.5, optimizer=optimizer)
            assert kind == "DeepSpeedCPUAdam"
            assert runs.far(found["weights"], expected["weights"]) <= 1e-5
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)

    def resumed(rank, number, strategy):
        accelerator = runs.accelerator(2, strategy=strategy) if strategy else runs.accelerator(
            cases[number][0], offload_optimizer_device="cpu")  # fmt: skip
        model = runs.mlp()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.3)
        batch = 8 if strategy else 4
        model, optimizer, loader = accelerator.prepare(
            model, cases[number][1](model), DataLoader(runs.data(40), batch_size=batch)
        )
        accelerator.load_state(tmp_path / str(number))
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return runs.vector(accelerator.get_state_dict(model))

    for number in (1, 2):
        first, second = run(resumed, 2, number, None, timeout=600)
        (alone,) = run(resumed, 1, number, "single", timeout=600, group=False)
        assert torch.equal(first, second) and runs.far(first, alone) <= 1e-5


@COMPILER
def test_the_optimizer_of_a_configuration_is_deepspeeds_own_where_states_are_offloaded(cpu_adam):
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip

    def work(rank):
        accelerator = fresh(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))
        found = runs.trained(accelerator, 4, optimizer=lambda m: DummyOptim(m.parameters(), lr=0.05, weight_decay=0.01))
        return type(found["prepared"][0].basic_optimizer).__name__, found["weights"]

    expected = runs.plain(8)["weights"]
    for kind, weights in run(work, 2, timeout=600):
        assert kind == "DeepSpeedCPUAdam" and runs.far(weights, expected) <= 1e-5


@COMPILER
def test_an_optimizer_of_torch_becomes_deepspeeds_with_its_groups_and_options(cpu_adam):
    model = runs.mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "betas": (0.5, 0.6)}]
    made = map_pytorch_optim_to_deepspeed(torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3, eps=1e-6))
    assert type(made).__name__ == "DeepSpeedCPUAdam" and made.adam_w_mode
    assert [group["lr"] for group in made.param_groups] == [0.2, 0.1]
    assert [tuple(group["betas"]) for group in made.param_groups] == [(0.9, 0.999), (0.5, 0.6)]
    assert {(group["weight_decay"], group["eps"]) for group in made.param_groups} == {(0.3, 1e-6)}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert map_pytorch_optim_to_deepspeed(sgd) is sgd
