"""What the Trainer's arguments and the module's hooks do, one by one."""

from __future__ import annotations

import datetime
import math

import pytest
import torch
import torchmetrics
from drivetrain import (
    Callback,
    DataModule,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    LambdaCallback,
    ModelCheckpoint,
    Timer,
    TrainModule,
)
from drivetrain.tests.loop.models import Line, Numbers, Slope, Validated, loader, quiet
from torch.utils.data import DataLoader, IterableDataset


class Order(Callback):
    """Notes the batches after which a validation ran: batches done in the run."""

    def __init__(self):
        self.at = []

    def on_validation_start(self, trainer, module):
        self.at.append(trainer.progress.batches)


# How long


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 5}, 5), ({"max_steps": "5ba"}, 5), ({"max_steps": "10sa"}, 5), ({"max_epochs": "2ep"}, 8),
        ({"max_epochs": 2, "max_steps": 100}, 8), ({"max_epochs": 5, "max_steps": 3}, 3), ({"max_epochs": 0}, 0),
        ({"max_epochs": -1, "max_steps": 9}, 9), ({"max_epochs": "1_0sa"}, 5),
    ],
)  # fmt: skip
def test_limits_are_durations(options, steps):
    trainer = quiet(**options)
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == steps


def test_max_time_stops_a_run():
    trainer = quiet(max_time=datetime.timedelta(seconds=0.3), max_epochs=-1)
    trainer.fit(Line(), loader(8))
    assert trainer.progress.seconds() >= 0.3 and trainer.stop_reason == "the time of 0.3 s is over"
    assert any(isinstance(callback, Timer) for callback in trainer.callbacks)


def test_minimums_hold_off_a_wish_to_stop():
    class Wish(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = True

    def steps(**options):
        trainer = quiet(max_epochs=5, callbacks=[Wish()], **options)
        trainer.fit(Line(), loader(8))
        return trainer.global_step

    assert steps() == 1
    assert steps(min_steps=6) == 6
    assert steps(min_epochs=2) == 8


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.5, 2), (1.0, 4), (0.01, 1), (100, 4)])
def test_limit_train_batches_and_its_short_last_window(limit, batches):
    module = Slope()
    trainer = quiet(max_epochs=2, limit_train_batches=limit, accumulate_grad_batches=3)
    trainer.fit(module, loader(4, 1))
    assert trainer.global_step == 2 * math.ceil(batches / 3)
    assert module.weight.item() == -trainer.global_step
    assert trainer.num_training_batches == batches


def test_limits_of_evaluation():
    class Counted(Validated):
        def __init__(self):
            super().__init__()
            self.count = {"val": 0, "test": 0, "predict": 0}

        def validation_step(self, batch, batch_idx):
            self.count["val"] += 1

        def test_step(self, batch, batch_idx):
            self.count["test"] += 1

        def predict_step(self, batch, batch_idx):
            self.count["predict"] += 1
            return batch_idx

    module = Counted()
    trainer = quiet(max_epochs=1, limit_val_batches=1, limit_test_batches=2, limit_predict_batches=0.75)
    trainer.fit(module, loader(4), loader(8))
    trainer.test(module, loader(8), verbose=False)
    assert trainer.predict(module, loader(8)) == [0, 1, 2]
    assert module.count == {"val": 1, "test": 2, "predict": 3}


def test_fast_dev_run_runs_everything_once_and_writes_nothing(tmp_path):
    module = Validated()
    trainer = quiet(fast_dev_run=2, logger=True, enable_checkpointing=None, default_root_dir=tmp_path,
                    callbacks=[EarlyStopping("mean")], max_epochs=50)  # fmt: skip
    trainer.fit(module, loader(20), loader(20))
    assert module.seen == [[0, 1], [2, 3]]
    assert trainer.num_val_batches == [2]
    assert list(tmp_path.iterdir()) == []


