"""Engines of DeepSpeed on two ranks against plain torch in one process: they compute the same."""

from __future__ import annotations

import pytest
import torch

from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


@STAGES
def test_parity_with_one_process_in_losses_norms_and_weights(stage):
    """Fifty steps; and with micro-batches, clipping, and both, twenty."""
    cases = [(4, 1, None, 400), (4, 1, 0.5, 160), (2, 2, None, 160), (2, 2, 0.5, 160)]

    def work(rank):
        return [
            runs.result(runs.trained(runs.accelerator(stage, steps=steps), batch, max_norm=norm, count=count))
            for batch, steps, norm, count in cases
        ]

    ranks = run(work, timeout=100)
    for index, (batch, steps, norm, count) in enumerate(cases):
        expected = runs.plain(2 * batch * steps, max_norm=norm, count=count)
        for found in (rank[index] for rank in ranks):
            assert runs.far(found["weights"], expected["weights"]) <= 1e-5
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            if steps == 1:
                assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
