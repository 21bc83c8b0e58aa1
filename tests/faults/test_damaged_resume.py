"""Resuming by "last" over a damaged newest checkpoint: the one before is taken, and the run ends as it would have."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from drivetrain import ModelCheckpoint
from drivetrain.tests.loop.models import Line, loader, quiet
from drivetrain.tests.strategies.checkpoint.test_damage import mutate

C = Path("runs/run-0001/checkpoints")


def train(steps: int) -> Line:
    """Train until a step, going on from what lies there."""
    module = Line()
    saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(max_steps=steps, seed=4, callbacks=[saves], enable_checkpointing=None)
    trainer.fit(module, loader(12, shuffle=True), resume="last")
    return module


def test_C3_mutated_checkpoints_are_never_loaded_by_resume():
    whole = train(4).state_dict()
    shutil.rmtree(C / "checkpoint-000004")
    shutil.copytree("runs", "spare")
    draw = random.Random(3)
    for number in range(50):
        shutil.rmtree("runs")
        shutil.copytree("spare", "runs")
        mutate(C / "checkpoint-000003", draw)
        end = train(4).state_dict()
        assert all(torch.equal(end[name], whole[name]) for name in whole), number
