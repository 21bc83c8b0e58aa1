"""`drivetrain launch --use_deepspeed`, with really started processes: by torchrun's agent and by DeepSpeed's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from drivetrain.tests.distributed import execute, free_port
from drivetrain.tests.strategies import deepspeed_runs as runs

pytestmark = pytest.mark.timeout(900)  # processes that import everything anew take long on a machine that is busy
SCRIPT = """
import torch
from drivetrain import Accelerator
from drivetrain.tests.strategies import deepspeed_runs as runs

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    weights = runs.trained(accelerator, 4)["weights"]
    plugin = accelerator.deepspeed_plugin
    torch.save([weights, plugin.zero_stage, accelerator.num_processes], f"rank-{accelerator.process_index}.pt")
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    runs.written(tmp_path / "ds.json", {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2})
    return tmp_path


def launch(*words):
    return [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--use_deepspeed", "--num_processes", "2", *words]


def check(place, output):
    expected = runs.plain(16)["weights"]  # windows of 2 × 2 ranks × 4 samples, as the file says
    found = [torch.load(place / f"rank-{rank}.pt") for rank in range(2)] if (place / "rank-1.pt").exists() else []
    assert len(found) == 2, output
    for weights, stage, size in found:
        assert (stage, size) == (1, 2) and runs.far(weights, expected) <= 1e-5


def test_a_script_that_names_no_engine_follows_deepspeeds_file(place):
    done = execute(launch("--deepspeed_config_file", "ds.json", "train.py"), cwd=place, timeout=600)
    assert done.returncode == 0, done.stderr
    check(place, done.stderr)


def test_a_launch_file_says_the_same(place):
    settings = {"distributed_type": "DEEPSPEED", "use_cpu": True, "num_processes": 2,
                "deepspeed_config": {"deepspeed_config_file": "ds.json"}}  # fmt: skip
    (place / "launch.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "drivetrain", "launch", "--config_file", "launch.yaml", "train.py"]
    done = execute(command, cwd=place, timeout=600)
    assert done.returncode == 0, done.stderr
    check(place, done.stderr)


def test_deepspeeds_own_launcher_starts_both_hosts_of_a_hostfile_where_both_are_this_machine(place):
    """Without ssh each host is started by itself (`nossh`), as a cluster's scheduler would do it."""
    (place / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    port = str(free_port())
    words = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port, "--deepspeed_hostfile",
             "hosts", "--deepspeed_multinode_launcher", "nossh", "--deepspeed_config_file", "ds.json"]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
               "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}  # fmt: skip
    hosts = [
        subprocess.Popen(launch(*words, "--machine_rank", str(rank), "train.py"), cwd=place, env=environ, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [host.communicate(timeout=600)[0] for host in hosts]
    finally:
        for host in hosts:
            if host.poll() is None:
                os.killpg(host.pid, 9)
    assert [host.returncode for host in hosts] == [0, 0], outputs
    check(place, outputs)
