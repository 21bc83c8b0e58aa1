"""FSDP beside plain `fully_shard` code: `python tests/benchmarks/sharding.py [--rounds 9] [--megabytes 60]`

Two gloo ranks, one torch thread each, in one run for both contenders, which take turns: a turn is some training steps of
the same transformer, and then a sharded save (drivetrain's, whose files are hashed and synced to the disk, and
torch.distributed.checkpoint's into a new folder, its files synced as well). Shown are medians with quartiles, and each
ratio taken within a turn. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from drivetrain import Accelerator
from drivetrain.tests.distributed import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH, ROWS, STEPS = 256, 8, 5


def network(megabytes: float) -> nn.Module:
    """Return feed-forward blocks of about so many MB of weights."""
    torch.manual_seed(0)
    blocks = max(2, round(megabytes * 1e6 / (8 * WIDTH**2 * 4)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return Net()


class Plain:
    """What somebody writes by hand."""

    def __init__(self, megabytes: float) -> None:
        self.model = network(megabytes)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


class Ours:
    """The same by drivetrain."""

    def __init__(self, megabytes: float) -> None:
        self.accelerator = Accelerator(cpu=True, strategy="fsdp")
        model = network(megabytes)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(self, x: torch.Tensor) -> None:
        self.accelerator.backward(self.model(x).square().mean())
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(folder)


def measure(rank: int, rounds: int, megabytes: float, root: Path) -> dict[str, list[tuple[float, float]]]:
    """Return for each contender (seconds a step, seconds a save) of each round; the first is not counted."""
    contenders: dict[str, Any] = {"plain": Plain(megabytes), "drivetrain": Ours(megabytes)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    x = torch.randn(ROWS, 32, WIDTH)
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                contender.step(x)
            torch.distributed.barrier()
            middle = time.perf_counter()
            contender.save(root / f"{name}-{number}")
            torch.distributed.barrier()
            end = time.perf_counter()
            if number:
                found[name].append(((middle - start) / STEPS, end - middle))
        torch.distributed.barrier()
        if rank == 0:
            for name in contenders:
                shutil.rmtree(root / f"{name}-{number}")
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Return the medians, and the ratios beside their bars."""
    lines = []
    for place, (what, bar) in enumerate([("step", "at most 1.03"), ("sharded save", "at most 1.11 (0.9 of the throughput)")]):
        for name, values in found.items():
            lines.append(f"{what:14} {name:12} {1000 * statistics.median(value[place] for value in values):8.1f} ms")
        ratios = [ours[place] / plain[place] for ours, plain in zip(found["drivetrain"], found["plain"])]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(f"{what:14} {'ratio':12} {middle:8.3f}  ({low:.3f} to {high:.3f}); bar: {bar}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=float, default=60.0)
    taken = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = run(measure, 2, taken.rounds, taken.megabytes, Path(root), timeout=900)[0]
    print(table(found))


if __name__ == "__main__":
    main()
