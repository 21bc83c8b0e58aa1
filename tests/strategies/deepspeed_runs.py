"""Runs on engines of DeepSpeed beside plain torch, for the tests of the strategy and of the laws."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, DeepSpeedPlugin
from drivetrain.strategies import environment
from drivetrain.strategies.deepspeed_engine import package


def preload():
    """Imports in the process that forks what every rank would import for itself, which takes seconds."""
    package(torch.device("cpu"))
    with environment.exported(environment.child_environment({"TORCH_WARM_POOL": "0"})):
        # Imports torch's compiler, which would start processes beside this one where Triton is installed.
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    import_module("drivetrain.strategies.deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


_BUILD = """
import deepspeed
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder({name!r}).load(verbose=False)
"""


def is_built(*names):
    """Whether these extensions are there already."""
    return all((Path(sys.prefix) / "deepspeed-extensions" / f"{name}.built").exists() for name in names)


def built(*names):
    """Builds extensions of DeepSpeed (CPUAdamBuilder, …), once for an environment; returns the folder that holds them.

    One process compiles, before the ranks are there; a compiler takes minutes for each.
    """
    folder = Path(sys.prefix) / "deepspeed-extensions"
    folder.mkdir(exist_ok=True)
    for name in names:
        if not (folder / f"{name}.built").exists():
            path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # where ninja is
            variables = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), "PATH": path}
            subprocess.run([sys.executable, "-c", _BUILD.format(name=name)], check=True, env=variables)
            (folder / f"{name}.built").touch()
    return folder


def mlp():
    """Of sizes that two ranks cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def data(count=160):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


def vector(weights):
    """All weights of a state dict as one vector."""
    return torch.cat([weights[key].float().flatten() for key in sorted(weights)])


def far(one, other):
    """The relative distance of two vectors."""
    return float(torch.linalg.norm(one - other) / torch.linalg.norm(other))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def plain(batch, *, count=160, max_norm=None, optimizer=adamw, weights=None, schedule=None):
    """A loop of plain torch: losses, norms, weights after all batches, and the optimizer."""
    model = mlp()
    optimizer = optimizer(model)
    scheduler = schedule(optimizer) if schedule else None
    x, y = data(count).tensors
    losses, norms = [], []
    for a, b in zip(x.split(batch), y.split(batch)):
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": vector(model.state_dict()), "optimizer": optimizer}


def trained(accelerator, batch, *, count=160, max_norm=None, optimizer=adamw, model=None, weighted=False):
    """The same by an Accelerator: losses (of all ranks), norms and weights; also what was prepared."""
    model = model or mlp()
    model, optimizer, loader = accelerator.prepare(model, optimizer(model), DataLoader(data(count), batch_size=batch))
    losses, norms = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss, weight=len(y) if weighted else None)
            if max_norm is not None and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    weights = vector(accelerator.get_state_dict(model))
    return {"losses": losses, "norms": norms, "weights": weights, "prepared": (model, optimizer, loader)}


def accelerator(stage=2, *, steps=1, precision=None, strategy=None, **options):
    """An Accelerator on a fresh set of states, as every run of a script has it."""
    from drivetrain.strategies.gradients import GradientState
    from drivetrain.strategies.state import PartialState

    GradientState._reset_state()
    PartialState._reset_state()
    plugin = None if strategy else DeepSpeedPlugin(zero_stage=stage, **options)
    return Accelerator(
        cpu=True, deepspeed_plugin=plugin, strategy=strategy, gradient_accumulation_steps=steps,
        mixed_precision=precision,
    )  # fmt: skip


def result(run):
    """What of a run goes through a pipe."""
    return {key: value for key, value in run.items() if key not in ("prepared", "optimizer")}


def written(path: Path, content: dict) -> str:
    """A configuration as a file."""
    path.write_text(json.dumps(content))
    return str(path)


if __name__ == "__main__":
    print(built(*sys.argv[1:]))
