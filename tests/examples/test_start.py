"""`./start`: one command from a fresh checkout. Making the environment itself is what every CI run begins with."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what `start` reads, with both environments being this one, marked as complete."""
    for name in ("start", "pyproject.toml", "constraints.txt", "constraints-xla.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    wanted = load(tmp_path / "start").wanted
    for folder, text in {".venv": wanted("examples,test"), ".venv-xla": wanted("test-xla", "constraints-xla.txt")}.items():
        python = tmp_path / folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        (tmp_path / folder / "installed.txt").write_text(text)
    return tmp_path


def load(script: Path):
    """Import `start`, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader("start", str(script))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("start", loader))
    loader.exec_module(module)
    return module


def start(checkout: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess:
    options = {"cwd": checkout, "timeout": 110, "capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, str(checkout / "start"), *arguments], stdin=subprocess.DEVNULL, **options)


def test_help_installs_nothing(tmp_path):
    shutil.copy(ROOT / "start", tmp_path / "start")
    done = start(tmp_path, "--help")
    assert done.returncode == 0 and "./start tests" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_an_environment_that_is_complete_is_used_as_it_is(checkout, tmp_path_factory):
    (checkout / "examples" / "digits.py").write_text("import os, sys; print('ran', os.getcwd(), sys.argv[1:])\n")
    done = start(checkout, cwd=tmp_path_factory.mktemp("elsewhere"))
    assert done.stdout.split("\n")[0] == f"ran {checkout} []"
    assert "Installing" not in done.stdout


def test_tests_are_handed_their_arguments_and_their_exit_code_comes_back(checkout):
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_one.py").write_text("def test_one(): assert 1 == 1\n\ndef test_two(): assert 1 == 2\n")
    failing = start(checkout, "tests", "-p", "no:randomly")
    assert failing.returncode == 1 and "1 failed, 1 passed" in failing.stdout
    passing = start(checkout, "tests", "-k", "not two")
    assert passing.returncode == 0 and "1 passed" in passing.stdout


def test_those_of_xla_are_the_marked_ones_in_their_own_folder_and_environment(checkout):
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / "tests" / "xla").mkdir(parents=True)
    (checkout / "tests" / "test_other.py").write_text("raise RuntimeError('another environment')\n")
    (checkout / "tests" / "xla" / "test_one.py").write_text(
        "import pytest\n\n@pytest.mark.xla\ndef test_one(): pass\n\ndef test_two(): assert 1 == 2\n")  # fmt: skip
    done = start(checkout, "tests-xla", "-k", "one or two")
    assert done.returncode == 0 and "1 passed, 1 deselected" in done.stdout, done.stdout
    failing = start(checkout, "tests-xla", "-m", "not xla")  # what is given last counts
    assert failing.returncode == 1 and "1 failed, 1 deselected" in failing.stdout, failing.stdout


@pytest.mark.parametrize("environment", ["tests", "tests-xla"])
def test_an_installation_that_fails_says_so_and_ends(checkout, environment):
    """pip here has no index to take anything from."""
    shutil.rmtree(checkout / ".venv")
    shutil.rmtree(checkout / ".venv-xla")
    unreachable = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = start(checkout, environment, env={**os.environ, "CI": "true", **unreachable})
    assert done.returncode == 1 and "The installation failed" in done.stderr, done.stderr
    assert not list(checkout.glob(".venv*/installed.txt"))


def test_a_change_of_the_requirements_is_noticed(checkout):
    module = load(checkout / "start")
    before = module.wanted("examples")
    (checkout / "constraints.txt").write_text("torch==2.13.0\n")
    assert module.wanted("examples") != before != module.wanted("examples,test")
    assert module.wanted("test-xla", "constraints-xla.txt") != module.wanted("test-xla")


def test_an_old_python_can_read_it():
    """Its first line of defence has to run where drivetrain does not."""
    import ast

    ast.parse((ROOT / "start").read_text(), feature_version=(3, 6))
