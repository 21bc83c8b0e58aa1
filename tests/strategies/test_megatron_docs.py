"""The programs of docs/megatron.md run on ranks of the CPU; launches end in the same engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drivetrain.tests.distributed import run
from drivetrain.tests.docs.pages import ROOT, blocks

pytest.importorskip("megatron.core")

from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(400)
FILES = {block.file: block.code for block in blocks(ROOT / "docs" / "megatron.md") if block.file}


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


def program(name):
    names = {"__name__": name}
    exec(compile(FILES[name], name, "exec"), names)
    return names


def test_the_trainers_program_runs():
    def work(rank):
        with OnCPU():
            quiet = {name: value for name, value in runs.QUIET.items() if name != "logger"}
            trainer = program("train.py")["main"](devices=2, **quiet)
            metrics = trainer.callback_metrics
            return trainer.global_step, float(metrics["val_loss"]), trainer.strategy.name

    found = run(work, 2, group=False, timeout=200)
    assert found[0][0] == 8 and 4.0 < found[0][1] < 5.5  # ln 128 is 4.85
    assert found[0] == found[1]


def test_the_loops_program_runs():
    def work(rank):
        with OnCPU():
            return program("loop.py")["main"](cpu=True)

    found = run(work, 2, group=False, timeout=200)
    assert 4.0 < found[0] < 5.5 and found[0] == found[1]


LAUNCHED = """
from drivetrain import Accelerator
from drivetrain.tests.strategies.megatron_cpu import OnCPU
import torch

with OnCPU():
    accelerator = Accelerator()
    plugin = accelerator.state.megatron_lm_plugin
    told = [accelerator.strategy.name, accelerator.distributed_type.value, plugin.tp_degree, plugin.pp_degree,
            plugin.num_micro_batches, plugin.sequence_parallelism, plugin.recompute_granularity, plugin.gradient_clipping,
            accelerator.strategy.rank_in("tp"), accelerator.strategy.data_world.size, accelerator.mixed_precision]
    open(f"told-{accelerator.process_index}", "w").write(" ".join(map(str, told)))
    accelerator.end_training()
"""


def test_a_launch_ends_in_the_engine_with_its_options(tmp_path):
    (tmp_path / "script.py").write_text(LAUNCHED)
    (tmp_path / "megatron.yaml").write_text(
        "{distributed_type: MEGATRON_LM, num_processes: 2, use_cpu: true, mixed_precision: bf16, megatron_lm_config: "
        "{megatron_lm_tp_degree: 2, megatron_lm_num_micro_batches: 4, megatron_lm_sequence_parallelism: true, "
        "megatron_lm_recompute_granularity: selective, megatron_lm_gradient_clipping: 0.5}}"
    )
    flags = ["--use_megatron_lm", "--num_processes", "2", "--cpu", "--mixed_precision", "bf16",
             "--megatron_lm_tp_degree", "2", "--megatron_lm_num_micro_batches", "4",
             "--megatron_lm_sequence_parallelism", "true", "--megatron_lm_recompute_granularity", "selective",
             "--megatron_lm_gradient_clipping", "0.5"]  # fmt: skip
    for arguments in (flags, ["--config_file", "megatron.yaml"]):
        command = [sys.executable, "-m", "drivetrain", "launch", *arguments, "script.py"]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path)}, capture_output=True,
                              text=True, timeout=190)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        for rank in range(2):
            told = tmp_path / f"told-{rank}"
            assert told.read_text() == f"megatron MEGATRON_LM 2 1 4 True selective 0.5 {rank} 1 bf16"
            told.unlink()