def test_overfit_batches_trains_and_validates_on_the_same_batches():
    class Seen(Validated):
        def __init__(self):
            super().__init__()
            self.validated = []

        def validation_step(self, batch, batch_idx):
            self.validated.append(batch.flatten().int().tolist())

    module = Seen()
    with pytest.warns(UserWarning, match="overfit"):
        quiet(max_epochs=2, overfit_batches=2).fit(module, loader(20, shuffle=True), loader(20))
    assert module.seen == [[0, 1], [2, 3]] * 2
    assert module.validated == [[0, 1], [2, 3]] * 2


# When to validate


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({}, [4, 8, 12]), ({"val_check_interval": 0.5}, [2, 4, 6, 8, 10, 12]), ({"val_check_interval": 3}, [3, 7, 11]),
        ({"check_val_every_n_epoch": 2}, [8]), ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10]),
        ({"val_check_interval": "5ba"}, [5, 10]), ({"val_check_interval": "6sa"}, [3, 6, 9, 12]),
        ({"val_check_interval": "2ep"}, [8]), ({"limit_val_batches": 0}, []),
    ],
)  # fmt: skip
def test_validation_intervals(options, at):
    order = Order()
    quiet(max_epochs=3, callbacks=[order], **options).fit(Validated(), loader(8), loader(4))
    assert order.at == at


def test_validation_interval_by_time():
    order = Order()
    quiet(max_steps=3000, max_epochs=-1, val_check_interval="0.05s", callbacks=[order]).fit(Validated(), loader(8), loader(2))
    assert 1 <= len(order.at) < 3000


def test_a_loader_without_length_needs_a_number_of_batches():
    class Endless(IterableDataset):
        def __iter__(self):
            index = 0
            while True:
                yield torch.tensor([float(index % 7)])
                index += 1

    order = Order()
    trainer = quiet(max_steps=10, val_check_interval=4, callbacks=[order])
    trainer.fit(Validated(), DataLoader(Endless(), batch_size=2), loader(2))
    assert order.at == [4, 8] and trainer.num_training_batches == math.inf
    with pytest.raises(ValueError, match=r"val_check_interval=0\.5"):
        quiet(max_steps=10, val_check_interval=0.5).fit(Validated(), DataLoader(Endless(), batch_size=2), loader(2))


# Loaders


@pytest.mark.parametrize("wrap", [list, tuple, lambda loaders: {"a": loaders[0], "b": loaders[1]}])
def test_several_evaluation_loaders(wrap):
    class Several(Validated):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("mean", batch.mean())
            self.log("all", batch.mean(), add_dataloader_idx=False)

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return dataloader_idx, batch_idx

    loaders = wrap([loader(4), loader(2)])
    trainer = quiet(max_epochs=1)
    rows = trainer.validate(Several(), loaders, verbose=False)
    assert rows == [{"mean/dataloader_idx_0": 1.5, "all": pytest.approx(7 / 6)}, {"mean/dataloader_idx_1": 0.5, "all": pytest.approx(7 / 6)}]
    assert trainer.predict(Several(), loaders) == [[(0, 0), (0, 1)], [(1, 0)]]
    assert trainer.num_predict_batches == [2, 1]


class Data(DataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        return loader(4)

    def val_dataloader(self):
        return loader(4)

    def test_dataloader(self):
        return loader(6)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + 10


@pytest.mark.parametrize("positional", [True, False])
def test_a_data_module_provides_everything(positional):
    class Tested(Validated):
        def test_step(self, batch, batch_idx):
            self.log("tested", batch.mean())

    data, module = Data(), Tested()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, data) if positional else trainer.fit(module, datamodule=data)
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]
    assert module.seen == [[10, 11], [12, 13]]
    assert trainer.callback_metrics["mean"] == 11.5
    assert trainer.test(datamodule=data, verbose=False) == [{"tested": 12.5}]


