"""The runs that are killed where ranks share a model, its sequences or its experts; see runs.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

from drivetrain import ModelCheckpoint, Trainer
from drivetrain.strategies import random as randomness
from drivetrain.tests.conformance.parallel_cells import CELLS, Language, Tokens
from drivetrain.tests.faults.killing import CLOCK, Early, Late
from drivetrain.tests.faults.runs import Run, ended

SAMPLES = 10  # in global batches of 4: the last one is short


def _collated(rows: list[Any]) -> Any:
    CLOCK.tick("fetch")
    return default_collate(rows)


def _noisy(kind: type[Language]) -> Language:
    """A module whose step draws random numbers, logs, and lets the clock tick."""

    class Noisy(kind):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            CLOCK.tick("training_step")
            loss, logits = self.loss(batch)
            loss = loss + functional.dropout(logits, 0.3).square().mean() / 10
            self.log("loss", loss, on_step=True, on_epoch=True)
            CLOCK.tick("training_step")
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            CLOCK.tick("validation_step")
            super().validation_step(batch, batch_idx)

    return Noisy(1 if kind is Language else 2)


def train(name: str, **options: Any) -> dict[str, Any]:
    """Train under a strategy in the current folder, going on from what lies there, and return how it ended here."""
    _, make, kind, more = CELLS[name]
    module = _noisy(kind)
    saves = ModelCheckpoint(every_n_train_steps=1)
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "logger": "csv", "gradient_clip_val": 1.0, **more, **options}
    trainer = Trainer(
        accelerator="cpu", strategy=make(), seed=5, callbacks=[Early(), saves, Late()], num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    share = 4 // trainer.accelerator.strategy.data_world.size
    loader = DataLoader(Tokens(SAMPLES), batch_size=share, shuffle=True, collate_fn=_collated)
    trainer.fit(module, loader, DataLoader(Tokens(4), batch_size=2), resume="last")
    if trainer.is_global_zero:
        return _here(ended(trainer, module))
    optimizers = [one.state_dict() for one in trainer.optimizers]
    end = {"weights": dict(module.named_parameters()), "optimizers": optimizers, "random": randomness.capture()}
    return _here({**end, "metrics": dict(trainer.callback_metrics)})


def _here(tree: Any) -> Any:
    """Return a state with this rank's parts in the place of tensors in parts."""
    if isinstance(tree, dict):
        return {key: _here(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_here(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        tree = tree.detach()
        return tree.to_local() if hasattr(tree, "to_local") else tree
    return tree


SHARDED_RUNS: dict[str, Run] = {
    name: Run(functools.partial(train, name), ranks) for name, (ranks, *_) in CELLS.items() if name != "single"
}
SHARDED_RUNS |= {
    f"{name} with windows": Run(functools.partial(train, name, accumulate_grad_batches=2), CELLS[name][0])
    for name in ("fsdp", "tp", "cp", "pp-1F1B", "ep")
}
