"""Planning: the numbers by hand, and against the memory that real processes took."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, Trainer, TrainModule
from drivetrain.strategies import world as worlds
from drivetrain.tests.distributed import run
from drivetrain.trainer import planning
from drivetrain.trainer.planning import Footprint, Meter, choose, least_bytes, measure, plan


class Line(TrainModule):
    """5000 → 1000 without bias: 20 MB of weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5000, 1000, bias=False)

    def training_step(self, x, i):
        return self.layer(x).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Deep(TrainModule):
    _no_split_modules = ["Block"]

    def __init__(self, width=512, depth=8):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def training_step(self, x, i):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


BATCH = torch.zeros(8, 5000)
WEIGHTS = 5000 * 1000 * 4


def test_the_parts_by_hand():
    """Weights, as many gradients, one momentum; at most all three, and the gradient's update beside them."""
    one = measure(Line, BATCH, "single")
    assert one.problem is None
    assert (one.weights, one.gradients, one.optimizer) == (WEIGHTS, WEIGHTS, WEIGHTS)
    assert 3 * WEIGHTS <= one.peak <= 4.1 * WEIGHTS
    ddp = measure(Line, BATCH, "ddp", devices=2)
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (WEIGHTS, 2 * WEIGHTS, WEIGHTS)
    assert ddp.peak == one.peak + WEIGHTS


