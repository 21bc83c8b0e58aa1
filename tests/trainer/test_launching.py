"""Trainer(devices=2) in a plain script: started again, or in spawned processes; and as many as a launcher started."""

from __future__ import annotations

import sys

import pytest
from drivetrain.tests.distributed import execute, torchrun

pytestmark = pytest.mark.timeout(300)  # processes that import everything anew take long on a machine that is busy

SCRIPT = """
import sys
from pathlib import Path
from drivetrain import Trainer
from drivetrain.tests.loop.models import Line, loader

if __name__ == "__main__":
    told = Path(__file__).parent / "told"  # a file for each process: what several print to one stream mixes
    told.mkdir(exist_ok=True)
    try:
        trainer = Trainer(accelerator="cpu", max_epochs=1, logger="csv", enable_progress_bar=False, {options})
    except ValueError as error:
        Path(told / f"error-{{__import__('os').environ['RANK']}}").write_text(str(error))
        raise
    module = Line()
    trainer.fit(module, loader(16))
    (told / str(trainer.global_rank)).write_text(
        f"{{trainer.world_size}}: {{trainer.global_step}} steps, {{len(module.seen)}} seen, "
        f"arguments {{sys.argv[1:]}}, {{trainer.run_id}}")
"""


def script(tmp_path, options):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(options=options))
    return path


def told(tmp_path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tmp_path / "told").iterdir()}


def test_a_script_is_started_again_with_its_arguments(tmp_path):
    done = execute([sys.executable, str(script(tmp_path, "devices=2")), "--word", "a b"], cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == dict.fromkeys("01", "2: 4 steps, 4 seen, arguments ['--word', 'a b'], run-0001")
    assert len((tmp_path / "runs" / "run-0001" / "metrics.csv").read_text().splitlines()) == 2


def test_spawned_processes_bring_back_their_results(tmp_path):
    done = execute([sys.executable, str(script(tmp_path, "devices=2, strategy='ddp_spawn', profiler='simple'"))], cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == {"0": "2: 4 steps, 0 seen, arguments [], run-0001"}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_prompt_can_look_at_a_trainer_and_fit_again(tmp_path, strategy):
    lines = [
        "from drivetrain import Trainer, notebook_launcher",
        "from drivetrain.tests.loop.models import Line, loader",
        "options = dict(accelerator='cpu', max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False)",
        f"trainer = Trainer(devices=2, strategy={strategy!r}, **options)",
        "print('before', trainer.is_global_zero, trainer.device)",
        "trainer.fit(Line(), loader(16))",
        "print('between', trainer.global_step, trainer.global_rank)",
        "trainer.fit(Line(), loader(8))",
        "print('after', trainer.global_step, notebook_launcher(int, num_processes=2))",
    ]
    done = execute([sys.executable, "-i", "-c", "\n".join(["import sys", "sys.ps1 = '>'", *lines, "sys.exit()"])], cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["before True cpu", "between 4 0", "after 2 [0, 0]"], done.stdout + done.stderr


@pytest.mark.parametrize(("options", "code"), [("strategy='auto'", 0), ("devices=2", 0), ("devices=3", 1)])
def test_under_torchrun_the_launched_processes_count(tmp_path, options, code):
    done = torchrun(script(tmp_path, options), timeout=240)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert told(tmp_path)["1"].startswith("2: 4 steps")
    else:
        assert any("devices × num_nodes = 3, and 2 processes started by torchrun" in text for text in told(tmp_path).values())
