"""Runs from the command line: what they compute, what they leave, what they say when something is wrong."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.trainer.cli import document
from drivetrain.trainer.cli.main import main
from drivetrain.trainer.cli.sources import ConstructionError
from drivetrain.trainer.cli.train_cli import TrainCLI


def weights(home, run="run-0001"):
    files = sorted(home.path.glob(f"runs/{run}/checkpoints/*/model.safetensors"))
    return load_file(files[-1])


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def error(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["fit", *args])
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and "jsonargparse" not in shown
    return end.value.code, shown.strip()


def printed(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["fit", *args, "--print-config"])
    assert end.value.code == 0
    return capsys.readouterr().out


# What a run computes


def test_fit_is_the_same_as_the_script(home):
    assert home.cli("fit", "--config", "run.yaml", "--seed_everything=7").returncode == 0
    script = """
from drivetrain import Trainer, set_seed
import nets
set_seed(7)
trainer = Trainer(max_epochs=2, accelerator="cpu", logger="csv", seed=7, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(nets.Net(lr=1e-2), datamodule=nets.Data())
"""
    home.write("train.py", script)
    done = home.python("train.py")
    assert done.returncode == 0, done.stderr
    assert same(weights(home), weights(home, "run-0002"))


def test_written_config_starts_the_same_run_again(home):
    assert main(["fit", "--config", "run.yaml", "--model.lr=0.03", "--trainer.max_epochs", "3ep", "--data.batch_size=8"]) == 0
    assert main(["fit", "--config", "runs/run-0001/config.yaml"]) == 0
    assert same(weights(home), weights(home, "run-0002"))
    copies = [document.read((home.path / f"runs/run-000{n}/config.yaml").read_text()) for n in (1, 2)]
    assert copies[0] == copies[1]
    assert copies[0]["trainer"]["max_epochs"] == "3ep" and copies[0]["model"]["init_args"]["lr"] == 0.03
    assert main(["fit", "--config", "runs/run-0001/config.yaml", "--seed_everything=1"]) == 0
    assert not same(weights(home), weights(home, "run-0003"))


def test_resume_goes_on_in_the_same_folder_and_keeps_both_configs(home):
    assert main(["fit", "--config", "run.yaml", "--resume=last"]) == 0  # nothing there yet: a fresh start
    assert main(["fit", "--config", "run.yaml", "--resume=last", "--trainer.max_epochs=4"]) == 0
    folder = home.path / "runs" / "run-0001"
    assert [path.name for path in (home.path / "runs").iterdir()] == ["run-0001"]
    epochs = [document.read((folder / name).read_text())["trainer"]["max_epochs"] for name in ("config-1.yaml", "config.yaml")]
    assert epochs == [2, 4]
    assert main(["fit", "--config", "run.yaml", "--resume=last", "--trainer.max_epochs=4"]) == 0
    assert sorted(path.name for path in folder.glob("config*")) == ["config-1.yaml", "config.yaml"]


@pytest.mark.parametrize(("command", "shown"), [("validate", "val_loss"), ("test", "mean"), ("predict", "")])
def test_other_stages_take_the_config_of_a_fit(home, capsys, command, shown):
    assert main(["fit", "--config", "run.yaml"]) == 0
    capsys.readouterr()
    assert main([command, "--config", "runs/run-0001/config.yaml", "--ckpt_path=last"]) == 0
    assert shown in capsys.readouterr().out


def test_a_dry_run_leaves_no_files(home):
    assert main(["fit", "--config", "run.yaml", "--trainer.fast_dev_run=true"]) == 0
    assert not list(home.path.glob("runs/*/config.yaml"))


@pytest.mark.parametrize("starter", ["module", "console script"])
def test_two_devices_are_started_by_the_command(home, starter):
    args = ["fit", "--config", "run.yaml", "--trainer.devices=2", "--trainer.max_epochs=1"]
    script = "import sys; from drivetrain.trainer.cli.main import main; sys.exit(main())"
    home.write("bin/drivetrain", f"#!/usr/bin/env python\n{script}\n")
    done = home.cli(*args) if starter == "module" else home.python("bin/drivetrain", *args)
    assert done.returncode == 0, done.stderr
    manifest = next(home.path.glob("runs/run-0001/checkpoints/*/manifest.json")).read_text()
    assert re.search(r'"world_size": ?2', manifest)
    assert document.read((home.path / "runs/run-0001/config.yaml").read_text())["trainer"]["devices"] == 2


# Where classes come from


def test_files_named_like_our_folders_are_the_users_own(home):
    for name in ("trainer", "callbacks", "strategies", "document", "help"):
        home.write(f"{name}.py", "from nets import *\nMINE = True\n")
    done = home.cli("fit", "--config", "run.yaml", "--model", "trainer.Net", "--data", "strategies.Data",
                    "--trainer.callbacks+=callbacks.Patient", "--trainer.max_epochs=1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "class_path: trainer.Net" in (home.path / "runs/run-0001/config.yaml").read_text()


def test_only_named_classes_are_imported(home):
    home.write("bomb.py", "raise RuntimeError('imported')")
    home.write("unused.yaml", "trainer: {max_epochs: 1}  # model: {class_path: bomb.Net}")
    assert main(["fit", "--config", "run.yaml", "--config", "unused.yaml"]) == 0
    assert "bomb" not in sys.modules


# The resolved config


def test_F2_print_config_names_the_source_of_every_value(home, capsys, monkeypatch):
    home.write("xdg/drivetrain/default.yaml", "trainer: {precision: bf16-mixed, max_epochs: 9, max_steps: 9}")
    monkeypatch.setenv("DRIVETRAIN_TRAINER__MAX_STEPS", "5")
    monkeypatch.setenv("DRIVETRAIN_TRAINER__MAX_EPOCHS", "8")
    shown = printed(capsys, "--config", "run.yaml", "--model.lr", "0.5", "--trainer.max_time=1:12:00:00")
    file = home.path / "run.yaml"
    for line in (
        "seed_everything: 0  # default",
        f"  precision: bf16-mixed  # {home.machine}",
        "  max_steps: 5  # DRIVETRAIN_TRAINER__MAX_STEPS",
        f"  max_epochs: 2  # {file}",
        '  max_time: "129600s"  # command line',
        f"  class_path: nets.Net  # {file}",
        "    lr: 0.5  # command line",
        "    width: 4  # default",
    ):
        assert line in shown.splitlines()
    assert all("  # " in line for line in shown.splitlines() if not line.rstrip().endswith(":"))
    home.write("again.yaml", shown)
    assert document.read(printed(capsys, "--config", "again.yaml")) == document.read(shown)


def test_F2_log_names_what_was_decided_elsewhere(home):
    home.write("xdg/drivetrain/default.yaml", "trainer: {precision: bf16-mixed, max_epochs: 9}")
    done = home.cli("fit", "--config", "run.yaml", "--trainer.max_steps=2", DRIVETRAIN_TRAINER__LOG_EVERY_N_STEPS="1")
    assert done.returncode == 0, done.stderr
    assert f"{home.machine} sets trainer.precision=bf16-mixed\n" in done.stderr
    assert "DRIVETRAIN_TRAINER__LOG_EVERY_N_STEPS sets trainer.log_every_n_steps=1\n" in done.stderr
    assert "bf16-mixed" in (home.path / "runs/run-0001/config.yaml").read_text()


def test_files_are_merged_in_order_and_the_command_line_wins_wherever_it_stands(home, capsys):
    home.write("more.yaml", "trainer: {max_epochs: 5, max_steps: 7}\nmodel: {init_args: {width: 8}}")
    shown = document.read(printed(capsys, "--trainer.max_steps=1", "--config", "run.yaml", "--config", "more.yaml"))
    assert (shown["trainer"]["max_epochs"], shown["trainer"]["max_steps"]) == (5, 1)
    assert shown["model"] == {"class_path": "nets.Net", "init_args": {"lr": 0.01, "width": 8, "activation": None}}
    shown = document.read(printed(capsys, "--config", "run.yaml", "--model=nets.Narrow"))
    assert shown["model"] == {"class_path": "nets.Narrow", "init_args": {"lr": 0.01}}


def test_callbacks_are_classes_of_the_package_or_of_the_user(home, capsys):
    args = ["--trainer.callbacks+=drivetrain.EarlyStopping", "--trainer.callbacks.monitor=val_loss",
            "--trainer.callbacks+=nets.Patient", "--trainer.callbacks.patience=5"]  # fmt: skip
    callbacks = document.read(printed(capsys, "--config", "run.yaml", *args))["trainer"]["callbacks"]
    assert [item["class_path"] for item in callbacks] == ["drivetrain.EarlyStopping", "nets.Patient"]
    assert callbacks[0]["init_args"]["monitor"] == "val_loss"
    assert callbacks[1]["init_args"] == {"patience": 5, "monitor": "loss"}


@pytest.mark.parametrize(
    ("value", "read"),
    [("3", 3), ("10ep", "10ep"), ("1_000sa", "1_000sa"), ("2h", "2h"), ("1:12:00:00", "129600s"), ("{hours: 2}", "7200s"),
     ('{"minutes": 1.5}', "90s"), ("0.5", 0.5), ("null", None)],
)  # fmt: skip
@pytest.mark.parametrize("place", ["command line", "file"])
def test_durations_mean_the_same_wherever_they_are_written(home, capsys, value, read, place):
    home.write("time.yaml", f"trainer: {{max_time: {value}}}")
    args = ["--config", "time.yaml"] if place == "file" else [f"--trainer.max_time={value}"]
    assert document.read(printed(capsys, "--config", "run.yaml", *args))["trainer"]["max_time"] == read


# Seeds


@pytest.mark.parametrize(
    ("args", "seeds"),
    [
        ([], (0, None)),
        (["--seed_everything=5"], (5, None)),
        (["--seed_everything=1"], (1, None)),
        (["--seed_everything=true"], (0, None)),
        (["--seed_everything=false"], (None, None)),
        (["--trainer.seed=6"], (6, 6)),
        (["--trainer.seed=6", "--seed_everything=6"], (6, 6)),
    ],
)
def test_seed_everything_and_the_trainers_seed_are_one(home, capsys, args, seeds):
    shown = document.read(printed(capsys, "--config", "run.yaml", *args))
    assert (shown["seed_everything"], shown["trainer"]["seed"]) == seeds


def test_two_different_seeds_are_an_error(home, capsys):
    code, text = error(capsys, "--config", "run.yaml", "--seed_everything=5", "--trainer.seed=6")
    assert code == 2
    assert "seed_everything=5 (command line) and trainer.seed=6 (command line). Remove one of them." in text


# What is wrong


FAULTS = [
    (["--config", "run.yaml", "--model.lrr=3"], "argument of nets.Net. Received: model.lrr (command line). Did you mean model.lr?"),
    (["--config", "typo.yaml"], "Received: model.lrr ({home}/typo.yaml). Did you mean model.lr?"),
    (["--config", "run.yaml", "--model.lr=abc"], "Expected model.lr to be of type float. Received: abc (command line)."),
    (["--config", "word.yaml"], "Expected model.lr to be of type float. Received: abc ({home}/word.yaml)."),
    (["--config", "run.yaml", "--trainer.num_nodes=abc"], "Expected trainer.num_nodes to be of type int. Received: abc"),
    (["--config", "run.yaml", "--trainer.callbacks+=nets.Patient", "--trainer.callbacks.patiense=1"], "Did you mean trainer.callbacks.patience?"),
    (["--config", "run.yaml", "--config", "engine.yaml"], "argument of drivetrain.DDPStrategy. Received: trainer.strategy.find_unused"),
    (["--config", "run.yaml", "--model=nets.Data"], "Expected model to be a subclass of TrainModule. Received: nets.Data"),
    (["--config", "run.yaml", "--model=nets.Nett"], "nets has no Nett. Did you mean nets.Net?"),
    (["--config", "run.yaml", "--model=nots.Net"], "there is no module nots. Install it, or start drivetrain in the folder"),
    (["--config", "run.yaml", "--model=faulty.Net"], "SyntaxError: {syntax}"),
    (["--config", "run.yaml", "--model=needy.Net"], "No module named 'nowhere' ({home}/needy.py:2). Correct that module."),
    (["--config", "run.yaml", "--trainer.precision=3"], "Received: precision="),
    (["--config", "run.yaml", "--lr_scheduler_config.interval=day"], "Literal['epoch', 'step']. Received: day"),
    (["--data", "nets.Data"], "Expected model. Received: none. Add for example --model my.Net"),
    (["--config", "run.yaml", "--optimizer=torch.optim.Adam"], "Received: optimizer=torch.optim.Adam and Net.configure_optimizers. Remove"),
    (["--config", "run.yaml", "--model=nets.Plain"], "Received: Plain without configure_optimizers, and no optimizer in the config."),
    (["--config", "run.yaml", "--model=nets.Plain", "--lr_scheduler=torch.optim.lr_scheduler.ConstantLR"], "Expected an optimizer to schedule."),
    (["--config", "run.yaml", "--model=nets.Plain", "--optimizer=torch.optim.SGD", "--optimizer.momemtum=1"], "Did you mean optimizer.momentum?"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "text"), FAULTS, ids=[" ".join(args[-1:]) for args, _ in FAULTS])
def test_F3_wrong_settings_are_one_clear_message(home, capsys, args, text):
    home.write("typo.yaml", "model: {class_path: nets.Net, init_args: {lrr: 3}}")
    home.write("word.yaml", "model: {class_path: nets.Net, init_args: {lr: abc}}")
    home.write("engine.yaml", "trainer: {strategy: {class_path: drivetrain.DDPStrategy, init_args: {find_unused: true}}}")
    home.write("faulty.py", "def f(:\n")
    home.write("needy.py", "\nimport nowhere\n")
    code, shown = error(capsys, *args)
    assert code == 2
    assert shown.startswith("drivetrain fit: error: Expected ") and "\n" not in shown
    assert text.format(home=home.path, syntax="") in shown


def test_a_constructor_that_raises_is_named_with_its_line(home, capsys):
    code, shown = error(capsys, "--config", "run.yaml", "--model=nets.Broken")
    assert code == 1 and "\n" not in shown
    line = (home.path / "nets.py").read_text().splitlines().index('        raise RuntimeError("no more room")') + 1
    expected = f"Received: RuntimeError: no more room ({home.path}/nets.py:{line}, in __init__)"
    assert "Expected nets.Broken to be built from its init_args. " + expected in shown


def test_the_whole_traceback_is_there_for_those_who_ask(home, monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_DEBUG", "1")
    with pytest.raises(ConstructionError) as caught:
        main(["fit", "--config", "run.yaml", "--model=nets.Broken"])
    assert str(caught.value.__cause__) == "no more room"


def test_what_training_raises_is_not_hidden(home):
    with pytest.raises(ArithmeticError, match="in training") as caught:
        main(["fit", "--config", "run.yaml", "--model=nets.Crashing"])
    assert caught.traceback[-1].name == "training_step"


# Optimizers of the config


def test_optimizer_and_scheduler_of_the_config_are_those_of_a_module_that_builds_them(home):
    home.write("more.py", """
import torch
from nets import Plain


class Own(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
""")  # fmt: skip
    home.write("optimizer.yaml", """
model: {class_path: nets.Plain}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.02, momentum: 0.9}}
lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 3, gamma: 0.5}}
lr_scheduler_config: {interval: step}
""")  # fmt: skip
    assert main(["fit", "--config", "run.yaml", "--config", "optimizer.yaml"]) == 0
    assert main(["fit", "--config", "run.yaml", "--model", "more.Own"]) == 0
    assert main(["fit", "--config", "runs/run-0001/config.yaml"]) == 0
    assert same(weights(home), weights(home, "run-0002"))
    assert same(weights(home), weights(home, "run-0003"))


def test_a_plateau_scheduler_gets_the_metric_that_the_config_names(home):
    """A threshold that no loss can beat: the learning rate falls to a tenth after every epoch."""
    args = ["--model=nets.Plain", "--optimizer=torch.optim.SGD", "--optimizer.lr=1e-3",
            "--lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau", "--lr_scheduler.patience=0",
            "--lr_scheduler.threshold=1e9", "--lr_scheduler_config.monitor=val_loss"]  # fmt: skip
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    cli = TrainCLI(args=["fit", "--data=nets.Data", "--trainer.max_epochs=3", *args, *quiet])
    assert cli.trainer.lr_scheduler_configs[0].monitor == "val_loss"
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-6)


def test_stages_without_training_need_no_optimizer(home):
    assert main(["test", "--config", "run.yaml", "--model=nets.Plain"]) == 0
    assert main(["test", "--config", "run.yaml", "--optimizer=torch.optim.SGD"]) == 0
