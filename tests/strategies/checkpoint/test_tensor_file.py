"""safetensors files: the library's bytes are read, ours are read by the library, and nothing else passes."""

from __future__ import annotations

import gc
import json
import os
import random
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn
from xxhash import xxh3_64_hexdigest

from drivetrain.strategies.checkpoint import CheckpointError
from drivetrain.strategies.checkpoint.files import CHUNK, HashingReader, HashingWriter
from drivetrain.strategies.checkpoint.tensor_file import DTYPES, read_tensors, split_aliases, write_tensors
from drivetrain.tests.strategies.checkpoint.samples import forked, megabytes, raw, same

FILE = Path("x.safetensors")


def write(tensors, **options) -> str:
    """Write FILE anew; return its hash."""
    FILE.unlink(missing_ok=True)
    with HashingWriter(FILE) as file:
        write_tensors(file, tensors, **options)
        size, digest = file.close()
    assert size == FILE.stat().st_size and digest == xxh3_64_hexdigest(FILE.read_bytes())
    return digest


def read(**options):
    """Return the tensors of FILE, whose hash has to be that of its bytes."""
    with HashingReader(FILE) as file:
        tensors, _ = read_tensors(file, **options)
        assert file.digest() == xxh3_64_hexdigest(FILE.read_bytes())
    return tensors


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bits of a dtype."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    data = torch.randint(0, 256, (max(1, int(torch.tensor(shape).prod())) * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype)[: int(torch.tensor(shape).prod())].reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_shape(dtype):
    tensors = {
        "m": sample(dtype, 3, 5),
        "scalar": sample(dtype, 1)[0],
        "empty": sample(dtype, 0, 4),
        "one": sample(dtype, 1),
    }
    write(tensors)
    assert same(read(), tensors)
    theirs = safetensors.torch.load_file(FILE)
    assert same({key: theirs[key] for key in tensors}, tensors)
    with safe_open(FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"} and raw(file.get_slice("m")[1:]) == raw(tensors["m"][1:])


def test_mixed_dtypes_come_back_in_the_order_of_the_dict():
    tensors = {name: sample(dtype, 3) for name, dtype in DTYPES.items()}
    write(tensors)
    assert list(read()) == list(tensors) and same(read(), tensors)
    assert same(dict(sorted(safetensors.torch.load_file(FILE).items())), dict(sorted(tensors.items())))
    header = json.loads(FILE.read_bytes()[8:].split(b"}}")[0] + b"}}")
    for name, place in header.items():
        if name != "__metadata__":  # each tensor lies where its dtype may lie in memory
            assert place["data_offsets"][0] % DTYPES[place["dtype"]].itemsize == 0


def test_files_of_the_library_are_read():
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.int8), "c": torch.tensor(1.5).bfloat16()}
    safetensors.torch.save_file(tensors, FILE, metadata={"who": "them"})
    assert same(dict(sorted(read().items())), tensors)
    with HashingReader(FILE) as file:
        assert read_tensors(file)[1] == {"who": "them"}


def test_the_library_s_own_way_of_telling_tied_weights_is_read():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(FILE))
    model.load_state_dict(read(), strict=True)


def test_nothing_and_nearly_nothing():
    write({})
    assert read() == {} and safetensors.torch.load_file(FILE) == {}
    write({"": torch.empty(0)})
    assert same(read(), {"": torch.empty(0)})
    write({'\u00e9 \U0001f600 "\\': torch.ones(1)}, metadata={"\n": "\u20ac"})
    assert same(read(), safetensors.torch.load_file(FILE))


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_tensors_are_pairs_and_come_back(dtype):
    tensors = {"m": sample(dtype, 2, 3), "scalar": sample(dtype, 1)[0], "empty": sample(dtype, 0)}
    tensors["conjugate"] = torch.randn(3, 2, dtype=torch.complex64).t().conj()
    tensors["imaginary"] = torch.randn(3, dtype=torch.complex64).conj().imag
    assert tensors["imaginary"].is_neg()
    write(tensors)
    assert same(read(), tensors)
    assert safetensors.torch.load_file(FILE)["m"].shape == (2, 3, 2)