def test_from_datasets():
    data = DataModule.from_datasets(Numbers(4), [Numbers(2), Numbers(4)], batch_size=2)
    assert len(data.train_dataloader()) == 2 and [len(one) for one in data.val_dataloader()] == [1, 2]


def test_a_module_brings_its_loaders_and_callbacks():
    order = Order()

    class Own(Validated):
        def train_dataloader(self):
            return loader(4)

        def val_dataloader(self):
            return loader(2)

        def configure_callbacks(self):
            return order

    module = Own()
    quiet(max_epochs=2).fit(module)
    assert len(module.seen) == 4 and order.at == [2, 4]


def test_reload_dataloaders_every_n_epochs():
    class Growing(Line):
        def train_dataloader(self):
            self.asked = getattr(self, "asked", 0) + 1
            return loader(2 * self.asked)

    module = Growing()
    trainer = quiet(max_epochs=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(module)
    assert module.asked == 2 and len(module.seen) == 1 + 1 + 2 + 2


# Optimization


def test_lbfgs_gets_its_closure():
    class Newton(Line):
        def training_step(self, batch, batch_idx):
            return (self.layer(batch) - 3 * batch - 1).square().mean()

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=20)

    module = Newton()
    quiet(max_epochs=3).fit(module, loader(8, 8))
    assert module.layer.weight.item() == pytest.approx(3, abs=1e-3)
    assert module.layer.bias.item() == pytest.approx(1, abs=1e-3)


def test_overridden_parts_of_the_optimization_are_called():
    calls = []

    class Own(Line):
        def backward(self, loss, *args, **kwargs):
            calls.append("backward")
            loss.backward()

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            calls.append(f"step {epoch} {batch_idx}")
            optimizer.step(closure=optimizer_closure)

        def lr_scheduler_step(self, scheduler, metric):
            calls.append("scheduler")
            scheduler.step()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step", "frequency": 2}]

    plain, own = Line(), Own()
    quiet(max_epochs=1).fit(plain, loader(8))
    plain_weight = plain.layer.weight.item()
    module = own
    module.configure_optimizers = lambda: Line.configure_optimizers(module)
    quiet(max_epochs=1).fit(module, loader(8))
    assert calls == [word for index in range(4) for word in (f"step 0 {index}", "backward")]
    assert module.layer.weight.item() == plain_weight
    calls.clear()
    quiet(max_epochs=1).fit(Own(), loader(8))
    assert calls.count("scheduler") == 2


def test_own_clipping_replaces_the_arguments():
    class Clipping(Slope):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            assert (gradient_clip_val, gradient_clip_algorithm) == (2.0, "norm")
            self.clip_gradients(optimizer, 0.25)

    module = Clipping(lambda index: 4.0)
    quiet(max_epochs=1, gradient_clip_val=2.0).fit(module, loader(1, 1))
    assert module.weight.item() == pytest.approx(-0.25)


def test_manual_optimization_with_two_optimizers():
    class Two(TrainModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer, parameter, slope in ((first, self.a, 1.0), (second, self.b, 2.0)):
                self.toggle_optimizer(optimizer)
                assert [p.requires_grad for p in (self.a, self.b)] == [parameter is self.a, parameter is self.b]
                self.manual_backward(parameter * slope)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)]

    module = Two()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(3, 1))
    assert (module.a.item(), module.b.item()) == (-3.0, -6.0)
    assert trainer.global_step == 6


@pytest.mark.parametrize(("interval", "frequency", "rate"), [("step", 1, 0.5**6), ("step", 2, 0.5**3), ("epoch", 1, 0.5**3), ("epoch", 2, 0.5)])
def test_schedulers_step_when_they_are_due(interval, frequency, rate):
    module = Line()

    def configure():
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, "frequency": frequency}}

    module.configure_optimizers = configure
    trainer = quiet(max_epochs=3)
    trainer.fit(module, loader(4))
    assert trainer.optimizers[0].param_groups[0]["lr"] == rate


