"""The laws under Megatron: parity with plain torch, checkpoints from anywhere to anywhere, interruption, failure."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, ModelCheckpoint, Trainer
from drivetrain.strategies.checkpoint import Checkpoint
from drivetrain.tests.conformance.megatron_cells import (
    CELLS,
    Megatron,
    OnCPU,
    Plain,
    cell,
    plain,
    preload,
    reference,
    strategy,
    train,
)
from drivetrain.tests.conformance.parallel_cells import Tokens, compare
from drivetrain.tests.distributed import RankFailed, run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.timeout(600)  # seconds on a machine of its own, minutes on a loaded one
SHARED = [name for name in CELLS if name != "megatron"]


@pytest.mark.parametrize("name", SHARED)
def test_parity_with_plain_torch_after_50_steps(name):
    compare(cell(name), reference())


@pytest.mark.parametrize("name", ["megatron-tp", "megatron-dp", "megatron-pp"])
def test_G1_accumulation_with_a_short_last_window(name):
    """Windows of three batches; an epoch has eight."""
    options = {"steps": 4, "accumulate": 3, "validate": False}
    compare(cell(name, **options), reference(**options))


@pytest.mark.parametrize("name", ["megatron-tp", "megatron-dp", "megatron-pp-interleaved"])
def test_G2_losses_count_by_their_tokens(name):
    """Over micro-batches, windows and ranks: the mean over all tokens that count, of which samples have 1 to 16.

    (What is logged is a mean by samples.)
    """
    options = {"steps": 4, "accumulate": 2, "validate": False, "data": Ragged()}
    compare({**cell(name, **options), "losses": []}, {**plain(**options), "losses": []})


class Ragged(Tokens):
    """Sequences of which only the first labels count, of the longest sixteen times as many as of the shortest."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        counts = torch.arange(len(item["labels"])) < (16, 1, 5, 9)[index % 4]
        return {**item, "labels": item["labels"].where(counts, -100)}


def test_G3_gradients_are_reduced_once_for_a_window():
    def rank(index: int) -> Any:
        from drivetrain.strategies.megatron_engine import Engine

        calls: list[str] = []
        reduce, forward = Engine.finish, Engine.run
        Engine.finish = lambda self: (calls.append("reduce"), reduce(self))[1]
        Engine.run = lambda self, *args, **more: (calls.append("run"), forward(self, *args, **more))[1]
        train("megatron-dp", steps=2, accumulate=4, validate=False)
        return calls

    assert run(rank, 2, timeout=280) == [["run"] * 4 + ["reduce"] + ["run"] * 4 + ["reduce"]] * 2


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
    way = ["megatron-tp", "megatron-pp-interleaved", "megatron-dp", "torch", "megatron-tp+pp"]
    options = {"validate": False, "enable_checkpointing": True}
    place, losses, norms = None, [], []
    for leg, name in enumerate(way, start=1):
        train = plain if name == "torch" else functools.partial(cell, name)
        folder = tmp_path / name
        found = train(steps=2 * leg, ckpt=place, default_root_dir=str(folder), **options)
        losses, norms = losses + found["losses"], norms + found["norms"]
        (manifest,) = folder.glob("runs/*/checkpoints/*/manifest.json")
        place = str(manifest.parent)
    compare({**found, "losses": losses, "norms": norms}, reference(steps=10, validate=False))


def test_killed_in_a_save_or_a_step_it_ends_the_same(tmp_path):
    """SIGKILL on any rank, and started again by the same command: the newest complete checkpoint is gone on with."""
    whole = ended(tmp_path / "whole")
    places = {1: (2, "step"), 0: (4, "save")}  # rank: in which step, where
    for rank, place in places.items():
        with pytest.raises(RankFailed, match=f"Rank {rank} of 2 was killed by SIGKILL"):
            ended(tmp_path / "killed", killed={rank: place})
    assert ended(tmp_path / "killed") == whole


def ended(folder: Path, killed: Mapping[int, tuple[int, str]] | None = None) -> list[Any]:
    """Train in a folder, going on from what lies there; return how it ended on each rank."""

    def rank(index: int) -> Any:
        step, place = (killed or {}).get(index, (None, ""))
        with OnCPU():
            return _train_to_the_end(folder, step, place)

    preload()
    return run(rank, 2, timeout=280, patience=20)


