"""A run goes on with another number of processes in the middle of an epoch: the same samples, the same weights."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, Callback, ModelCheckpoint, TrainModule
from drivetrain.strategies import random
from drivetrain.tests import distributed
from drivetrain.tests.faults.toy import trainer

SAMPLES, STEP = 40, 16  # of an epoch, and of an optimizer step on all ranks: the last step of an epoch has 8
WORLDS = [(2, 1), (1, 2), (2, 4)]


class Fitted(TrainModule):
    """A line through numbered points, by Adam; keeps the numbers that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line = torch.nn.Linear(1, 1)
        self.kept: list[list[int]] = [[], []]

    def training_step(self, batch, batch_idx):
        self.kept[self.trainer.current_epoch] += batch.int().tolist()
        return (self.line(batch[:, None] / 40) - batch[:, None].sin()).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.line.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Stop(Callback):
    """Ends training after a step, when the ModelCheckpoint has saved it."""

    priority = 1000

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.step


def fit(rank, root, size, accumulation, *, stop=99):
    """Train on ``size`` ranks with the same number of samples in a step; return what was seen, and the weights."""
    module, each = Fitted(), STEP // size // accumulation
    data = DataLoader(torch.arange(float(SAMPLES)), batch_size=each, shuffle=True)
    options = {"accumulate_grad_batches": accumulation, "max_epochs": 2, "seed": 4}
    run = trainer(root, callbacks=[ModelCheckpoint(every_n_train_steps=1), Stop(stop)], **options)
    run.fit(module, data, resume="last")
    return module.kept, [parameter.tolist() for parameter in module.line.parameters()], run.global_step


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("before, after", WORLDS)
def test_R6_every_sample_once_and_the_same_weights(before, after, accumulation, step, tmp_path):
    whole = distributed.run(fit, before, tmp_path / "whole", before, accumulation)
    first = distributed.run(lambda rank: fit(rank, tmp_path / "parts", before, accumulation, stop=step), before)
    rest = distributed.run(fit, after, tmp_path / "parts", after, accumulation)
    for epoch in (0, 1):
        seen = [number for kept, _, _ in (*first, *rest) for number in kept[epoch]]
        assert sorted(seen) == list(range(SAMPLES))
    assert [steps for _, _, steps in rest] == [6] * after and first[0][2] == step
    for one, other in zip(whole[0][1], rest[0][1]):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)


def loop(rank, root, size, *, stop=99):
    """The same by a loop of one's own; it goes on where its place says, in batches of this world size."""
    random.set_seed(4)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    data = DataLoader(torch.arange(48.0), batch_size=STEP // size, shuffle=True)  # whole steps: the raw loader fills up
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    place, seen = {"epoch": 0, "steps": 0}, [[], []]
    if (root / "saved").exists():
        place = accelerator.load_state(root / "saved")["place"]
    for epoch in range(place["epoch"], 2):
        done = place["steps"] if epoch == place["epoch"] else 0
        data.set_epoch(epoch)
        for index, batch in enumerate(accelerator.skip_first_batches(data, done), start=done):
            seen[epoch] += batch.int().tolist()
            accelerator.backward((model(batch[:, None] / 40) - batch[:, None].sin()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 0 and index + 1 == stop:
                accelerator.save_state(root / "saved", metadata={"place": {"epoch": 0, "steps": stop}})
                return seen, None
    return seen, [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("before, after", WORLDS)
def test_R6_a_loop_of_ones_own(before, after, tmp_path):
    (tmp_path / "none").mkdir()
    whole = distributed.run(loop, before, tmp_path / "none", before)
    first = distributed.run(lambda rank: loop(rank, tmp_path, before, stop=1), before)
    rest = distributed.run(loop, after, tmp_path, after)
    seen = [number for kept, _ in (*first, *rest) for number in kept[0]]
    assert sorted(seen) == list(range(48))
    for one, other in zip(whole[0][1], rest[0][1]):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)
