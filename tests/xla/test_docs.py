"""The code blocks of docs/xla.md run as they are printed."""

from __future__ import annotations

import pytest

from drivetrain.tests.docs.pages import ROOT
from drivetrain.tests.docs.test_code import ELSEWHERE, run_page


@pytest.mark.timeout(400)
def test_blocks_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert ELSEWHERE == {"xla"}
    run_page(ROOT / "docs" / "xla.md", tmp_path)
