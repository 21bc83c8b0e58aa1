"""Engines of DeepSpeed on two ranks against plain torch in one process: they compute the same."""

from __future__ import annotations

import pytest
import torch

from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs

pytestmark = pytest.mark.timeout(600)  # seconds on a machine of its own, minutes on a loaded one
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

    ranks = run(work, timeout=200)
    for index, (batch, steps, norm, count) in enumerate(cases):
        expected = runs.plain(2 * batch * steps, max_norm=norm, count=count)
        for found in (rank[index] for rank in ranks):
            assert runs.far(found["weights"], expected["weights"]) <= 1e-5
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            if steps == 1:
                assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def saved(rank, stage, folder, precision=None, steps=10, **options):
    """Ten steps, a checkpoint, ten more; returns weights then and at the end."""
    accelerator = runs.accelerator(stage, precision=precision, **options)
    first = runs.trained(accelerator, 4, count=8 * steps)
    model, optimizer, loader = first["prepared"]
    accelerator.save_state(folder)
    return runs.vector(accelerator.get_state_dict(model)), continued(accelerator, model, optimizer)


def continued(accelerator, model, optimizer, batch=4):
    """Ten more steps on other samples."""
    x, y = runs.data(240).tensors
    x, y = x[160:], y[160:]
    for start in range(0, 80, 8):
        part = slice(start + accelerator.process_index * batch, start + (accelerator.process_index + 1) * batch)
        accelerator.backward(F.cross_entropy(model(x[part]), y[part]))
        optimizer.step()
        optimizer.zero_grad()
    return runs.vector(accelerator.get_state_dict(model))


def loaded(rank, stage, folder, strategy=None, batch=4, precision=None, **options):
    """Fresh objects (other weights) that go on from a checkpoint."""
    accelerator = runs.accelerator(stage, strategy=strategy, precision=precision, **options)
    model = runs.mlp()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    model, optimizer, loader = accelerator.prepare(
        model, runs.adamw(model), DataLoader(runs.data(80), batch_size=4)
    )
    accelerator.load_state(folder)
    return runs.vector(accelerator.get_state_dict(model)), continued(accelerator, model, optimizer, batch)


@STAGES
def test_checkpoints_resume_bit_for_bit_and_go_to_plain_torch_and_back(stage, tmp_path):
    """Weights and moments: 2 ranks → the same; → another stage; → one process of torch; that → 2 ranks; all go on."""
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")

    def plainly(rank):
        accelerator = runs.accelerator(strategy="single")
        first = runs.trained(accelerator, 8, count=80)
        accelerator.save_state(theirs)
        return runs.vector(accelerator.get_state_dict(first["prepared"][0]))

    def by_engines(rank):
        whole = saved(rank, stage, ours)
        others = [loaded(rank, number, ours) for number in (stage, (stage + 1) % 4)]
        return whole, *others, loaded(rank, stage, theirs)

    (written,) = run(plainly, 1, timeout=200, group=False)
    for (then, end), resumed, other, back in run(by_engines, 2, timeout=200):
        assert torch.equal(resumed[0], then) and torch.equal(resumed[1], end)
        assert torch.equal(other[0], then) and runs.far(other[1], end) <= 1e-5
        assert torch.equal(back[0], written) and runs.far(back[1], end) <= 1e-5
    ((single, after),) = run(loaded, 1, 0, ours, "single", 8, timeout=200, group=False)
    assert torch.equal(single, then) and runs.far(after, end) <= 1e-5
