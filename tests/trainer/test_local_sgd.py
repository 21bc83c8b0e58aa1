"""Local SGD: weights of the ranks, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Accelerator, LocalSGD
from drivetrain.tests.distributed import run


def train(local_sgd_steps, batches, *, enabled=True, accumulated=1):
    """w starts at 0; rank r's gradient is -(r + 1) in every micro-batch, the rate 1: apart it grows by r + 1 a step."""

    def rank(rank):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        seen = []
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=local_sgd_steps, enabled=enabled) as local:
            for _ in range(batches):
                with accelerator.accumulate(model):
                    accelerator.backward(-model(torch.full((1, 1), rank + 1.0)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
                seen.append(accelerator.unwrap_model(model).weight.item())
        return seen, accelerator.unwrap_model(model).weight.item()

    return run(rank, 2)


def test_weights_are_averaged_every_few_steps():
    first, second = train(2, 3)
    assert first == ([1.0, 3.0, 4.0], 4.5)  # 2 and 4 become 3; then 4 and 5, at the end 4.5
    assert second == ([2.0, 3.0, 5.0], 4.5)


def test_steps_are_the_optimizers():
    first, second = train(1, 4, accumulated=2)  # a window's gradient is the mean of its micro-batches
    assert first == ([0.0, 1.5, 1.5, 3.0], 3.0) and second == first


def test_disabled_it_is_not_there():
    first, second = train(2, 2, enabled=False)
    assert first == second == ([1.5, 3.0], 3.0)


def test_one_process_and_wrong_steps():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with LocalSGD(accelerator, model, 1) as local:
        local.step()
    assert not local.enabled
    with pytest.raises(ValueError, match="local_sgd_steps=0"):
        LocalSGD(accelerator, model, 0)


def test_sharded_weights_are_refused():
    def rank(rank):
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        with pytest.raises(NotImplementedError, match="a copy of the model on every process. Received: strategy 'fsdp'"):
            LocalSGD(accelerator, accelerator.prepare(torch.nn.Linear(1, 1)), 2)

    run(rank, 2)
