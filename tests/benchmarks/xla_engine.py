"""What drivetrain costs beside torch_xla used by hand: `PJRT_DEVICE=CPU python tests/benchmarks/xla_engine.py [--rounds 20]`.

By hand, by an Accelerator and by a Trainer the same model trains on the same devices in one process, in turns of one
epoch, so that whatever else the machine does hits all three. A ratio is taken within each round, by the clock (until
the device is done) and by the processor time of all threads; its median is shown beside the bar of 1.03. Memory is what
each adds to a process of its own at its peak, the median of three.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from drivetrain import Accelerator, Callback, Trainer, TrainModule
from drivetrain.tests.xla.running import run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BAR, STEPS, WARM_UP, ROWS, WIDTH = 1.03, 40, 2, 32, 256
WAYS = {"xla": 1, "xla_spmd": 2, "xla_fsdp": 2}  # and how many devices
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
Turn = Callable[[], None]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * STEPS, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :8].contiguous()), batch_size=ROWS)


def by_hand(way: str) -> Turn:
    import numpy as np
    import torch_xla
    from torch_xla.distributed import spmd
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    net, rows = model().to(torch_xla.device()), None
    if WAYS[way] > 1:
        mesh = spmd.Mesh(np.arange(WAYS[way]), (WAYS[way],), ("data",))
        rows = spmd.ShardingSpec(mesh, ("data", None))
        for parameter in net.parameters() if way == "xla_fsdp" else ():
            longest = max(range(parameter.dim()), key=lambda dim: parameter.shape[dim])
            spmd.mark_sharding(parameter, mesh, tuple("data" if dim == longest else None for dim in range(parameter.dim())))
    loader = MpDeviceLoader(data(), torch_xla.device(), input_sharding=rows)  # it syncs between two batches
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def turn() -> None:
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return turn


def by_accelerator(way: str) -> Turn:
    accelerator, net = Accelerator(strategy=way), model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), data())

    def turn() -> None:
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.mse_loss(net(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return turn


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock:
    """Seconds on the wall and of the processor since it was started, when the device is done."""

    def __init__(self) -> None:
        import torch_xla.core.xla_model as xla

        self.wait = xla.wait_device_ops
        self.start()

    def start(self) -> None:
        self.wait()
        self.began = time.perf_counter(), time.process_time()

    def spent(self) -> tuple[float, float]:
        self.wait()
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]


class Rounds(Callback):
    """Runs the turns of others at the end of each epoch of a Trainer, and keeps what each turn took."""

    def __init__(self, others: dict[str, Turn]) -> None:
        self.others, self.clock = others, Clock()
        self.taken: list[dict[str, tuple[float, float]]] = []

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        spent = {"Trainer": self.clock.spent()}
        for name in sorted(self.others, reverse=bool(len(self.taken) % 2)):
            self.clock.start()
            self.others[name]()
            spent[name] = self.clock.spent()
        self.taken.append(spent)
        self.clock.start()


def rounds(way: str, count: int) -> list[dict[str, tuple[float, float]]]:
    start(way)
    taken = Rounds({"hand": by_hand(way), "Accelerator": by_accelerator(way)})
    Trainer(strategy=way, max_epochs=count + WARM_UP, callbacks=[taken], **QUIET).fit(Module(), data())
    return taken.taken[WARM_UP:]


def start(way: str) -> None:
    """Start the runtime, which is all devices' or one's for the life of the process."""
    import torch_xla
    from torch_xla import runtime

    if WAYS[way] > 1:
        runtime.use_spmd()
    torch_xla.device()


def peak(way: str, who: str) -> int:
    """Return what three epochs add to a process that has nothing but the runtime, in KiB."""
    start(way)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if who == "Trainer":
        Trainer(strategy=way, max_epochs=3, **QUIET).fit(Module(), data())
    else:
        turn = by_hand(way) if who == "hand" else by_accelerator(way)
        for _ in range(3):
            turn()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def shown(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    count = parser.parse_args().rounds
    for way, devices in WAYS.items():
        taken = run(rounds, way, count, devices=devices, timeout=3600)
        kinds = ("hand", "Accelerator", "Trainer")
        peaks = [{who: run(peak, way, who, devices=devices, timeout=600) for who in kinds} for _ in range(3)]
        memory = {who: statistics.median(one[who] for one in peaks) for who in kinds}
        hand = statistics.median(spent["hand"][0] for spent in taken)
        print(f"{way}: {hand / STEPS * 1000:.2f} ms a step by hand, {memory['hand'] / 1024:.0f} MiB; bar {BAR}", flush=True)
        for who in ("Accelerator", "Trainer"):
            wall, cpu = (shown([spent[who][kind] / spent["hand"][kind] for spent in taken]) for kind in (0, 1))
            print(f"  {who}: time {wall}, processor {cpu}, memory {memory[who] / memory['hand']:.3f}", flush=True)


if __name__ == "__main__":
    main()
