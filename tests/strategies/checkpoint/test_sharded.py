"""Tensors in parts: who writes what, what is read of it, and checkpoints that any strategy saves and any loads."""

from __future__ import annotations

import json
import math

import pytest
import torch
from drivetrain import Accelerator, load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer
from drivetrain.strategies.checkpoint.pieces import Pieces, boxes_between, within
from drivetrain.strategies.checkpoint.references import open_state
from drivetrain.strategies.checkpoint.sharded import load_sharded_state, open_parts, save_sharded, save_sharded_state
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies import world as worlds
from drivetrain.tests.conformance.cells import Transformer, loss_of, tokens
from drivetrain.tests.distributed import RankFailed, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WHOLE = torch.arange(60.0).view(5, 12)


def save(rank, folder):
    """On four ranks, as 2 replicas × 2 shards: an uneven tensor, a column-wise one, a tiny one, plain ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    tensors = {
        "rows": distribute_tensor(WHOLE, mesh, [Replicate(), Shard(0)]),
        "columns": distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]),
        "one": distribute_tensor(torch.tensor([7.0]), mesh, [Replicate(), Shard(0)]),
        "plain": torch.full((3,), float(rank)),
        "count": torch.tensor(rank + 5),
        "empty": torch.empty(0, 4),
        "complex": torch.tensor([1 + 2j, 3j]),
    }
    tensors["again"] = tensors["rows"]
    if rank == 2:
        tensors["own"] = torch.tensor([2.0])
    with Writer(folder, world=worlds.current()) as writer:
        save_sharded(writer, tensors, stem="model")
        writer.commit({"step": 1})


def test_parts_are_written_once_by_the_ranks_that_hold_them(tmp_path):
    run(save, 4, tmp_path / "c")
    checkpoint = Checkpoint.open(tmp_path / "c")
    index = json.loads((tmp_path / "c" / "model.shards.json").read_text())
    assert index["tensors"]["rows"]["shape"] == [5, 12] and index["aliases"] == {"again": "rows"}
    assert sorted(part[1:] for part in index["tensors"]["rows"]["parts"]) == [[[0, 0], [3, 12]], [[3, 0], [2, 12]]]
    assert len(index["tensors"]["columns"]["parts"]) == 4 and len(index["files"]) == 4
    parts = open_parts(checkpoint)
    for name in ("rows", "again", "columns"):
        assert torch.equal(parts.read(name), WHOLE)
    assert parts.read("one").tolist() == [7.0] and parts.read("own").tolist() == [2.0]
    assert parts.read("plain").tolist() == [0.0] * 3 and parts.read("count").item() == 5  # the first rank's count
    assert parts.read("empty").shape == (0, 4) and parts.read("complex").tolist() == [1 + 2j, 3j]


@pytest.mark.parametrize(
    "box", [((0, 0), (5, 12)), ((2, 5), (2, 3)), ((4, 11), (1, 1)), ((3, 0), (2, 12)), ((0, 6), (5, 6))]
)
def test_any_box_is_read_from_the_parts_that_it_touches(tmp_path, box):
    run(save, 4, tmp_path / "c")
    parts = open_parts(Checkpoint.open(tmp_path / "c"))
    (row, column), (rows, columns) = box
    for name in ("rows", "columns"):
        assert torch.equal(parts.read(name, box), WHOLE[row : row + rows, column : column + columns])


def test_state_of_ranks_with_different_parameters_is_joined(tmp_path):
    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        name = ["first", "second"][rank]
        moment = distribute_tensor(WHOLE, mesh, [Shard(0)])
        state = {"state": {name: {"m": torch.ones(2) * rank}, "shared": {"m": moment}},
                 "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [name, "shared"]}]}  # fmt: skip
        with Writer(tmp_path / "c", world=worlds.current()) as writer:
            save_sharded_state(writer, "optimizer-0", state)
            writer.commit({})
        found = load_sharded_state(Checkpoint.open(tmp_path / "c"), "optimizer-0", {"shared": moment})
        kept = found["state"]["shared"]["m"]
        return isinstance(kept, DTensor) and torch.equal(kept.to_local(), moment.to_local())

    assert run(work) == [True, True]
    found = load_sharded_state(Checkpoint.open(tmp_path / "c"), "optimizer-0", {})
    assert found["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["first", "shared", "second"]}]
    assert found["state"]["second"]["m"].tolist() == [1.0, 1.0] and torch.equal(found["state"]["shared"]["m"], WHOLE)


def test_an_index_that_lies_is_refused(tmp_path):
    run(save, 4, tmp_path / "c")
    good = json.loads((tmp_path / "c" / "model.shards.json").read_text())
    beyond = {**good, "tensors": {"rows": {**good["tensors"]["rows"], "parts": [[0, [4, 0], [3, 12]]]}}}
    missing = {**good, "tensors": {"rows": {**good["tensors"]["rows"], "parts": good["tensors"]["rows"]["parts"][:1]}},
               "aliases": {}}  # fmt: skip
    for number, (tree, message) in enumerate([
        (beyond, "no index of parts"), ({**good, "files": ["../x"]}, "no index of parts|names"), ({"tensors": {}}, "no index"),
        ({**good, "aliases": {"a": "nothing"}}, "names tied tensors"), (missing, "parts of the tensor 'rows' are missing"),
    ]):  # fmt: skip
        folder = tmp_path / f"bad{number}"
        with Writer(folder) as writer:
            for name in good["files"]:
                (writer.folder / name).write_bytes((tmp_path / "c" / name).read_bytes())
                writer.adopt(name)
            writer.json("model.shards.json", tree)
            writer.commit({})
        with pytest.raises(CheckpointError, match=message):
            open_parts(Checkpoint.open(folder)).read("rows")


# Any strategy saved, any loaded

KINDS = {"single": (None, 1), "ddp": ("ddp", 2), "fsdp": ("fsdp", 2), "fsdp-4": ("fsdp", 4), "hsdp": ("hsdp", 4),
         "fsdp1": ("fsdp1", 2)}  # fmt: skip


def step(accelerator, model, optimizer, seed):
    rows = tokens(8, seed=seed).tensors[0].chunk(accelerator.num_processes)[accelerator.process_index]
    accelerator.backward(loss_of(model, rows))
    optimizer.step()
    optimizer.zero_grad()


def go_on(rank, strategy, folder, how):
    """Save after two steps (or load what somebody saved so), make a third one, and return the whole weights."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = Transformer()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if how == "load":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
    else:
        for seed in (1, 2):
            step(accelerator, model, optimizer, seed)
        accelerator.save_state(folder, asynchronous=how == "background")
    step(accelerator, model, optimizer, 3)
    accelerator.wait_for_saves()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("saved", KINDS)