def test_a_plateau_scheduler_watches_its_metric():
    class Flat(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("flat", 1.0)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "flat"}

    trainer = quiet(max_epochs=3)
    trainer.fit(Flat(), loader(4), loader(2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.01)


def test_training_without_an_optimizer():
    class Still(Line):
        def configure_optimizers(self):
            return None

    module = Still()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(4))
    assert len(module.seen) == 2 and module.layer.weight.item() == 0.5 and trainer.global_step == 2


def test_none_from_training_step_skips_the_batch():
    class Skipping(Slope):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    module = Skipping()
    quiet(max_epochs=1).fit(module, loader(4, 1))
    assert module.weight.item() == -2.0


def test_arguments_are_callbacks():
    trainer = quiet(max_epochs=1, accumulate_grad_batches=4, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    kinds = {type(callback): callback for callback in trainer.callbacks}
    assert kinds[GradientAccumulation].steps(0) == 4
    assert (kinds[GradientClipping].value, kinds[GradientClipping].algorithm) == (0.5, "value")


def test_an_accumulation_schedule():
    trainer = quiet(max_epochs=3, callbacks=[GradientAccumulation({0: 1, 1: 2, 2: 4})])
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == 4 + 2 + 1
    assert trainer.estimated_stepping_batches == 7


# Logging


def test_torchmetrics_as_they_are():
    class Measured(Validated):
        def __init__(self):
            super().__init__()
            self.train_mean = torchmetrics.MeanMetric()
            self.metrics = torchmetrics.MetricCollection({"least": torchmetrics.MinMetric(), "most": torchmetrics.MaxMetric()}, prefix="val_")

        def training_step(self, batch, batch_idx):
            self.train_mean(batch)
            self.log("train_mean", self.train_mean, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.metrics.update(batch)
            self.log_dict(self.metrics)

    trainer = quiet(max_epochs=2, log_every_n_steps=1)
    trainer.fit(Measured(), loader(8), loader(6))
    values = trainer.callback_metrics
    assert values["train_mean_epoch"] == 3.5 and values["train_mean_step"] == 6.5
    assert (values["val_least"], values["val_most"]) == (0.0, 5.0)


def test_step_and_epoch_values_have_names_of_their_own():
    class Both(Line):
        def training_step(self, batch, batch_idx):
            self.log("item", batch.mean(), on_step=True, on_epoch=True, prog_bar=True)
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1)
    trainer.fit(Both(), loader(4))
    assert trainer.callback_metrics == {"item_step": 2.5, "item_epoch": 1.5, "item": 1.5, "loss": trainer.callback_metrics["loss"]}
    assert trainer.progress_bar_metrics == {"item_step": 2.5, "item_epoch": 1.5}


def test_logging_in_hooks_that_are_not_about_a_batch():
    class Hooked(Validated):
        def on_train_epoch_end(self):
            self.log("end", 3.0)

        def on_validation_epoch_end(self):
            self.log("val_end", 4.0)

    trainer = quiet(max_epochs=1)
    trainer.fit(Hooked(), loader(4), loader(2))
    assert (trainer.callback_metrics["end"], trainer.callback_metrics["val_end"]) == (3.0, 4.0)


def test_save_hyperparameters_takes_the_outermost_arguments():
    class Base(Line):
        def __init__(self, lr=0.1, **kwargs):
            super().__init__()
            self.save_hyperparameters()

    class Child(Base):
        def __init__(self, width, lr=0.2, secret=None):
            super().__init__(lr=lr)
            self.save_hyperparameters(ignore="secret")

    module = Child(4, secret=object())
    assert {k: v for k, v in module.hparams.items() if k != "secret"} == {"width": 4, "lr": 0.2}
    assert module.hparams.lr == 0.2
    with pytest.raises(AttributeError, match="width"):
        module.hparams.missing


# A run in processes of its own


def test_two_devices_in_a_test_or_notebook_are_forked_and_bring_back_their_results():
    class Tested(Line):
        def test_step(self, batch, batch_idx):
            self.log("mean", batch.mean())

    module = Tested()
    trainer = quiet(max_epochs=2, devices=2)
    trainer.fit(module, loader(8, 1))
    alone = Tested()
    quiet(max_epochs=2).fit(alone, loader(8, 2))
    torch.testing.assert_close(module.layer.weight, alone.layer.weight)
    assert trainer.global_step == 8 and trainer.callback_metrics["loss"] == pytest.approx(0.5, abs=0.5)
    assert trainer.test(module, loader(5), verbose=False) == [{"mean": 2.0}]


def test_each_fit_is_a_run_of_its_own_and_a_test_belongs_to_the_last(tmp_path):
    class Tested(Line):
        def test_step(self, batch, batch_idx):
            self.log("mean", batch.mean())

    module = Tested()
    trainer = quiet(max_epochs=1, logger="csv", default_root_dir=tmp_path)
    trainer.fit(module, loader(4))
    trainer.fit(module, loader(4))
    assert trainer.run_id == "run-0002"
    trainer.test(module, loader(4), verbose=False)
    assert trainer.run_id == "run-0002"


def test_weights_alone_can_start_a_fit(tmp_path, caplog):
    first = Line()
    trainer = quiet(max_epochs=1)
    trainer.fit(first, loader(4))
    trainer.save_checkpoint(tmp_path / "w", weights_only=True)
    second = quiet(max_epochs=0)
    module = Line()
    second.fit(module, loader(4), ckpt_path=tmp_path / "w")
    assert "only weights" in caplog.text
    assert torch.equal(module.layer.weight, first.layer.weight) and second.global_step == 0


def test_a_fit_goes_on_from_the_end_of_another(tmp_path):
    whole, first, second = Line(), Line(), Line()
    quiet(max_epochs=3, seed=1).fit(whole, loader(8, shuffle=True))
    trainer = quiet(max_epochs=2, seed=1)
    trainer.fit(first, loader(8, shuffle=True))
    trainer.save_checkpoint(tmp_path / "c")
    quiet(max_epochs=3, seed=1).fit(second, loader(8, shuffle=True), ckpt_path=tmp_path / "c")
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.layer.weight, whole.layer.weight)


