"""Tensor and pipeline parallel beside plain torch code: `python tests/benchmarks/dividing.py [--rounds 9]`

Two gloo ranks, one torch thread each, in one run for both contenders, which take turns of some training steps of the
same layers. Shown are medians, of the wall and of the processor's time of a rank (what other processes do to the clock
does less to that), and the ratios taken within a turn, with quartiles. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import OrderedDict
from typing import Any

import torch
from drivetrain import Accelerator, PipelineStrategy, TensorParallelStrategy
from drivetrain.tests.distributed import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, BLOCKS, ROWS, STEPS, MICRO = 256, 8, 256, 3, 4


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks, and the step that drivetrain takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(OrderedDict((f"block{index}", Block()) for index in range(BLOCKS)))

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return a loss."""
        return self.net(x).square().mean()


class PlainTensor:
    """What somebody writes by hand."""

    def __init__(self) -> None:
        self.model = Model()
        mesh = init_device_mesh("cpu", (2,))
        for block in self.model.net:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, x: torch.Tensor) -> None:
        self.model.training_step(x, 0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainPipeline:
    """The same for stages."""

    def __init__(self) -> None:
        rank = torch.distributed.get_rank()
        blocks = list(Model().net)[rank * BLOCKS // 2 : (rank + 1) * BLOCKS // 2]
        self.stage, self.first = nn.Sequential(*blocks), rank == 0
        stage = PipelineStage(self.stage, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICRO, loss_fn=lambda output, target: output.square().mean())
        self.optimizer = torch.optim.AdamW(self.stage.parameters())

    def step(self, x: torch.Tensor) -> None:
        if self.first:
            self.schedule.step(x, return_outputs=False)
        else:
            self.schedule.step(target=x, losses=[], return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ours:
    """The same by drivetrain."""

    def __init__(self, strategy: Any) -> None:
        self.accelerator = Accelerator(cpu=True, strategy=strategy)
        model = Model()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        self.entry = self.accelerator.entry(self.model, "training_step")

    def step(self, x: torch.Tensor) -> None:
        self.accelerator.backward(self.entry(x, 0))
        self.optimizer.step()
        self.optimizer.zero_grad()


KINDS: dict[str, tuple[Any, Any]] = {
    "tensor": (PlainTensor, lambda: TensorParallelStrategy(2, {"net.*.up": "colwise", "net.*.down": "rowwise"})),
    "pipeline": (PlainPipeline, lambda: PipelineStrategy(2, schedule="1F1B", microbatches=MICRO)),
}


def measure(rank: int, kind: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each contender (wall, processor's) seconds a step of each round; the first is not counted."""
    plain, strategy = KINDS[kind]
    contenders: dict[str, Any] = {"plain": plain(), "drivetrain": Ours(strategy())}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    x = torch.randn(ROWS, WIDTH)
    for number in range(rounds + 1):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            torch.distributed.barrier()
            start, begun = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                contenders[name].step(x)
            used = time.process_time() - begun
            torch.distributed.barrier()
            if number:
                found[name].append(((time.perf_counter() - start) / STEPS, used / STEPS))
    return found


def table(kind: str, found: dict[str, list[tuple[float, float]]]) -> str:
    """Return the medians and the ratios."""
    lines = []
    for place, what in enumerate(("wall", "processor")):
        for name, values in found.items():
            lines.append(f"{kind:9} {what:9} {name:10} {1000 * statistics.median(one[place] for one in values):8.1f} ms")
        ratios = [ours[place] / plain[place] for ours, plain in zip(found["drivetrain"], found["plain"])]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(f"{kind:9} {what:9} {'ratio':10} {middle:8.3f}  ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


def main() -> None:
    """Measure both kinds and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for kind in KINDS:
        print(table(kind, run(measure, 2, kind, rounds, timeout=900)[0]), flush=True)


if __name__ == "__main__":
    main()
