"""Uses of the Trainer that once came out wrong, each with the right value."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torchmetrics
from drivetrain import Callback
from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.loop.models import Line, Validated, loader, quiet
from torch.utils.data import DataLoader

# Logging


class Summed(Line):
    """Logs the sum of the items seen in the epoch, by steps."""

    def __init__(self):
        super().__init__()
        self.sum = torchmetrics.SumMetric()
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.sum.update(batch)
        self.log("sum", self.sum)
        return super().training_step(batch, batch_idx)

    def on_log(self, metrics, step):
        self.rows.append(metrics.get("sum"))


def test_a_metric_logged_by_steps_begins_each_epoch_anew():
    module = Summed()
    quiet(max_epochs=3, log_every_n_steps=1).fit(module, loader(4))
    assert [row for row in module.rows if row is not None] == [1.0, 6.0] * 3


class EveryKind(Validated):
    """Logs what an evaluation can log, one name for each way in which values are reduced."""

    def __init__(self):
        super().__init__()
        self.sum, self.cat = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.collected = None

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.sum.update(batch)
        self.cat.update(batch.flatten())
        self.log("metric", self.sum, add_dataloader_idx=False)
        self.log("mean", batch.mean())
        self.log("largest", batch.max(), reduce_fx="max")
        self.log("smallest", batch.min(), reduce_fx="min", add_dataloader_idx=False)
        self.log("median", batch.mean(), reduce_fx=lambda values: values.median(), on_epoch=True)

    def on_validation_epoch_end(self):
        self.log("end", 2.0)
        self.collected = self.cat.compute().tolist()
        self.cat.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


def test_D4_fewer_samples_than_ranks():
    def fit(rank):
        trainer = quiet(max_epochs=2, devices=2)
        trainer.fit(EveryKind(), loader(4), DataLoader(torch.tensor([[3.0]]), batch_size=2))
        return trainer.callback_metrics

    expected = {"metric": 3.0, "mean": 3.0, "largest": 3.0, "smallest": 3.0, "median": 3.0, "end": 2.0}
    for metrics in run(fit):
        assert {name: metrics[name] for name in expected} == expected


def test_D4_one_of_several_loaders_has_fewer_samples_than_ranks():
    def test(rank):
        return quiet(devices=3).test(EveryKind(), [loader(6, 2), loader(1), loader(3, 2)], verbose=False)

    for rows in run(test, 3):
        assert [row["metric"] for row in rows] == [15.0 + 0.0 + 3.0] * 3
        assert [row[f"mean/dataloader_idx_{i}"] for i, row in enumerate(rows)] == [2.5, 0.0, 1.0]
        assert [row[f"largest/dataloader_idx_{i}"] for i, row in enumerate(rows)] == [5.0, 0.0, 2.0]


def test_D6_a_rank_without_a_batch_does_not_excuse_the_others():
    class Odd(Validated):
        def validation_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("odd", batch.mean())

    with pytest.raises(RankFailed, match=r"(?s)Expected every rank to log the same names.*odd"):
        run(lambda rank: quiet(devices=3).validate(Odd(), loader(2, 1), verbose=False), 3)


def test_a_users_reduction_of_rank_zero_only():
    class Own(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("unsynced", batch.mean(), reduce_fx=torch.amax, sync_dist=False)
            if self.global_rank == 0:
                self.log("alone", batch.mean(), reduce_fx=torch.amax, rank_zero_only=True)

    found = run(lambda rank: quiet(devices=2).validate(Own(), loader(8), verbose=False)[0])
    assert found == [{"unsynced": 4.5, "alone": 4.5}, {"unsynced": 4.5}]


class Late(Validated):
    """Logs in one hook that is not about a batch."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, lambda *_: self.log("late", 7.0))


def test_a_value_logged_when_training_starts_is_in_the_first_epochs_row():
    trainer = quiet(max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(Late("on_train_start"), loader(4), loader(4))
    assert trainer.callback_metrics["late"] == 7.0


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_end", "on_fit_end", "teardown"])
def test_values_logged_after_the_last_row_are_told(hook):
    trainer = quiet(max_epochs=2)
    with pytest.warns(UserWarning, match="'late'"):
        trainer.fit(Late(hook), loader(4), loader(4))
    assert "late" not in trainer.callback_metrics


def test_values_logged_in_setup_of_a_second_run():
    module, trainer = Late("setup"), quiet(max_epochs=1)
    for _ in range(2):
        trainer.fit(module, loader(4), loader(4))
        assert trainer.callback_metrics["late"] == 7.0
    with pytest.warns(UserWarning, match="'late'"):
        trainer.validate(module, loader(4), verbose=False)


def test_numbers_of_numpy_are_numbers():
    class Numpy(Line):
        def training_step(self, batch, batch_idx):
            for kind in (np.float32, np.float64, np.int64):
                self.log(kind.__name__, kind(2), on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1)
    trainer.fit(Numpy(), loader(4))
    assert [trainer.callback_metrics[name] for name in ("float32", "float64", "int64")] == [2.0] * 3


# Schedulers


@pytest.mark.parametrize("every", [1, 50])
def test_a_plateau_scheduler_stepped_by_steps_sees_the_value_of_its_step(every):
    class Plateau(Line):
        def training_step(self, batch, batch_idx):
            self.log("rising", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "rising"}]

    trainer = quiet(max_epochs=1, log_every_n_steps=every)
    trainer.fit(Plateau(), loader(8))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125  # better at the first of four steps only


