"""Weights as Hugging Face keeps them: single files, shards, tied weights, folders of others, names without wrappers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, clean_keys, load_weights, save_weights
from drivetrain.tests.strategies.checkpoint.samples import same

CK = Path("checkpoint")


class Tied(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight


def tensors(count: int) -> dict[str, torch.Tensor]:
    """Return so many tensors of 400 bytes."""
    return {f"layers.{number}.weight": torch.full((100,), float(number)) for number in range(count)}


def save(state, **options) -> list[str]:
    """Save weights in a checkpoint."""
    with Writer(CK) as writer:
        names = save_weights(writer, state, **options)
        writer.commit()
    return names


def test_one_file():
    state = {"b": torch.randn(3), "a": torch.randn(2, 2).to(torch.bfloat16)}
    assert save(state) == ["model.safetensors"]
    for source in (CK, str(CK), Checkpoint.open(CK), Checkpoint.open(CK, verify=False)):
        assert same(load_weights(source), state)
    assert same(
        dict(sorted(safetensors.torch.load_file(CK / "model.safetensors").items())), dict(sorted(state.items()))
    )
    with safetensors.safe_open(CK / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "size, shards", [(1200, 4), ("1.2KB", 4), ("1KiB", 5), (399, 10), (10**9, 1), ("4kb", 1), ("3.99 KB", 2)]
)
def test_shards(size, shards):
    names = save(tensors(10), max_shard_size=size)
    if shards == 1:
        assert names == ["model.safetensors"]
        return
    expected = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    assert names == [*expected, "model.safetensors.index.json"]
    index = json.loads((CK / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4000}
    for tensor, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(CK / file)[tensor], tensors(10)[tensor])
    assert list(index["weight_map"]) == list(tensors(10))
    assert same(dict(sorted(load_weights(CK).items())), dict(sorted(tensors(10).items())))
    targets = {name: torch.zeros(100) for name in tensors(10)}
    load_weights(CK, into=targets)
    assert same(targets, tensors(10))


@pytest.mark.parametrize("size", ["", "many", "10XB", -1, 0, "GB", None, "1e3"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match='Expected a size such as "10GB"'):
        save_weights(CK, tensors(1), max_shard_size=size)


def test_several_models_in_one_checkpoint():
    with Writer(CK) as writer:
        save_weights(writer, tensors(1))
        save_weights(writer, tensors(2), name="model_1", max_shard_size=400)
        writer.commit()
    assert same(load_weights(CK), tensors(1)) and same(load_weights(CK, name="model_1"), tensors(2))
    with pytest.raises(CheckpointError, match="has neither model_2.safetensors nor model_2.safetensors.index.json"):
        load_weights(CK, name="model_2")


@pytest.mark.parametrize("size", ["10GB", 300])
@pytest.mark.parametrize("plain", [False, True])
def test_C6_shared_weights_are_stored_once_and_load_strictly(size, plain):
    model, other = Tied(), Tied()
    if plain:
        save_weights(CK, model.state_dict(), max_shard_size=size)
    else:
        save(model.state_dict(), max_shard_size=size)
    stored = {}
    for path in CK.glob("*.safetensors"):
        stored |= safetensors.torch.load_file(path)
    assert set(stored) == {"embedding.weight", "body.weight", "body.bias"}
    other.load_state_dict(load_weights(CK, foreign=plain), strict=True)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight is other.embedding.weight
    if size == "10GB":  # as Hugging Face's libraries do it
        third = Tied()
        safetensors.torch.load_model(third, CK / "model.safetensors", strict=True)
        assert same(dict(third.state_dict()), dict(model.state_dict()))


def test_a_plain_folder_keeps_other_files_and_loses_earlier_weights():
    CK.mkdir()
    (CK / "config.json").write_text("{}")
    (CK / "model-notes.safetensors.txt").write_text("x")
    save_weights(CK, tensors(3), max_shard_size=400)
    assert len(os.listdir(CK)) == 6
    save_weights(CK, tensors(2))
    assert sorted(os.listdir(CK)) == ["config.json", "model-notes.safetensors.txt", "model.safetensors"]
    assert same(load_weights(CK, foreign=True), tensors(2))
    save_weights(CK, tensors(4), name="ema", max_shard_size=400)
    assert same(load_weights(CK, foreign=True), tensors(2))
    with pytest.raises(TypeError, match="bad: a int"):
        save_weights(CK, {"good": torch.ones(1), "bad": 1})
    assert len(os.listdir(CK)) == 8 and same(load_weights(CK, foreign=True), tensors(2))


def test_foreign_folders_are_read_when_asked_for():
    CK.mkdir()
    with pytest.raises(CheckpointError, match="has neither"):
        load_weights(CK, foreign=True)
    safetensors.torch.save_file(tensors(2), CK / "model.safetensors")
    with pytest.raises(CheckpointError, match="load them with foreign=True"):
        load_weights(CK)
    assert same(dict(sorted(load_weights(CK, foreign=True).items())), tensors(2))
    assert same(dict(sorted(load_weights(CK / "model.safetensors", foreign=True).items())), tensors(2))
    blob = Path("blob")
    (CK / "model.safetensors").rename(blob)
    (CK / "model.safetensors").symlink_to(blob.absolute())  # as in Hugging Face's cache
    assert same(dict(sorted(load_weights(CK, foreign=True).items())), tensors(2))


BAD_INDEXES = {
    "no JSON": "{",
    "a list": "[]",
    "no map": '{"metadata": {}}',
    "a map that is none": '{"weight_map": ["a"]}',
    "numbers": '{"weight_map": {"layers.0.weight": 1}}',
    "outside": '{"weight_map": {"layers.0.weight": "../other.safetensors"}}',
    "absolute": '{"weight_map": {"layers.0.weight": "/etc/passwd"}}',
    "missing": '{"weight_map": {"layers.0.weight": "nowhere.safetensors"}}',
    "elsewhere": '{"weight_map": {"x": "part.safetensors"}}',
}


@pytest.mark.parametrize("text", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_bad_indexes_are_refused(text):
    CK.mkdir()
    safetensors.torch.save_file(tensors(1), CK / "part.safetensors")
    safetensors.torch.save_file(tensors(1), "other.safetensors")
    (CK / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json|nowhere.safetensors"):
        load_weights(CK, foreign=True)


def test_pickled_weights_are_never_read():
    CK.mkdir()
    torch.save(tensors(1), CK / "pytorch_model.bin")
    for source in (CK, CK / "pytorch_model.bin"):
        with pytest.raises(CheckpointError):
            load_weights(source, foreign=True)


class Wrapped(nn.Module):
    """A user's module that wraps and compiles its parts, and calls another one `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Linear(2, 2))
        self.parallel = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
        self.module = nn.Linear(2, 2)


NAMES = ["compiled.bias", "compiled.weight", "module.bias", "module.weight", "parallel.0.bias", "parallel.0.weight"]


def test_C6_wrappers_do_not_show_in_names():
    module = Wrapped()
    assert sorted(clean_keys(module.state_dict(), module)) == NAMES
    compiled = torch.compile(module)
    assert sorted(clean_keys(compiled.state_dict(), compiled)) == NAMES
    save(clean_keys(module.state_dict(), module))
    assert sorted(load_weights(CK)) == NAMES


def test_C6_names_alone_tell_most():
    state = {"_orig_mod.a.module.b": 1, "module.c": 2, "d._orig_mod": 3, "modules.e": 4, "my_module.f": 5}
    assert clean_keys(state) == {"a.b": 1, "c": 2, "d": 3, "modules.e": 4, "my_module.f": 5}
    assert clean_keys({"module.a": 1, "a": 2, "module.b": 3}) == {"module.a": 1, "a": 2, "b": 3}
