"""Asynchronous saves of the Accelerator and the Trainer: what is written, when it is told, and what is waited for."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator, ProjectConfiguration
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, complete, load_weights, newest
from drivetrain.strategies.checkpoint.snapshot import LARGE
from drivetrain.tests.distributed import execute, run
from drivetrain.tests.strategies.checkpoint.disks import Disk
from drivetrain.tests.strategies.checkpoint.samples import forked, hidden, same, visible


def trained(size=40, **options):
    """An accelerator with a model, and momentum in its optimizer; every number of both is `mark`ed together."""
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, size)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def mark(model, optimizer, step):
    """Set all that is saved to a number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
        for state in optimizer.state.values():
            state["momentum_buffer"].fill_(step)


def numbers(directory):
    """Every number in the weights and the optimizer state of a checkpoint."""
    checkpoint = Checkpoint.open(directory)
    tensors = [*load_weights(checkpoint).values(), *checkpoint.tensors("optimizer-0.safetensors").values()]
    assert len(tensors) == 4
    return {number for tensor in tensors for number in tensor.flatten().tolist()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_C8_one_number_only(ranks):
    def job(rank):
        accelerator, model, optimizer = trained()
        disk = Disk(held=True)
        mark(model, optimizer, 3)
        assert accelerator.save_state("here", asynchronous=True) == "here"
        assert disk.reached.wait(30)
        for step in range(4, 10):
            mark(model, optimizer, step)
            accelerator.reduce(torch.ones(1))  # training's own talk goes on
        assert accelerator.saves.pending and not Path("here").exists()
        disk.go.set()
        accelerator.wait_for_saves()
        assert numbers("here") == {3}

    if ranks == 1:
        assert forked(lambda: job(0)) == 0
    else:
        run(job, ranks)


def test_an_asynchronous_save_equals_a_synchronous_one():
    accelerator, *_ = trained()
    accelerator.save_state("one", metadata={"step": 1})
    accelerator.save_state("two", metadata={"step": 1}, asynchronous=True)
    accelerator.wait_for_saves()
    one, two = Checkpoint.open("one"), Checkpoint.open("two")
    assert one.files == two.files and len(one.files) >= 5
    moment = {"time": 0, "checksum": 0}
    assert {**one.manifest, **moment} == {**two.manifest, **moment}


def test_loading_waits_for_what_is_being_saved():
    def child():
        accelerator, model, optimizer = trained()
        Disk(delay=0.01)
        mark(model, optimizer, 1)
        accelerator.save_state("here", asynchronous=True)
        mark(model, optimizer, 2)
        accelerator.load_state("here")
        assert model.weight.eq(1).all() and not accelerator.saves.pending

    assert forked(child) == 0


def test_only_what_is_durable_lets_old_ones_go():
    def child():
        config = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=1)
        accelerator, *_ = trained(project_config=config)
        told, folder = [], Path("checkpoints")
        accelerator.save_state(asynchronous=True, then=lambda: told.append(visible(folder)))
        accelerator.wait_for_saves()
        disk = Disk(held=True)
        accelerator.save_state(asynchronous=True, then=lambda: told.append(visible(folder)))
        assert disk.reached.wait(30) and visible(folder) == ["checkpoint_0"] and accelerator.save_iteration == 2
        disk.go.set()
        accelerator.wait_for_saves()
        disk.full = True
        accelerator.save_state(asynchronous=True, then=lambda: told.append("never"))
        with pytest.raises(CheckpointError, match="ENOSPC"):
            accelerator.wait_for_saves()
        assert visible(folder) == ["checkpoint_1"] and complete(folder / "checkpoint_1")
        assert told == [["checkpoint_0"], ["checkpoint_1"]]

    assert forked(child) == 0


def test_end_training_waits():
    def child():
        accelerator, *_ = trained()
        Disk(delay=0.05)
        accelerator.save_state("here", asynchronous=True)
        accelerator.end_training()
        assert complete("here")

    assert forked(child) == 0


@pytest.mark.parametrize(("size", "background"), [(2000, False), (4100, True)])
def test_by_default_the_size_decides(size, background):
    """Weights and momentum of (size, size) in float32: 32 MB and 134 MB."""

    def child():
        accelerator, *_ = trained(size)
        disk = Disk(held=True)  # for a thread
        assert (2 * 4 * size * (size + 1) >= LARGE) == background
        accelerator.save_state("here", asynchronous=None)
        assert accelerator.saves.pending == background and complete("here") != background
        disk.go.set()
        accelerator.wait_for_saves()
        assert complete("here")

    assert forked(child) == 0
