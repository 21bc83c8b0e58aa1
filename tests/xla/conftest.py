"""The tests of the XLA engine: they need torch_xla, which needs a torch of its own version, so an environment of its own.

`./start tests-xla` makes that environment and runs them; elsewhere they are skipped. No file here may import torch_xla
when it is imported itself: only inside of tests, or in what they run (see `running`).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark what lies in this folder, and skip it where torch_xla is missing."""
    missing = find_spec("torch_xla") is None
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.xla)
        if missing:
            item.add_marker(pytest.mark.skip(reason="needs torch_xla and its own torch: run ./start tests-xla"))
