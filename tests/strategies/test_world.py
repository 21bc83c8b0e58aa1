"""The world of one process and that of several gloo ranks: every collective, every dtype, beginnings and ends."""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from drivetrain.strategies import environment
from drivetrain.strategies.world import TorchWorld, World, current, set_current
from drivetrain.tests.distributed import RankFailed, execute, free_port, run, torchrun
from torch.nn.parallel import DistributedDataParallel

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]


# One process


def test_one_process_gives_back_what_it_got():
    world = World()
    tensor = torch.tensor([1.0, 2.0])
    assert (world.rank, world.local_rank, world.size, world.local_size, world.node_rank) == (0, 0, 1, 1, 0)
    assert world.device == torch.device("cpu") and world.backend == ""
    for op in ("sum", "mean", "max", "min", "product"):
        assert world.all_reduce(tensor, op) is tensor and tensor.tolist() == [1.0, 2.0]
    assert world.broadcast(tensor) is tensor
    assert [part.tolist() for part in world.all_gather(tensor)] == [[1.0, 2.0]]
    assert [part.tolist() for part in world.all_gather_uneven(tensor)] == [[1.0, 2.0]]
    assert world.broadcast_object({"a": 1}) == {"a": 1} and world.gather_object(5) == [5]
    assert world.agree(True) and world.agree(True, how="all") and not world.agree(False)
    assert world.peer_failure() is None
    world.barrier("here")
    world.close()
    world.close()


def test_a_gathered_tensor_is_not_the_original_on_one_process_either():
    tensor = torch.zeros(2, requires_grad=True)
    (gathered,) = World().all_gather(tensor)
    gathered += 1
    assert tensor.tolist() == [0.0, 0.0] and not gathered.requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_mean_of_integers_is_refused_everywhere(dtype):
    with pytest.raises(TypeError, match="Expected a floating-point tensor for a mean in place. Received: dtype="):
        World().all_reduce(torch.ones(2, dtype=dtype), "mean")


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="Received: op='avg'"):
        World().all_reduce(torch.ones(1), "avg")
    with pytest.raises(ValueError, match="Received: how='most'"):
        World().agree(True, how="most")


def test_the_current_world_is_one_process_until_one_is_set():
    before = current()
    assert before.size == 1
    mine = World("cpu")
    set_current(mine)
    assert current() is mine
    set_current(before)


# Several ranks


def test_all_reduce_every_dtype_and_op():
    def work(rank):
        world, wrong = current(), []
        for dtype in FLOATS + INTEGERS:
            for op, right in {"sum": [3, 7], "max": [2, 4], "min": [1, 3], "product": [2, 12]}.items():
                tensor = torch.tensor([[1, 3], [2, 4]][rank]).to(dtype)
                result = world.all_reduce(tensor, op)
                if result is not tensor or tensor.dtype != dtype or tensor.to(torch.float64).tolist() != right:
                    wrong.append((dtype, op, tensor))
        for dtype in FLOATS:
            tensor = torch.tensor([[1, 3], [2, 5]][rank]).to(dtype)
            if world.all_reduce(tensor, "mean").to(torch.float64).tolist() != [1.5, 4.0]:
                wrong.append((dtype, "mean", tensor))
        return wrong

    assert run(work) == [[], []]


def test_booleans_reduce_to_any_and_all():
    def work(rank):
        values = torch.tensor([False, rank == 1, True])
        return [current().all_reduce(values.clone(), op).tolist() for op in ("sum", "max", "product", "min")]

    anyone, everyone = [False, True, True], [False, False, True]
    assert run(work) == [[anyone, anyone, everyone, everyone]] * 2


def test_many_true_votes_do_not_wrap_around():
    assert run(lambda rank: current().all_reduce(torch.tensor([True] * 4)).tolist(), 4) == [[True] * 4] * 4


def test_the_mean_of_halves_survives_a_sum_that_overflows():
    def work(rank):
        return float(current().all_reduce(torch.tensor([40000.0], dtype=torch.float16), "mean"))

    assert run(work) == [40000.0, 40000.0]


def test_all_reduce_reaches_views_graphs_and_inference_tensors():
    def work(rank):
        world = current()
        base = torch.zeros(2, 3)
        world.all_reduce(base[:, 1].add_(1 + rank))
        leaf = torch.ones(2, requires_grad=True)
        world.all_reduce(leaf)
        with torch.inference_mode():
            inner = torch.ones(2, dtype=torch.bfloat16)
            world.all_reduce(inner, "mean")
        world.all_reduce(inner, "sum")
        scalar = world.all_reduce(torch.tensor(1.0 + rank), "mean")
        empty = world.all_reduce(torch.empty(0))
        assert leaf.requires_grad and leaf.is_leaf
        complexes = world.all_reduce(torch.tensor([1 + 2j]), "mean")
        return base.tolist(), leaf.tolist(), inner.tolist(), scalar.item(), empty.tolist(), complexes.tolist()

    right = ([[0, 3, 0], [0, 3, 0]], [2.0, 2.0], [2.0, 2.0], 1.5, [], [1 + 2j])
    assert run(work) == [right, right]