def test_shares_by_hand():
    """Over 4 ranks a quarter each; HSDP on one machine: 2 replicas over 2."""
    for strategy, part in (("hsdp", WEIGHTS // 2), ("fsdp", WEIGHTS // 4)):
        one = measure(Line, BATCH, strategy, devices=4)
        assert (one.weights, one.gradients, one.optimizer) == pytest.approx((part,) * 3, abs=100)


def test_recomputing_saves_activations():
    batch = torch.zeros(512, 512)
    plain, again = (measure(Deep, batch, "fsdp", devices=2, checkpointing=c) for c in (False, True))
    assert again.activations < plain.activations / 2 and again.peak < plain.peak
    assert again.name == "fsdp + activation checkpointing"


def _resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024


def _really(rank, word, make=lambda: Deep(1024, 4), batch=lambda: torch.randn(256, 1024)):
    """The most resident memory of three steps over what there was before the model."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 65536), libc.mallopt(-1, 65536)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: what is freed goes back
    accelerator, x = Accelerator(cpu=True, strategy=word), batch()
    x = x if accelerator.strategy.divide_batch is None else accelerator.strategy.divide_batch(x)[0]
    nn.functional.linear(torch.randn(256, 1024), torch.randn(8, 1024)).sum()
    gc.collect(), libc.malloc_trim(0)
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    module = make()
    model, optimizer = accelerator.prepare(module, module.configure_optimizers())
    step = accelerator.entry(model, "training_step")
    for _ in range(3):
        accelerator.backward(step(x, 0))
        optimizer.step(), optimizer.zero_grad()
    return _resident("VmHWM") - before


@pytest.mark.parametrize(("word", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_peak_is_that_of_real_processes_within_15_percent(word, ranks):
    planned = measure(lambda: Deep(1024, 4), torch.zeros(256, 1024), word, devices=ranks).peak
    for real in run(_really, ranks, word, timeout=280):
        assert abs(planned / real - 1) <= 0.15, (word, planned, real)


class Attending(TrainModule):
    """Blocks with attention over sequences of 64, which carry a plan for sharing their layers out."""

    def __init__(self, width=512, depth=6):
        super().__init__()
        self.net = nn.Module()
        self.net.blocks = nn.ModuleList([Attention(width) for _ in range(depth)])
        words = {"qkv.*": "colwise", "o": "rowwise", "up": "colwise", "down": "rowwise"}
        vars(self.net)["_tp_plan"] = {f"blocks.*.{name}": word for name, word in words.items()}
        self.places = nn.Embedding(64, width)

    def training_step(self, batch, i):
        x = batch["x"] + self.places(batch["place"])
        for block in self.net.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.o = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 64)).transpose(1, 2) for layer in self.qkv)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def sequences():
    return {"x": torch.zeros(16, 64, 512), "place": torch.arange(64).expand(16, 64)}


@pytest.mark.parametrize("word", ["tp", "cp", "sp"])
def test_the_peak_where_layers_or_sequences_are_shared_is_that_of_real_processes(word):
    planned = measure(Attending, sequences(), word, devices=2)
    assert planned.problem is None
    for real in run(_really, 2, word, Attending, sequences, timeout=120):
        assert abs(planned.peak / real - 1) <= 0.15, (word, planned, real)


def test_what_a_model_does_not_allow_is_left_out_unless_it_is_asked_for():
    options = {"devices": 2, "memory": 1e12}
    assert {one.strategy for one in plan(Deep, torch.zeros(8, 512), **options).footprints} == {"ddp", "hsdp", "fsdp"}
    found = plan(Attending, sequences(), **options)
    assert {one.strategy for one in found.footprints} == {"ddp", "hsdp", "fsdp", "tp", "cp", "sp"}
    assert found.choice.strategy == "ddp"
    asked = plan(Deep, torch.zeros(8, 512), **options, strategies=["tp"])
    assert asked.footprints[0].problem.startswith("ValueError: Expected a plan for tensor parallel")


def test_what_fits_is_chosen_in_the_order_of_what_it_exchanges():
    found = plan(Deep, torch.zeros(512, 512), devices=4).footprints
    sizes = [one.peak for one in found]
    assert sizes == sorted(sizes, reverse=True)
    names = [choose(found, 1.12 * size).choice.name for size in sizes]  # a tenth stays free
    assert names == ["ddp", "hsdp", "fsdp", "fsdp + activation checkpointing"]
    nothing = choose(found, sizes[-1])
    assert nothing.choice is None
    assert nothing.reason.startswith("Nothing fits: fsdp + activation checkpointing takes least")


def test_a_step_that_reads_values_is_named():
    class Reads(Line):
        def training_step(self, x, i):
            return super().training_step(x, i) * (2.0 if x.sum().item() > 0 else 1.0)

    found = plan(Reads, BATCH, memory=1e12)
    assert found.choice is None and found.footprints[0].problem.startswith("DataDependentOutputException")
    assert found.reason == "No step could be measured."


def test_it_leaves_no_trace():
    before, resize = worlds.current(), torch.UntypedStorage.resize_
    measure(Line, BATCH, "fsdp", devices=2)
    assert worlds.current() is before and torch.UntypedStorage.resize_ is resize and not dist.is_initialized()


def test_it_is_refused_beside_a_process_group():
    def rank(index):
        with pytest.raises(RuntimeError, match="no process group while planning"):
            plan(Line, BATCH)
        return True

    assert run(rank, 2) == [True, True]


def test_the_meter_follows_what_lives():
    with Meter() as meter:
        first = torch.zeros(1000)
        second = first.view(10, 100)  # the same memory
        third = first + 1
        assert meter.now == 8000
        del third
        assert meter.now == 4000 and meter.peak == 8000
        first.untyped_storage().resize_(0)
        assert meter.now == 0
        del first, second
    assert meter.now == 0


def test_the_least_that_a_replica_takes():
    module = Line()
    module.register_buffer("buffer", torch.zeros(10))
    module.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
    assert least_bytes(module) == 5 * WEIGHTS + 40 + 20


def _auto(memory, **options):
    def rank(index):
        planning.device_memory = lambda *args, **kwargs: memory
        from drivetrain.trainer import suiting

        suiting.device_memory = planning.device_memory
        module = Line()
        trainer = Trainer(
            accelerator="cpu", devices=2, max_steps=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(module, DataLoader(torch.zeros(8, 5000), batch_size=2))
        return trainer.strategy.name, trainer.global_step

    return run(rank, 2)


@pytest.mark.parametrize(
    ("memory", "options", "name"),
    [(4 * WEIGHTS, {}, "fsdp"), (8 * WEIGHTS, {}, "ddp"), (4 * WEIGHTS, {"strategy": "ddp"}, "ddp")],
)
def test_auto_shares_what_does_not_fit_an_imagined_memory(memory, options, name):
    assert _auto(memory, **options) == [(name, 2)] * 2


def test_names():
    assert Footprint("ddp", 2).name == "ddp"
