"""Operations on nested data: structure kept, values right on every rank, differences named."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from drivetrain.strategies import collectives as c
from drivetrain.strategies.world import current
from drivetrain.tests.distributed import run

Pair = namedtuple("Pair", "left right")


def nested(value: float):
    return {"a": [torch.full((2,), value), "text"], "b": Pair(torch.tensor([[value]]), (torch.tensor(value), None))}


# One rank


def test_recursively_apply_keeps_structure_and_other_leaves():
    result = c.recursively_apply(lambda leaf, plus: leaf + plus, nested(1.0), 2)
    assert result["a"][0].tolist() == [3.0, 3.0] and result["a"][1] == "text"
    assert isinstance(result["b"], Pair) and result["b"].left.tolist() == [[3.0]]
    assert isinstance(result["b"].right, tuple) and result["b"].right[0].item() == 3.0 and result["b"].right[1] is None


def test_recursively_apply_keeps_mapping_types():
    ordered = c.recursively_apply(torch.neg, OrderedDict(x=torch.tensor(1)))
    default = c.recursively_apply(torch.neg, defaultdict(list, x=torch.tensor(1)))
    assert type(ordered) is OrderedDict and ordered["x"].item() == -1
    assert type(default) is defaultdict and default["new"] == []


def test_recursively_apply_other_types():
    assert c.recursively_apply(lambda leaf: leaf * 2, [1, "x"], test_type=lambda leaf: isinstance(leaf, int)) == [2, "x"]
    with pytest.raises(TypeError, match="Received: str"):
        c.recursively_apply(torch.neg, ["x"], error_on_other_type=True)


def test_send_to_device():
    class Batch:
        def to(self, device):
            return ("moved", device)

    class Ids(dict):
        def to(self, device, non_blocking=False):
            return Ids({key: value.to(device) for key, value in self.items()}, moved=True)

    data = {"x": torch.ones(1), "keep": torch.ones(1), "list": [torch.ones(1), 3], "batch": Batch(), "pair": Pair(1, 2)}
    moved = c.send_to_device(data, "meta", skip_keys="keep")
    assert moved["x"].device.type == "meta" and moved["keep"].device.type == "cpu"
    assert moved["list"][0].device.type == "meta" and moved["list"][1] == 3
    assert moved["batch"] == ("moved", "meta") and moved["pair"] == Pair(1, 2)
    assert c.send_to_device(Ids(x=torch.ones(1)), "meta", non_blocking=True)["moved"]
    skipped = c.send_to_device([{"a": torch.ones(1), "b": torch.ones(1)}], "meta", skip_keys=["a"])[0]
    assert (skipped["a"].device.type, skipped["b"].device.type) == ("cpu", "meta")


def test_batch_size_device_and_shapes():
    assert c.find_batch_size([{"x": torch.zeros(3, 2)}, torch.zeros(4)]) == 3
    assert c.find_batch_size({"names": ["a"], "x": torch.zeros(5)}) == 5
    assert c.find_device({"x": [1, torch.zeros(1)]}) == torch.device("cpu") and c.find_device([1]) is None
    assert c.get_shape({"x": torch.zeros(3, 2)}) == {"x": [3, 2]}
    with pytest.raises(ValueError, match="without dimensions"):
        c.find_batch_size(torch.tensor(1.0))
    with pytest.raises(ValueError, match="an empty list"):
        c.find_batch_size([])
    with pytest.raises(TypeError, match="Received: int"):
        c.find_batch_size(3)
    assert [c.ignorant_find_batch_size(data) for data in (torch.zeros(2), [], 3, "x")] == [2, None, None, None]


def test_structure_there_and_back():
    data = {"x": torch.zeros(2, 3, dtype=torch.int32), "other": 1}
    structure = c.get_data_structure(data)
    assert c.is_tensor_information(structure["x"]) and structure["x"] == c.TensorInformation((2, 3), torch.int32)
    made = c.initialize_tensors(structure)
    assert made["x"].shape == (2, 3) and made["x"].dtype == torch.int32 and made["other"] == 1


def test_small_ones():
    assert c.listify({"x": torch.tensor([[1, 2]]), "h": torch.tensor([0.5], dtype=torch.bfloat16)}) == {
        "x": [[1, 2]], "h": [0.5]}
    assert c.is_namedtuple(Pair(1, 2)) and not c.is_namedtuple((1, 2)) and c.is_torch_tensor(torch.ones(1))
    assert c.honor_type(Pair(1, 2), (x for x in (3, 4))) == Pair(3, 4) and c.honor_type([1], iter((2,))) == [2]
    assert c.slice_tensors([torch.arange(4), "x"], slice(1, 3))[0].tolist() == [1, 2]
    joined = c.concatenate([{"x": Pair(torch.tensor([1]), torch.tensor([2]))}] * 2)
    assert joined["x"].left.tolist() == [1, 1] and isinstance(joined["x"], Pair)
    assert c.concatenate([torch.ones(1, 2), torch.zeros(1, 2)], dim=1).tolist() == [[1, 1, 0, 0]]
    with pytest.raises(TypeError):
        c.concatenate([1, 2])
    assert c.pad_input_tensors([torch.ones(3)], 3, 2)[0].tolist() == [1, 1, 1, 0]
    assert c.pad_input_tensors(torch.ones(4), 4, 2).tolist() == [1, 1, 1, 1]


def test_half_precision_outputs():
    outputs = c.convert_outputs_to_fp32(lambda x: {"y": x, "n": torch.tensor([1])})(torch.ones(1).bfloat16())
    assert outputs["y"].dtype == torch.float32 and outputs["n"].dtype == torch.int64
    assert c.convert_to_fp32([torch.ones(1).half(), torch.ones(1).double()])[1].dtype == torch.float64


def test_one_process_gives_back_its_own():
    data = nested(1.0)
    assert c.gather(data) is data and c.gather_uneven(data) is data and c.gather_object([1]) == [1]
    assert c.broadcast(data) is data and c.pad_across_processes(data) is data
    assert c.broadcast_object_list([1, 2]) == [1, 2]
    reduced = c.reduce({"x": torch.tensor([1, 2])}, "mean")["x"]
    assert reduced.tolist() == [1.0, 2.0] and reduced.dtype == torch.float32
    value = torch.ones(1)
    assert c.reduce(value, "sum") is not value


# Ranks


def test_gather_joins_along_dimension_0():
    def work(rank):
        small = {"a": torch.full((2,), rank), "b": Pair(torch.tensor([[rank + 0.5, 1.0]]), torch.tensor(rank == 1))}
        result = c.gather(small)
        many = c.gather([torch.tensor([rank + i], dtype=torch.int16) for i in range(20)])
        large = c.gather([torch.full((1 << 20,), float(rank)), torch.tensor([rank])])
        assert large[0].shape == (2 << 20,) and large[0][-1] == 1 and large[1].tolist() == [0, 1]
        assert many[19].tolist() == [19, 20] and many[3].dtype == torch.int16
        assert isinstance(result["b"], Pair)
        return result["a"].tolist(), result["b"].left.tolist(), result["b"].right.tolist()

    assert run(work) == [([0, 0, 1, 1], [[0.5, 1.0], [1.5, 1.0]], [False, True])] * 2


def test_gather_keeps_no_graph_and_takes_views():
    def work(rank):
        leaf = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
        result = c.gather([leaf * 1, leaf])
        return result[0].requires_grad, result[0].tolist() == torch.cat([leaf, leaf]).tolist()

    assert run(work) == [(False, True)] * 2


MISMATCHES = {
    "shapes": ([torch.zeros(2, 2), torch.zeros(3, 2)], ["rank 0: cpu float32 [2, 2]", "rank 1: cpu float32 [3, 2]"]),
    "dtypes": ([torch.zeros(2), torch.zeros(2).int()], ["rank 0: cpu float32 [2]", "rank 1: cpu int32 [2]"]),
    "keys": ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], ["rank 0: ['a']", "rank 1: ['b']"]),
    "order_of_keys": ([{"a": torch.zeros(1), "b": torch.zeros(1)}, {"b": torch.zeros(1), "a": torch.zeros(1)}],
                      ["rank 0: ['a']", "rank 1: ['b']"]),
    "numbers": ([[torch.zeros(1)] * 2, [torch.zeros(1)]], ["[1]: cpu float32 [1]", "rank 1: [0]: cpu float32 [1]"]),
    "nothing": ([[torch.zeros(1)], []], ["rank 1: nothing"]),
}


@pytest.mark.parametrize("operation", [c.gather, c.reduce, c.broadcast])
@pytest.mark.parametrize("name", MISMATCHES)
def test_differences_between_ranks_are_named_on_all(name, operation):
    data, expected = MISMATCHES[name]

    def work(rank):
        with pytest.raises(c.DistributedOperationException) as caught:
            operation(data[rank])
        current().barrier("everybody is still here")
        return str(caught.value)

    messages = run(work)
    assert messages[0] == messages[1] and all(part in messages[0] for part in expected), messages[0]
    assert isinstance(c.DistributedOperationException(), ValueError)


def test_gather_refuses_objects_before_anything_is_sent():
    def work(rank):
        with pytest.raises(TypeError, match=r"Received: str at \['x'\]\[1\]"):
            c.gather({"x": [torch.ones(1), "text"]})

    run(work)


def test_gather_uneven():
    def work(rank):
        data = {"x": torch.full((rank, 2), float(rank)), "y": torch.arange(2 - rank), "s": torch.tensor(rank)}
        result = c.gather_uneven(data)
        many = c.gather_uneven([torch.full((rank + 1,), i) for i in range(20)])
        assert [len(part) for part in many] == [3] * 20 and many[19].tolist() == [19] * 3
        return result["x"].tolist(), result["y"].tolist(), result["s"].tolist()

    assert run(work) == [([[1.0, 1.0]], [0, 1, 0], [0, 1])] * 2


def test_gather_uneven_names_what_must_be_equal():
    def work(rank):
        with pytest.raises(ValueError, match=r"rank 0: cpu float32 \[2\], rank 1: cpu float32 \[3\]"):
            c.gather_uneven(torch.zeros(1, 2 + rank))

    run(work)


def test_gather_object():
    def work(rank):
        for wrong in ("text", {"a": 1}, 3):
            with pytest.raises(TypeError, match="Put it into a list"):
                c.gather_object(wrong)
        return c.gather_object([{"rank": rank}] * (rank + 1)), c.gather_object(("x",))

    assert run(work) == [([{"rank": 0}, {"rank": 1}, {"rank": 1}], ["x", "x"])] * 2


def test_broadcast():
    def work(rank):
        data = {"x": torch.full((2,), float(rank)), "n": [torch.tensor(rank)]}
        same = c.broadcast(data, from_process=1)
        objects = ["a", rank, None] if rank == 0 else [0, 0, 0]
        again = c.broadcast_object_list(objects)
        return same is data, data["x"].tolist(), data["n"][0].item(), objects, again is objects

    assert run(work) == [(True, [1.0, 1.0], 1, ["a", 0, None], True)] * 2


def test_reduce():
    def work(rank):
        data = {"x": torch.tensor([1.0, 2.0]) * (rank + 1), "n": torch.tensor(rank), "flag": torch.tensor(rank == 1)}
        total, mean = c.reduce(data, "sum"), c.reduce(data)
        assert data["x"].tolist() == [1.0 * (rank + 1), 2.0 * (rank + 1)]
        assert total["n"].dtype == torch.int64 and mean["n"].dtype == torch.float32
        return (total["x"].tolist(), total["n"].item(), total["flag"].item(), mean["x"].tolist(), mean["n"].item(),
                mean["flag"].item(), c.reduce(data["x"], "sum", scale=0.5).tolist())

    assert run(work) == [([3.0, 6.0], 1, True, [1.5, 3.0], 0.5, 0.5, [1.5, 3.0])] * 2


def test_reduce_none_and_unknown():
    def work(rank):
        with pytest.raises(ValueError, match="Received: reduction='avg'"):
            c.reduce(torch.ones(1), "avg")
        return c.reduce(torch.tensor([float(rank)]), "none").item()

    assert run(work) == [0.0, 1.0]


def test_pad_across_processes():
    def work(rank):
        data = {"x": torch.full((rank + 1, 2), float(rank + 1)), "scalar": torch.tensor(rank), "same": torch.ones(1)}
        end = c.pad_across_processes(data, pad_index=9)
        front = c.pad_across_processes(data["x"], pad_first=True)
        wide = c.pad_across_processes(torch.ones(2, rank + 1), dim=1)
        last = c.pad_across_processes(torch.ones(2, rank + 1), dim=-1)
        assert wide.shape == last.shape == (2, 2) and end["scalar"].item() == rank and end["same"] is data["same"]
        return end["x"].tolist(), front.tolist()

    assert run(work) == [
        ([[1.0, 1.0], [9.0, 9.0]], [[0.0, 0.0], [1.0, 1.0]]),
        ([[2.0, 2.0], [2.0, 2.0]], [[2.0, 2.0], [2.0, 2.0]]),
    ]


def test_nested_tensors_are_not_padded_and_it_is_said():
    def work(rank):
        tensor = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            same = c.pad_across_processes([tensor])[0] is tensor
        return same, any(issubclass(one.category, c.CannotPadNestedTensorWarning) for one in caught)

    assert run(work) == [(True, True)] * 2


# Metrics


def loader(*, end=True, samples=2, total=4, remainder=-1):
    return SimpleNamespace(end_of_dataloader=end, samples=samples, global_samples=total, remainder=remainder)


METRICS = {
    # rows of each rank, loader of each rank, what all ranks get
    "inside_an_epoch": ([[0, 1], [2, 3]], [loader(end=False, remainder=3)] * 2, [0, 1, 2, 3]),
    "full_last_batch": ([[0, 1], [2, 3]], [loader()] * 2, [0, 1, 2, 3]),
    "filled_up_by_repeating": ([[4, 5], [6, 0]], [loader(remainder=3)] * 2, [4, 5, 6]),
    "shared_short": ([[4, 5], [6]], [loader(total=3, remainder=3), loader(samples=1, total=3, remainder=3)], [4, 5, 6]),
    "one_without": ([[4], [4]], [loader(samples=1, total=1, remainder=1), loader(samples=0, total=1, remainder=1)], [4]),
    "no_loader": ([[0], [1]], [None, None], [0, 1]),
}


@pytest.mark.parametrize("name", METRICS)
def test_D4_metrics_see_each_sample_once(name):
    rows, loaders, right = METRICS[name]

    def work(rank):
        tensors = c.gather_for_metrics((torch.tensor(rows[rank]), {"x": torch.tensor(rows[rank])}), loaders[rank])
        texts = c.gather_for_metrics([str(row) for row in rows[rank]], loaders[rank])
        objects = c.gather_for_metrics(list(torch.tensor(rows[rank])), loaders[rank], use_gather_object=True)
        return tensors[0].tolist(), tensors[1]["x"].tolist(), texts, [int(one) for one in objects]

    assert run(work) == [(right, right, [str(row) for row in right], right)] * 2
