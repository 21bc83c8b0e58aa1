"""Saving in the background: what is written is the state of the call, one save at a time, and errors are told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from drivetrain.strategies import world as worlds
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, complete, newest, save_weights
from drivetrain.strategies.checkpoint.snapshot import Buffers, Saves
from drivetrain.strategies.world import World
from drivetrain.tests.distributed import execute, run
from drivetrain.tests.strategies.checkpoint.disks import Disk
from drivetrain.tests.strategies.checkpoint.samples import forked, hidden, same, visible


def tensors():
    """Tensors of every sort that a state may hold."""
    return {
        "turned": torch.arange(12.0).view(3, 4).t(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "none": torch.empty(0, 5),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "eight": torch.arange(5.0).to(torch.float8_e4m3fn),
        "half": torch.arange(7.0).to(torch.bfloat16),
        "weight": torch.nn.Parameter(torch.ones(3)),
        "slice": torch.arange(10)[2:7:2],
    }


def number(step: int) -> dict[str, torch.Tensor]:
    return {f"layer{index}.weight": torch.full((50, 40), float(step)) for index in range(8)}


def fill(state, extra=None):
    def write(writer):
        if writer.world.rank == 0:
            save_weights(writer, state)
        writer.state(f"rank-{writer.world.rank:05d}", {"extra": extra, "numbers": state})

    return write


def test_copies_equal_what_was_copied_and_are_memory_of_their_own():
    buffers, source = Buffers(), tensors()
    copies = dict(zip(source, buffers.copies(list(source.values())), strict=True))
    for name, copy in copies.items():
        assert same(copy, source[name].detach().resolve_conj().contiguous()), name
        assert copy.is_contiguous() and not copy.requires_grad
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) == 1


def test_the_same_memory_is_used_again_and_only_grows_for_more():
    buffers = Buffers()
    places = []
    for count in (1000, 1000, 500, 900, 2000, 1000):
        first, second = buffers.copies([torch.full((count,), 1.0), torch.full((count,), 2.0)])
        assert first.eq(1).all() and second.eq(2).all() and len(first) == len(second) == count
        places.append(first.untyped_storage().nbytes())
    assert places == [8064, 8064, 8064, 8064, 16000, 16000]  # each copy begins at a multiple of 64 bytes


@pytest.mark.parametrize("background", [False, True])
def test_both_ways_write_the_same_files(background):
    weights = {**tensors(), "tied": torch.ones(4)}
    weights["again"] = weights["tied"]
    saves = Saves(World())

    def write(writer):
        save_weights(writer, weights, max_shard_size=100)
        writer.state("training", {"array": torch.arange(3).numpy(), "nested": [{"t": weights["turned"]}, (1, 2)]})
        (writer.folder / "notes.txt").write_text("by a hook")
        writer.adopt("notes.txt")

    saves.save("ck", write, metadata={"step": 3}, background=background)
    saves.wait()
    with Writer("reference") as writer:
        write(writer)
        writer.commit({"step": 3})
    ours, reference = Checkpoint.open("ck"), Checkpoint.open("reference")
    assert ours.files == reference.files and len(ours.files) > 4
    assert ours.manifest["step"] == 3
    assert (Path("ck") / "notes.txt").read_text() == "by a hook"


def test_C8_the_file_holds_the_state_of_the_call():
    def child():
        disk, saves, told = Disk(held=True), Saves(World()), []
        state, extra = number(7), [1, 2]
        saves.save("ck", fill(state, extra), metadata={"step": 7}, then=lambda: told.append("ck"), background=True)
        assert saves.pending and disk.reached.wait(200)
        for step in range(8, 20):
            for tensor in state.values():
                tensor.fill_(step)
            extra.append(step)
            saves.poll()
        assert saves.pending and not told and not os.path.exists("ck")
        disk.go.set()
        saves.wait()
        assert not saves.pending and told == ["ck"]
        checkpoint = Checkpoint.open("ck")
        assert same(checkpoint.tensors("model.safetensors"), number(7))
        assert same(checkpoint.state("rank-00000"), {"extra": [1, 2], "numbers": number(7)})

    assert forked(child) == 0


def test_a_second_save_waits_for_the_first():
    def child():
        disk, saves, order = Disk(delay=0.05), Saves(World()), []
        for step in (1, 2, 3):
            saves.save(
                f"ck-{step}",
                fill(number(step)),
                metadata={"step": step},
                then=lambda step=step: order.append((step, complete(f"ck-{step}"))),
                background=step < 3,
            )
            assert [step for step, _ in order] == list(range(1, step + (step == 3)))
        assert order == [(1, True), (2, True), (3, True)]
        assert [Checkpoint.open(f"ck-{step}").tensors("model.safetensors")["layer0.weight"][0, 0] for step in (1, 2, 3)]
        assert disk.writes > 0 and hidden(Path.cwd()) == []

    assert forked(child) == 0


@pytest.mark.parametrize("by", ["poll", "wait", "save"])
def test_C8_a_full_disk_is_told_once_and_the_save_before_it_stays(by):
    def child():
        disk, saves, told = Disk(), Saves(World()), []
        saves.save("runs/one", fill(number(1)), metadata={"step": 1}, background=True)
        saves.wait()
        disk.full = True
        then = lambda: told.append("two")  # noqa: E731
        saves.save("runs/two", fill(number(2)), metadata={"step": 2}, then=then, background=True)
        with pytest.raises(CheckpointError, match=r"model.safetensors of .*two: No space left on device \(ENOSPC\)"):
            if by == "poll":
                for _ in range(10_000):
                    saves.poll()
                    saves._thread.join(0.01)
            elif by == "wait":
                saves.wait()
            else:
                saves.save("runs/three", fill(number(3)), metadata={"step": 3})
        assert not saves.pending and not told
        assert visible(Path("runs")) == ["one"] and hidden(Path("runs")) == []
        disk.full = False
        saves.wait()
        saves.save("runs/three", fill(number(3)), metadata={"step": 3}, background=True)
        saves.wait()
        assert newest("runs").name == "three"

    assert forked(child) == 0


def test_what_cannot_be_saved_is_told_at_the_call():
    saves = Saves(World())
    with pytest.raises(TypeError, match="training.model: a Linear"):
        saves.save(
            "ck", lambda writer: writer.state("training", {"model": torch.nn.Linear(1, 1)}), metadata={}, background=True
        )
    assert not saves.pending and os.listdir() == []
    Path("taken").write_text("")
    with pytest.raises(CheckpointError, match="taken"):
        saves.save("taken", fill(number(1)), metadata={}, background=True)
    saves.save("ck", fill(number(1)), metadata={}, background=True)
    saves.wait()
    assert complete("ck")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["taken", "written"])
def test_ranks_fail_together(failing, when):
    def job(rank):
        world = worlds.current()
        disk, saves = Disk(held=True), Saves(world)
        disk.full = rank == failing and when == "written"
        broken = torch.nn.Linear(1, 1) if rank == failing and when == "taken" else None
        error = ""
        try:
            saves.save(
                "ck", lambda writer: writer.state(f"rank-{rank}", [broken, torch.ones(9)]), metadata={}, background=True
            )
            disk.go.set()
            for _ in range(20_000):  # until it raises
                saves.poll()
                world.all_reduce(torch.ones(3))
                saves._thread.join(0.01)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        assert not saves.pending
        disk.go.set()
        disk.full = False
        saves.save("ck", lambda writer: writer.state(f"rank-{rank}", torch.ones(9)), metadata={}, background=True)
        saves.wait()
        return error, sorted(Checkpoint.open("ck").files)

    results = run(job, 2)
    assert all("ENOSPC" in error if when == "written" else "a Linear" in error for error, _ in results), results
    assert f"rank {failing} failed" in results[1 - failing][0]
    assert {len(files) for _, files in results} == {4}


def test_ranks_train_on_while_they_save():
    """The thread and the loop talk to the other rank at once, each over a group of its own."""

    def job(rank):
        world = worlds.current()
        saves, sums, finished, disk = Saves(world), 0, [], Disk()
        for step in range(1, 7):
            disk.hold()
            saves.save(
                f"ck-{step}", fill(number(step)), metadata={"step": step}, then=lambda: finished.append(1), background=True
            )
            while saves.pending:
                sums += world.all_reduce(torch.ones(1)).item() == 2
                if sums >= 2 * step:
                    disk.go.set()
                saves.poll()
        return sums, len(finished)

    (first, done), (second, _) = run(job, 2)
    assert first == second >= 12 and done == 6
    for step in range(1, 7):
        assert same(Checkpoint.open(f"ck-{step}").tensors("model.safetensors"), number(step))


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_while_it_is_written_the_one_before_stays(ranks):
    def job(rank):
        saves = Saves(worlds.current())
        saves.save("runs/one", fill(number(1)), metadata={"step": 1}, background=True)
        saves.wait()
        disk = Disk(held=True)
        saves.save("runs/two", fill(number(2)), metadata={"step": 2}, background=True)
        assert disk.reached.wait(200)
        if ranks == 2:
            worlds.current().barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    if ranks == 1:
        assert forked(lambda: job(0)) == -signal.SIGKILL
    else:
        with pytest.raises(Exception, match="SIGKILL|-9|signal 9"):
            run(job, 2)
    assert visible(Path("runs")) == ["one"] and len(hidden(Path("runs"))) == 1
    assert newest("runs").name == "one"
    with Writer("runs/three") as writer:
        writer.commit({"step": 3})
    assert hidden(Path("runs")) == []


def test_a_process_that_ends_without_waiting_finishes_its_save():
    code = """
import torch
from drivetrain.strategies.checkpoint.snapshot import Saves
from drivetrain.strategies.world import World
from drivetrain.tests.strategies.checkpoint.disks import Disk
Disk(delay=0.3)
saves = Saves(World())
saves.save("ck", lambda writer: writer.state("training", torch.ones(5)), metadata={}, background=True,
           then=lambda: print("durable"))
print("the end")
"""
    done = execute([sys.executable, "-c", code], timeout=240, cwd=Path.cwd())
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["the end", "durable"]), done.stderr
    assert complete("ck")
