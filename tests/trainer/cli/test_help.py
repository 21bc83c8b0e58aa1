"""What is answered without torch: help, version, unknown keys and commands."""

from __future__ import annotations

import inspect

import pytest

import drivetrain
from drivetrain.trainer.cli import help as pages
from drivetrain.trainer.cli.main import main

RUN = """
import sys
from drivetrain.trainer.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("status", status, "heavy", sorted({"torch", "numpy", "jsonargparse"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        ([], 0, "usage: drivetrain COMMAND"),
        (["--help"], 0, "usage: drivetrain COMMAND"),
        (["--version"], 0, f"drivetrain {drivetrain.__version__}"),
        (["fit", "--help"], 0, "--trainer.max_epochs"),
        (["test", "-h"], 0, "usage: drivetrain test"),
        (["fit", "--trainer.devices=2", "--help"], 0, "--trainer.max_epochs"),
        (["fti"], 2, "Received: 'fti'. Did you mean fit?"),
        (["--config", "run.yaml"], 2, "Place the command first"),
        (["fit", "--trainer.max_epoch=3"], 2, "Did you mean trainer.max_epochs?"),
        (["fit", "--config", "wrong.yaml"], 2, "wrong.yaml). Did you mean trainer.max_epochs?"),
        (["fit", "--config", "nowhere.yaml"], 2, "there is no file"),
        (["fit", "run.yaml"], 2, "Write --config run.yaml."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_answers_come_without_importing_torch(home, args, status, text):
    home.write("wrong.yaml", "trainer: {max_epoch: 3}")
    done = home.python("-c", RUN, *args)
    assert done.stdout.splitlines()[-1] == f"status {status} heavy []", done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_every_argument_of_the_trainer_is_shown_with_its_type_default_and_meaning(home, capsys):
    arguments = {argument.name: argument for argument in pages.trainer_arguments()}
    signature = inspect.signature(drivetrain.Trainer.__init__)
    assert list(arguments) == [name for name in signature.parameters if name != "self"]
    for name, argument in arguments.items():
        assert argument.doc, f"the docstring of Trainer says nothing about {name}"
        assert argument.default == str(signature.parameters[name].default)
        assert argument.type == signature.parameters[name].annotation
    assert main(["fit", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--trainer.{name} " in shown or f"--trainer.{name}\n" in shown for name in arguments)
    assert max(map(len, shown.splitlines())) <= 120


def test_keys_of_the_help_page_are_those_of_the_parser(home):
    from drivetrain.trainer.cli.train_cli import TrainCLI

    class Keys(TrainCLI):
        def add_arguments_to_parser(self, parser):
            self.found = parser.keys()
            raise KeyError

    cli = Keys.__new__(Keys)
    with pytest.raises(KeyError):
        cli.__init__(args=["fit"])
    groups = {"trainer", "lr_scheduler_config", "ckpt_path", "resume"}  # groups, and keys that are added last
    assert pages.keys() - groups == cli.found - groups


def test_help_shows_the_arguments_of_named_classes(home, capsys):
    assert main(["fit", "--model.class_path", "nets.Net", "--data", "nets.Data", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--model.lr LR" in shown and "learning rate of SGD (type: float, default: 0.1)" in shown
    assert "--data.batch_size" in shown
    assert "known subclasses" not in shown


def test_help_knows_the_classes_of_a_config_file_and_of_torch(home, capsys):
    assert main(["fit", "--config", "run.yaml", "--optimizer", "torch.optim.AdamW", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--model.lr LR" in shown and "--data.size" in shown
    assert "--optimizer.weight_decay" in shown and "--optimizer.params" not in shown


def test_help_for_a_class_that_is_not_there(home, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", "--model", "nets.Nett", "--help"])
    assert end.value.code == 2
    assert "nets has no Nett. Did you mean nets.Net?" in capsys.readouterr().err