def test_a_checkpoint_of_any_strategy_goes_on_under_any(tmp_path, saved):
    strategy, ranks = KINDS[saved]
    how = "background" if saved in ("fsdp", "fsdp-4") else "save"
    expected = run(go_on, ranks, strategy, tmp_path / "c", how)[0]
    for strategy, ranks in KINDS.values() if saved == "fsdp" else [KINDS["single"], KINDS["fsdp"], KINDS["fsdp-4"]]:
        found = run(go_on, ranks, strategy, tmp_path / "c", "load")[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_full_state_is_written_by_the_first_rank_where_that_is_asked_for(tmp_path):
    expected = run(go_on, 2, FSDPStrategy(state_dict_type="FULL_STATE_DICT"), tmp_path / "c", "save")[0]
    names = set(Checkpoint.open(tmp_path / "c").files)
    assert {"model.safetensors", "optimizer-0.safetensors"} <= names and "model.shards.json" not in names
    found = run(go_on, 2, "fsdp", tmp_path / "c", "load")[0]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_damaged_part_is_named_and_nothing_is_loaded(tmp_path):
    run(go_on, 2, "fsdp", tmp_path / "c", "save")
    path = tmp_path / "c" / "model.shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(RankFailed, match="model.shard-00001.safetensors: is damaged"):
        run(go_on, 2, "fsdp", tmp_path / "c", "load")


def test_accelerates_functions_save_and_load_models_and_optimizers(tmp_path):
    def work(rank):
        accelerator = Accelerator(strategy="fsdp")
        model = Transformer()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        plugin = accelerator.state.fsdp_plugin
        step(accelerator, model, optimizer, 1)
        save_fsdp_model(plugin, accelerator, model, tmp_path)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path)
        step(accelerator, model, optimizer, 2)
        expected = accelerator.get_state_dict(model)
        load_fsdp_model(plugin, accelerator, model, tmp_path)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path)
        step(accelerator, model, optimizer, 2)
        found = accelerator.get_state_dict(model)
        return all(torch.equal(found[name], expected[name]) for name in expected)

    assert run(work) == [True, True]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 1), (2, 1, 3)])