def test_all_gather_every_dtype_and_shape():
    def work(rank):
        world, wrong = current(), []
        for dtype in [*FLOATS, *INTEGERS, torch.bool, torch.complex64]:
            for shape in ((), (3,), (2, 0), (2, 1, 2)):
                mine = torch.full(shape, rank).to(dtype)
                parts = world.all_gather(mine)
                same = all(
                    part.dtype == dtype and part.shape == shape and (part == torch.full(shape, source).to(dtype)).all()
                    for source, part in enumerate(parts)
                )
                if not same or len(parts) != 2:
                    wrong.append((dtype, shape))
        return wrong

    assert run(work) == [[], []]


def test_all_gather_of_views():
    def work(rank):
        return [part.tolist() for part in current().all_gather((torch.arange(6).reshape(2, 3) + 10 * rank).t())]

    right = [[[0, 3], [1, 4], [2, 5]], [[10, 13], [11, 14], [12, 15]]]
    assert run(work) == [right, right]


def test_all_gather_uneven_rows():
    def work(rank):
        parts = current().all_gather_uneven(torch.full((rank, 2), float(rank)))
        same = current().all_gather_uneven(torch.tensor([rank]))
        none = current().all_gather_uneven(torch.empty(0, 3))
        return [part.tolist() for part in parts], [part.tolist() for part in same], [tuple(p.shape) for p in none]

    right = ([[], [[1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]], [[0], [1], [2]], [(0, 3)] * 3)
    assert run(work, 3) == [right] * 3


@pytest.mark.parametrize("tensors", [
    (torch.zeros(1, 2), torch.zeros(1, 3)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
])
def test_all_gather_uneven_names_ranks_and_shapes_that_do_not_fit(tensors):
    def work(rank):
        with pytest.raises(ValueError) as caught:
            current().all_gather_uneven(tensors[rank])
        current().barrier("everybody is still here")
        return str(caught.value)

    first, second = run(work)
    assert first == second
    for rank, tensor in enumerate(tensors):
        assert f"rank {rank}: {str(tensor.dtype)[6:]}{list(tensor.shape)}" in first


def test_broadcast_overwrites_by_the_source():
    def work(rank):
        world = current()
        tensor = torch.full((2, 2), float(rank))
        assert world.broadcast(tensor, src=1) is tensor
        view = torch.zeros(2, 3)
        world.broadcast(view[:, 1].fill_(rank + 5.0), src=0)
        flag = world.broadcast(torch.tensor([rank == 1]), src=1)
        return tensor.tolist(), view.tolist(), flag.tolist()

    right = ([[1.0, 1.0], [1.0, 1.0]], [[0, 5, 0], [0, 5, 0]], [True])
    assert run(work) == [right, right]


def test_objects_travel():
    def work(rank):
        world = current()
        told = world.broadcast_object({"from": rank, "weights": torch.tensor([rank])}, src=1)
        heard = world.gather_object("x" * (10_000 * rank))
        return told["from"], told["weights"].tolist(), [len(text) for text in heard]

    assert run(work) == [(1, [1], [0, 10_000])] * 2


def test_agreement():
    def work(rank):
        world = current()
        return world.agree(rank == 1), world.agree(rank == 1, how="all"), world.agree(True, how="all"), world.agree(0)

    assert run(work) == [(True, False, True, False)] * 2


def test_a_mean_of_integers_is_refused_by_all_ranks_and_none_hangs():
    def work(rank):
        with pytest.raises(TypeError):
            current().all_reduce(torch.ones(1, dtype=torch.int32), "mean")
        current().barrier()

    run(work)


def test_a_barrier_that_one_rank_misses_is_named(tmp_path):
    def work(rank):
        if rank == 1:
            return _wait_for(tmp_path / "told")
        with pytest.raises(RuntimeError, match="Expected all 2 ranks to come to the barrier 'save'. Received: rank 0"):
            current().barrier("save")
        return (tmp_path / "told").touch()

    run(work, group_timeout=6)


# Beginnings and ends


def _free_world(port: int, timeout: timedelta | float | None = None) -> TorchWorld:
    placement = environment.detect({**os.environ, "MASTER_PORT": str(port)})
    world = TorchWorld.create(placement, "cpu", timeout=timeout)
    set_current(world)
    return world


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_world_can_be_closed_twice_and_another_made():
    ports = [free_port(), free_port()]

    def work(rank):
        sums = []
        for port in ports:
            world = _free_world(port)
            sums.append(int(world.all_reduce(torch.tensor([rank + 1]))))
            world.close()
            world.close()
            assert not dist.is_initialized() and current().size == 1
        return sums

    assert run(work, group=False) == [[3, 3], [3, 3]]


def test_the_users_own_process_group_is_adopted_and_left_alone(tmp_path):
    def work(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=2)
        world = TorchWorld.create(environment.detect({}), "cpu")
        placed = (world.rank, world.size, world.local_rank, world.local_size, world.num_nodes)
        total = int(world.all_reduce(torch.tensor([1])))
        world.close()
        assert dist.is_initialized()
        value = torch.ones(1)
        dist.all_reduce(value)
        return placed, total, float(value)

    assert run(work, group=False) == [((0, 2, 0, 2, 1), 2, 2.0), ((1, 2, 1, 2, 1), 2, 2.0)]


def test_the_timeout_is_that_of_the_group(tmp_path):
    """gloo's own would be half an hour, which `run` does not wait for."""
    port = free_port()

    def work(rank):
        world = _free_world(port, timeout=6)
        if rank == 1:
            return _wait_for(tmp_path / "told")
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            world.all_reduce(torch.ones(1))
        return (tmp_path / "told").touch()

    run(work, group=False)


def test_closing_does_not_wait_for_a_rank_that_is_gone():
    port = free_port()

    def work(rank):
        world = _free_world(port)
        other = world.gather_object(os.getpid())[1]
        if rank == 1:
            os._exit(9)
        while Path(f"/proc/{other}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)
        world.close()
        raise ZeroDivisionError("closed")

    with pytest.raises(RankFailed) as caught:
        run(work, group=False, patience=60, timeout=120)
    assert "Then rank 0 raised ZeroDivisionError: closed" in str(caught.value)


def test_a_model_that_outlives_its_world_does_not_hang_the_rank():
    """The order that deadlocked in about one of ten forked ranks: the group goes, then DistributedDataParallel."""
    ports = [free_port() for _ in range(5)]

    def work(rank):
        for port in ports:
            world = _free_world(port)
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            model(torch.randn(8, 64)).sum().backward()
            world.close()
            del model
            gc.collect()
        return "alive"

    assert run(work, group=False, timeout=240) == ["alive", "alive"]


def test_an_unknown_address_is_an_error_before_anything_waits():
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
               "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match="Received: 2 nodes under mpi, and no MASTER_ADDR. Export MASTER_ADDR"):
        TorchWorld.create(environment.detect(environ), "cpu")


def test_ranks_that_end_without_closing_end_well(tmp_path):
    """A script that just ends, its model and its group alive: no abort while the interpreter goes down."""
    script = tmp_path / "script.py"
    script.write_text("""
import pathlib, sys, torch
from drivetrain.strategies import environment, world
set_up = world.TorchWorld.create(environment.detect(), "cpu")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(3):
    model(torch.randn(8, 64)).sum().backward()
pathlib.Path(sys.argv[1], f"trained-{set_up.rank}-of-{set_up.size}").touch()
""")
    result = torchrun(script, tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.glob("trained-*")) == ["trained-0-of-2", "trained-1-of-2"]


# Failures that the others hear of


def test_a_failure_is_told_to_the_others():
    port = free_port()

    def work(rank):
        world = _free_world(port)
        assert world.peer_failure() is None
        world.barrier()
        if rank == 1:
            world.report_failure(ValueError("boom"))
            world.report_failure(KeyError("what followed"))
        world.barrier()
        return world.peer_failure()

    assert run(work, group=False) == ["rank 1: ValueError: boom", None]


def test_the_agent_is_told_what_ended_a_rank(tmp_path):
    """torchrun's summary shows the traceback of a script that never heard of its `record` decorator."""
    script = tmp_path / "script.py"
    script.write_text("""
from drivetrain.strategies import environment, world
set_up = world.TorchWorld.create(environment.detect(), "cpu")
set_up.barrier()
if set_up.rank == 1:
    raise ValueError("boom on one")
set_up.barrier("the last")
""")
    result = torchrun(script)
    assert result.returncode == 1
    summary = result.stderr[result.stderr.index("FAILED"):]
    assert 'raise ValueError("boom on one")' in summary


def test_importing_the_world_starts_nothing():
    program = "import drivetrain.strategies.world, torch.distributed as d, threading; "
    program += "assert not d.is_initialized() and threading.active_count() == 1"
    assert execute([sys.executable, "-c", program]).returncode == 0
