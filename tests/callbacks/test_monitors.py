"""ThroughputMonitor, DeviceStatsMonitor and NormMonitor: names, values and what they leave alone."""

from __future__ import annotations


import pytest
import torch
from torch import nn

from drivetrain import Callback, DeviceStatsMonitor, GradientClipping, NormMonitor, ThroughputMonitor, TrainModule
from drivetrain.tests.callbacks.toy import Line, loader, quiet
from drivetrain.tests.distributed import run


class Rows(Callback):
    """What a tracker would get."""

    def __init__(self):
        self.rows = []

    def on_log(self, trainer, module, metrics, step):
        self.rows.append((step, metrics))


def rows(callbacks, module=None, batches=6, **options):
    listener = Rows()
    trainer = quiet(callbacks=[*callbacks, listener], **options)
    trainer.fit(module or Line(), loader(batches, batch_size=2))
    return listener.rows


class Clock:
    """Stands for `time`: goes on only where a test says so."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_rates_are_counts_by_seconds(monkeypatch):
    """3 batches of 2 a row; each is waited for 1 s and worked on for 3 s: 0.25 steps and 0.5 samples a second."""
    clock = Clock()
    monkeypatch.setattr("drivetrain.callbacks.throughput.time", clock)

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            clock.now += 0.5  # two a batch
            return torch.tensor([1.0])

    class Working(Line):
        def training_step(self, batch, batch_idx):
            clock.now += 3
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            clock.now += 100  # counts nowhere

    listener = Rows()
    monitor = ThroughputMonitor(length_fn=lambda batch: 7 * len(batch), flops_per_batch=8e6, available_flops=4e6)
    data = torch.utils.data.DataLoader(Slow(), batch_size=2)
    quiet(callbacks=[monitor, listener], log_every_n_steps=3, max_epochs=1, val_check_interval=3).fit(
        Working(), data, loader(1)
    )
    found = [{k: v for k, v in row.items() if k.startswith("throughput")} for _, row in listener.rows]
    expected = {
        "throughput/steps_per_sec": 0.25, "throughput/samples_per_sec": 0.5, "throughput/data_wait": 0.25,
        "throughput/items_per_sec": 3.5, "throughput/flops_per_sec": 2e6, "throughput/mfu": 0.5,
    }  # fmt: skip
    assert [row for row in found if row] == [pytest.approx(expected), pytest.approx(expected)]


def test_rates_of_a_short_last_row_and_by_accumulation(monkeypatch):
    """5 batches with log_every_n_steps=4: one row at step 4, one at the epoch's end; 2 micro-batches a step: other rows."""
    found = rows([ThroughputMonitor()], batches=10, log_every_n_steps=4)
    assert [step for step, row in found if "throughput/steps_per_sec" in row] == [4, 5]
    found = rows([ThroughputMonitor()], batches=16, log_every_n_steps=2, accumulate_grad_batches=2)
    assert [step for step, row in found if "throughput/steps_per_sec" in row] == [2, 4]


def test_operations_are_counted_in_the_first_batch():
    """A linear layer without bias from 4 to 3: forward and the weight's gradient are 2·B·4·3 each; B = 2."""

    class Four(TrainModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3, bias=False)

        def training_step(self, batch, batch_idx):
            return self.layer(batch.repeat(1, 4)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = ThroughputMonitor(flops_per_batch="measure", available_flops=1e9)
    found = rows([monitor], Four(), log_every_n_steps=1)
    assert monitor.flops_per_batch == 96
    assert all(row["throughput/flops_per_sec"] > 0 for _, row in found)


def test_an_unknown_device_has_no_utilization(caplog):
    found = rows([ThroughputMonitor(flops_per_batch=5.0)], log_every_n_steps=1)
    assert all("throughput/mfu" not in row and "throughput/flops_per_sec" in row for _, row in found)
    assert "available_flops" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length_fn": 3}, TypeError, "length_fn=3"),
        ({"batch_size_fn": "x"}, TypeError, "batch_size_fn='x'"),
        ({"flops_per_batch": "mesure"}, ValueError, '"measure"'),
        ({"available_flops": "much"}, ValueError, "available_flops='much'"),
    ],
)
def test_wrong_arguments_of_throughput(arguments, error, message):
    with pytest.raises(error, match=message):
        ThroughputMonitor(**arguments)


