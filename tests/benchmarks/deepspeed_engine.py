"""What drivetrain costs beside DeepSpeed's engine used by hand: `python tests/benchmarks/deepspeed_engine.py [--rounds 20]`.

Both train the same model on the same two ranks, in turns of 20 steps, so that whatever else the machine does hits both.
Time is process CPU time of rank 0; a ratio is taken within each turn, and its median shown beside the bar of 1.03.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator, DeepSpeedPlugin
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs

BAR, STEPS, WARM_UP = 1.03, 20, 3


def model(width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def by_hand(stage: int, batch: tuple[torch.Tensor, torch.Tensor]):
    import deepspeed

    net = model()
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3),
        config={"train_micro_batch_size_per_gpu": len(batch[1]), "zero_optimization": {"stage": stage},
                "gradient_clipping": 0.0, "steps_per_print": 10**9},
    )  # fmt: skip

    def turn() -> None:
        for _ in range(STEPS):
            engine.backward(F.cross_entropy(engine(batch[0]), batch[1]))
            engine.step()

    return turn


def by_drivetrain(accelerator: Accelerator, batch: tuple[torch.Tensor, torch.Tensor]):
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def turn() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(batch[0]), batch[1]))
                optimizer.step()
                optimizer.zero_grad()

    return turn


def measure(rank: int, stage: int, rounds: int) -> tuple[float, float]:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    batch = torch.randn(16, 512), torch.randint(0, 10, (16,))
    turns = [by_hand(stage, batch), by_drivetrain(accelerator, batch)]
    ratios, seconds = [], []
    for number in range(rounds + WARM_UP):
        spent = []
        for turn in turns if number % 2 else turns[::-1]:
            accelerator.wait_for_everyone()
            start = time.process_time()
            turn()
            spent.append(time.process_time() - start)
        hand, ours = spent if number % 2 else spent[::-1]
        if number >= WARM_UP:
            ratios.append(ours / hand)
            seconds.append(hand / STEPS)
    return statistics.median(ratios), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    deepspeed_runs.preload()
    for stage in range(4):
        ratio, seconds = run(measure, 2, stage, rounds, timeout=3600)[0]
        verdict = "" if ratio <= BAR else f"   above {BAR}"
        print(f"ZeRO-{stage}: {seconds * 1000:6.2f} ms a step by hand, × {ratio:.3f} by drivetrain{verdict}", flush=True)
    print(f"Largest resident memory of a rank: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
