"""prove_resume: a sound run passes; what hides state is named."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, Trainer, TrainModule, prove_loop, prove_resume
from drivetrain.strategies import random as randomness
from drivetrain.tests.faults.runs import Duel, Flow, Net, Noisy, Still, Watched
from drivetrain.tests.loop.models import Line, Numbers, quiet
from drivetrain.trainer.cli.main import main


class Drift(torch.nn.Module):
    """Adds a number that grows with each call, which no state_dict knows."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.buffered = buffer
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls / 100


class Drifting(Line):
    """A line with a module that drifts."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.noise = Drift(buffer)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.noise(self.layer(batch / 10)).square().mean()


class Forgetful(Line):
    """Counts its steps in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.done += 1
        return super().training_step(batch, batch_idx) * self.done


class Remembering(Forgetful):
    """The same, and it says so to the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["done"] = self.done

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.done = checkpoint["done"]


class Counting(Numbers):
    """Data whose samples depend on how many were fetched before."""

    fetched = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        Counting.fetched += 1
        return super().__getitem__(index) + Counting.fetched


class OwnGenerator(Line):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch + torch.rand(1, generator=self.own), batch_idx)


class Smoothing(torch.optim.SGD):
    """An optimizer with a number that is not in its state."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.param_groups[0]["params"][0].data.add_(self.steps / 100)
        return super().step(closure)


class Smoothed(Line):
    """A line with such an optimizer."""

    def configure_optimizers(self):
        return Smoothing(self.parameters(), lr=0.01)


def maker(module, data=lambda: Numbers(14), **options):
    """Return what builds a run of a module."""

    def make() -> tuple[Trainer, dict]:
        source = data()
        shuffle = None if isinstance(source, Flow) else True
        loader = DataLoader(source, batch_size=3, shuffle=shuffle, num_workers=options.pop("workers", 0))
        trainer = quiet(max_epochs=9, seed=3, **options)
        return trainer, {"model": module(), "train_dataloaders": loader, "val_dataloaders": DataLoader(Still(4), 2)}

    return make


@pytest.mark.parametrize("data", [Noisy, Flow])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 3}])
def test_a_sound_run_passes(data, options):
    proof = prove_resume(maker(Net, data, num_sanity_val_steps=1, **options), steps=9)
    assert proof and "is the same" in str(proof), proof
    assert (proof.steps, proof.interrupted_at) == (9, 4) and proof.compared > 60
    assert not list(Path().iterdir())


def test_a_sound_run_passes_with_workers_a_plateau_and_a_hook():
    assert prove_resume(maker(Watched, Noisy, workers=2), steps=30, interrupt_at=16)
    assert prove_resume(maker(Remembering), steps=8)
    assert prove_resume(maker(lambda: Drifting(buffer=True)), steps=8)


def test_a_module_that_hides_state_is_named():
    proof = prove_resume(maker(Drifting), steps=8)
    assert not proof
    assert "epoch 0, batch 4 (after step 4): the output of noise (Drift)." in str(proof), proof
    assert "noise.calls: 4 → 0" in str(proof)


def test_a_training_module_that_hides_state_is_named():
    proof = prove_resume(maker(Forgetful), steps=8)
    assert "what training_step of Forgetful returned" in str(proof) and "Forgetful.done: 4 → 0" in str(proof), proof


@pytest.mark.parametrize(
    ("module", "data", "named"),
    [
        (Line, lambda: Counting(14), "the samples of the batch"),
        (OwnGenerator, lambda: Numbers(14), "what layer (Linear) was given"),
        (Smoothed, lambda: Numbers(14), "the weight layer.weight"),
    ],
)
def test_other_hidden_state_is_named(module, data, named):
    proof = prove_resume(maker(module, data), steps=8)
    assert not proof and named in str(proof), proof


def test_a_random_state_that_is_not_restored_is_named():
    class Careless(Line):
        def on_train_start(self):
            random.seed()
            torch.manual_seed(random.randrange(10**9))

    assert "the random state of torch" in str(prove_resume(maker(Careless), steps=8))


