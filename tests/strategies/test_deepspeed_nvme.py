"""Optimizer states on a disk (NVMe offload), really swapped out and in by two ranks.

The extension for it takes some nine CPU minutes to build, so it is not built for this test:
`python -m drivetrain.tests.strategies.deepspeed_runs CPUAdamBuilder AsyncIOBuilder` does that once for an environment.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not runs.is_built("CPUAdamBuilder", "AsyncIOBuilder"),
        reason="async_io is not built here: python -m drivetrain.tests.strategies.deepspeed_runs CPUAdamBuilder AsyncIOBuilder",
    ),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(runs.built("CPUAdamBuilder", "AsyncIOBuilder")))
        patch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
        yield


def wide():
    """Its middle layer's part of a rank is larger than a MiB, below which DeepSpeed swaps nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.001)


def steps(model, optimizer, backward, part):
    x, y = runs.data(64).tensors
    for a, b in list(zip(x.split(16), y.split(16))):
        backward(F.cross_entropy(model(a[part]), b[part]))
        optimizer.step()
        optimizer.zero_grad()


def test_states_on_a_disk_train_as_in_memory_and_go_into_a_checkpoint(tmp_path):
    options = dict(offload_optimizer_device="nvme", offload_optimizer_nvme_path=str(tmp_path / "disk"))
    saved = str(tmp_path / "saved")

    def work(rank):
        accelerator = runs.accelerator(3, **options)
        model = wide()
        model, optimizer = accelerator.prepare(model, adamw(model))
        steps(model, optimizer, accelerator.backward, slice(8 * rank, 8 * rank + 8))
        accelerator.save_state(saved)
        swapped = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.swp"))
        weights = runs.vector(accelerator.get_state_dict(model))
        with pytest.raises(NotImplementedError, match="swapped out to NVMe. Go on with offload_optimizer_device='cpu'"):
            accelerator.load_state(saved)
        return weights, swapped

    def alone(rank):
        accelerator = runs.accelerator(strategy="single")
        model = wide()
        model, optimizer = accelerator.prepare(model, adamw(model))
        accelerator.load_state(saved)
        steps(model, optimizer, accelerator.backward, slice(0, 16))
        return runs.vector(accelerator.get_state_dict(model))

    model = wide()
    optimizer, expected = adamw(model), []
    for _ in range(2):
        steps(model, optimizer, torch.Tensor.backward, slice(0, 16))
        expected.append(runs.vector(model.state_dict()))
    for weights, swapped in run(work, 2, timeout=900):
        assert swapped > 2 * 2**20  # the moments and the float32 weights of the middle layer's part
        assert runs.far(weights, expected[0]) <= 1e-5
    (gone_on,) = run(alone, 1, timeout=900, group=False)
    assert runs.far(gone_on, expected[1]) <= 1e-5
