"""Trainer(devices=2) in a plain script: started again, or in spawned processes; and as many as a launcher started."""

from __future__ import annotations

import sys

import pytest
from drivetrain.tests.distributed import execute, torchrun

SCRIPT = """
import sys
from drivetrain import Trainer
from drivetrain.tests.loop.models import Line, loader

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger="csv", enable_progress_bar=False, {options})
    module = Line()
    trainer.fit(module, loader(16))
    print(f"rank {{trainer.global_rank}} of {{trainer.world_size}}: {{trainer.global_step}} steps, {{len(module.seen)}} seen, "
          f"arguments {{sys.argv[1:]}}, {{trainer.run_id}}\\n", end="", flush=True)
"""


def script(tmp_path, options):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(options=options))
    return path


def test_a_script_is_started_again_with_its_arguments(tmp_path):
    done = execute([sys.executable, str(script(tmp_path, "devices=2")), "--word", "a b"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2: 4 steps, 4 seen, arguments ['--word', 'a b'], run-0001" in done.stdout
    assert done.stdout.count("steps") == 2
    assert len((tmp_path / "runs" / "run-0001" / "metrics.csv").read_text().splitlines()) == 2


def test_spawned_processes_bring_back_their_results(tmp_path):
    done = execute([sys.executable, str(script(tmp_path, "devices=2, strategy='ddp_spawn', profiler='simple'"))], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1: 4 steps, 0 seen, arguments [], run-0001" in done.stdout


@pytest.mark.parametrize(("options", "code"), [("strategy='auto'", 0), ("devices=2", 0), ("devices=3", 1)])
def test_under_torchrun_the_launched_processes_count(tmp_path, options, code):
    done = torchrun(script(tmp_path, options))
    assert done.returncode == code, done.stderr
    if code == 0:
        assert "rank 1 of 2: 4 steps" in done.stdout
    else:
        assert "devices × num_nodes = 3, and 2 processes started by torchrun" in done.stderr
