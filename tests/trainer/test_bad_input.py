"""Wrong input: an error or a warning that says what was expected, what came and what to do, before training where it can."""

from __future__ import annotations

import pytest
import torch
from drivetrain import (
    Callback,
    DataModule,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    ModelCheckpoint,
    Timer,
    Tracking,
    Trainer,
    TrainModule,
)
from drivetrain.tests.loop.models import Line, Slope, Validated, loader, quiet
from torch.utils.data import DataLoader


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_epochs": "3 days of sun"}, "max_epochs"), ({"max_epochs": -2}, "max_epochs"), ({"max_steps": 1.5}, "max_steps"),
        ({"devices": 0}, "devices"), ({"devices": "many"}, "devices"), ({"accelerator": "abacus"}, "abacus"),
        ({"precision": "12-mixed"}, "precision"), ({"limit_train_batches": 1.5}, "limit_train_batches"),
        ({"limit_val_batches": -1}, "limit_val_batches"), ({"val_check_interval": 0}, "val_check_interval"),
        ({"val_check_interval": 1.5}, "val_check_interval"), ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch"),
        ({"log_every_n_steps": -1}, "log_every_n_steps"), ({"accumulate_grad_batches": 0}, "scheduling"),
        ({"gradient_clip_val": -1.0}, "value"), ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "squeeze"}, "squeeze"),
        ({"callbacks": [object()]}, "callbacks"), ({"strategy": "dpp"}, "ddp"), ({"max_time": "10ep"}, "max_time"),
        ({"profiler": "magic"}, "magic"), ({"fast_dev_run": -1}, "fast_dev_run"), ({"num_sanity_val_steps": 0.5}, "num_sanity"),
        ({"accumulate_grad_batches": 4, "callbacks": GradientAccumulation(2)}, "accumulate_grad_batches=4"),
        ({"gradient_clip_val": 1.0, "callbacks": GradientClipping(2.0)}, "gradient_clip_val=1.0"),
        ({"enable_checkpointing": False, "callbacks": ModelCheckpoint()}, "enable_checkpointing"),
        ({"barebones": True, "enable_progress_bar": True}, "barebones"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "val_check_interval=0.5"),
        ({"logger": Tracking("csv"), "callbacks": Tracking("csv")}, "Tracking"),
        ({"seed": -1}, "seed"), ({"logger": "tensorbord"}, "tensorboard"), ({"accelerator": 3}, "accelerator"),
        ({"accelerator": Trainer}, "accelerator"), ({"callbacks": ModelCheckpoint}, "callbacks"), ({"callbacks": 5}, "callbacks"),
        ({"gradient_clip_algorithm": "squeeze"}, "squeeze"), ({"deterministic": "yes"}, "deterministic"),
        ({"benchmark": "no"}, "benchmark"), ({"barebones": "no"}, "barebones"), ({"inference_mode": None}, "inference_mode"),
        ({"enable_progress_bar": "yes"}, "enable_progress_bar"), ({"sync_batchnorm": "x"}, "sync_batchnorm"),
        ({"use_distributed_sampler": 3}, "use_distributed_sampler"), ({"detect_anomaly": "y"}, "detect_anomaly"),
        ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders"), ({"default_root_dir": 5}, "default_root_dir"),
        ({"min_epochs": 5, "max_epochs": 2}, "min_epochs"), ({"min_steps": 5, "max_steps": 2}, "min_steps"),
    ],
)  # fmt: skip
def test_arguments_are_checked_when_the_trainer_is_made(options, word):
    with pytest.raises((ValueError, TypeError), match=r"(?s)Expected.*Received") as caught:
        Trainer(**{"accelerator": "cpu", "logger": False, **options})
    assert word in str(caught.value)


def test_a_way_to_clip_without_a_value_warns():
    with pytest.warns(UserWarning, match="Expected gradient_clip_val"):
        Trainer(accelerator="cpu", logger=False, gradient_clip_algorithm="norm")


def test_a_fast_run_is_short_whatever_the_minimum():
    trainer = quiet(fast_dev_run=2, min_epochs=5, max_epochs=9)
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == 2


def test_unknown_arguments_name_themselves():
    with pytest.raises(TypeError, match="max_epoch"):
        Trainer(max_epoch=3)