def test_layouts_that_are_not_contiguous():
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {"transposed": base.transpose(0, 2), "sliced": base[:, ::2, 1:], "expanded": torch.ones(1).expand(5, 2),
               "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}  # fmt: skip
    write(tensors)
    assert same(read(), tensors)


def test_large_tensors_that_are_not_contiguous_are_copied_piece_by_piece():
    wide = megabytes(80).reshape(2, -1, 4).transpose(1, 2)  # one row is 40 MiB
    deep = megabytes(140).reshape(1, -1, 2).transpose(1, 2)  # its only row is more than a piece
    write(
        {
            "wide": wide,
            "deep": deep,
        }
    )
    back = read()
    assert torch.equal(back["wide"].view(torch.int32), wide.contiguous().view(torch.int32))
    assert torch.equal(back["deep"].view(torch.int32), deep.contiguous().view(torch.int32))


def test_C6_tied_tensors_are_stored_once_and_come_back_under_all_names():
    weight, other = torch.randn(30, 30), torch.randn(3)
    tensors = {"embedding": weight, "bias": other, "head": weight, "view": weight[:], "again.bias": other}
    write(tensors)
    assert FILE.stat().st_size < 30 * 30 * 4 + 1000
    assert set(safetensors.torch.load_file(FILE)) == {"embedding", "bias"}  # the first name is the one that stays
    back = read()
    assert same({key: back[key] for key in tensors}, tensors)
    assert back["head"] is back["embedding"] is back["view"] and back["again.bias"] is back["bias"]


def test_tensors_that_share_only_a_part_are_stored_each():
    base = torch.arange(10.0)
    tensors = {
        "all": base,
        "head": base[:5],
        "tail": base[5:],
        "matrix": base.view(2, 5),
        "turned": base.view(2, 5).t(),
    }
    unique, aliases = split_aliases(tensors)
    assert list(unique) == list(tensors) and not aliases
    write(tensors)
    back = read()
    assert same(back, tensors)
    back["all"].zero_()
    assert torch.equal(back["head"], base[:5])
    unique, aliases = split_aliases({"a": torch.empty(0), "b": torch.empty(0)})
    assert len(unique) == 2 and not aliases  # nothing has no place that could be the same


def test_parameters_and_inference_tensors():
    with torch.inference_mode():
        made = torch.ones(3) * 2
    write({"p": nn.Parameter(torch.ones(2)), "i": made})
    assert same(read(), {"p": torch.ones(2), "i": torch.full((3,), 2.0)})


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"a": 5}, "a: a int"),
        ({"a": torch.eye(2).to_sparse()}, "a: a tensor of layout"),
        ({"a": torch.empty(1, device="meta")}, "a: a tensor on the meta device"),
        ({"a": Wrapper(torch.ones(1))}, "a: a Wrapper, which is more than its memory"),
        ({"a": nn.LazyLinear(3).weight}, "without values yet"),
        ({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "a: a nested tensor"),
        ({"__metadata__": torch.ones(1)}, "a name for no tensor"),
        ({3: torch.ones(1)}, "3: a name for no tensor"),
    ],
)
def test_what_no_file_can_hold_is_refused_by_name(tensors, words):
    with pytest.raises(TypeError) as error:
        write({"good": torch.ones(1), **tensors})
    assert words in str(error.value)


def test_reading_into_tensors_that_are_there():
    tensors = {"a": torch.randn(4, 3), "tied": None, "z": torch.randn(3, dtype=torch.complex64), "big": megabytes(1),
               "empty": torch.empty(0)}  # fmt: skip
    tensors["tied"] = tensors["a"]
    write(tensors)
    straight = {key: torch.zeros_like(value) for key, value in tensors.items()}
    straight["tied"] = straight["a"]
    back = read(into=straight)
    assert same({key: back[key] for key in tensors}, tensors) and all(back[key] is straight[key] for key in tensors)
    other = {"a": nn.Parameter(torch.zeros(3, 4, dtype=torch.float64).t()), "tied": torch.zeros(4, 3),
             "z": torch.zeros(3, dtype=torch.complex128)}  # fmt: skip
    back = read(into=other)
    assert torch.equal(other["a"], tensors["a"].double()) and torch.equal(other["tied"], tensors["a"])
    assert torch.equal(other["z"], tensors["z"].to(torch.complex128)) and same(back["big"], tensors["big"])
    only = {"tied": torch.zeros(4, 3)}
    assert read(into=only)["a"] is only["tied"] and torch.equal(only["tied"], tensors["a"])


def test_reading_into_another_shape_changes_nothing():
    write({"a": torch.ones(2), "b": torch.ones(3)})
    targets = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"expected b to have the shape \[4\]. Received: \[3\]"):
        read(into=targets)
    assert not targets["a"].any()


def test_buffers_of_every_size_around_a_chunk():
    draw = random.Random(0)
    sizes = [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, *(draw.randrange(3 * CHUNK) for _ in range(8))]
    tensors = {f"t{number}": torch.randint(0, 256, (size,), dtype=torch.uint8) for number, size in enumerate(sizes)}
    tensors |= {f"small{number}": torch.full((number % 5,), number) for number in range(1500)}
    write(tensors)
    assert same(read(), tensors)


