"""Nested state as JSON and tensors: everything comes back bit for bit, or is refused by name and path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import pathlib
import random
import struct
import sys

import numpy as np
import pytest
import torch
from torch import nn

from drivetrain.strategies.checkpoint import CheckpointError, decode, encode
from drivetrain.tests.strategies.checkpoint.samples import same


def round_trip(value):
    tree, tensors = encode(value)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)


UTC = datetime.timezone.utc
VALUES = [
    None, True, False, 0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 3**400, -(10**5000),
    0.0, -0.0, 0.1, 1e-310, 5e-324, sys.float_info.max, math.pi, 1 / 3, math.inf, -math.inf, math.nan,
    struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
    struct.unpack(">d", bytes.fromhex("fff8000000000000"))[0],
    complex(1, -0.0), complex(math.nan, math.inf), "", "text", "$tensor", "\ud800 \0 \u2028 \U0001f600", b"",
    b"\0\xff\n",
    [], (), {}, set(), frozenset(), [[]], ((),), (1,), {"": 0}, {"$tensor": "x"}, {"$": 1, "a": 2}, {1: "a", "1": "b"},
    {None: 1, True: 2, 2.5: 3, (1, ("a", None)): 4, math.inf: 5}, {(): []}, {1, 2, (3, "x")}, frozenset({"a", b"a"}),
    torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool,
    torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"),
    pathlib.Path("/a/b"), pathlib.Path("."), pathlib.Path("x y/\u00e9"),
    datetime.datetime(2024, 2, 29, 23, 59, 59, 999999), datetime.datetime(1, 1, 1, tzinfo=UTC),
    datetime.date(9999, 12, 31),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))),
    datetime.time(1, 2, 3, 4), datetime.time(5, tzinfo=UTC), datetime.timedelta(days=-3, microseconds=7),
    np.float64(0.1), np.float32("nan"), np.float16(-0.0), np.int8(-5), np.uint64(2**64 - 1), np.bool_(True),
    np.complex128(1 - 2j), np.longdouble("0.1"), np.datetime64("2024-02-29T01:02:03", "ns"), np.timedelta64(-5, "D"),
    np.arange(6).reshape(2, 3), np.zeros((0, 3)), np.array(2.5), np.array([True, False]), np.arange(3, dtype=">i4"),
    np.array(["a", "\u00e9\u20ac"]), np.array([b"x", b"yz"]), np.array(["2024-01-01"], dtype="M8[D]"),
    np.longdouble([1, 2]),
    np.array([1 + 2j]), np.arange(4, dtype=np.uint16), np.float16([1, 2]), np.array([], dtype="<U3"),
    torch.tensor(3), torch.empty(0, 2), torch.tensor([1 + 2j]), torch.tensor([True]),
    torch.tensor([65535], dtype=torch.uint16),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_value_comes_back(value):
    assert same(round_trip(value), value)
    assert same(round_trip({"a": [value, (value,)]}), {"a": [value, (value,)]})


def test_plain_data_is_plain_json():
    value = {"epoch": 3, "lr": [0.1, 0.2], "name": "x", "done": None, "nested": {"ok": True}}
    assert encode(value) == (value, {})


def test_the_documented_form():
    tree, tensors = encode({"w": torch.ones(2), "t": (1, b"a"), 5: math.inf}, "opt")
    assert tree == {
        "$dict": [
            ["w", {"$tensor": "opt.w"}], ["t", {"$tuple": [1, {"$bytes": "YQ=="}]}], [5, {"$float": "inf"}],
        ]
    }  # fmt: skip
    assert list(tensors) == ["opt.w"] and torch.equal(tensors["opt.w"], torch.ones(2))


class Color(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Plain(enum.Enum):
    A = 1


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value, expected",
    [
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Point(1, 2.0), (1, 2.0)),
        (Color.RED, "red"),
        (Level.HIGH, 3),
        ({Color.RED: 1, Level.HIGH: 2}, {"red": 1, 3: 2}),
        (Text("x"), "x"),
        (np.str_("x"), "x"),
        (np.bytes_(b"x"), b"x"),
        (type("MyList", (list,), {})([1]), [1]),
    ],
)
def test_subclass_becomes_what_it_is_beneath(value, expected):
    assert same(round_trip(value), expected)


def test_parameter_comes_back_as_a_tensor_without_its_graph():
    parameter = nn.Parameter(torch.randn(3))
    back = round_trip({"p": parameter, "q": parameter * 2})
    assert type(back["p"]) is torch.Tensor and not back["p"].requires_grad and not back["q"].requires_grad
    assert torch.equal(back["q"], parameter.detach() * 2)


def test_one_tensor_in_two_places_stays_one():
    tensor, array = torch.randn(3), np.arange(3)
    tree, tensors = encode({"a": tensor, "b": [tensor], "c": array, "d": array})
    assert set(tensors) == {"state.a", "state.c"}
    back = decode(tree, tensors)
    assert back["a"] is back["b"][0]


def test_tensor_names_that_would_be_equal_are_numbered():
    first, second, third = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    tree, tensors = encode({"a.b": first, "a": {"b": second}, ("a", 1): third})
    assert len(tensors) == 3
    assert same(decode(tree, tensors), {"a.b": first, "a": {"b": second}, ("a", 1): third})


def test_sets_are_written_in_one_order_whatever_the_hash_seed():
    assert encode({"b", "a", "c"})[0] == {"$set": ["a", "b", "c"]}


def test_arrays_that_torch_cannot_view_are_copied():
    reverse, frozen = np.arange(5)[::-1], np.arange(5)
    frozen.flags.writeable = False
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    back = round_trip([reverse, frozen, fortran])
    assert all(np.array_equal(a, b) for a, b in zip(back, [reverse, frozen, fortran], strict=True))
    back[1][0] = 7  # what comes back can be written


def test_random_states_of_torch_and_numpy_come_back():
    for state in (torch.get_rng_state(), np.random.get_state(), random.getstate(), np.random.PCG64(3).state):
        assert same(round_trip(state), state)


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


REFUSED = [
    (nn.Linear(2, 2), "a Linear"),
    (nn.CrossEntropyLoss(), "a CrossEntropyLoss"),
    (object(), "a object"),
    (print, "a builtin_function_or_method"),
    (lambda: 0, "a function"),
    (nn.Linear, "a type"),
    (functools.partial(print), "a partial"),
    (Settings(), "a Settings. Save dataclasses.asdict()"),
    (Plain.A, "a Plain. Save its name or value"),
    (torch.Generator(), "a Generator. Save its get_state()"),
    (np.random.default_rng(0), "a Generator"),
    (range(3), "a range"),
    (slice(1), "a slice"),
    (bytearray(b"x"), "a bytearray"),
    (iter([]), "a list_iterator"),
    (np.array([object()]), "a ndarray. It has dtype object"),
    (np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]), "a ndarray. It has dtype"),
    (np.ma.masked_array([1, 2], [True, False]), "a MaskedArray"),
    (np.dtype("f4"), "a Float32DType"),
    (torch.eye(2).to_sparse(), "a Tensor. It is a tensor of layout torch.sparse_coo"),
    (torch.empty(2, device="meta"), "a Tensor. It is a tensor on the meta device"),
    (
        nn.UninitializedParameter() if hasattr(nn, "UninitializedParameter") else nn.LazyLinear(2).weight,
        "without values",
    ),
]


@pytest.mark.parametrize("value, words", REFUSED, ids=lambda value: str(value)[:30])
def test_C7_what_cannot_be_held_is_refused_with_its_name_and_path(value, words):
    with pytest.raises(TypeError) as error:
        encode({"a": [1, {"loss": value}]}, "hparams")
    assert "hparams.a.1.loss: " in str(error.value) and words in str(error.value)


def test_C7_the_object_is_named_by_its_path():
    with pytest.raises(TypeError, match=r"Received: hparams\.loss: a Linear\."):
        encode({"lr": 0.1, "loss": nn.Linear(2, 2)}, "hparams")


def test_keys_that_cannot_be_held_are_refused():
    for key in (frozenset(), b"x", nn.ReLU(), Plain.A, (1, object())):
        with pytest.raises(TypeError, match="is a key|Save its name"):
            encode({"a": {key: 1}})


def test_what_contains_itself_or_is_too_deep_is_refused():
    loop: list = []
    loop.append({"x": loop})
    with pytest.raises(TypeError, match="state.0.x: a list. It contains itself"):
        encode(loop)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match="200 deep"):
        encode(deep)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]  # twice is not a circle


HOSTILE = [
    {"$unknown": 1}, {"$tuple": [1], "x": 2}, {"$reduce": ["os.system", ["true"]]}, {"$tensor": "not there"},
    {"$tensor": []},
    {"$tensor": None}, {"$array": "not there"}, {"$array": "bf16"}, {"$bytearray": ["t", "|O", [1]]},
    {"$bytearray": ["t", "<f8", [99]]}, {"$bytearray": ["t", "<f8"]}, {"$bytearray": ["t", [["a", "<f4"]], [1]]},
    {"$scalar": ["|O", "AAAAAAAAAAA="]}, {"$scalar": ["<f8", "AA"]}, {"$scalar": ["<f8", ""]}, {"$scalar": 5},
    {"$dtype": "nn"}, {"$dtype": "__name__"}, {"$dtype": "load"}, {"$dtype": 3}, {"$device": "toaster"},
    {"$device": [1]},
    {"$int": "x"}, {"$int": 5}, {"$float": "0xzz"}, {"$float": "one"}, {"$float": 1}, {"$complex": [1]},
    {"$complex": ["a", 1]},
    {"$bytes": "*"}, {"$bytes": 1}, {"$set": [[1]]}, {"$set": 1}, {"$dict": [[[1], 2]]}, {"$dict": [1]},
    {"$dict": {"a": 1}},
    {"$size": ["a"]}, {"$size": 1}, {"$path": 1}, {"$datetime": "yesterday"}, {"$date": 5}, {"$time": "25:00"},
    {"$timedelta": ["a"]}, {"$timedelta": [1e300]}, {"$tuple": None},
]  # fmt: skip


@pytest.mark.parametrize("tree", HOSTILE, ids=str)
def test_tree_that_nobody_wrote_is_refused(tree):
    tensors = {"t": torch.zeros(8, dtype=torch.uint8), "bf16": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="Expected"):
        decode({"a": [tree]}, tensors)


def test_tree_that_is_too_deep_is_refused():
    tree: list = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        decode(tree)


def random_value(draw: random.Random, depth: int):
    """Return some nested value out of everything that a checkpoint holds."""
    if depth and draw.random() < 0.6:
        size = draw.randrange(5)
        kind = draw.choice(["list", "tuple", "dict", "keys", "set"])
        if kind in ("list", "tuple"):
            items = [random_value(draw, depth - 1) for _ in range(size)]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {random_text(draw): random_value(draw, depth - 1) for _ in range(size)}
        if kind == "keys":
            return {random_key(draw): random_value(draw, depth - 1) for _ in range(size)}
        return draw.choice([set, frozenset])(random_key(draw) for _ in range(size))
    return random_leaf(draw)


def random_leaf(draw: random.Random):
    choice = draw.randrange(8)
    if choice == 0:
        return struct.unpack(">d", draw.randbytes(8))[0]
    if choice == 1:
        return draw.getrandbits(draw.choice([4, 60, 63, 64, 130])) * draw.choice([1, -1])
    if choice == 2:
        return random_text(draw)
    if choice == 3:
        return draw.randbytes(draw.randrange(9))
    if choice == 4:
        dtype = draw.choice(
            [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64, torch.float8_e5m2]
        )
        shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
        size = math.prod(shape) * dtype.itemsize
        data = torch.frombuffer(bytearray(draw.randbytes(size or 8)), dtype=dtype)
        return data[: math.prod(shape)].reshape(shape)
    if choice == 5:
        dtype = np.dtype(draw.choice(["<f4", ">f8", "<i2", "|u1", "<c16", "<M8[s]", "|S3", "<f2"]))
        count = draw.randrange(4)
        return np.frombuffer(draw.randbytes(dtype.itemsize * count), dtype=dtype)
    if choice == 6:
        return np.frombuffer(draw.randbytes(8), dtype=draw.choice(["<f8", "<i8", "<u8", "<m8[ms]"]))[0]
    return draw.choice([value for value in VALUES if isinstance(value, (type(None), bool, torch.dtype, pathlib.Path))])


def random_key(draw: random.Random):
    return draw.choice(
        [random_text(draw), draw.randrange(-9, 9) + 0.5, draw.getrandbits(70), None, (1, random_text(draw))]
    )


def random_text(draw: random.Random) -> str:
    return "".join(
        draw.choice(["a", "$", ".", "~", '"', "\\", "\n", "\u00e9", "\ud83d", "\0"]) for _ in range(draw.randrange(5))
    )


@pytest.mark.parametrize("seed", range(8))
def test_any_nested_state_comes_back_bit_for_bit(seed):
    draw = random.Random(seed)
    for _ in range(100):
        value = random_value(draw, 4)
        tree, tensors = encode(value)
        back = decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)
        assert same(back, value), value


def test_a_big_list_of_numbers_costs_little():
    tree, _ = encode({"order": list(range(200_000))})
    assert tree["order"][-1] == 199_999
