"""drivetrain installed for real, in every way, each into an environment of its own."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "runs", ".mypy_cache")


@dataclass(frozen=True)
class Installed:
    """An environment with drivetrain, and the checkout that it was installed from."""

    kind: str
    folder: Path
    checkout: Path

    def run(self, *command: str, cwd: Path) -> str:
        """Run a program of this environment; return what it printed."""
        program = str(self.folder / "bin" / command[0])
        return check(program, *command[1:], cwd=cwd)


def check(*command: str, cwd: Path) -> str:
    """Run a command that has to succeed; return its standard output."""
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # and nothing before it
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, env=installed)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_environment(folder: Path) -> Path:
    """Create an empty environment that sees torch and the rest of this one, but not its drivetrain.

    A folder that a .pth file adds is searched, its own .pth files (an editable drivetrain) are not read.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text("\n".join(path for path in site.getsitepackages()) + "\n")
    return folder


def install(folder: Path, *what: str) -> None:
    """Install without looking for dependencies or a build environment: nothing is downloaded."""
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    check(*pip, "--no-build-isolation", "--ignore-installed", *what, cwd=folder)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of the working tree under another name."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "my-fork", ignore=LEFT_OUT))


@pytest.fixture(scope="session")
def archives(checkout, tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("archives")
    check(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(checkout), cwd=folder)
    return folder


@pytest.fixture(scope="session", params=["wheel", "sdist", "editable"])
def installed(request, checkout, archives, tmp_path_factory) -> Installed:
    """drivetrain installed as a wheel, from an sdist, and editable."""
    folder = make_environment(tmp_path_factory.mktemp(request.param) / "environment")
    what = {
        "wheel": lambda: [str(next(archives.glob("*.whl")))],
        "sdist": lambda: [str(next(archives.glob("*.tar.gz")))],
        "editable": lambda: ["-e", str(checkout)],
    }
    install(folder, *what[request.param]())
    return Installed(request.param, folder, checkout)
