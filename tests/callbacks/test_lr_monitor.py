"""LearningRateMonitor: names and values."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Callback, LearningRateMonitor
from drivetrain.tests.callbacks.toy import Line, loader, quiet


class Rows(Callback):
    """What a tracker would get."""

    def __init__(self):
        self.rows = []

    def on_log(self, trainer, module, metrics, step):
        self.rows.append((step, {k: v for k, v in metrics.items() if not k.startswith(("train_", "val_"))}))


class Configured(Line):
    def __init__(self, configure):
        super().__init__()
        self.configure = configure

    def configure_optimizers(self):
        return self.configure(self)


def rows(monitor, configure, *, batches=4, epochs=1, **options):
    listener = Rows()
    trainer = quiet(callbacks=[monitor, listener], max_epochs=epochs, **options)
    trainer.fit(Configured(configure), loader(batches))
    return [(step, values) for step, values in listener.rows if values]


def halved(model, interval="step", name=None, optimizer=torch.optim.SGD, **options):
    optimizer = optimizer(model.parameters(), lr=1.0, **options)
    scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": interval, "name": name}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def test_each_row_has_the_rate_of_its_step():
    found = rows(LearningRateMonitor(), halved, log_every_n_steps=1)
    assert found == [(1, {"lr-SGD": 1.0}), (2, {"lr-SGD": 0.5}), (3, {"lr-SGD": 0.25}), (4, {"lr-SGD": 0.125})]


def test_only_where_rows_are():
    monitor = LearningRateMonitor()
    assert rows(monitor, halved, log_every_n_steps=2) == [(2, {"lr-SGD": 0.5}), (4, {"lr-SGD": 0.125})]
    assert monitor.lrs == {"lr-SGD": [0.5, 0.125]}


def test_L1_at_least_once_an_epoch():
    found = rows(LearningRateMonitor(), halved, batches=2, epochs=2)
    assert found == [(2, {"lr-SGD": 0.5}), (4, {"lr-SGD": 0.125})]


def test_by_epoch():
    found = rows(LearningRateMonitor(), lambda model: halved(model, "epoch"), batches=2, epochs=3)
    assert found == [(2, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.5}), (6, {"lr-SGD": 0.25})]


def test_interval_of_ones_own():
    found = rows(LearningRateMonitor("epoch"), halved, batches=2, epochs=2, log_every_n_steps=1)
    assert found == [(1, {"lr-SGD": 1.0}), (3, {"lr-SGD": 0.25})]


def test_accumulation_takes_one_value_a_step():
    monitor = LearningRateMonitor()
    found = rows(monitor, halved, accumulate_grad_batches=2, log_every_n_steps=1)
    assert found == [(1, {"lr-SGD": 1.0}), (2, {"lr-SGD": 0.5})]
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5]}


def test_momentum_and_weight_decay():
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    found = rows(monitor, lambda model: halved(model, optimizer=torch.optim.AdamW, weight_decay=0.1), batches=1)
    assert found == [(1, {"lr-AdamW": 1.0, "lr-AdamW-momentum": 0.9, "lr-AdamW-weight_decay": 0.1})]
    monitor = LearningRateMonitor(log_momentum=True)
    found = rows(monitor, lambda model: halved(model, momentum=0.8), batches=1)
    assert found == [(1, {"lr-SGD": 1.0, "lr-SGD-momentum": 0.8})]


def groups(model):
    return torch.optim.AdamW([
        {"params": [model.layer.weight], "lr": 0.1}, {"params": [model.layer.bias], "lr": 0.2, "name": "biases"},
    ])  # fmt: skip


def test_parameter_groups():
    assert rows(LearningRateMonitor(), groups, batches=1) == [(1, {"lr-AdamW/pg1": 0.1, "lr-AdamW/biases": 0.2})]


def test_names_of_schedulers_and_a_prefix():
    found = rows(LearningRateMonitor(log_key_prefix="opt/"), lambda model: halved(model, name="warm"), batches=1)
    assert found == [(1, {"opt/warm": 1.0})]


def test_two_optimizers_of_a_class():
    class Manual(Configured):
        def __init__(self, configure):
            super().__init__(configure)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).mean()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

    listener = Rows()
    configure = lambda model: [torch.optim.SGD([p], lr=lr) for p, lr in zip(model.layer.parameters(), (0.1, 0.2))]  # noqa: E731
    quiet(callbacks=[LearningRateMonitor(), listener]).fit(Manual(configure), loader(1))
    assert {"lr-SGD": 0.1, "lr-SGD-1": 0.2} in [values for _, values in listener.rows]


def test_without_optimizer():
    assert rows(LearningRateMonitor(), lambda model: None) == []


def test_bad_interval():
    with pytest.raises(ValueError, match="Received: logging_interval='batch'"):
        LearningRateMonitor("batch")
