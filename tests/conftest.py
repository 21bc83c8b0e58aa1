"""What every test relies on: one thread a process, and a current folder of its own."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; children inherit it


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory, monkeypatch):
    """Runs, checkpoints and logs land outside the checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
