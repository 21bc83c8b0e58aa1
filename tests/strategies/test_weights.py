"""Weights in files and models: saving, loading, empty models, sizes, ties."""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import drivetrain
from drivetrain.strategies import torch_files
from drivetrain.strategies import world as worlds
from drivetrain.strategies.checkpoint import CheckpointError, Writer, save_weights
from drivetrain.tests.distributed import run


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def test_saved_tensors_come_back(tmp_path):
    weights = {"a": torch.arange(4.0), "b": torch.arange(6).view(2, 3).t()}
    drivetrain.save(weights, tmp_path / "state.safetensors", safe_serialization=True)
    found = drivetrain.load(tmp_path / "state.safetensors", map_location="cpu", weights_only=True)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert load_file(tmp_path / "state.safetensors")["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_safetensors_hold_tensors_only(tmp_path):
    with pytest.raises(TypeError, match="Expected a dict of tensors by name. Received: dict"):
        drivetrain.save({"step": 3}, tmp_path / "x", safe_serialization=True)
    with pytest.raises(TypeError, match="Received: Linear"):
        drivetrain.save(nn.Linear(1, 1), tmp_path / "x", safe_serialization=True)
    assert not list(tmp_path.iterdir())


def test_torchs_own_files_go_there_and_back(tmp_path):
    state = {"step": 3, "weights": OrderedDict(a=torch.arange(3.0)), "rows": [(1, "a"), None], "seen": np.arange(3)}
    drivetrain.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=False)["step"] == 3  # as torch.save writes it
    found = drivetrain.load(tmp_path / "state.pt", map_location="cpu")
    assert found["step"] == 3 and found["rows"] == state["rows"] and found["weights"]["a"].tolist() == [0, 1, 2]
    assert found["seen"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    buffer = io.BytesIO()
    drivetrain.save(state, buffer)
    buffer.seek(0)
    assert drivetrain.load(buffer)["step"] == 3


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (os.fspath(self.place),)


@pytest.mark.parametrize("legacy", [False, True])
def test_no_file_that_is_loaded_runs_code(legacy, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1), "b": Trap(tmp_path / "ran")}, path, _use_new_zipfile_serialization=not legacy)
    for load in (drivetrain.load, drivetrain.load_state_dict):
        with pytest.raises(CheckpointError, match="Expected tensors and plain values in .*pytorch_model.bin"):
            load(path)
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError, match="loading other objects can run code"):
            drivetrain.load_checkpoint_in_model(nn.Linear(1, 1), place)
    with pytest.raises(ValueError, match="Expected weights_only=True. Received: weights_only=False"):
        drivetrain.load(path, weights_only=False)
    with pytest.raises(TypeError, match="pickle_module"):
        drivetrain.load(path, pickle_module=json)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_file_of_weights(tmp_path):
    with pytest.raises(CheckpointError, match="nothing.bin, which is not there"):
        drivetrain.load_state_dict(tmp_path / "nothing.bin")
    torch.save({"a": 1}, tmp_path / "numbers.bin")
    with pytest.raises(CheckpointError, match="Expected tensors by name in .*numbers.bin"):
        drivetrain.load_state_dict(tmp_path / "numbers.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../numbers.bin"}}')
    with pytest.raises(CheckpointError, match="which is no file of this folder"):
        drivetrain.load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


def test_only_the_first_process_saves(tmp_path):
    def rank(rank):
        drivetrain.save({"rank": torch.tensor([rank])}, tmp_path / "state")
        drivetrain.save({"rank": torch.tensor([rank])}, tmp_path / "safe", safe_serialization=True)
        drivetrain.wait_for_everyone()
        return [drivetrain.load(tmp_path / name)["rank"].item() for name in ("state", "safe")]

    assert run(rank, 2) == [[0, 0]] * 2


