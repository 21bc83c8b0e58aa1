"""PartialState and AcceleratorState: views of the world, and what only some processes do."""

from __future__ import annotations

import time

import pytest
import torch

from drivetrain.strategies import world as worlds
from drivetrain.strategies.settings import DistributedType
from drivetrain.strategies.state import AcceleratorState, PartialState, share
from drivetrain.strategies.world import World
from drivetrain.tests.distributed import run


@pytest.fixture(autouse=True)
def _fresh():
    PartialState._reset_state()
    yield
    PartialState._reset_state()
    worlds.set_current(World())


def ranked(rank, size):
    world = World()
    world.rank, world.size = rank, size
    return world


def test_one_process():
    state = PartialState(cpu=True)
    assert state.initialized and not state.use_distributed
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert state.device == torch.device("cpu") and state.distributed_type is DistributedType.NO and state.backend is None
    assert "0 of 1" in repr(state)
    state.wait_for_everyone()


def test_two_processes_share_one_view():
    def work(rank):
        PartialState._reset_state()
        state, again = PartialState(), AcceleratorState(mixed_precision="bf16")
        seen = (state.num_processes, state.process_index, again.process_index, state.backend, again.mixed_precision)
        flags = (state.is_main_process, state.is_last_process, state.distributed_type.value)
        return seen, flags, again.is_fsdp2

    assert run(work) == [
        ((2, 0, 0, "gloo", "bf16"), (True, False, "MULTI_CPU"), False),
        ((2, 1, 1, "gloo", "bf16"), (False, True, "MULTI_CPU"), False),
    ]


def test_decorators_run_where_they_say():
    def work(rank):
        PartialState._reset_state()
        state = PartialState()
        ran = [
            state.on_main_process(lambda: "main")(),
            state.on_local_main_process(lambda: "local")(),
            state.on_last_process(lambda: "last")(),
            state.on_process(lambda: "one", process_index=1)(),
            state.on_process(process_index=0)(lambda: "zero")(),
            state.on_local_process(local_process_index=1)(lambda: "local one")(),
        ]

        @state.on_main_process
        def named():
            """Says something."""

        return ran, named.__name__, named.__doc__

    first, second = run(work)
    assert first[0] == ["main", "local", None, None, "zero", None]
    assert second[0] == [None, None, "last", "one", None, "local one"]
    assert first[1:] == ("named", "Says something.")
    alone = ["main", "local", "last", "one", "zero", "local one"]  # as in Accelerate: the only one is every one
    assert run(work, 1)[0][0] == alone


@pytest.mark.parametrize("which", ["main_process_first", "local_main_process_first"])
def test_main_process_goes_first(which, tmp_path):
    def work(rank):
        PartialState._reset_state()
        with getattr(PartialState(), which)():
            if rank == 0:
                time.sleep(0.2)
                (tmp_path / "made").touch()
            return (tmp_path / "made").exists()

    assert run(work) == [True, True]


@pytest.mark.parametrize(
    ("items", "size", "padding", "expected"),
    [
        ([1, 2, 3, 4, 5], 2, False, [[1, 2, 3], [4, 5]]),
        ([1, 2, 3, 4, 5], 2, True, [[1, 2, 3], [4, 5, 5]]),
        ((1, 2, 3, 4), 2, False, [(1, 2), (3, 4)]),
        ([1, 2], 3, False, [[1], [2], []]),
        ([1, 2], 3, True, [[1], [2], [2]]),
        ([1, 2, 3, 4, 5, 6, 7], 3, False, [[1, 2, 3], [4, 5], [6, 7]]),
        ([], 2, True, [[], []]),
    ],
)
def test_share(items, size, padding, expected):
    assert [share(items, ranked(rank, size), padding) for rank in range(size)] == expected


def test_share_of_tensors_and_dicts():
    data = {"x": torch.arange(5), "names": ["a", "b", "c", "d", "e"]}
    first, second = (share(data, ranked(rank, 2), True) for rank in range(2))
    assert first["x"].tolist() == [0, 1, 2] and first["names"] == ["a", "b", "c"]
    assert second["x"].tolist() == [3, 4, 4] and second["names"] == ["d", "e", "e"]


def test_share_refuses_what_it_cannot_divide():
    with pytest.raises(ValueError, match="lengths {'a': 1, 'b': 2}"):
        share({"a": [1], "b": [1, 2]}, ranked(0, 2))
    with pytest.raises(TypeError, match="Received: int"):
        share(3, ranked(0, 2))


def test_split_between_processes():
    def work(rank):
        PartialState._reset_state()
        with PartialState().split_between_processes(["a", "b", "c"]) as mine:
            return mine

    assert run(work) == [["a", "b"], ["c"]]


def test_print_once_per_machine():
    def work(rank):
        PartialState._reset_state()
        with open(f"printed-{rank}", "w+") as file:
            PartialState().print("hello", rank, file=file)
            file.seek(0)
            return file.read()

    assert run(work) == ["hello 0\n", ""]


def test_the_state_tells_of_sharding():
    def work(rank):
        from drivetrain import Accelerator, AcceleratorState

        accelerator = Accelerator(cpu=True, strategy="fsdp")
        return accelerator.is_fsdp2, AcceleratorState().is_fsdp2, accelerator.multi_device, AcceleratorState().debug

    assert run(work) == [(True, True, False, False)] * 2
