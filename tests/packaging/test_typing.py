"""Editors and type checkers see the lazy names, with their types, in an installed drivetrain."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

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
                          capture_output=True, text=True, timeout=110)  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [name.removeprefix("script.") for name in revealed[:4]] == ["Net", "Step", "Loader", "Net"], done.stdout
    assert "drivetrain.trainer.trainer.Trainer" in revealed[4]
    assert revealed[5].startswith("def (self: drivetrain.trainer.module.TrainModule, name: ")
    assert revealed[6].endswith("int"), done.stdout
    assert re.search(r'Unexpected keyword argument "max_epoch" for "Trainer"', done.stdout)
    assert done.stdout.count("error:") == 1, done.stdout
