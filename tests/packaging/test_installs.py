"""drivetrain imports the same however it is installed, wherever it is used from, whatever lies beside the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import drivetrain
light = "torch" not in sys.modules
from drivetrain import callbacks, strategies, trainer
from drivetrain import Callback
from drivetrain.callbacks.base import Callback as Same
print(json.dumps([light, drivetrain.__file__, trainer.__name__, strategies.__name__, callbacks.__name__,
                  Callback is Same, Callback.__module__]))
"""
NAMES = ["drivetrain.trainer", "drivetrain.strategies", "drivetrain.callbacks", True, "drivetrain.callbacks.base"]


def where(installed, tmp_path: Path, place: str) -> Path:
    folders = {"elsewhere": tmp_path, "checkout": installed.checkout, "beside checkout": installed.checkout.parent}
    return folders[place]


@pytest.mark.parametrize("place", ["elsewhere", "checkout", "beside checkout"])
def test_imports_in_any_folder(installed, tmp_path, place):
    light, file, *names = json.loads(installed.run("python", "-c", SCRIPT, cwd=where(installed, tmp_path, place)))
    assert light
    assert names == NAMES
    assert (Path(file).parent == installed.checkout) == (installed.kind == "editable")


def test_a_users_own_files_do_not_collide(installed, tmp_path):
    for name in ("trainer", "callbacks", "strategies"):
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    (tmp_path / "train.py").write_text(
        "import trainer, callbacks, strategies\n"
        "assert [trainer.MINE, callbacks.MINE, strategies.MINE] == ['trainer', 'callbacks', 'strategies']\n"
        "from drivetrain import Trainer, Accelerator, EarlyStopping\n"
        "import drivetrain.trainer, drivetrain.callbacks, drivetrain.strategies\n"
        "assert trainer is not drivetrain.trainer and not hasattr(drivetrain.trainer, 'MINE')\n"
        "print(Trainer.__module__, Accelerator.__module__)\n"
    )
    out = installed.run("python", "train.py", cwd=tmp_path)
    assert out.split() == ["drivetrain.trainer.trainer", "drivetrain.trainer.accelerator"]


@pytest.mark.parametrize("command", [["drivetrain"], ["python", "-m", "drivetrain"]], ids=["script", "module"])
def test_the_command_is_there(installed, tmp_path, command):
    assert "fit" in installed.run(*command, "--help", cwd=tmp_path)


def test_a_checkout_named_like_the_package(tmp_path, checkout, archives):
    """Beside a folder called drivetrain, Python takes that folder: it is the package too."""
    from_checkout = tmp_path / "drivetrain"
    from_checkout.symlink_to(checkout)
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-S", "-c", "import drivetrain; print(drivetrain.__file__)"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == str(from_checkout / "__init__.py")