def test_errors_are_told():
    class Broken(Line):
        def training_step(self, batch, batch_idx):
            raise KeyError("broken here")

    with pytest.raises(RuntimeError, match="broken here"):
        prove_resume(maker(Broken), steps=4)
    with pytest.raises(ValueError, match="at least 2 steps"):
        prove_resume(maker(Line), steps=1)
    with pytest.raises(ValueError, match="ends after 2"):
        prove_resume(maker(Line, max_steps=2), steps=9, interrupt_at=5)


# Several processes


class OneForgets(Forgetful):
    """Only its second rank counts its steps in an attribute."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.done += self.trainer.global_rank
        return Line.training_step(self, batch, batch_idx) * max(self.done, 1)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_two_processes_are_what_the_trainer_says(options):
    proof = prove_resume(maker(Net, Noisy, devices=2, strategy="ddp", num_sanity_val_steps=1, **options), steps=6)
    assert proof and "on 2 processes" in str(proof), proof
    assert (proof.steps, proof.interrupted_at, proof.processes) == (6, 3, 2) and not list(Path().iterdir())


def test_the_rank_that_hides_state_is_named():
    proof = prove_resume(maker(OneForgets, devices=2, strategy="ddp"), steps=6)
    assert not proof and "On rank 1: First it differs at" in str(proof) and "OneForgets.done: 3 → 0" in str(proof), proof


def test_an_error_on_one_of_two_processes_is_told():
    class Broken(Line):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_rank == 1:
                raise KeyError("broken here")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="broken here"):
        prove_resume(maker(Broken, devices=2, strategy="ddp"), steps=4)


# Loops of one's own


def loop(proof, *, forgets=False):
    """Train for two epochs as the documentation of save_state shows it."""
    randomness.set_seed(5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
    data = DataLoader(Noisy(), batch_size=3, shuffle=True)
    model, optimizer, data, scheduler = accelerator.prepare(net, optimizer, data, scheduler)
    place = proof.resume(accelerator) or {"epoch": 0, "batch": 0}
    place = {"epoch": place["epoch"], "batch": 0} if forgets else place
    for epoch in range(place["epoch"], 2):
        done = place["batch"] if epoch == place["epoch"] else 0
        data.set_epoch(epoch)
        for index, batch in enumerate(accelerator.skip_first_batches(data, done), start=done):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), batch[:, 0].sin())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                proof.step(accelerator, batch, loss, place={"epoch": epoch, "batch": index + 1})


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_of_ones_own_passes(processes):
    steps = 5 if processes == 1 else 3
    proof = prove_loop(loop, steps=steps, processes=processes)
    assert proof and (proof.steps, proof.interrupted_at, proof.processes) == (steps, steps // 2, processes), proof
    assert not list(Path().iterdir())


def test_a_loop_that_forgets_its_place_is_named():
    proof = prove_loop(partial(loop, forgets=True), steps=5)
    assert not proof and "First it differs at the batch after step 2: the samples of the batch." in str(proof), proof


def test_a_loop_has_to_begin_by_resuming():
    def work(proof):
        proof.step(Accelerator(cpu=True))

    with pytest.raises(RuntimeError, match="proof.resume"):
        prove_loop(work, steps=4)


USER = '''
import torch
from torch.utils.data import DataLoader
from drivetrain import TrainModule

class Net(TrainModule):
    def __init__(self, hidden: bool = False):
        super().__init__()
        self.layer, self.hidden, self.calls = torch.nn.Linear(1, 1), hidden, 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.layer(batch).square().mean() * (self.calls if self.hidden else 1)

    def train_dataloader(self):
        return DataLoader([torch.ones(1) * i for i in range(20)], batch_size=2, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
'''


@pytest.mark.parametrize(("hidden", "code", "text"), [("false", 0, "is the same"), ("true", 1, "Net.calls: 3 → 0")])
def test_the_command(hidden, code, text, capsys, monkeypatch):
    Path("mine.py").write_text(USER)
    Path("run.yaml").write_text(f"model:\n  class_path: mine.Net\n  init_args:\n    hidden: {hidden}\n")
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the command adds this folder to
    done = main(["prove-resume", "--config", "run.yaml", "--steps", "6", "--trainer.max_epochs=2"])
    said = capsys.readouterr()
    assert (done, text in said.out) == (code, True), said.out + said.err
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == ["mine.py", "run.yaml"]
