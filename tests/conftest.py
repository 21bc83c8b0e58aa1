"""What every test relies on: one thread a process, a current folder of its own, and the same random numbers each time."""

from __future__ import annotations

import os
import random

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; children inherit it


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory, monkeypatch):
    """Runs, checkpoints and logs land outside the checkout."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


@pytest.fixture(autouse=True)
def _own_random_numbers():
    """What a test draws depends on no other test, and on no chance."""
    import numpy
    import torch

    torch.default_generator.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
