"""Checkpoints that Lightning and Accelerate themselves have written go on here as they would there, and run no code.

tests/data/lightning-2.6.6: a module (Linear, BatchNorm1d, Linear) trained for 3 epochs of 4 batches by AdamW and StepLR;
epoch.ckpt is of the end of the first epoch, mid.ckpt of step 6, end.safetensors the weights at the end. accelerate-1.15.0:
a loop of 9 steps with drawn noise, SGD with momentum, StepLR and a registered object; checkpoint_4 is of step 5.
"""

from __future__ import annotations

import pickle
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from drivetrain import Accelerator, TrainModule
from drivetrain.strategies.checkpoint import Checkpoint
from drivetrain.tests.loop.models import quiet
from drivetrain.trainer.cli.main import main
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

DATA = Path(__file__).parents[2] / "data"
LIGHTNING, ACCELERATE = DATA / "lightning-2.6.6", DATA / "accelerate-1.15.0"
ANOTHER_PROCESSOR = {"rtol": 1e-3, "atol": 1e-4}  # the files come from one, which rounds sums in another order


class Model(TrainModule):
    """The module that Lightning has trained."""

    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):
        return (self.body(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(36.0).reshape(12, 3) / 36), batch_size=3)


def convert(source: Path, target: str, library: str, capsys, code: int = 0) -> str:
    """Import a checkpoint by the command; return what it said."""
    assert main(["checkpoint", "convert", str(source), target, "--from", library]) == code
    out, err = capsys.readouterr()
    return out + err


def test_a_fit_goes_on_where_lightning_stopped(capsys):
    said = convert(LIGHTNING / "epoch.ckpt", "imported", "lightning", capsys)
    assert "9 tensors" in said and "1 optimizer states, 1 schedulers, step 4, epoch 1" in said
    model, trainer = Model.load_from_checkpoint("imported"), quiet(max_epochs=3)
    trainer.fit(model, data(), ckpt_path="imported")
    assert (trainer.global_step, trainer.current_epoch) == (12, 3)
    plain = goes_on_plainly(torch.load(LIGHTNING / "epoch.ckpt", weights_only=False))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())
    end = load_file(LIGHTNING / "end.safetensors")
    for name in ("body.0.bias", "body.1.running_mean"):  # normalized away: their gradient is nothing but rounding
        del end[name]
    torch.testing.assert_close({name: model.state_dict()[name] for name in end}, end, **ANOTHER_PROCESSOR)


def goes_on_plainly(stopped: dict) -> dict:
    """Return the weights after two more epochs of a loop in plain torch."""
    model = Model()
    model.load_state_dict(stopped["state_dict"])
    (optimizer,), (scheduler,) = model.configure_optimizers()
    optimizer.load_state_dict(stopped["optimizer_states"][0])
    scheduler.load_state_dict(stopped["lr_schedulers"][0])
    for _ in range(2):
        for index, batch in enumerate(data()):
            optimizer.zero_grad()
            model.training_step(batch, index).backward()
            optimizer.step()
        scheduler.step()
    return model.state_dict()


def test_an_epoch_that_was_not_finished_begins_anew(capsys):
    assert "step 6, epoch 1" in convert(LIGHTNING / "mid.ckpt", "imported", "lightning", capsys)
    model, trainer = Model(), quiet(max_epochs=3)
    trainer.fit(model, data(), ckpt_path="imported")
    assert (trainer.global_step, trainer.current_epoch) == (6 + 4 + 4, 3)


