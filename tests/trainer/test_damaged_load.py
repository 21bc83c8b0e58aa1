"""Loading reads each file once, and a damaged one leaves nothing half loaded, on any rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator, ModelCheckpoint, ProjectConfiguration
from drivetrain.strategies.checkpoint import CheckpointError, files
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import Line, loader, quiet
from drivetrain.tests.strategies.checkpoint.samples import same


def trained(seed: int, **options):
    """An accelerator with a model, and state in its optimizer, all of it drawn from a seed."""
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    scheduler.step()
    return accelerator, model, optimizer, scheduler


def everything(accelerator, model, optimizer, scheduler):
    """All that loading changes, copied."""
    weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    moments = {
        f"{index}.{key}": value.clone()
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    return weights, moments, dict(scheduler.state_dict()), torch.get_rng_state()


@pytest.mark.parametrize("ranks", [1, 2])
def test_C3_a_damaged_file_leaves_everything_as_it_was(ranks):
    def job(rank):
        accelerator, *parts = trained(1)
        accelerator.save_state("here")
        names = sorted(path.name for path in Path("here").iterdir())
        fresh, *others = trained(2)
        before, told = everything(fresh, *others), {}
        for name in names:
            path = Path("here", name)
            fresh.world.barrier()
            good = path.read_bytes()
            fresh.world.barrier()
            if rank == 0:
                path.write_bytes(good[:-3] + bytes([good[-3] ^ 8]) + good[-2:])
            fresh.world.barrier()
            with pytest.raises(CheckpointError) as error:
                fresh.load_state("here")
            told[name] = str(error.value)
            assert same(everything(fresh, *others), before), name
            fresh.world.barrier()
            if rank == 0:
                path.write_bytes(good)
        fresh.world.barrier()
        fresh.load_state("here")
        assert not same(everything(fresh, *others), before)
        return told

    for told in [job(0)] if ranks == 1 else run(job, ranks):
        assert len(told) >= 4 + ranks and all(name in words for name, words in told.items()), told


def test_each_file_is_read_once(monkeypatch):
    accelerator, *parts = trained(1)
    accelerator.save_state("here")
    opened, start = Counter(), files.HashingReader.__init__

    def counted(self, path, **options):
        opened[Path(path).name] += 1
        start(self, path, **options)

    monkeypatch.setattr(files.HashingReader, "__init__", counted)
    accelerator.load_state("here")
    assert set(opened) == {path.name for path in Path("here").iterdir()} and set(opened.values()) == {1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_C3_the_newest_that_is_damaged_is_named_and_the_one_before_is_taken(ranks, caplog):
    def job(rank):
        config = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
        accelerator, model, *_ = trained(1, project_config=config)
        for number in (1.0, 2.0):
            with torch.no_grad():
                accelerator.unwrap_model(model).weight.fill_(number)
            accelerator.save_state()
        path = Path("project/checkpoints/checkpoint_1/rank-00000.json")
        accelerator.world.barrier()
        if rank == 0:
            path.write_bytes(path.read_bytes()[:-1])
        accelerator.world.barrier()
        accelerator.load_state()
        return accelerator.unwrap_model(model).weight[0, 0].item()

    assert ([job(0)] if ranks == 1 else run(job, ranks)) == [1.0] * ranks
    if ranks == 1:
        assert "checkpoint_1/rank-00000.json" in caplog.text


def test_C3_a_module_is_made_from_verified_weights_alone():
    with_moments = ModelCheckpoint(dirpath="kept", every_n_train_steps=1)
    quiet(max_steps=1, callbacks=[with_moments], enable_checkpointing=None).fit(Line(), loader(4))
    folder = Path(with_moments.best_model_path)
    Path(folder, "training.json").write_text("{}")
    assert Line.load_from_checkpoint(folder).layer.weight.item() != 0.5
    data = Path(folder, "model.safetensors").read_bytes()
    Path(folder, "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="model.safetensors"):
        Line.load_from_checkpoint(folder)