def test_shared_memory_is_stored_once(caplog):
    cleaned = drivetrain.clean_state_dict_for_safetensors(Tied().state_dict())
    assert list(cleaned) == ["first.weight", "scale"] or list(cleaned) == ["scale", "first.weight"]
    assert [record.message.split(":")[0] for record in caplog.records] == ["Removed shared tensor second.weight"]


def test_each_machine_saves_where_that_is_asked_for(tmp_path):
    """Both ranks are the first of their machine."""
    def rank(rank):
        worlds.current().local_rank = 0
        for each in (False, True):
            config = drivetrain.ProjectConfiguration(save_on_each_node=each)
            accelerator = drivetrain.Accelerator(cpu=True, project_config=config)
            accelerator.world.local_rank = 0
            accelerator.save({"rank": rank}, tmp_path / f"{each}-{rank}")
        drivetrain.wait_for_everyone()
        return sorted(path.name for path in tmp_path.iterdir())

    assert run(rank, 2) == [["False-0", "True-0", "True-1"]] * 2


def test_devices_by_the_longest_beginning(tmp_path):
    save_file({"a.b.w": torch.ones(1), "a.w": torch.ones(1), "c": torch.ones(1)}, tmp_path / "m.safetensors")
    found = drivetrain.load_state_dict(tmp_path / "m.safetensors", {"a": "meta", "a.b": "cpu"})
    assert {name: value.device.type for name, value in found.items()} == {"a.b.w": "cpu", "a.w": "meta", "c": "cpu"}


@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_of_torchs_files_goes_into_a_model(shards, tmp_path):
    source = Tied()
    with Writer(tmp_path / "weights") as writer:
        names = torch_files.save_weights(writer, source.state_dict(), max_shard_size=36 if shards else "1GB")
        writer.commit()
    expected = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    assert names == (expected if shards else ["pytorch_model.bin"])
    for name in ["", names[-1]]:
        model = Tied()
        drivetrain.load_checkpoint_in_model(model, tmp_path / "weights" / name, strict=True)
        assert torch.equal(model.first.weight, source.first.weight) and model.second.weight is model.first.weight


