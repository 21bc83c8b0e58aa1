"""Editors and type checkers see the lazy names, with their types, in an installed drivetrain."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from drivetrain.tests.architecture.source import ROOT

SCRIPT = """
from drivetrain import Accelerator, Callback, Trainer, TrainModule

class Net: ...
class Loader: ...
class Step: ...

accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(Net(), Step(), Loader())
reveal_type(model)
reveal_type(optimizer)
reveal_type(loader)
reveal_type(accelerator.prepare(Net()))
reveal_type(Trainer)
reveal_type(TrainModule.log)

class Mine(Callback):
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        reveal_type(trainer.global_step)

Trainer(max_epoch=3)
"""
CONFIG = """
[mypy]
cache_dir = cache
[mypy-torch.*,torchmetrics.*,numpy.*,yaml.*,tqdm.*,safetensors.*,jsonargparse.*,xxhash.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.mark.parametrize("installed", ["wheel"], indirect=True)
def test_names_have_their_types(installed, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    python = str(installed.folder / "bin" / "python")
    done = subprocess.run([sys.executable, "-m", "mypy", "--python-executable", python, "script.py"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [name.removeprefix("script.") for name in revealed[:4]] == ["Net", "Step", "Loader", "Net"], done.stdout
    assert "drivetrain.trainer.trainer.Trainer" in revealed[4]
    assert revealed[5].startswith("def (self: drivetrain.trainer.module.TrainModule, name: ")
    assert revealed[6].endswith("int"), done.stdout
    assert re.search(r'Unexpected keyword argument "max_epoch" for "Trainer"', done.stdout)
    assert done.stdout.count("error:") == 1, done.stdout


INTERFACE = [
    "trainer/accelerator.py", "trainer/expected.py", "trainer/local_sgd.py", "trainer/standing.py",
    "trainer/cli/basic_config.py",
    *(f"strategies/{name}.py" for name in (
        "agreement", "availability", "collectives", "empty_weights", "file_names", "float8", "fp8_recipes", "gradients",
        "memory", "messages", "nested", "optimizer", "ports", "refusals", "scheduler", "settings", "sizes", "state",
        "torch_files", "variables", "weights", "wrappers",
    )),
    *(f"strategies/data/{name}.py" for name in ("dispatcher", "preparing", "shards")),
]  # fmt: skip
STRICT = """
[mypy]
cache_dir = cache
strict = true
follow_imports = silent
disallow_untyped_calls = false
disallow_subclassing_any = false
disallow_untyped_decorators = false
warn_unused_ignores = false
warn_return_any = false
[mypy-torch.*,torchmetrics.*,numpy.*,yaml.*,tqdm.*,safetensors.*,jsonargparse.*,xxhash.*,packaging.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-bitsandbytes.*,habana_frameworks.*,torch_xla.*,torchao.*]
ignore_missing_imports = true
"""


def test_the_accelerators_interface_is_strict(tmp_path):
    """Torch is left out, which would take a minute; what is typed by its classes is Any here."""
    (tmp_path / "mypy.ini").write_text(STRICT)
    (tmp_path / "drivetrain").symlink_to(ROOT)
    files = [f"drivetrain/{name}" for name in INTERFACE]
    done = subprocess.run([sys.executable, "-m", "mypy", *files], cwd=tmp_path, capture_output=True, text=True,
                          timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout


USES = """
from drivetrain import Accelerator, LocalSGD, find_executable_batch_size, gather, get_logger, prepare_data_loader

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
reveal_type(accelerator.num_processes)
reveal_type(accelerator.is_main_process)
reveal_type(accelerator.save_state("folder"))
reveal_type(accelerator.check_trigger())
reveal_type(get_logger(__name__))
with accelerator.accumulate(), accelerator.autocast(), accelerator.main_process_first():
    pass
accelerator.gather_for_metrics([1], use_gather_objects=True)
Accelerator(mixed_precission="bf16")
"""


def test_scripts_are_checked(tmp_path):
    (tmp_path / "script.py").write_text(USES)
    (tmp_path / "mypy.ini").write_text(STRICT)
    (tmp_path / "drivetrain").symlink_to(ROOT)
    done = subprocess.run([sys.executable, "-m", "mypy", "script.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=240)  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [name.removeprefix("builtins.") for name in revealed[:4]] == ["int", "bool", "str", "bool"], done.stdout
    assert revealed[4].endswith("messages.MultiProcessAdapter")
    errors = re.findall(r"error: (.*)  \[", done.stdout)
    assert len(errors) == 2 and "use_gather_objects" in errors[0] and "mixed_precission" in errors[1], done.stdout
