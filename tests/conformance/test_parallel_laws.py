"""The laws where ranks divide a model or its sequences: parity with one process, accumulation, interruption."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from drivetrain.tests.conformance.parallel_cells import CELLS, cell, compare, reference, train
from drivetrain.tests.distributed import RankFailed, run

LONG = ("cp", "pp-1F1B")  # quick enough for the law's 50 steps
OTHERS = [name for name in CELLS if name not in (*LONG, "single")]


@pytest.mark.parametrize("name", LONG)
def test_parity_after_50_steps(name):
    compare(cell(name), reference(name))


@pytest.mark.parametrize("name", OTHERS)
def test_parity(name):
    compare(cell(name, steps=6), reference(name, steps=6))


@pytest.mark.parametrize("name", ["tp", "cp", "dp+pp", "ep"])
def test_accumulation(name):
    """Windows of four micro-batches."""
    options = {"steps": 3, "accumulate": 4, "validate": False}
    compare(cell(name, **options), reference(name, **options))


@pytest.mark.parametrize("name", ["cp", "pp-1F1B"])
def test_parity_in_bfloat16(name):
    options = {"steps": 6, "precision": "bf16-mixed"}
    compare(cell(name, **options), reference(name, **options), tolerance=2e-2)


def test_a_short_last_batch_goes_through_a_pipeline():
    options = {"steps": 9, "batch": 10}  # 64 samples: the seventh batch of an epoch has 4
    compare(cell("pp-1F1B", **options), reference("pp-1F1B", **options))


@pytest.mark.parametrize("name", ["fsdp", "fsdp1", "tp", "fsdp+tp", "cp", "pp-1F1B", "ep"])
def test_an_evaluation_before_the_first_step_changes_nothing(name):
    """Weights that are gathered for the first time in an evaluation can be trained with afterwards."""
    options = {"steps": 3, "num_sanity_val_steps": 2}
    compare(cell(name, **options), reference(name, steps=3))


# Checkpoints and interruption


def saved(name: str, folder: Path) -> Path:
    """The folder of a checkpoint after 4 of 8 steps."""
    cell(name, steps=4, validate=False, enable_checkpointing=True, default_root_dir=str(folder))
    (found,) = folder.glob("runs/*/checkpoints/*/manifest.json")
    return found.parent


def rest(record: dict) -> dict:
    return {**record, "losses": record["losses"][4:], "norms": record["norms"][4:]}


@pytest.mark.parametrize("name", ["tp", "cp", "fsdp+tp", "pp-1F1B"])
def test_interruption(name, tmp_path):
    """Stopped and gone on with: bit for bit as if it had not been."""
    whole = rest(cell(name, steps=8, validate=False))
    found = cell(name, steps=8, validate=False, ckpt=str(saved(name, tmp_path)))
    assert found["losses"] == whole["losses"] and found["norms"] == whole["norms"]
    for key, value in whole["weights"].items():
        assert torch.equal(found["weights"][key], value), key


@pytest.mark.parametrize(
    ("first", "second"),
    [("tp", "cp"), ("cp", "tp"), ("fsdp+tp", "single"), ("single", "fsdp+cp"), ("dp+pp", "pp-ZBVZeroBubble"),
     ("dp+ep", "ep")],
)  # fmt: skip
def test_a_checkpoint_of_one_strategy_goes_on_under_another(first, second, tmp_path):
    options = {"steps": 8, "validate": False}
    found = cell(second, **options, ckpt=str(saved(first, tmp_path)))
    compare(found, rest(reference(second, **options)))


# Failures


@pytest.mark.parametrize("name", ["tp", "cp", "sp", "pp-1F1B", "ep"])
def test_a_rank_that_is_killed_ends_the_others(name):
    """Rank 1 is killed in its third step, while rank 0 waits for its part: rank 0 ends by itself, and says why."""
    _, make, kind, more = CELLS[name]

    def rank(index):
        module = kind()
        layer = list(module.net.modules())[-1]
        forward, calls = layer.forward, iter(range(1_000_000))

        def dying(*arguments, **named):
            if index == 1 and next(calls) >= 2 * layer_calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(*arguments, **named)

        layer_calls = 4 if name.startswith("pp") else 1  # micro-batches
        layer.forward = dying
        return train(make(), module=module, steps=8, validate=False, **more)["losses"]

    with pytest.raises(RankFailed, match="Rank 1 of 2 was killed by SIGKILL") as failure:
        run(rank, 2, timeout=240, patience=30)
    assert "Then rank 0 " in str(failure.value)