def test_weights_in_two_formats_are_read_from_safetensors(tmp_path):
    save_file({"weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    torch.save({"weight": torch.zeros(1, 1)}, tmp_path / "pytorch_model.bin")
    model = nn.Linear(1, 1, bias=False)
    drivetrain.load_checkpoint_in_model(model, tmp_path)
    assert model.weight.item() == 1.0


def test_only_the_first_process_reads_where_that_is_asked_for(tmp_path):
    """The file is on the first machine's disk alone."""
    save_file({"weight": torch.full((1, 1), 5.0), "bias": torch.ones(1)}, tmp_path / "model.safetensors")

    def rank(rank):
        model = nn.Linear(1, 1)
        drivetrain.load_checkpoint_in_model(
            model, tmp_path if rank == 0 else tmp_path / "nowhere", broadcast_from_rank0=True, strict=True
        )
        return model.weight.item(), model.bias.item()

    assert run(rank, 2) == [(5.0, 1.0)] * 2


@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_of_weights_goes_into_a_model(shards, tmp_path):
    source = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    save_weights(tmp_path, source.state_dict(), max_shard_size=64 if shards else "10GB")
    assert (tmp_path / "model.safetensors.index.json").exists() is shards
    places = [tmp_path, tmp_path / ("model.safetensors.index.json" if shards else "model.safetensors")]
    for place in places:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        drivetrain.load_checkpoint_in_model(model, place, strict=True)
        assert all(map(torch.equal, model.parameters(), source.parameters()))


def test_an_empty_model_is_filled(tmp_path):
    source = Tied()
    drivetrain.save(source.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    with drivetrain.init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert not model[1].running_mean.is_meta  # buffers are real, unless asked for
    assert not nn.Linear(1, 1).weight.is_meta
    with drivetrain.init_empty_weights(include_buffers=True):
        assert nn.BatchNorm1d(3).running_mean.is_meta
    with drivetrain.init_empty_weights():
        linear = nn.Linear(3, 3, bias=False)
    save_file({"weight": torch.eye(3)}, tmp_path / "model.safetensors")
    drivetrain.load_checkpoint_in_model(linear, tmp_path, dtype="float16")
    assert linear.weight.dtype == torch.float16 and linear.weight.tolist() == torch.eye(3).tolist()


def test_some_modules_keep_float32(tmp_path):
    model = nn.ModuleDict({"norm": nn.Linear(1, 1), "rest": nn.Linear(1, 1)})
    drivetrain.save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    with drivetrain.init_empty_weights():
        empty = nn.ModuleDict({"norm": nn.Linear(1, 1), "rest": nn.Linear(1, 1)})
    drivetrain.load_checkpoint_in_model(empty, tmp_path, dtype=torch.bfloat16, keep_in_fp32_modules=["norm"])
    assert empty["norm"].weight.dtype == torch.float32 and empty["rest"].weight.dtype == torch.bfloat16


def test_device_maps_and_wrong_names_are_errors(tmp_path):
    drivetrain.save(nn.Linear(1, 1).state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    with pytest.raises(ValueError, match="Expected weights for one device"):
        drivetrain.load_checkpoint_in_model(nn.Linear(1, 1), tmp_path, device_map={"a": "cpu", "b": "disk"})
    with pytest.raises(RuntimeError, match="Missing key"):
        drivetrain.load_checkpoint_in_model(nn.Sequential(nn.Linear(1, 1)), tmp_path, strict=True)


def test_parameters_on_a_device():
    with drivetrain.init_on_device("meta", include_buffers=True):
        norm = nn.BatchNorm1d(2)
    assert norm.weight.is_meta and norm.running_var.is_meta


def test_ties_are_found_and_made_again():
    model = Tied()
    assert drivetrain.find_tied_parameters(model) == [["first.weight", "second.weight"]]
    model.second.weight = nn.Parameter(torch.zeros(3, 3))
    assert drivetrain.find_tied_parameters(model) == []
    drivetrain.retie_parameters(model, [["first.weight", "second.weight"]])
    assert model.second.weight is model.first.weight


def test_tensors_of_a_module():
    model = Tied()
    assert [name for name, _ in drivetrain.named_module_tensors(model)] == ["scale", "cache"]
    names = [name for name, _ in drivetrain.named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert names == ["first.weight", "scale"]


def test_sizes():
    assert [drivetrain.convert_bytes(size) for size in (10, 1536, 3 * 2**30)] == ["10 bytes", "1.5 KB", "3.0 GB"]
    sizes = {"5GB": 5 * 10**9, "2GiB": 2**31, "1.5MB": 1_500_000, 7: 7}
    assert {text: drivetrain.convert_file_size_to_int(text) for text in sizes} == sizes
    with pytest.raises(ValueError, match="size='much'"):
        drivetrain.convert_file_size_to_int("much")
    kinds = [torch.float32, torch.bfloat16, torch.int8, torch.bool, drivetrain.CustomDtype.INT4]
    assert [drivetrain.dtype_byte_size(kind) for kind in kinds] == [4, 2, 1, 1 / 8, 1 / 2]
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))  # 9 floats; 6, and 6 floats and an int64 of buffers
    found = drivetrain.compute_module_sizes(model)
    assert (found[""], found["0"], found["0.weight"], found["1"]) == (92, 36, 24, 56)
    assert drivetrain.compute_module_sizes(model, dtype=torch.float16)[""] == 50
    assert drivetrain.compute_module_sizes(model, buffers_only=True)[""] == 32


def test_storages_tell_memory_apart():
    base = torch.zeros(4)
    assert drivetrain.id_tensor_storage(base) == drivetrain.id_tensor_storage(base[1:])
    assert drivetrain.id_tensor_storage(base) != drivetrain.id_tensor_storage(base.clone())
