"""The laws under Megatron: parity with plain torch, checkpoints from anywhere to anywhere, interruption, failure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.tests.conformance import parallel_cells
from drivetrain.tests.conformance.megatron_cells import CELLS, Plain, cell, reference
from drivetrain.tests.conformance.parallel_cells import compare
from drivetrain.tests.distributed import run

pytest.importorskip("megatron.core")
SHARED = [name for name in CELLS if name != "megatron"]


@pytest.mark.parametrize("name", SHARED)
def test_parity_with_plain_torch_after_50_steps(name):
    compare(cell(name), reference())


@pytest.mark.parametrize("name", ["megatron-tp", "megatron-dp", "megatron-pp"])
def test_accumulation(name):
    """Windows of four micro-batches."""
    options = {"steps": 3, "accumulate": 4, "validate": False}
    compare(cell(name, **options), reference(**options))


@pytest.mark.parametrize("name", ["megatron-tp", "megatron-dp", "megatron-pp-interleaved"])
def test_parity_in_bfloat16(name):
    options = {"steps": 6, "precision": "bf16-mixed", "validate": False}
    compare(cell(name, **options), reference(**options), tolerance=2e-2)


# Checkpoints and interruption


def saved(train: Callable[..., Any], folder: Path) -> Path:
    """The folder of a checkpoint after 4 of 8 steps."""
    train(steps=4, validate=False, enable_checkpointing=True, default_root_dir=str(folder))
    (found,) = folder.glob("runs/*/checkpoints/*/manifest.json")
    return found.parent


def rest(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "losses": record["losses"][4:], "norms": record["norms"][4:]}


def plainly(**options: Any) -> dict[str, Any]:
    return run(lambda rank: parallel_cells.train(module=Plain(), **options), 1, group=False, timeout=110)[0]


@pytest.mark.parametrize("way", [{}, {"precision": "bf16-mixed"}], ids=["32", "bf16"])
@pytest.mark.parametrize("name", ["megatron-tp", "megatron-pp-interleaved", "megatron-dp"])
def test_interruption(name, way, tmp_path):
    """Stopped and gone on with: bit for bit as if it had not been, dropout included."""
    train = functools.partial(cell, name, validate=False, dropout=0.1, **way)
    whole = rest(train(steps=8))
    found = train(steps=8, ckpt=str(saved(functools.partial(cell, name, dropout=0.1, **way), tmp_path)))
    assert found["losses"] == whole["losses"] and found["norms"] == whole["norms"]
    for key, value in whole["weights"].items():
        assert torch.equal(found["weights"][key], value), key


def test_a_checkpoint_goes_from_anywhere_to_anywhere(tmp_path):
    """tp → pp → dp → plain torch → tp: weights, moments, steps, schedules and places go over."""
    way = ["megatron-tp", "megatron-pp-interleaved", "megatron-dp", "plain", "megatron-tp+pp"]
    options = {"validate": False, "enable_checkpointing": True}
    place, losses, norms = None, [], []
    for leg, name in enumerate(way, start=1):
        train = plainly if name == "plain" else functools.partial(cell, name)
        folder = tmp_path / name
        found = train(steps=2 * leg, ckpt=place, default_root_dir=str(folder), **options)
        losses, norms = losses + found["losses"], norms + found["norms"]
        (manifest,) = folder.glob("runs/*/checkpoints/*/manifest.json")
        place = str(manifest.parent)
    compare({**found, "losses": losses, "norms": norms}, reference(steps=10, validate=False))