def _train_to_the_end(folder: Path, step: int | None, place: str) -> Any:
    dying = _Dying(step, place)
    trainer = Trainer(
        accelerator="cpu", strategy=strategy(tp_degree=2, use_distributed_optimizer=True), precision="bf16-mixed",
        seed=5, max_steps=6, callbacks=[dying, ModelCheckpoint(every_n_train_steps=1)], logger=False,
        default_root_dir=str(folder), enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        accumulate_grad_batches=2, gradient_clip_val=1.0, log_every_n_steps=1,
    )  # fmt: skip
    module = Megatron(hidden_dropout=0.2, attention_dropout=0.2)
    trainer.fit(module, DataLoader(Tokens(), batch_size=4, shuffle=True), resume="last")
    opened = max((Checkpoint.open(one.parent) for one in folder.glob("runs/*/checkpoints/*/manifest.json")),
                 key=lambda one: one.manifest["step"])  # fmt: skip
    assert opened.manifest["step"] == 6 and opened.has("rank-00001-megatron.safetensors")
    tensors = {name: opened.tensors(name) for name in opened.files if name.endswith(".safetensors")}
    bits = {(file, name): one.view(torch.uint8).tolist() if one.ndim else float(one)
            for file, found in tensors.items() for name, one in found.items()}  # fmt: skip
    return dying.losses[-1], bits, {name: one.tolist() for name, one in module.named_parameters()}


class _Dying(Callback):
    """Kills its process in a step, or while it writes the checkpoint after it."""

    def __init__(self, step: int | None, place: str) -> None:
        self.step, self.place, self.losses = step, place, []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and self.place == "step":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if trainer.global_step == self.step and self.place == "save":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


# Evaluation and failures


@pytest.mark.parametrize("name", ["megatron-dp", "megatron-pp", "megatron-tp"])
def test_evaluation_sees_each_sample_once(name):
    """Five samples on two ranks, in batches of two: the metrics of one process, and every sample in its order."""
    options = {"samples": 5, "batch": 2}
    expected = run(lambda rank: evaluated(Trainer(accelerator="cpu", **QUIET), Plain(), **options), 1, group=False)[0]

    def rank(index: int) -> Any:
        with OnCPU():
            trainer = Trainer(accelerator="cpu", strategy=strategy(**CELLS[name][1]), **QUIET)
            return evaluated(trainer, Megatron(), **options)

    for loss, rows in run(rank, 2, timeout=280):
        assert loss == pytest.approx(expected[0], rel=1e-5) and sorted(rows) == sorted(expected[1])


QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def evaluated(trainer: Any, module: Any, *, samples: int, batch: int) -> tuple[float, list[int]]:
    """Return the mean loss over all samples, and the samples that all ranks with other data have seen."""
    seen: list[int] = []
    first = [tokens.tolist() for tokens in Tokens(samples).tokens[:, :4]]

    def test_step(rows: Any, index: int) -> None:
        seen.extend(first.index(row.tolist()) for row in rows["tokens"][:, :4])
        outputs = module.loss(rows) if isinstance(module, Plain) else module.net.loss(rows)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        module.log("loss", loss, batch_size=len(rows["tokens"]))

    module.test_step = test_step
    loader = DataLoader(Tokens(samples), batch_size=batch)
    (found,) = trainer.test(module, loader)
    of_all = trainer.strategy.data_world.gather_object(seen)
    return found["loss"], [row for rows in of_all for row in rows]


@pytest.mark.parametrize("name", ["megatron-tp", "megatron-pp-interleaved", "megatron-dp"])
def test_a_rank_that_is_killed_ends_the_others(name):
    """Rank 1 is killed in its third step, while rank 0 waits for its part: rank 0 ends by itself, and says why."""

    def rank(index: int) -> Any:
        dying = _Dying(2 if index == 1 else None, "step")
        return train(name, steps=8, validate=False, callbacks=[dying])["losses"]

    preload()
    with pytest.raises(RankFailed, match="Rank 1 of 2 was killed by SIGKILL") as failure:
        run(rank, 2, timeout=110, patience=15)
    assert "Then rank 0 " in str(failure.value)
