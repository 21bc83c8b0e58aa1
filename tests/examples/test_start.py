"""`./start`: one command from a fresh checkout. Making the environment itself is what every CI run begins with."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what `start` reads, with an environment that is this one, marked as complete."""
    for name in ("start", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / "installed.txt").write_text(load(tmp_path / "start").wanted("examples,test"))
    return tmp_path


def load(script: Path):
    """Import `start`, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader("start", str(script))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("start", loader))
    loader.exec_module(module)
    return module


def start(checkout: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(checkout / "start"), *arguments], cwd=cwd or checkout, timeout=110,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)  # fmt: skip


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


def test_a_change_of_the_requirements_is_noticed(checkout):
    module = load(checkout / "start")
    before = module.wanted("examples")
    (checkout / "constraints.txt").write_text("torch==2.13.0\n")
    assert module.wanted("examples") != before != module.wanted("examples,test")


def test_an_old_python_can_read_it():
    """Its first line of defence has to run where drivetrain does not."""
    import ast

    ast.parse((ROOT / "start").read_text(), feature_version=(3, 6))
