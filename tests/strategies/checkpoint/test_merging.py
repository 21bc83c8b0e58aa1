"""Weights in pieces, brought into one Hugging Face checkpoint: the same numbers, one tensor at a time, no code run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from drivetrain.strategies.checkpoint import CheckpointError, Writer, load_weights, merging, save_weights
from drivetrain.tests.distributed import run


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(6, 4, generator=generator), "layers.0.bias": torch.randn(6, generator=generator),
        "half": torch.randn(3, 5, generator=generator).to(torch.bfloat16), "count": torch.tensor(12),
        "empty": torch.zeros(0, 3),
    }  # fmt: skip


def same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(
        torch.equal(value, right[name]) and value.dtype == right[name].dtype for name, value in found.items()
    )


def merged(source, target, **options) -> list[str]:
    return merging.merge(merging.find(source, **options), target)


def test_a_checkpoint_in_shards_becomes_one_file_with_its_tied_weights(tmp_path):
    right = weights()
    right["tied"] = right["layers.0.weight"]
    right["complex"] = torch.randn(2, 3, dtype=torch.complex64)
    with Writer(tmp_path / "one") as writer:
        assert len(save_weights(writer, right, max_shard_size=64)) > 3
        writer.commit({})
    assert merged(tmp_path / "one", tmp_path / "two") == ["model.safetensors"]
    assert same(load_weights(tmp_path / "two", foreign=True), right)
    assert "tied" not in load_file(tmp_path / "two/model.safetensors")  # stored once


def test_a_damaged_checkpoint_is_refused(tmp_path):
    with Writer(tmp_path / "one") as writer:
        save_weights(writer, weights())
        writer.commit({})
    file = tmp_path / "one/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="model.safetensors: is damaged"):
        merged(tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_folder_of_another_library_can_be_divided_anew(tmp_path):
    (tmp_path / "one").mkdir()
    right = {f"module.{name}": value for name, value in weights().items()}
    save_file(right, tmp_path / "one/model.safetensors")
    files = merging.merge(merging.find(tmp_path / "one"), tmp_path / "two", max_shard_size=60)
    assert len(files) > 2 and files[-1] == "model.safetensors.index.json"
    assert same(load_weights(tmp_path / "two", foreign=True), weights())


def test_what_accelerates_fsdp_writes(tmp_path):
    """Two ranks' shards in pytorch_model_fsdp_0, as `save_state` with SHARDED_STATE_DICT leaves them."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    place = tmp_path / "state/pytorch_model_fsdp_0"

    def save(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        right = {name: value.detach().clone() for name, value in model.state_dict().items()}
        fully_shard(model)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=place)
        return right

    right = run(save)[0]
    with pytest.raises(CheckpointError, match="is a pickle. Add --foreign"):
        merged(tmp_path / "state", tmp_path / "out")
    assert merged(tmp_path / "state", tmp_path / "out", foreign=True) == ["model.safetensors"]
    assert same(load_file(tmp_path / "out/model.safetensors"), right)
    assert merged(place, tmp_path / "again", foreign=True) == ["model.safetensors"]


def test_what_our_own_sharding_writes(tmp_path):
    from drivetrain import Accelerator
    from drivetrain.strategies.fsdp_plugin import FullyShardedDataParallelPlugin

    def save(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        right = {name: value.detach().clone() for name, value in model.state_dict().items()}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.save_state(str(tmp_path / "state"))
        return right

    right = run(save, group=False)[0]
    assert len(list((tmp_path / "state").glob("model.shard-*"))) == 2
    assert merged(tmp_path / "state", tmp_path / "out") == ["model.safetensors"]
    assert same(load_file(tmp_path / "out/model.safetensors"), right)


def test_an_index_that_would_run_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "one")
    index = tmp_path / "one/.metadata"
    index.write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match="a file that asks for (posix|nt).system. Do not load it"):
        merging.find(tmp_path / "one", foreign=True)
    assert not (tmp_path / "ran").exists()
    for content in (b"", b"no pickle", pickle.dumps({"a": 1})):
        index.write_bytes(content)
        with pytest.raises(CheckpointError, match="is no index of a sharded checkpoint"):
            merging.find(tmp_path / "one", foreign=True)


def test_an_index_stays_in_its_folder(tmp_path):
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "one")
    index = pickle.loads((tmp_path / "one/.metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../other.distcp"
    (tmp_path / "one/.metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="names '../other.distcp', which is no file of this folder"):
        merging.find(tmp_path / "one", foreign=True)


def test_folders_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="Expected a checkpoint, a folder of safetensors files, or one of sharded"):
        merging.find(tmp_path)
    for number in (0, 1):
        dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / f"pytorch_model_fsdp_{number}")
    with pytest.raises(CheckpointError, match="with pytorch_model_fsdp_0, pytorch_model_fsdp_1. Name one"):
        merging.find(tmp_path, foreign=True)


LIMITED = """
import resource, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint
from drivetrain.strategies.checkpoint import merging

source, target = map(Path, sys.argv[1:3])
merging.merge(merging.find(Path(sys.argv[3]), foreign=True), target / "warm")  # what is allocated once is there
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[4]), -1))
print(merging.merge(merging.find(source, foreign=True), target / "out"))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sharded", "safetensors"])
def test_no_process_holds_the_model_whole(tmp_path, kind):
    """128 MiB of weights are merged by a process that may allocate 64 more than before: each tensor has 4."""
    large = {f"layer{index}": torch.full((2**20,), float(index)) for index in range(32)}
    small = {"layer0": torch.zeros(8)}
    for name, content in (("large", large), ("small", small)):
        if kind == "sharded":
            dcp.save({"model": content}, checkpoint_id=tmp_path / name)
        else:
            save_weights(tmp_path / name, content, max_shard_size="40MB")
    command = [sys.executable, "-c", LIMITED, *map(str, (tmp_path / "large", tmp_path, tmp_path / "small", 64 * 2**20))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert same(load_file(tmp_path / "out/model.safetensors"), large)


def test_a_damaged_or_hostile_shard_is_an_error(tmp_path):
    """torch's own exception for it is no Exception: a handler would let it pass."""

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=tmp_path / "one")
    shard = next((tmp_path / "one").glob("*.distcp"))
    for content in (b"", shard.read_bytes()[:100], pickle.dumps(Attack())):
        shard.write_bytes(content)
        with pytest.raises(CheckpointError, match="model.a cannot be read"):
            merged(tmp_path / "one", tmp_path / "out", foreign=True)
    assert not (tmp_path / "ran").exists()
