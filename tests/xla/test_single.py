"""One XLA device against plain torch on the CPU, by Accelerator and Trainer; what is compiled, run and read."""

from __future__ import annotations

import pytest
import torch
from drivetrain import Accelerator
from drivetrain.tests.xla import cases
from drivetrain.tests.xla.running import run
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_fifty_steps_equal_plain_torch(accumulate):
    found = cases.trained("xla", steps=50, accumulate=accumulate)
    assert len(found["norms"]) == -(-50 // accumulate)
    assert cases.far(found, cases.expected(steps=50, accumulate=accumulate)) <= 1e-5


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_stays_near_the_cpus(precision):
    found = cases.trained("xla", steps=30, precision=precision)
    assert cases.far(found, cases.expected(steps=30, precision=precision)) <= 5e-2
    assert found["losses"] != cases.expected(steps=30)["losses"]
    wanted = torch.float32 if precision == "bf16-mixed" else torch.bfloat16
    assert {value.dtype for value in found["weights"].values()} == {wanted}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_window_is_one_graph_that_is_compiled_once_and_nothing_is_read(accumulate):
    """Clipping, a changing rate, Adam's step counts: all of them are data of the graph."""

    def work():
        cases.started()
        seen = []
        cases.Loop("xla", steps=40, accumulate=accumulate).run(each=lambda number: seen.append(cases.counted()))
        return seen

    seen = run(work)
    first, last = seen[12], seen[36]
    assert first["compiled"] == last["compiled"] == 2  # Adam begins with zeros, which the first graph makes itself
    assert last["ran"] - first["ran"] == 24 // accumulate
    assert last["read"] == 0


@pytest.mark.parametrize("clears", [True, False])
def test_a_loop_without_prepared_loaders_runs_one_graph_a_step(clears):
    def work():
        cases.started()
        accelerator = Accelerator(strategy="xla")
        model = cases.Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        x, y = (tensor.to(accelerator.device) for tensor in cases.rows(8).tensors)
        seen = []
        for _ in range(12):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad() if clears else model.zero_grad()
            seen.append(cases.counted())
        return seen

    seen = run(work)
    assert seen[11]["compiled"] == seen[4]["compiled"]
    assert seen[11]["ran"] - seen[4]["ran"] == 7
    assert seen[11]["read"] == 0