def test_a_run_of_elements_is_boxes_in_their_order(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            boxes = boxes_between(shape, start, stop)
            found = [numbers[within(box, (0,) * len(shape))].flatten().tolist() for box in boxes]
            assert sum(found, []) == list(range(start, stop)) and len(boxes) <= max(1, 2 * len(shape) - 1)


def save_runs(rank, folder):
    """Each of three ranks holds a run of elements, as boxes; the second also has one of the third's."""
    first, last = [(0, 17), (17, 41), (41, 60)][rank]
    boxes = boxes_between((5, 12), first, last) + ([((4, 0), (1, 12))] if rank == 1 else [])
    views = [WHOLE[within(box, (0, 0))] for box in boxes]
    pieces = Pieces((5, 12), torch.float32, tuple(boxes), tuple(views))
    own = {"state": {"rows": {"exp_avg": pieces, "step": torch.tensor(3.0)}}, "params": ["rows"]}
    with Writer(folder, world=worlds.current()) as writer:
        save_sharded(writer, {"rows": pieces}, stem="model")
        save_sharded_state(writer, "optimizer-0", own)
        writer.commit({"step": 1})


def test_a_rank_may_hold_several_boxes_of_a_tensor(tmp_path):
    run(save_runs, 3, tmp_path / "c")
    checkpoint = Checkpoint.open(tmp_path / "c")
    index = json.loads((tmp_path / "c" / "model.shards.json").read_text())
    assert "model.shard-00001-1.safetensors" in index["files"] and len(index["tensors"]["rows"]["parts"]) == 7
    assert torch.equal(open_parts(checkpoint).read("rows"), WHOLE)
    state = open_state(checkpoint, "optimizer-0")
    reference = state["state"]["rows"]["exp_avg"]
    assert reference.shape == (5, 12) and torch.equal(reference.read(((1, 3), (3, 2))), WHOLE[1:4, 3:5])
    assert float(state["state"]["rows"]["step"].read()) == 3.0 and state["params"] == ["rows"]
    assert torch.equal(load_sharded_state(checkpoint, "optimizer-0", {})["state"]["rows"]["exp_avg"], WHOLE)


def test_a_tensor_of_which_nobody_has_a_part_is_noticed(tmp_path):
    box, view = ((0, 0), (1, 2)), torch.zeros(1, 2)
    rows = Pieces((2, 2), torch.float32, (box,), (view,))
    with pytest.raises(AssertionError, match=r"rows of \[2, 2\] in parts of 2 elements"), Writer(tmp_path / "c") as new:
        save_sharded(new, {"rows": rows}, stem="model")
    assert not (tmp_path / "c").exists()


def test_boxes_belong_in_sharded_state_alone(tmp_path):
    with pytest.raises(TypeError, match=r"optimizer-0\.rows: a Pieces\. It is a part of a tensor"):
        with Writer(tmp_path / "c") as writer:
            writer.state("optimizer-0", {"rows": Pieces((2,), torch.float32)})
