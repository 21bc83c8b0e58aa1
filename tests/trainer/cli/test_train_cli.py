"""TrainCLI in a script of one's own."""

from __future__ import annotations

import pytest

from drivetrain.trainer.cli import document
from drivetrain.trainer.cli.train_cli import TrainCLI

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false",
         "--trainer.enable_model_summary=false", "--trainer.max_epochs=1"]  # fmt: skip


@pytest.fixture
def nets(home):
    import nets

    return nets


def test_arguments_of_given_classes_stand_without_class_path(nets):
    cli = TrainCLI(nets.Net, nets.Data, args=["fit", *QUIET, "--model.lr=0.5", "--data.batch_size=8"])
    assert type(cli.model) is nets.Net and cli.model.lr == 0.5
    assert cli.datamodule.batch_size == 8
    assert cli.trainer.global_step == 2
    assert cli.config.model.lr == 0.5 and cli.subcommand == "fit"


def test_written_config_starts_the_script_again(nets, home):
    first = TrainCLI(nets.Net, nets.Data, args=["fit", *QUIET, "--model.lr=0.5"])
    again = TrainCLI(nets.Net, nets.Data, args=["fit", "--config", str(first.trainer.log_dir / "config.yaml")])
    assert again.model.layer.weight.equal(first.model.layer.weight)
    assert again.trainer.log_dir != first.trainer.log_dir


def test_subclass_mode_takes_subclasses_of_the_given_class_only(nets, capsys):
    args = ["fit", *QUIET, "--model=nets.Narrow", "--data=nets.Data"]
    cli = TrainCLI(nets.Net, subclass_mode_model=True, args=args)
    assert type(cli.model) is nets.Narrow and cli.model.lr == 0.3
    with pytest.raises(SystemExit) as end:
        TrainCLI(nets.Narrow, subclass_mode_model=True, args=["fit", "--model=nets.Net"])
    assert end.value.code == 2
    assert "Expected model to be a subclass of Narrow. Received: nets.Net" in capsys.readouterr().err


def test_without_run_everything_is_built_and_nothing_started(nets):
    cli = TrainCLI(nets.Net, nets.Data, run=False, args=[*QUIET, "--model.lr=0.5"])
    assert cli.subcommand is None and cli.trainer.global_step == 0
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.global_step == 4
    assert (cli.trainer.log_dir / "config.yaml").exists()


def test_defaults_of_the_script_yield_to_the_user(nets):
    defaults = {"max_epochs": 7, "log_every_n_steps": 3}
    cli = TrainCLI(nets.Net, nets.Data, run=False, args=QUIET, trainer_defaults=defaults, seed_everything_default=9)
    assert (cli.trainer.max_epochs, cli.trainer.log_every_n_steps, cli.config.seed_everything) == (1, 3, 9)


def test_config_is_not_written_where_the_script_does_not_want_it(nets):
    cli = TrainCLI(nets.Net, nets.Data, args=["fit", *QUIET], save_config_callback=None)
    assert not (cli.trainer.log_dir / "config.yaml").exists()


def test_own_arguments_links_and_hooks(nets, capsys):
    calls = []

    class Mine(TrainCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_argument("--features", type=int, default=4)
            parser.link_arguments("features", "model.width")
            parser.link_arguments("data.batch_size", "model.lr", compute_fn=lambda size: size / 100, apply_on="instantiate")

        def before_fit(self):
            calls.append(("before", self.trainer.global_step))

        def after_fit(self):
            calls.append(("after", self.trainer.global_step))

    cli = Mine(nets.Net, nets.Data, args=["fit", *QUIET, "--features=4"])
    assert calls == [("before", 0), ("after", 4)]
    assert cli.model.lr == 0.04
    with pytest.raises(SystemExit):
        Mine(nets.Net, nets.Data, args=["fit", *QUIET, "--features=4", "--print-config"])
    assert document.read(capsys.readouterr().out)["features"] == 4


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--model.lr=1"], "Expected one of fit, validate, test, predict first. Received: --model.lr=1."),
        ([], "Received: nothing."),
        (["fit", "--model.lrr=1"], "Received: model.lrr (command line). Did you mean model.lr?"),
        (["fit", "--modle.lr=1"], "Received: modle (command line). Did you mean model?"),
        (["fit", "--model.lr=abc"], "Expected model.lr to be of type float. Received: abc (command line)."),
        (["fit", "--trainer.max_epoch=1"], "Did you mean trainer.max_epochs?"),
    ],
)
def test_F3_wrong_usage_is_one_clear_message(nets, capsys, args, text):
    with pytest.raises(SystemExit) as end:
        TrainCLI(nets.Net, nets.Data, args=args, parser_kwargs={"prog": "train.py"})
    shown = capsys.readouterr().err.strip()
    assert end.value.code == 2
    assert shown.startswith("train.py: error: ") and text in shown and "\n" not in shown


def test_help_shows_the_arguments_of_the_classes(nets, capsys):
    with pytest.raises(SystemExit) as end:
        TrainCLI(nets.Net, args=["fit", "--data=nets.Data", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert "--model.lr LR" in shown and "--trainer.max_epochs" in shown and "--data.batch_size" in shown


def test_a_class_may_have_an_argument_named_config(home):
    """It was not built, as a parser for the arguments of a class had config files of its own."""
    home.write("mine.py", "from nets import Net\n\nclass Mine(Net):\n    def __init__(self, config: str = ''):\n"
               "        super().__init__()\n        self.config = config\n")  # fmt: skip
    cli = TrainCLI(run=False, args=["--config", "run.yaml", "--model=mine.Mine", "--model.config=a.json"])
    assert cli.model.config == "a.json"