def test_C9_saving_takes_no_copy_of_the_tensors():
    tensors = {f"layer{number}": megabytes(32) for number in range(8)}

    def measure():
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        with HashingWriter(FILE) as file:
            write_tensors(file, tensors)
            file.close()
        assert resident("VmHWM") - before < 0.1 * 256 * 2**20

    forked(measure)


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def craft(header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    FILE.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def one(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


BAD = {
    "empty file": lambda: FILE.write_bytes(b""),
    "seven bytes": lambda: FILE.write_bytes(b"\0" * 7),
    "no header": lambda: craft(b""),
    "header longer than the file": lambda: craft(one(), b"\0" * 8, 10**6),
    "header of 2**64 bytes": lambda: craft(one(), b"\0" * 8, 2**64 - 1),
    "no JSON": lambda: craft(b"{{{{", b"\0" * 8),
    "no UTF-8": lambda: craft(b'{"\xff": 1}', b"\0" * 8),
    "deep JSON": lambda: craft(b"[" * 100_000),
    "a list": lambda: craft([1]),
    "a number": lambda: craft(b"17"),
    "a tensor that is a number": lambda: craft({"a": 1}),
    "no dtype": lambda: craft({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
    "unknown dtype": lambda: craft(one(dtype="F31"), b"\0" * 8),
    "dtype is a list": lambda: craft(one(dtype=["F32"]), b"\0" * 8),
    "shape does not fit": lambda: craft(one(shape=[3]), b"\0" * 8),
    "negative shape": lambda: craft(one(shape=[-2]), b"\0" * 8),
    "two negative sizes": lambda: craft(one(shape=[-2, -1]), b"\0" * 8),
    "fractional shape": lambda: craft(one(shape=[2.0]), b"\0" * 8),
    "boolean shape": lambda: craft(one(shape=[True, 2]), b"\0" * 8),
    "huge and zero": lambda: craft(one(shape=[0, 2**70], data_offsets=[0, 0])),
    "very many dimensions": lambda: craft(one(shape=[0] + [2**40] * 5, data_offsets=[0, 0])),
    "shape is text": lambda: craft(one(shape="ab"), b"\0" * 8),
    "offsets turned": lambda: craft(one(data_offsets=[8, 0]), b"\0" * 8),
    "offsets beyond the file": lambda: craft(one(data_offsets=[8, 16]), b"\0" * 8),
    "three offsets": lambda: craft(one(data_offsets=[0, 8, 8]), b"\0" * 8),
    "a gap": lambda: craft({**one(), "b": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, b"\0" * 10),
    "an overlap": lambda: craft({**one(), "b": {"dtype": "U8", "shape": [1], "data_offsets": [7, 8]}}, b"\0" * 8),
    "bytes left over": lambda: craft(one(), b"\0" * 9),
    "bytes missing": lambda: craft(one(), b"\0" * 7),
    "metadata no dict": lambda: craft({"__metadata__": 1, **one()}, b"\0" * 8),
    "metadata no text": lambda: craft({"__metadata__": {"a": 1}, **one()}, b"\0" * 8),
    "alias of nothing": lambda: craft({"__metadata__": {"drivetrain.aliases": '{"b": "c"}'}, **one()}, b"\0" * 8),
    "alias of itself": lambda: craft({"__metadata__": {"drivetrain.aliases": '{"a": "a"}'}, **one()}, b"\0" * 8),
    "alias is a list": lambda: craft({"__metadata__": {"drivetrain.aliases": '{"b": ["a"]}'}, **one()}, b"\0" * 8),
    "aliases no dict": lambda: craft({"__metadata__": {"drivetrain.aliases": "[1]"}, **one()}, b"\0" * 8),
    "aliases no JSON": lambda: craft({"__metadata__": {"drivetrain.aliases": "{"}, **one()}, b"\0" * 8),
    "complex without pairs": lambda: craft(
        {"__metadata__": {"drivetrain.complex": '["a"]'}, **one(shape=[1], dtype="F64")}, b"\0" * 8),
    "complex integers": lambda: craft({"__metadata__": {"drivetrain.complex": '["a"]'}, **one(dtype="I32")}, b"\0" * 8),
    "complex nothing": lambda: craft({"__metadata__": {"drivetrain.complex": '["x"]'}, **one()}, b"\0" * 8),
    "complex list": lambda: craft({"__metadata__": {"drivetrain.complex": '[["a"]]'}, **one()}, b"\0" * 8),
}  # fmt: skip


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_files_that_are_no_safetensors_are_refused_by_name(make):
    make()
    with pytest.raises(CheckpointError, match="x.safetensors"):
        read()


def test_random_damage_to_a_header_never_does_more_than_raise():
    write({"a": torch.randn(3, 2), "b": torch.ones(2, dtype=torch.int8), "c": torch.ones(2), "z": torch.zeros(1) * 1j})
    good, draw, refused = FILE.read_bytes(), random.Random(0), 0
    end = 8 + struct.unpack("<Q", good[:8])[0]
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 5])):
            bad[draw.randrange(end)] = draw.choice([draw.randrange(256), *b'0123456789"[]{},:'])
        FILE.write_bytes(bad)
        try:
            with HashingReader(FILE) as file:
                read_tensors(file)
        except CheckpointError:
            refused += 1
    assert refused > 1000


def test_what_is_no_regular_file_is_refused_at_once():
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("link").symlink_to(FILE)
    FILE.write_bytes(b"x")
    for name in ("pipe", "folder", "link", "missing", "/dev/zero"):
        with pytest.raises(CheckpointError, match=name):
            HashingReader(name)
    HashingReader("link", follow=True).close()
