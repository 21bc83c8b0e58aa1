"""Examples are scripts: their folder is on the path when they run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in EXAMPLES.glob("*.py")} - before:
        sys.modules.pop(name, None)
