"""Asynchronous saves of the Accelerator and the Trainer: what is written, when it is told, and what is waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator, Callback, ModelCheckpoint, ProjectConfiguration
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, complete, load_weights
from drivetrain.strategies.checkpoint.snapshot import LARGE
from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.loop.models import Line, loader, quiet
from drivetrain.tests.strategies.checkpoint.disks import Disk
from drivetrain.tests.strategies.checkpoint.samples import forked, hidden, visible


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
        assert disk.reached.wait(200)
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
        assert disk.reached.wait(200) and visible(folder) == ["checkpoint_0"] and accelerator.save_iteration == 2
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


# The Trainer


class Straight(Line):
    """Line whose optimizer has momentum; `at(step)` is called in each step, before anything else."""

    def __init__(self, at=lambda step: None):
        super().__init__()
        self.at = at

    def training_step(self, batch, batch_idx):
        self.at(self.trainer.global_step)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def saving(asynchronous=True, **options):
    defaults = {"dirpath": "ck", "every_n_train_steps": 1, "save_top_k": -1}
    return ModelCheckpoint(**{**defaults, **options}, asynchronous=asynchronous)


def fit(module, *callbacks, items=12, **options):
    """Six steps an epoch on one rank, in an order of their own."""
    path = options.pop("ckpt_path", None)
    trainer = quiet(**{"max_epochs": 1, "enable_checkpointing": None, "seed": 2, "callbacks": list(callbacks), **options})
    trainer.fit(module, loader(items, shuffle=True), ckpt_path=path)
    return trainer


def kept(folder="ck"):
    """Name of each checkpoint, with the hashes of its files that say nothing about time."""
    files = {name: Checkpoint.open(Path(folder) / name).files for name in visible(Path(folder))}
    return {
        name: {file: record for file, record in found.items() if file != "training.json"} for name, found in files.items()
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_C8_every_checkpoint_holds_its_own_step(ranks):
    def job(rank):
        fit(Straight(), saving(False, dirpath="reference"), items=12 * ranks)
        disk = Disk(delay=0.003)
        fit(Straight(), saving(True), items=12 * ranks)
        assert disk.writes > 0 or rank > 0

    run(job, ranks)
    found = kept()
    assert found == kept("reference") and list(found) == [f"checkpoint-{step:06d}" for step in range(1, 7)]
    assert len({str(files["model.safetensors"]) for files in found.values()}) == 6


def test_C8_a_full_disk_stops_the_fit_at_a_later_step_and_the_next_one_works():
    def child():
        disk, steps = Disk(held=True), []

        def at(step):
            steps.append(step)
            if step == 3:  # while the save of step 3 is written
                disk.full = True
                disk.go.set()

        class Patient(Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                if trainer.global_step == 4:
                    raise AssertionError("the error came too late")

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                while trainer.global_step == 4 and threading.active_count() > 1:
                    time.sleep(0.01)

        module = Straight(at)
        with pytest.raises(CheckpointError, match=r"checkpoint-000003: No space left on device \(ENOSPC\)"):
            fit(module, Patient(), saving(every_n_train_steps=3, save_top_k=1), max_epochs=9)
        assert steps == [0, 1, 2, 3]
        assert not Path("ck/checkpoint-000003").exists() and hidden(Path("ck")) == []
        disk.full = False
        again = saving(every_n_train_steps=3, save_top_k=1)
        fit(Straight(), again)
        assert visible(Path("ck")) == ["checkpoint-000006"] == [Path(again.best_model_path).name]

    assert forked(child) == 0


@pytest.mark.parametrize("end", ["the end", "an error"])
def test_C8_fit_ends_when_its_last_save_is_durable(end):
    def child():
        Disk(delay=0.03)

        def at(step):
            if step == 5 and end == "an error":
                raise OSError("the data has gone")

        checkpoint = saving(every_n_train_steps=5 if end == "an error" else 6, save_last=True)
        try:
            trainer = fit(Straight(at), checkpoint)
            assert trainer.global_step == 6
        except OSError as error:
            assert str(error) == "the data has gone"
        name, link = visible(Path("ck"))
        assert link == "last" and complete(Path("ck") / name)
        assert Path("ck/last").resolve().name == name == Path(checkpoint.best_model_path).name
        assert threading.active_count() == 1

    assert forked(child) == 0


@pytest.mark.parametrize("every", [2, 3, 4])
def test_C8_sigterm_ends_the_fit_when_the_last_save_is_durable(every):
    """It comes in the fourth step: one save is being written, has just been told, or begins with that step."""

    def child():
        Disk(delay=0.03)
        module = Straight(lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit) as ended:
            fit(module, saving(every_n_train_steps=every, save_top_k=1), max_epochs=9)
        assert ended.value.code == 128 + signal.SIGTERM and threading.active_count() == 1
        last = Path("ck/checkpoint-000004")
        assert Path(ended.value.checkpoint).name == last.name and complete(last) and hidden(Path("ck")) == []
        assert torch.equal(load_weights(Checkpoint.open(last))["layer.weight"], module.layer.weight)

    assert forked(child) == 0


def test_a_rank_that_fails_waits_for_what_all_are_saving():
    def job(rank):
        Disk(delay=0.02)

        def at(step):
            if rank == 1 and step == 5:
                raise OSError("the data has gone")

        fit(Straight(at), saving(every_n_train_steps=5), items=24)

    with pytest.raises(RankFailed, match="the data has gone"):
        run(job, 2)
    assert complete("ck/checkpoint-000005")


def test_a_failed_save_does_not_hide_what_stopped_the_fit(caplog):
    def child():
        disk = Disk(held=True)

        def at(step):
            if step == 2:
                disk.full = True
                disk.go.set()
                raise ValueError("the real reason")

        with pytest.raises(ValueError, match="the real reason"):
            fit(Straight(at), saving(every_n_train_steps=2, save_on_exception=True))
        assert "The last checkpoint was not saved" in caplog.text and "ENOSPC" in caplog.text
        assert visible(Path("ck")) == ["checkpoint-000002"]  # saved by the rescue, in the foreground

    assert forked(child) == 0


def test_the_one_before_goes_when_the_new_one_is_durable_and_in_the_main_thread():
    def child():
        disk, seen = Disk(), []

        class Watch(Callback):
            priority = 500  # after the checkpoint's

            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                if trainer.global_step == 5:
                    trainer.accelerator.wait_for_saves()
                    disk.hold()

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if trainer.global_step == 6:
                    seen.append((visible(Path("ck")), Path(trainer.checkpoint_callback.best_model_path).name))
                    disk.go.set()
                if trainer.global_step == 7:
                    then = lambda: seen.append(threading.current_thread().name)  # noqa: E731
                    assert trainer.save_checkpoint("own", then=then, asynchronous=True) is False
                    assert Path(trainer.checkpoint_callback.best_model_path).name == "checkpoint-000006"

        fit(Straight(), saving(save_top_k=1, every_n_train_steps=3), Watch(), items=18)
        assert seen == [(["checkpoint-000003"], "checkpoint-000003"), "MainThread"] and complete("own")
        assert visible(Path("ck")) == ["checkpoint-000009"]

    assert forked(child) == 0


# Interruption


class Seen(Straight):
    """Keeps what it saw in its checkpoint, and dies at a step."""

    def __init__(self, dies_at=None):
        super().__init__(self.die)
        self.dies_at = dies_at

    def die(self, step):
        if step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


@pytest.mark.parametrize(("ranks", "kills"), [(1, [1, 2, 3, 5, 8, 11]), (2, [3, 7])])
def test_interrupted_while_saves_go_on_equals_uninterrupted(ranks, kills):
    def job(rank, folder, dies_at=None):
        Disk(delay=0.004)
        module, checkpoint = Seen(dies_at), saving(dirpath=f"{folder}/ck", save_top_k=2, save_last=True)
        fit(module, checkpoint, items=24 * ranks, default_root_dir=folder, ckpt_path="last", max_epochs=1)
        return module.seen if rank == 0 else [], [value.tolist() for value in module.state_dict().values()]

    whole = run(job, ranks, "whole")
    expected = kept("whole/ck")
    assert list(expected) == ["checkpoint-000011", "checkpoint-000012", "last"]
    for step in kills:
        with pytest.raises(RankFailed):
            run(job, ranks, "killed", step)
    assert run(job, ranks, "killed") == whole
    assert kept("killed/ck") == expected
    assert Path("killed/ck/last").resolve() == Path("killed/ck/checkpoint-000012").resolve()
