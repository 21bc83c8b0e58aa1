"""What every test relies on: one thread a process, a current folder of its own, and the same random numbers each time."""

from __future__ import annotations

import os
import random
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; children inherit it
_LEAVE_THREADS = (
    "trainer/test_uploads.py", "tracking/test_choice.py", "tracking/test_server.py", "tracking/test_services.py"
)  # fmt: skip


def pytest_configure():
    """A suite that was started in the background or by nohup ignores signals, and so would all that it starts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    """Clients of services come last: they leave threads in this process, from which other tests fork ranks."""
    items.sort(key=lambda item: item.path.as_posix().endswith(_LEAVE_THREADS))


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