class Nothing(TrainModule):
    pass


class Unoptimized(TrainModule):
    def training_step(self, batch, batch_idx):
        return torch.zeros(())


@pytest.mark.parametrize(
    ("make", "data", "word"),
    [
        (lambda: torch.nn.Linear(1, 1), loader(4), "TrainModule"), (Nothing, loader(4), "training_step"),
        (Unoptimized, loader(4), "configure_optimizers"), (Line, None, "DataLoader"), (Line, "data", "str"),
        (Line, [loader(4), loader(4)], "one loader"), (Line, 5, "int"),
    ],
)  # fmt: skip
def test_modules_and_data_are_checked_before_training(make, data, word):
    with pytest.raises((ValueError, TypeError), match=r"(?s)Expected.*Received") as caught:
        quiet(max_epochs=1).fit(make(), data)
    assert word in str(caught.value)


def test_a_data_module_in_the_place_of_loaders_comes_alone():
    with pytest.raises(ValueError, match="Expected loaders or a data module. Received: both"):
        quiet(max_epochs=1).fit(Line(), DataModule.from_datasets([1.0]), loader(4))
    with pytest.raises(ValueError, match="Expected one data module. Received: two"):
        quiet(max_epochs=1).fit(Line(), DataModule.from_datasets([1.0]), DataModule.from_datasets([1.0]))


@pytest.mark.parametrize("datamodule", [3, DataModule, "digits"])
def test_a_data_module_is_one(datamodule):
    with pytest.raises(TypeError, match="Expected a DataModule. Received: datamodule="):
        quiet(max_epochs=1).fit(Line(), datamodule=datamodule)


def test_validation_data_that_nothing_looks_at():
    with pytest.warns(UserWarning, match="Expected Line to have a validation_step"):
        quiet(max_epochs=1).fit(Line(), loader(4), loader(4))


def test_an_optimizer_over_no_parameters_names_the_module():
    class Empty(Line):
        def configure_optimizers(self):
            return torch.optim.SGD([], lr=0.1)

    with pytest.raises(ValueError, match="Expected an optimizer over parameters. Received: none, in Empty"):
        quiet(max_epochs=1).fit(Empty(), loader(4))


def test_names_of_earlier_hooks_are_reported_with_those_of_today():
    class Old(Line):
        def training_epoch_end(self, outputs):
            raise AssertionError

        def configure_sharded_model(self):
            raise AssertionError

    with pytest.warns(UserWarning) as caught:
        quiet(max_epochs=1).fit(Old(), loader(4))
    told = "\n".join(str(warning.message) for warning in caught)
    assert "Old.training_epoch_end, which nothing calls. Rename it to on_train_epoch_end" in told
    assert "Old.configure_sharded_model, which nothing calls. Rename it to configure_model" in told


def test_a_value_is_logged_under_a_name():
    class Numbered(Line):
        def training_step(self, batch, batch_idx):
            self.log(5, 1.0)

    with pytest.raises(TypeError, match="Expected a name to log under. Received: 5"):
        quiet(max_epochs=1).fit(Numbered(), loader(4))


def test_a_timer_without_a_duration_is_no_limit():
    with pytest.warns(UserWarning, match="Expected max_epochs, max_steps or max_time. Received: none"):
        quiet(limit_train_batches=0, callbacks=[Timer(), StopAtOnce()]).fit(Line(), loader(4))


def test_values_need_a_run():
    with pytest.raises(RuntimeError, match="Expected a run to log to"):
        quiet(max_epochs=1).log_dict({"speed": 1.0})


class StopAtOnce(Callback):
    def on_train_start(self, trainer, module):
        trainer.should_stop = True


def test_an_empty_loader():
    with pytest.raises(ValueError, match=r"at least one batch"):
        quiet(max_epochs=1).fit(Line(), DataLoader([], batch_size=2))