class ByHand(Line):
    """Manual optimization with a scheduler for each epoch, which the module steps itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = copy.copy(self.optimizers())
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_manual_optimization_leaves_schedulers_to_the_module():
    trainer = quiet(max_epochs=2)
    trainer.fit(ByHand(), loader(4))
    assert (trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step) == (0.25, 4)


# Errors in hooks


class Witness(Callback):
    """Notes how the run ended for it."""

    def __init__(self):
        self.notes = []

    def on_exception(self, trainer, module, exception):
        self.notes.append(str(exception))

    def teardown(self, trainer, module, stage):
        self.notes.append("teardown")


class Raising(Callback):
    """Raises in one hook."""

    def __init__(self, hook):
        setattr(self, hook, self.fail)
        self.hook = hook

    def fail(self, *_):
        raise RuntimeError(self.hook)


def test_an_error_at_the_end_of_fit_is_an_exception_of_the_run():
    witness = Witness()
    with pytest.raises(RuntimeError, match="on_fit_end"):
        quiet(max_epochs=1, callbacks=[witness, Raising("on_fit_end")]).fit(Line(), loader(4))
    assert witness.notes == ["on_fit_end", "teardown"]


def test_an_error_in_on_exception_does_not_keep_the_run_from_its_end():
    witness, failing = Witness(), Line()
    failing.training_step = lambda batch, batch_idx: 1 / 0
    trainer = quiet(max_epochs=1, callbacks=[Raising("on_exception"), witness])
    with pytest.raises(RuntimeError, match="on_exception") as caught:
        trainer.fit(failing, loader(4))
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert witness.notes == ["division by zero", "teardown"]
    assert trainer.stage is None


def test_an_error_in_teardown_does_not_keep_the_other_callbacks_from_theirs():
    witness = Witness()
    trainer = quiet(max_epochs=1, callbacks=[Raising("teardown"), witness])
    with pytest.raises(RuntimeError, match="teardown"):
        trainer.fit(Line(), loader(4))
    assert witness.notes == ["teardown"]
    assert trainer.stage is None


def test_an_error_in_configure_callbacks_reaches_the_callbacks():
    witness, module = Witness(), Line()
    module.configure_callbacks = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=[witness]).fit(module, loader(4))
    assert witness.notes == ["division by zero", "teardown"]


@pytest.mark.parametrize("inner", ["fit", "validate"])
def test_a_run_within_a_run_is_refused_and_leaves_the_outer_one_whole(inner):
    class Nested(Validated):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with pytest.raises(RuntimeError, match=rf"(?s)Expected one run at a time. Received: {inner} .*train"):
                getattr(self.trainer, inner)(self, loader(4))

    module = Nested()
    trainer = quiet(max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(module, loader(8), loader(4))
    assert (trainer.global_step, len(module.seen)) == (8, 8)
    assert trainer.callback_metrics["mean"] == 1.5


def test_a_run_that_has_prepared_nothing_yet_cannot_be_saved(tmp_path):
    module = Line()
    module.setup = lambda stage: module.trainer.save_checkpoint(tmp_path / "empty")
    with pytest.raises(RuntimeError, match="Expected a run to save"):
        quiet(max_epochs=1).fit(module, loader(4))
    assert not (tmp_path / "empty").exists()


# Models


class Counting(torch.nn.Module):
    """Keeps a number and a tensor beside its parameters."""

    def __init__(self):
        super().__init__()
        self.calls, self.last = 0, torch.zeros(1)

    def forward(self, x):
        self.calls, self.last = self.calls + 1, x[0].clone()
        return x

    def get_extra_state(self):
        return {"calls": self.calls, "last": self.last}

    def set_extra_state(self, state):
        self.calls, self.last = state["calls"], state["last"]


class Extra(Line):
    """A line behind a module with extra state."""

    def __init__(self):
        super().__init__()
        self.counting = Counting()

    def training_step(self, batch, batch_idx):
        return super().training_step(self.counting(batch), batch_idx)


def test_extra_state_of_modules_is_saved_and_comes_back(tmp_path):
    first, second = Extra(), Extra()
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(first, loader(6))
    trainer.save_checkpoint(tmp_path / "saved")
    loaded = Extra.load_from_checkpoint(tmp_path / "saved")
    assert (loaded.counting.calls, loaded.counting.last.tolist()) == (3, [4.0])
    quiet(max_epochs=2).fit(second, loader(6), ckpt_path=tmp_path / "saved")
    assert (second.counting.calls, second.counting.last.tolist()) == (6, [4.0])


def test_ddp_names_the_parameters_that_were_not_used_and_no_others():
    class Unused(Line):
        def __init__(self):
            super().__init__()
            self.frozen, self.idle = torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.Linear(1, 1)

    with pytest.raises(RankFailed, match=r"took no part in a loss on this rank: idle.weight, idle.bias\. Freeze"):
        run(lambda rank: quiet(max_epochs=1, devices=2).fit(Unused(), loader(8)))
