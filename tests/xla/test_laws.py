"""The laws of a run on XLA: parity by the Trainer, isolation, interruption, accumulation, evaluation, thinness."""

from __future__ import annotations

import importlib.metadata
import os
import signal

import pytest
import torch
from drivetrain import Accelerator, Callback, GradientAccumulationPlugin, Trainer, TrainModule
from drivetrain.tests.conformance.parallel_cells import Language, compare, train
from drivetrain.tests.distributed import RankFailed
from drivetrain.tests.xla import cases
from drivetrain.tests.xla.running import run
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.timeout(400)


def test_the_trainer_gives_the_numbers_of_plain_torch():
    """Losses and norms of each step, metrics of the validations, weights."""

    def work():
        cases.started()
        return train("auto", steps=20, module=Language(1)), train("xla", accelerator="tpu", steps=20, module=Language(1))

    expected, found = run(work, timeout=300)
    compare(found, expected)


class Toy(TrainModule):
    """A network with dropout; logs, validates."""

    def __init__(self):
        super().__init__()
        self.net = cases.Net(dropout=0.3)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("right", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False,
         "num_sanity_val_steps": 0}  # fmt: skip


def fit(steps, *, validate=False, ckpt=None, batch=8, **options):
    """Fit the toy; return its weights, and the trainer."""
    trainer = Trainer(strategy="xla", seed=3, max_steps=steps, gradient_clip_val=1.0, **options)
    data = DataLoader(cases.rows(96), batch_size=batch, shuffle=True)
    checks = DataLoader(cases.rows(20, seed=2), batch_size=8) if validate else None
    trainer.fit(Toy(), data, checks, ckpt_path=ckpt)
    return trainer.accelerator.get_state_dict(trainer.session.model), trainer


def test_validation_logging_and_saving_leave_no_trace_in_training(tmp_path):
    def work():
        cases.started()
        quiet, _ = fit(18, **QUIET)
        loud, trainer = fit(
            18, validate=True, val_check_interval=5, log_every_n_steps=3, default_root_dir=tmp_path, logger=True,
        )  # fmt: skip
        assert trainer.callback_metrics["right"] > 0
        return quiet, loud

    quiet, loud = run(work)
    assert all(torch.equal(loud[name], value) for name, value in quiet.items())


class Killed(Callback):
    """Ends the process at a step, without a word."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path):
    """Killed in its second epoch, some steps after a checkpoint in the middle of it."""
    from drivetrain import ModelCheckpoint

    def work(folder, **options):
        cases.started()
        saves = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        callbacks = [saves, *options.pop("callbacks", [])]
        quiet = {name: value for name, value in QUIET.items() if name != "enable_checkpointing"}
        return fit(22, default_root_dir=folder, callbacks=callbacks, **quiet, **options)[0]

    whole = run(lambda: work(tmp_path / "whole"))
    with pytest.raises(RankFailed, match="SIGKILL"):
        run(lambda: work(tmp_path / "cut", callbacks=[Killed(19)]))
    again = run(lambda: work(tmp_path / "cut", ckpt="last"))
    assert all(torch.equal(again[name], value) for name, value in whole.items())


class Unit(TrainModule):
    """One weight whose gradient is always 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, index):
        return (self.weight * torch.ones_like(batch[0])).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_g1_g2_g3_short_windows_token_weights_and_windows_equal_large_batches():
    def work():
        cases.started()
        module, seen = Unit(), []
        module.on_train_batch_end = lambda outputs, batch, index: seen.append(module.weight.item())
        Trainer(strategy="xla", max_epochs=1, accumulate_grad_batches=4, **QUIET).fit(
            module, DataLoader(TensorDataset(torch.ones(5, 1)), batch_size=1)
        )
        return seen, weighted(), windowed()

    def weighted():
        """Micro-batches of 1 and of 9 tokens against one batch of the 10."""
        accelerator = Accelerator(strategy="xla", gradient_accumulation_steps=2)
        weight = torch.nn.Linear(1, 1, bias=False)
        weight.weight.data.zero_()
        model, optimizer = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=1.0))
        tokens = torch.arange(1.0, 11.0).reshape(10, 1)
        for part in (tokens[:1], tokens[1:]):
            with accelerator.accumulate(model):
                accelerator.backward(model(part.to(accelerator.device)).mean(), weight=len(part))
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.item()

    def windowed():
        plugin = GradientAccumulationPlugin(num_steps=4, scale_last_window=True)
        small = cases.Loop("xla", steps=8, batch=2, gradient_accumulation_plugin=plugin).run().result()
        large = cases.Loop("xla", steps=2, batch=8).run().result()
        return max(float((small["weights"][n] - value).abs().max()) for n, value in large["weights"].items())

    seen, weight, distance = run(work)
    assert seen == [0, 0, 0, -1, -2]
    assert weight == pytest.approx(-5.5)
    assert distance <= 1e-6


def test_g4_g5_scaled_losses_are_refused_with_what_to_use_instead():
    def work():
        for precision in ("fp16", "16-true"):
            with pytest.raises(ValueError, match="Expected a precision of XLA.*'16-.*Use 'bf16-"):
                Accelerator(strategy="xla", mixed_precision=precision)
        with pytest.raises(ValueError, match="Received: 'fp8-mixed'. Use 'bf16-mixed'"):
            Accelerator(strategy="xla", mixed_precision="fp8")

    run(work)


class Seen(TrainModule):
    """Keeps which samples come, and their mean."""

    def test_step(self, batch, index):
        self.log("mean", batch[0].mean())

    def predict_step(self, batch, index):
        return batch[0] * 1


@pytest.mark.parametrize(("devices", "strategy"), [(1, "xla"), (2, "xla_spmd")])
def test_d4_each_sample_counts_once_also_in_a_short_last_batch(devices, strategy):
    def work():
        trainer = Trainer(strategy=strategy, **QUIET)
        loader = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2)
        (row,) = trainer.test(Seen(), loader)
        return row["mean"], torch.cat(trainer.predict(Seen(), loader)).tolist()

    assert run(work, devices=devices) == (2.0, [0, 1, 2, 3, 4])


def test_thinness_nothing_is_read_or_compiled_between_log_points(tmp_path):
    """With the progress bar, a tracker, a schedule, clipping and an epoch's mean: one graph a step."""

    class Counts(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.seen.append(cases.counted())

    def work():
        cases.started()
        counts = Counts()
        fit(48, log_every_n_steps=10, callbacks=[counts], default_root_dir=tmp_path, enable_checkpointing=False)
        return counts.seen

    seen = run(work)
    log_points = [number for number in range(1, 48) if seen[number]["read"] > seen[number - 1]["read"]]
    epochs = [12, 24, 36]
    assert set(log_points) <= {10, 20, 30, 40, *epochs}
    ran = {number: seen[number]["ran"] - seen[number - 1]["ran"] for number in range(14, 48)}
    assert {ran[number] for number in ran if number not in log_points} == {1}
    assert seen[47]["compiled"] == seen[25]["compiled"]


def test_thinness_the_installed_version_is_looked_up_once_in_a_run():
    def work():
        cases.started()
        looked, version = [], importlib.metadata.version
        importlib.metadata.version = lambda name: looked.append(name) or version(name)
        cases.Loop("xla", steps=5).run()
        return looked.count("torch_xla")

    assert run(work) <= 1  # none where the process knew it before
