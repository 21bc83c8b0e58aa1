"""What is measured: each contender is one function that trains (or evaluates, or iterates) until it is stopped.

Run as a process of its own by run.py: `python workloads.py CONTENDER STEPS READ_FD WRITE_FD`. Contenders of one workload do
the same arithmetic on the same data; each calls `tick()` once a step, in the user's part of the code.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FOREVER = 10**9
EPOCH = 500  # steps
tick: Callable[[], None] = lambda: None  # noqa: E731


class Clock:
    """Reports the process CPU time of every ``steps`` steps, and waits for the word to go on."""

    def __init__(self, steps: int, read: int, write: int) -> None:
        self.steps, self.read, self.write = steps, read, write
        self.count = 0
        self.since = time.process_time()

    def tick(self) -> None:
        self.count += 1
        if self.count % self.steps == 0:
            self.report()

    def report(self) -> None:
        os.write(self.write, f"{time.process_time() - self.since!r}\n".encode())
        if not os.read(self.read, 1):
            os._exit(0)
        self.since = time.process_time()


# Models and data


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def loader(steps: int = EPOCH, *, shuffle: bool = True) -> DataLoader:
    """Return ``steps`` batches of 16 rows, in memory, without workers."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * steps, 32), torch.randint(10, (16 * steps,)))
    return DataLoader(data, batch_size=16, shuffle=shuffle)


class Transformer(nn.Module):
    """A language model of 2 layers, 128 wide, over 64 tokens of 256 kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(256, 128), nn.Embedding(64, 128)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def lm_loader() -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randint(256, (8 * 100, 65))), batch_size=8, shuffle=True)


def lm_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# Raw torch loops


def raw_bare() -> None:
    model, data = mlp(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(FOREVER):
        for x, y in data:
            tick()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def raw_everything() -> None:
    """By hand: a bar that shows the loss, TensorBoard every 50 steps, both from a value fetched when it is due."""
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

    model, data = mlp(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer, step = SummaryWriter(tempfile.mkdtemp()), 0
    for epoch in range(FOREVER):
        bar = tqdm(data, desc=f"epoch {epoch}")
        for x, y in bar:
            tick()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                value = loss.item()
                bar.set_postfix(loss=value, refresh=False)
                writer.add_scalar("loss", value, step)


def raw_accumulation() -> None:
    model, data = mlp(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.99)
    for _ in range(FOREVER):
        for index, (x, y) in enumerate(data):
            tick()
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            if (index + 1) % 4 == 0 or index + 1 == len(data):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def raw_lm() -> None:
    model, data = Transformer(), lm_loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(FOREVER):
        for (tokens,) in data:
            tick()
            loss = lm_loss(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def raw_evaluation() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    model, metric = mlp().eval(), MulticlassAccuracy(10, average="micro")
    with torch.inference_mode():
        for x, y in loader(EPOCH * 100, shuffle=False):
            tick()
            metric.update(model(x), y)


def raw_loader() -> None:
    data = loader()
    for _ in range(FOREVER):
        for _batch in data:
            tick()


# drivetrain


def classifier(logs: int = 0, *, bar: bool = False, fused: bool | None = None):
    """Return a module around the same network that logs its loss under ``logs`` names."""
    from drivetrain import TrainModule

    names = [f"loss{index}" for index in range(logs)]

    class Classifier(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, batch_idx):
            tick()
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            for name in names:
                self.log(name, loss, prog_bar=bar)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    return Classifier()


def trainer(**options):
    """Return a trainer without anything optional, but for ``options``."""
    from drivetrain import Trainer

    plain = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    plain |= {"enable_model_summary": False, "max_epochs": -1, "default_root_dir": tempfile.mkdtemp()}
    return Trainer(**{**plain, **options})


def trainer_bare() -> None:
    trainer().fit(classifier(), loader())


def trainer_fused() -> None:
    trainer().fit(classifier(fused=True), loader())


def trainer_everything() -> None:
    everything = {"logger": ["tensorboard"], "enable_progress_bar": True, "enable_checkpointing": True}
    trainer(**everything, log_every_n_steps=50).fit(classifier(1, bar=True), loader())


def trainer_log_1() -> None:
    trainer(logger=["csv"]).fit(classifier(1), loader())


def trainer_log_101() -> None:
    trainer(logger=["csv"]).fit(classifier(101), loader())


def trainer_accumulation() -> None:
    module = classifier()

    def configure_optimizers():
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    trainer(accumulate_grad_batches=4, gradient_clip_val=1.0).fit(module, loader())


def trainer_lm() -> None:
    from drivetrain import TrainModule

    class LanguageModel(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Transformer()

        def training_step(self, batch, batch_idx):
            tick()
            (tokens,) = batch
            return lm_loss(self.net, tokens)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer().fit(LanguageModel(), lm_loader())


def trainer_evaluation() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    from drivetrain import TrainModule

    class Evaluated(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.metric = mlp(), MulticlassAccuracy(10, average="micro")

        def validation_step(self, batch, batch_idx):
            tick()
            x, y = batch
            self.metric.update(self.net(x), y)
            self.log("accuracy", self.metric)

    trainer().validate(Evaluated(), loader(EPOCH * 100, shuffle=False))


def prepared(steps: int):
    """Return the raw loop's objects, prepared."""
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, data = mlp(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer, data)


def accelerator_accumulate(steps: int = 1) -> None:
    accelerator, model, optimizer, data = prepared(steps)
    for _ in range(FOREVER):
        for x, y in data:
            tick()
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def accelerator_loader() -> None:
    data = prepared(1)[-1]
    for _ in range(FOREVER):
        for _batch in data:
            tick()


def raw_gather(ranks: int = 1) -> None:
    """By hand: predictions and labels of all ranks, without samples that are there twice (there are none)."""
    import torch.distributed as dist

    rank = joined(ranks)
    model, seen = mlp().eval(), []
    with torch.inference_mode():
        for x, y in shared(rank, ranks):
            tick()
            predicted = model(x).argmax(-1)
            if ranks > 1:
                both = torch.stack([predicted, y])
                every = [torch.empty_like(both) for _ in range(ranks)]
                dist.all_gather(every, both)
                predicted, y = torch.cat(every, 1)
            seen.append((predicted == y).sum())


def accelerator_gather(ranks: int = 1) -> None:
    from drivetrain import Accelerator

    joined(ranks)
    accelerator = Accelerator(cpu=True)
    model, data = accelerator.prepare(mlp().eval(), loader(EPOCH * 100, shuffle=False))
    seen = []
    with torch.inference_mode():
        for x, y in data:
            tick()
            predicted, y = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            seen.append((predicted == y).sum())


def raw_gather_2() -> None:
    raw_gather(2)


def accelerator_gather_2() -> None:
    accelerator_gather(2)


def joined(ranks: int) -> int:
    """Fork the other ranks of a group over gloo and join it; only the first rank is measured."""
    global tick
    if ranks == 1:
        return 0
    import socket

    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)
    if rank:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with the first
        tick = lambda: None  # noqa: E731
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    dist.init_process_group("gloo")
    return rank


def shared(rank: int, ranks: int) -> DataLoader:
    """The evaluation's data, every rank its batches in turn."""
    whole = loader(EPOCH * 100, shuffle=False)
    part = torch.utils.data.DistributedSampler(whole.dataset, ranks, rank, shuffle=False)
    return DataLoader(whole.dataset, batch_size=16, sampler=part)


def main() -> None:
    global tick
    name, steps, read, write = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    tick = Clock(steps, read, write).tick
    globals()[name]()


if __name__ == "__main__":
    main()