def test_throughput_is_that_of_all_ranks():
    """2 ranks, 4 samples in all a step: samples a step is 4, items 7 a sample."""

    def rank(index):
        found = rows([ThroughputMonitor(length_fn=lambda batch: 7 * len(batch))], batches=8, log_every_n_steps=1)
        return [{k: v for k, v in row.items() if k.startswith("throughput")} for _, row in found]

    first, second = run(rank, 2)
    assert first == second and len(first) == 2
    for row in first:
        assert row["throughput/samples_per_sec"] == pytest.approx(4 * row["throughput/steps_per_sec"])
        assert row["throughput/items_per_sec"] == pytest.approx(28 * row["throughput/steps_per_sec"])
        assert 0 <= row["throughput/data_wait"] <= 1


def test_statistics_of_the_processor():
    found = [row for _, row in rows([DeviceStatsMonitor()], log_every_n_steps=3)]
    assert len(found) >= 1
    assert 0.05 < found[0]["cpu/process_gib"] < 64 and 0 < found[0]["cpu/memory_percent"] < 100
    assert set(found[0]) >= {"cpu/percent", "cpu/process_percent"}
    found = [row for _, row in rows([DeviceStatsMonitor(filter_keys={"cpu/percent"})], log_every_n_steps=3)]
    assert [key for key in found[0] if key.startswith("cpu")] == ["cpu/percent"]
    assert not any(key.startswith("cpu") for _, row in rows([DeviceStatsMonitor(False)]) for key in row)


class Two(TrainModule):
    """Gradients known beforehand: 3 and 4 for `a` (norm 5), 12 for `b.c` (with `a`: 13)."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 1, bias=False)
        self.b = nn.ModuleDict({"c": nn.Linear(1, 1, bias=False)})
        with torch.no_grad():
            self.a.weight.copy_(torch.tensor([[6.0, 8.0]]))
            self.b["c"].weight.fill_(24.0)

    def training_step(self, batch, batch_idx):
        return (self.a.weight * torch.tensor([[3.0, 4.0]])).sum() + 12 * self.b["c"].weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


EXPECTED = {
    "grad_norm/a": 5, "grad_norm/b.c": 12, "grad_norm/total": 13,
    "weight_norm/a": 10, "weight_norm/b.c": 24, "weight_norm/total": 26,
}  # fmt: skip


def norms(*callbacks, **options):
    found = rows(callbacks, Two(), **{"log_every_n_steps": 2, **options})
    return [{k: v for k, v in row.items() if "norm" in k} for _, row in found]


def test_norms_are_those_before_clipping():
    assert [row for row in norms(GradientClipping(0.1), NormMonitor(), log_every_n_steps=1) if row] == [EXPECTED] * 3
    assert [row for row in norms(NormMonitor()) if row] == [EXPECTED]  # a row at step 2, none at the third


def test_norms_with_a_loss_scaler():
    assert norms(NormMonitor(), precision="16-mixed", log_every_n_steps=1)[-1] == pytest.approx(EXPECTED)


def test_norms_chosen():
    keys = {"grad_norm/a", "grad_norm/b", "grad_norm/total"}
    assert norms(NormMonitor(weights=False, depth=1))[0] == {k: EXPECTED[k.replace("/b", "/b.c")] for k in keys}
    assert norms(NormMonitor(per_layer=False, gradients=False))[0] == {"weight_norm/total": 26}
    assert norms(NormMonitor(1.0, weights=False))[0] == {"grad_norm/a": 7, "grad_norm/b.c": 12, "grad_norm/total": 19}


def test_wrong_arguments_of_norms():
    for arguments in ({"norm_type": "two"}, {"depth": 0}, {"gradients": False, "weights": False}):
        with pytest.raises(ValueError, match="Received"):
            NormMonitor(**arguments)


def test_monitors_change_nothing_in_training():
    def trained(callbacks):
        torch.manual_seed(0)
        module = Line(lr=0.1)
        quiet(callbacks=callbacks, log_every_n_steps=1).fit(module, loader(6))
        return module.layer.weight.item()

    assert trained([]) == trained([ThroughputMonitor(flops_per_batch="measure"), DeviceStatsMonitor(), NormMonitor()])
