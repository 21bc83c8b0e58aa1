"""Counting what XLA compiles, its profiler's trace, and the other monitors on its device."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Callback,
    CompilationMonitor,
    DeviceStatsMonitor,
    LearningRateMonitor,
    NormMonitor,
    Profiler,
    ThroughputMonitor,
    Trainer,
    TrainModule,
)
from drivetrain.tests.xla.running import run

LOGGER = "drivetrain.callbacks.compilation"


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Rows(Callback):
    """Keeps the rows of values."""

    def __init__(self):
        self.rows = []

    def on_log(self, trainer, module, metrics, step):
        self.rows.append((step, dict(metrics)))


class Warned(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self, name):
        super().__init__()
        self.said: list[str] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


def loader(samples):
    x = torch.linspace(-1, 1, samples * 4).view(samples, 4)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def fit(samples, *callbacks, validate=False, **options):
    """Fit twice over so many samples; return the Trainer, the rows and what CompilationMonitor warned of."""
    warned, rows = Warned(LOGGER), Rows()
    settings = {"max_epochs": 2, "log_every_n_steps": 4, "logger": False, "enable_progress_bar": False, **options}
    trainer = Trainer(strategy="xla", callbacks=[rows, *callbacks], enable_checkpointing=False, **settings)
    trainer.fit(Line(), loader(samples), loader(samples) if validate else None)
    return trainer, rows.rows, warned.said


def compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def test_steps_of_one_shape_compile_no_more_after_the_warm_up():
    def count():
        _, rows, warned = fit(80, CompilationMonitor(), validate=True)
        return [row["xla/compilations"] for _, row in rows if "xla/compilations" in row], rows[-1][1], warned, compiled()

    counts, last, warned, total = run(count)
    assert warned == []
    assert len(counts) == 5 and set(counts) == {2.0}  # the optimizer's first step makes its states
    assert last.keys() >= {"val_loss"} and total > 2  # validations and the first row compiled too


def test_a_late_graph_is_named_with_its_step_and_shapes_once():
    def count():
        monitor = CompilationMonitor()
        _, rows, warned = fit(82, monitor)
        return [row.get("xla/late_compilations") for _, row in rows], warned, (monitor.compilations, monitor.late)

    late, warned, counts = run(count)
    assert len(warned) == 1
    assert "for batch 11 of this fit (step 11), after 4 batches" in warned[0]
    assert "Shapes of that batch: [2, 4], [2, 1]; of the one before: [8, 4], [8, 1]." in warned[0]
    assert counts == (3, 1)  # the second epoch's short batch is known
    assert [value for value in late if value is not None] == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_window_of_accumulated_batches_is_one_graph():
    def count():
        monitor = CompilationMonitor(warmup=8)
        fit(128, monitor, accumulate_grad_batches=4)
        return monitor.compilations, monitor.late

    assert run(count) == (2, 0)


def test_operators_that_xla_lacks_are_counted():
    def count():
        class Falls(Line):
            def training_step(self, batch, batch_idx):
                spectrum = torch.linalg.eigvals(batch[0][:4].detach())  # computed on the CPU
                return super().training_step(batch, batch_idx) + 0 * spectrum.real.sum()

        warned, rows = Warned(LOGGER), Rows()
        trainer = Trainer(strategy="xla", max_steps=8, log_every_n_steps=4, logger=False, enable_progress_bar=False,
                          enable_checkpointing=False, callbacks=[rows, CompilationMonitor()])  # fmt: skip
        trainer.fit(Falls(), loader(80))
        return [row["xla/fallbacks"] for _, row in rows.rows], warned.said

    fallbacks, _ = run(count)
    assert len(fallbacks) == 2 and 0 < fallbacks[0] < fallbacks[1]


def test_the_profiler_writes_a_trace(tmp_path):
    def profile():
        fit(80, Profiler("xla", dirpath=tmp_path, wait=2, active=3), max_epochs=1)

    run(profile)
    (trace,) = tmp_path.rglob("*.xplane.pb")
    assert trace.relative_to(tmp_path).parts[:3] == ("profile-xla", "plugins", "profile")  # where TensorBoard looks
    assert b"SyncTensorsGraph" in trace.read_bytes()  # graphs that ran, by torch_xla's name for them


def test_the_profiler_traces_as_many_batches_as_it_was_asked_for():
    """Counted by the profiler's own calls, replaced here: a trace does not tell how many steps it has."""

    def profile(stop_at):
        import torch_xla.debug.profiler as profiler

        calls, batch = [], []

        class Batches(Callback):
            def on_train_batch_start(self, trainer, module, inputs, batch_idx):
                batch.append(batch_idx)

        profiler.start_trace = lambda path: calls.append(("start", len(batch)))
        profiler.stop_trace = lambda: calls.append(("stop", len(batch)))
        fit(80, Batches(), Profiler("xla", wait=2, active=3), max_steps=stop_at, max_epochs=-1)
        return calls

    assert run(profile, 8) == [("start", 2), ("stop", 5)]
    assert run(profile, 4) == [("start", 2), ("stop", 4)]  # the fit ended before


@pytest.mark.parametrize("every", [2, 10])
def test_the_other_monitors_run_and_read_nothing_from_the_device(every):
    def fetched(*callbacks):
        import torch_xla.debug.metrics as metrics

        def transfers():
            return (metrics.metric_data("TransferFromDeviceTime") or [0])[0]

        before = transfers()
        _, rows, _ = fit(160, *callbacks, max_epochs=1, log_every_n_steps=every)
        return rows, transfers() - before

    def monitored():
        return fetched(ThroughputMonitor(flops_per_batch=100.0, available_flops=1e9), DeviceStatsMonitor(cpu_stats=True),
                       LearningRateMonitor(), CompilationMonitor())  # fmt: skip

    (rows, transfers), (_, alone) = run(monitored), run(fetched)
    assert len(rows) == 20 // every and transfers == alone == len(rows)  # the values of a row, together
    row = rows[0][1]
    assert row.keys() >= {"throughput/samples_per_sec", "throughput/mfu", "cpu/process_gib", "lr-AdamW", "xla/compilations"}
    assert not {name for name in row if name.startswith("device/")}  # the CPU behind XLA does not tell of its memory


def test_norms_are_those_of_the_cpu():
    def norms(strategy):
        rows = Rows()
        trainer = Trainer(strategy=strategy, accelerator="cpu" if strategy == "single" else "auto", max_steps=4,
                          log_every_n_steps=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
                          callbacks=[rows, NormMonitor()])  # fmt: skip
        trainer.fit(Line(), loader(80))
        return rows.rows

    found, right = run(norms, "xla"), run(norms, "single")
    assert [step for step, _ in found] == [step for step, _ in right] == [2, 4]
    for (_, one), (_, other) in zip(found, right):
        assert one == pytest.approx(other, rel=1e-5)


def test_without_xla_nothing_is_counted_and_that_is_said():
    def count():
        warned = Warned(LOGGER)
        trainer = Trainer(strategy="single", accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False,
                          enable_checkpointing=False, callbacks=[CompilationMonitor()])  # fmt: skip
        trainer.fit(Line(), loader(80))
        return warned.said

    assert run(count) == ["CompilationMonitor counts what XLA compiles; this run is on cpu."]
