"""`drivetrain merge-weights` as a command: what it prints, what it refuses, what it removes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from drivetrain.trainer.cli.main import main


@pytest.fixture
def state(home):
    dcp.save({"model": {"a": torch.ones(3), "b": torch.zeros(2, 2)}}, checkpoint_id=home.path / "state/pytorch_model_fsdp_0")
    return home


def refused(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["merge-weights", *args])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_sharded_weights_become_one_checkpoint(state, capsys):
    assert "is a pickle. Add --foreign to read it" in refused(capsys, "state", "out")
    assert main(["merge-weights", "--foreign", "state", "out"]) == 0
    assert capsys.readouterr().out == "2 tensors of sharded weights of torch, state, are in out: model.safetensors.\n"
    assert torch.equal(load_file("out/model.safetensors")["a"], torch.ones(3)) and (state.path / "state").exists()


def test_the_pieces_can_go(state, capsys):
    assert "which goes." in refused(capsys, "--foreign", "--remove_checkpoint_dir", "state", "state/out")
    assert main(["merge-weights", "--foreign", "--remove_checkpoint_dir", "--max_shard_size", "12", "state", "out"]) == 0
    assert not (state.path / "state").exists() and len(list((state.path / "out").iterdir())) == 3


def test_what_is_refused(home, capsys):
    assert "Received: nowhere, which is none." in refused(capsys, "nowhere", "out")
    assert "No pickles are written here." in refused(capsys, "--unsafe_serialization", ".", "out")
    assert "Expected a checkpoint, a folder of safetensors files" in refused(capsys, ".", "out")