@pytest.mark.parametrize(("asked", "most"), [(2, 2), (-1, 3), (5, 3)])
def test_batches_of_the_sanity_check(asked, most):
    trainer = quiet(max_epochs=1, num_sanity_val_steps=asked)
    trainer.fit(Validated(), loader(4), loader(6))
    assert trainer.num_val_batches == [3]
    assert trainer.num_sanity_val_batches == [most]


def test_a_checkpoint_may_watch_a_value_of_its_own_step(tmp_path):
    class Falling(Line):
        def training_step(self, batch, batch_idx):
            self.log("height", float(10 - batch_idx))
            return super().training_step(batch, batch_idx)

    rows = []
    listener = LambdaCallback(on_log=lambda trainer, module, metrics, step: rows.append(metrics))
    saving = ModelCheckpoint(tmp_path, monitor="height", every_n_train_steps=1, save_top_k=2)
    quiet(max_epochs=1, enable_checkpointing=None, log_every_n_steps=50, callbacks=[saving, listener]).fit(Falling(), loader(8))
    assert saving.best_model_score == 7.0
    assert sorted(saving.best_k_models.values()) == [7.0, 8.0]
    assert rows == [{"height": 7.0, "loss": rows[0]["loss"]}]  # at the end of the epoch, nothing lost


def test_a_finished_run_says_so_when_it_is_resumed(tmp_path, caplog):
    trainer = quiet(max_epochs=2)
    trainer.fit(Line(), loader(4))
    trainer.save_checkpoint(tmp_path / "c")
    quiet(max_epochs=2).fit(Line(), loader(4), ckpt_path=tmp_path / "c")
    assert "Nothing is left to train" in caplog.text and "2ep" in caplog.text
