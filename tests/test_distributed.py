"""The helper that forks ranks: results, failures, deaths, hangs, and forking after torch has computed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from drivetrain.strategies import environment
from drivetrain.strategies.world import current
from drivetrain.tests.distributed import RankFailed, execute, run, torchrun
from torch.nn.parallel import DistributedDataParallel


def test_results_come_in_rank_order_from_closures_with_arguments():
    offset = 10
    results = run(lambda rank, factor: torch.tensor([offset + factor * rank]), 3, 2)
    assert [int(result) for result in results] == [10, 12, 14]


def test_ranks_find_themselves_launched():
    def placed(rank):
        placement = environment.detect()
        world = current()
        assert (world.rank, world.size, world.local_rank) == (rank, 2, rank)
        return placement.rank, placement.size, placement.launcher, placement.launched, os.environ["OMP_NUM_THREADS"]

    assert run(placed) == [(0, 2, "torchrun", True, "1"), (1, 2, "torchrun", True, "1")]


def test_without_a_group_the_world_is_left_to_the_function():
    assert run(lambda rank: (torch.distributed.is_initialized(), current().size), group=False) == [(False, 1)] * 2


def test_the_traceback_of_the_rank_that_raises_and_the_output_of_all():
    def work(rank):
        print(f"seen by {rank}")
        if rank == 1:
            raise ValueError("boom")
        current().barrier("never")

    with pytest.raises(RankFailed) as caught:
        run(work)
    message = str(caught.value)
    assert caught.value.rank == 1
    assert message.startswith("Rank 1 of 2 raised ValueError: boom.")
    assert 'raise ValueError("boom")' in message
    assert "seen by 0" in message and "seen by 1" in message


def test_a_rank_that_is_killed_is_reported_as_such():
    def work(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        current().barrier("never")

    with pytest.raises(RankFailed, match="Rank 0 of 2 was killed by SIGKILL") as caught:
        run(work)
    assert caught.value.rank == 0


def test_a_rank_that_exits_early_is_reported_with_its_code():
    with pytest.raises(RankFailed, match="Rank 1 of 2 exited with code 3 before it returned"):
        run(lambda rank: os._exit(3) if rank == 1 else current().barrier("never"))


def test_a_rank_that_hangs_is_reported_with_the_place():
    def sleeps_for_long(rank):
        if rank == 1:
            time.sleep(100)

    with pytest.raises(RankFailed, match="Rank 1 of 2 did not return within 6 s") as caught:
        run(sleeps_for_long, timeout=6)
    assert "in sleeps_for_long" in str(caught.value)


def test_no_rank_outlives_a_failure(tmp_path):
    def work(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        current().barrier()
        if rank == 0:
            raise ValueError("boom")
        time.sleep(100)

    with pytest.raises(RankFailed):
        run(work)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_patience_lets_the_other_ranks_end_by_themselves(tmp_path):
    def work(rank):
        if rank == 1:
            raise ValueError("boom")
        time.sleep(0.2)
        (tmp_path / "cleaned").write_text("yes")

    with pytest.raises(RankFailed, match="Rank 1 of 2 raised ValueError: boom"):
        run(work, patience=20)
    assert (tmp_path / "cleaned").exists()


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RankFailed, match="returned what cannot be pickled"):
        run(lambda rank: lambda: rank)


def test_an_exit_call_is_a_failure_too():
    with pytest.raises(RankFailed, match="raised SystemExit: 4"):
        run(lambda rank: sys.exit(4))


def test_ranks_can_be_forked_after_this_process_ran_backward():
    """In a process of its own: this one may have been held to one thread."""
    program = """
import torch
from drivetrain.strategies.world import current
from drivetrain.tests.distributed import run

def train(rank=0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    for _ in range(3):
        model(torch.randn(256, 512)).pow(2).mean().backward()
    return float(current().all_reduce(model[0].weight.grad.norm()))

torch.set_num_threads(2)
alone = train()
for _ in range(3):
    assert all(abs(norm - 2 * alone) < 1e-4 * alone for norm in run(train, timeout=120)), alone
print("well")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240,
                            env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert result.stdout.strip() == "well", result.stdout + result.stderr


def test_data_parallel_training_averages_gradients():
    def work(rank):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
        return float(model.module.weight.grad)

    assert run(work) == [2.0, 2.0]  # the mean of 1 and 3


def test_torchrun_starts_real_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nrank, size = os.environ['RANK'], os.environ['WORLD_SIZE']\n"
                      "open(f'{sys.argv[1]}/{rank} of {size}', 'w').write(str(sys.argv[2:]))")
    result = torchrun(script, tmp_path, "--flag", 3)
    assert result.returncode == 0, result.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("? of *")} == dict.fromkeys(["0 of 2", "1 of 2"], "['--flag', '3']")


def test_execute_ends_what_a_command_left_behind(tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        execute(["sh", "-c", f"sleep 100 & echo $! > {note}; wait"], timeout=5)
    _expect_gone(int(note.read_text()))


def _expect_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
