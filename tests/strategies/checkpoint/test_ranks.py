"""One save by several ranks: together there, or together not."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.strategies import world as worlds
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, complete, newest
from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.strategies.checkpoint.samples import check, same, save, visible

CK = Path("runs/checkpoint-1")


def shared_save(rank: int, step: int = 1, directory: Path = CK) -> Path:
    """Write one file by each rank."""
    world = worlds.current()
    with Writer(directory, world=world) as writer:
        if rank == 0:
            writer.json("training.json", {"step": step})
        writer.state(f"rank-{rank:05d}", {"rank": rank, "state": torch.full((3,), rank)})
        return writer.commit({"step": step})


def test_every_rank_writes_its_own_files():
    def job(rank):
        # Rank 0's name counts: other ranks may have another clock in theirs.
        directory = shared_save(rank, directory=CK if rank == 0 else Path("elsewhere/x"))
        checkpoint = Checkpoint.open(directory)
        return str(directory), sorted(checkpoint.files), checkpoint.manifest["world_size"]

    results = run(job, 3)
    files = sorted(
        ["training.json", *(f"rank-{rank:05d}.{end}" for rank in range(3) for end in ("json", "safetensors"))]
    )
    assert results == [(str(CK.absolute()), files, 3)] * 3
    assert os.listdir(CK.parent) == ["checkpoint-1"] and not Path("elsewhere").exists()
    assert same(Checkpoint.open(CK).state("rank-00002"), {"rank": 2, "state": torch.full((3,), 2)})


def test_C4_a_save_can_be_loaded_at_once_on_every_rank():
    def job(rank):
        torch.manual_seed(0)
        model = nn.Linear(3000, 3000)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3000)).sum().backward()
        optimizer.step()
        for attempt in range(4):
            with Writer("ck", world=worlds.current()) as writer:
                if rank == 0:
                    writer.tensors("model.safetensors", dict(model.state_dict()))
                    writer.state("optimizer-0", optimizer.state_dict())
                writer.state(f"rank-{rank:05d}", {"attempt": attempt, "random": torch.get_rng_state()})
                writer.commit({"step": attempt})
            checkpoint = Checkpoint.open("ck", verify=rank == 0)
            assert checkpoint.manifest["step"] == attempt
            assert same(checkpoint.tensors("model.safetensors"), dict(model.state_dict()))
            assert same(checkpoint.state("optimizer-0"), optimizer.state_dict())
            assert checkpoint.state(f"rank-{rank:05d}")["attempt"] == attempt

    run(job, 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_fails_the_save_on_all(failing):
    save(CK, 1)

    def job(rank):
        try:
            with Writer(CK, world=worlds.current()) as writer:
                writer.json(f"rank-{rank}.json", rank)
                if rank == failing:
                    raise ValueError("the reason")
                writer.commit({"step": 2})
        except (ValueError, CheckpointError) as error:
            assert os.listdir(CK.parent) == ["checkpoint-1"] or rank != 0
            return type(error).__name__, str(error)
        return None

    results = run(job, 2)
    assert results[failing] == ("ValueError", "the reason")
    kind, text = results[1 - failing]
    assert kind == "CheckpointError" and f"rank {failing} failed: ValueError: the reason" in text
    assert os.listdir(CK.parent) == ["checkpoint-1"]
    check(CK, 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_C1_a_file_size_limit_on_one_rank(failing):
    run(shared_save, 2)

    def job(rank):
        if rank == failing:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, old[1]))
        with pytest.raises(CheckpointError) as error:
            shared_save(rank, 2)
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            assert error.value.__cause__.errno == errno.EFBIG
        assert "EFBIG" in str(error.value)
        worlds.current().barrier("looked")
        shared_save(rank, 3)  # the ranks are still in step: the next save works
        return Checkpoint.open(CK).manifest["step"]

    assert run(job, 2) == [3, 3]
    assert os.listdir(CK.parent) == ["checkpoint-1"]


def test_what_fails_at_the_start_or_the_end_fails_on_all():
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("x")

    def job(rank):
        with pytest.raises(CheckpointError, match="neither"):
            shared_save(rank, directory=Path("full"))
        with pytest.raises(CheckpointError, match="Could not save .*: Not a directory"):
            shared_save(rank, directory=Path("full/thesis.tex/ck"))
        with pytest.raises((TypeError, CheckpointError), match="metadata.loss: a Linear"):
            with Writer(CK, world=worlds.current()) as writer:
                writer.commit({"loss": nn.Linear(1, 1)} if rank == 0 else None)
        with pytest.raises(CheckpointError, match="Expected each file from one rank|rank 1 failed: .*taken|exists"):
            with Writer(CK, world=worlds.current()) as writer:
                worlds.current().barrier("together")
                writer.json("same.json", rank)
                writer.commit()
        worlds.current().barrier("rank 0 has deleted what was written")
        return os.listdir("runs")

    assert run(job, 2) == [[], []]


def test_leaving_without_a_commit():
    def job(rank):
        with Writer(CK, world=worlds.current()) as writer:
            writer.json(f"rank-{rank}.json", rank)  # all leave: no error
        with pytest.raises(CheckpointError, match="rank 1 failed: it left without a commit"):
            with Writer(CK, world=worlds.current()) as writer:
                writer.json(f"rank-{rank}.json", rank)
                if rank == 0:
                    writer.commit()
        worlds.current().barrier("done")
        return os.listdir("runs")

    assert run(job, 2) == [[], []]


def test_a_folder_that_another_rank_does_not_see_is_an_error():
    """As on machines that do not share a file system."""

    def job(rank):
        world = worlds.current()
        words = "Expected rank 1 to see|Received: rank 1|rank 1 failed: CheckpointError: Expected rank 1 to see"
        with pytest.raises(CheckpointError, match=words), Writer(CK, world=world) as writer:
            if rank == 1:
                writer.folder = Path("other/disk") / writer.folder.name
            writer.json(f"rank-{rank}.json", rank)
            writer.commit()

    run(job, 2)
    assert os.listdir(CK.parent) == []


@pytest.mark.parametrize("killed", [0, 1])
def test_C2_a_rank_that_is_killed_during_a_save(killed):
    run(shared_save, 2)

    def job(rank):
        with Writer(CK, world=worlds.current()) as writer:
            writer.json(f"rank-{rank}.json", rank)
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                writer.commit({"step": 2})
            except RuntimeError:
                Path("noticed").write_text(str(time.time()))
                raise

    with pytest.raises(RankFailed, match=f"(?s)[Rr]ank {killed} (of 2 )?was killed by SIGKILL"):
        run(job, 2, patience=20)
    assert Path("noticed").exists()
    assert visible(CK.parent) == ["checkpoint-1"] and complete(CK)
    assert Checkpoint.open(newest(CK.parent)).manifest["step"] == 1
    run(shared_save, 2, 3)
    assert os.listdir(CK.parent) == ["checkpoint-1"]