def test_what_the_optimizer_does_not_fit_is_said(capsys):
    convert(LIGHTNING / "epoch.ckpt", "imported", "lightning", capsys)

    class Reversed(Model):
        def configure_optimizers(self):
            return torch.optim.AdamW(list(self.parameters())[::-1])

    class Two(Model):
        def configure_optimizers(self):
            first, *rest = self.parameters()
            optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class InAnotherOrder(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(list(self.parameters())[::-1])
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    for kind, words in ((Reversed, "schedulers"), (Two, r"groups of \[1, 5\]"), (InAnotherOrder, "to have the shape")):
        with pytest.raises(ValueError, match=words):
            quiet(max_epochs=3).fit(kind(), data(), ckpt_path="imported")


class Registered:
    """An object that Accelerate saves beside the rest."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self):
        return {"n": self.number, "t": torch.arange(3)}

    def load_state_dict(self, state):
        self.number = state["n"]


def test_a_loop_goes_on_where_accelerate_stopped(capsys):
    said = convert(ACCELERATE / "checkpoint_4", "imported", "accelerate", capsys)
    assert "1 optimizer states, 1 schedulers, random states of 1 processes, 1 registered objects" in said
    accelerator, registered = Accelerator(cpu=True), Registered()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(registered)
    accelerator.load_state("imported")
    assert registered.number == 7 and accelerator.project_configuration.iteration == 0
    losses = noisy_steps(model, optimizer, scheduler, accelerator.backward)
    found, (plain, plain_losses) = accelerator.unwrap_model(model).state_dict(), loops_on_plainly()
    assert losses == plain_losses and all(torch.equal(tensor, plain[name]) for name, tensor in found.items())
    end = load_file(ACCELERATE / "end.safetensors")
    torch.testing.assert_close({**found, "losses": torch.tensor(losses).to(end["losses"])}, end, **ANOTHER_PROCESSOR)


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))


def noisy_steps(model, optimizer, scheduler, backward) -> list[float]:
    """Train steps 5 to 8 on inputs with noise; return the losses."""
    losses = []
    for value in range(5, 9):
        inputs = torch.full((2, 3), float(value)) + torch.rand(1) * random.random() * np.random.rand()
        loss = (model(inputs) - 1).square().mean()
        backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loops_on_plainly() -> tuple[dict, list[float]]:
    """Return weights and losses of the same steps in plain torch."""
    folder, model = ACCELERATE / "checkpoint_4", small_model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin"))
    scheduler.load_state_dict(torch.load(folder / "scheduler.bin"))
    drawn = torch.load(folder / "random_states_0.pkl", weights_only=False)
    torch.set_rng_state(drawn["torch_manual_seed"])
    random.setstate(drawn["random_state"])
    np.random.set_state(drawn["numpy_random_seed"])
    return model.state_dict(), noisy_steps(model, optimizer, scheduler, torch.Tensor.backward)


def test_the_numbers_of_saves_go_on(capsys):
    convert(ACCELERATE / "checkpoint_4", "imported", "accelerate", capsys)
    assert Checkpoint.open("imported").state("training")["extra"] == {"iteration": 4}


class Dangerous:
    """Runs code when it is unpickled by pickle itself."""

    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


class Commands:
    def __reduce__(self):
        return (subprocess.check_output, (["touch", "ran"],))


@pytest.mark.parametrize("kind", [Dangerous, Commands])
@pytest.mark.parametrize("place", ["state_dict", "optimizer_states", "callbacks", "hyper_parameters", "loops", "x"])
def test_a_hostile_lightning_file_runs_nothing(capsys, kind, place):
    content = torch.load(LIGHTNING / "epoch.ckpt", weights_only=True)
    content[place] = {"a": [kind()]}
    torch.save(content, "hostile.ckpt")
    said = convert(Path("hostile.ckpt"), "out", "lightning", capsys, code=1)
    assert "Expected tensors and plain values in hostile.ckpt" in said
    assert not Path("ran").exists() and not Path("out").exists()


@pytest.mark.parametrize(
    "name",
    ["optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl", "scaler.pt", "pytorch_model.bin"],
)
def test_a_hostile_accelerate_folder_runs_nothing(capsys, name):
    ways = (
        lambda path: torch.save({"a": Dangerous()}, path),
        lambda path: path.write_bytes(pickle.dumps(Commands())),
    )
    for write in ways:
        shutil.rmtree("state", ignore_errors=True)
        shutil.copytree(ACCELERATE / "checkpoint_4", "state")
        if name == "pytorch_model.bin":
            Path("state/model.safetensors").unlink()
        write(Path("state", name))
        said = convert(Path("state"), "out", "accelerate", capsys, code=1)
        assert f"Expected tensors and plain values in state/{name}" in said
        assert not Path("ran").exists() and not Path("out").exists()


def test_an_array_of_objects_is_refused(capsys):
    shutil.copytree(ACCELERATE / "checkpoint_4", "state")
    for value in (np.array([{}], dtype=object), {"state": {}, "param_groups": [{"params": [0], "x": np.array([None])}]}):
        torch.save(value, "state/optimizer.bin")
        assert "Received: " in convert(Path("state"), "out", "accelerate", capsys, code=1)
        assert not Path("out").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_sharded_pickles_are_told_from_whole_weights(capsys, name):
    """torch's own sharded folders begin with a pickle, `.metadata`."""
    folder = Path("state/pytorch_model_fsdp_0")
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Commands()))
    (folder / name).write_bytes(pickle.dumps(Dangerous()))
    said = convert(Path("state"), "out", "accelerate", capsys, code=1)
    assert not Path("ran").exists() and not Path("out").exists() and "state" in said


def test_files_that_are_none_are_named(capsys):
    Path("state").mkdir()
    torch.save({"w": torch.ones(2)}, "state/pytorch_model.bin")
    for name, content, words in (
        ("optimizer.bin", {"state": {}}, "an optimizer's state_dict"),
        ("random_states_0.pkl", {"x": 1}, "random states"),
    ):
        torch.save(content, f"state/{name}")
        assert words in convert(Path("state"), "out", "accelerate", capsys, code=1)
        Path("state", name).unlink()
    convert(Path("state"), "out", "accelerate", capsys)
    assert not Checkpoint.open("out").has("training.json")