@pytest.mark.parametrize(
    ("configured", "word"),
    [
        (lambda m: torch.optim.SGD([{"params": []}], lr=1), "parameters"), (lambda m: "adam", "str"), (lambda m: {"optim": 1}, "optim"),
        (lambda m: [torch.optim.SGD(m.parameters()), torch.optim.SGD(m.parameters())], "automatic_optimization"),
        (lambda m: {"optimizer": torch.optim.SGD(m.parameters()), "lr_scheduler": {"sheduler": 1}}, "sheduler"),
        (lambda m: {"optimizer": torch.optim.SGD(m.parameters()), "lr_scheduler": 3}, "scheduler"),
    ],
)  # fmt: skip
def test_what_configure_optimizers_returns_is_checked(configured, word):
    module = Line()
    module.configure_optimizers = lambda: configured(module)
    with pytest.raises((ValueError, TypeError), match=r"(?s)Expected.*Received") as caught:
        quiet(max_epochs=1).fit(module, loader(4))
    assert word in str(caught.value)
    assert module.seen == []


def test_a_plateau_scheduler_without_a_metric():
    module = Line()

    def configure():
        optimizer = torch.optim.SGD(module.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    module.configure_optimizers = configure
    with pytest.raises(ValueError, match="monitor"):
        quiet(max_epochs=1).fit(module, loader(4))


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (lambda w: (w * torch.ones(3)), "3"), (lambda w: w.detach(), "graph"), (lambda w: 3.0, "float"),
        (lambda w: {"los": w}, "loss"), (lambda w: "loss", "str"),
    ],
)  # fmt: skip
def test_a_bad_loss_is_explained(loss, word):
    module = Slope()
    module.training_step = lambda batch, index: loss(module.weight)
    with pytest.raises((ValueError, TypeError), match=r"(?s)Expected.*Received") as caught:
        quiet(max_epochs=1).fit(module, loader(2))
    assert word in str(caught.value)


def test_F3_misspelled_hooks_are_named():
    class Misspelled(Line):
        def on_train_bacth_end(self, outputs, batch, batch_idx):
            pass

        def validaton_step(self, batch, batch_idx):
            pass

    class Listener(Callback):
        def on_validation_ends(self, trainer, module):
            pass

    with pytest.warns(UserWarning) as caught:
        quiet(max_epochs=1, callbacks=[Listener()]).fit(Misspelled(), loader(2))
    text = " ".join(str(warning.message) for warning in caught)
    for wrong, right in (("on_train_bacth_end", "on_train_batch_end"), ("validaton_step", "validation_step"),
                         ("on_validation_ends", "on_validation_end")):  # fmt: skip
        assert wrong in text and right in text


def test_a_metric_that_is_monitored_but_never_logged():
    with pytest.raises(ValueError, match=r"val_los.*mean|mean.*val_los"):
        quiet(max_epochs=1, callbacks=[EarlyStopping("val_los")]).fit(Validated(), loader(4), loader(4))
    with pytest.raises(ValueError, match=r"val_los.*mean|mean.*val_los"):
        quiet(max_epochs=1, enable_checkpointing=None, callbacks=[ModelCheckpoint(monitor="val_los")]).fit(Validated(), loader(4), loader(4))


@pytest.mark.parametrize("value", ["text", torch.ones(3), None, [1.0]])
def test_only_numbers_can_be_logged(value):
    class Wrong(Line):
        def training_step(self, batch, batch_idx):
            self.log("wrong", value)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="wrong"):
        quiet(max_epochs=1).fit(Wrong(), loader(2))


def test_options_of_log_that_contradict_each_other():
    class Wrong(Line):
        def training_step(self, batch, batch_idx):
            self.log("twice", 1.0, prog_bar=batch_idx == 1)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="twice"):
        quiet(max_epochs=1).fit(Wrong(), loader(4))


def test_a_missing_checkpoint_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere"):
        quiet(max_epochs=1).fit(Line(), loader(4), ckpt_path="nowhere")
    with pytest.raises(ValueError, match="ckpt_path"):
        quiet(max_epochs=1).fit(Line(), loader(4), ckpt_path="a", resume="b")


def test_a_checkpoint_is_a_path():
    with pytest.raises(TypeError, match="Expected a checkpoint. Received: ckpt_path=5"):
        quiet(max_epochs=1).fit(Line(), loader(4), ckpt_path=5)


def test_logging_outside_a_run_warns():
    with pytest.warns(UserWarning, match="loss"):
        Line().log("loss", 1.0)
