"""A config file that somebody else wrote runs nothing: each case would leave a file where code of its choice ran."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml
from drivetrain.trainer.cli import document
from drivetrain.trainer.cli.main import main

MODULE = '''
import os
from pathlib import Path
from subprocess import Popen
from typing import Any, Callable

import torch
from nets import Net


class Open(Net):
    def __init__(self, kind: torch.nn.Module | None = None, anything: Any = None, untyped=None,
                 function: Callable = torch.relu, maker: Callable[[], torch.nn.Module] | None = None,
                 many: list[Any] | None = None, data: dict | None = None):
        super().__init__()
        self.kind, self.given = kind, (anything, untyped, function, maker, many)
        assert data is None or data == {"class_path": "open_nets.shell", "init_args": {"command": "touch ran"}}


def shell(command: str):
    return os.system(command)


def relu() -> torch.nn.Module:
    return torch.nn.ReLU()


class Touch:
    def __init__(self):
        Path("ran").touch()
'''
TOUCH = "touch ran"
BAD = {
    "a command": {"class_path": "os.system", "init_args": {"command": TOUCH}},
    "a process": {"class_path": "subprocess.Popen", "init_args": {"args": TOUCH, "shell": True}},
    "eval": {"class_path": "builtins.eval", "init_args": {"source": "open('ran', 'w')"}},
    "a command by another name": {"class_path": "torch.os.system", "init_args": {"command": TOUCH}},
    "a process by your module": {"class_path": "open_nets.Popen", "init_args": {"args": TOUCH, "shell": True}},
    "a function": {"class_path": "open_nets.shell", "init_args": {"command": TOUCH}},
    "a function of torch": {"class_path": "torch.hub.load",
                            "init_args": {"repo_or_dir": "hub", "model": "x", "source": "local"}},
    "a class of torch that runs commands": {
        "class_path": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        "init_args": {"entrypoint": "touch", "args": ["ran"], "env": {}, "stdout": None, "stderr": None,
                      "local_rank_id": 0}},
    "another class": {"class_path": "open_nets.Touch"},
}  # fmt: skip
OPEN = ("trainer.logger", "model.init_args.anything", "model.init_args.function", "model.init_args.maker")
PLACES = (
    *("model", "data", "optimizer", "lr_scheduler", "trainer.callbacks", "trainer.profiler", "trainer.strategy"),
    *("trainer.accelerator", "trainer.max_time", "trainer.devices", "model.init_args.kind", "model.init_args.untyped"),
)


@pytest.fixture(autouse=True)
def modules(home):
    """What a config can name, and a hub whose file runs."""
    home.write("open_nets.py", MODULE)
    home.write("hub/hubconf.py", "open('ran', 'w')\n")


def config(place: str, value: object) -> dict:
    """A config that is right but for one place."""
    options = {"max_steps": 1, "logger": False, "accelerator": "cpu", "enable_progress_bar": False,
               "enable_model_summary": False, "enable_checkpointing": False}  # fmt: skip
    tree = {"trainer": options, "model": {"class_path": "open_nets.Open", "init_args": {}},
            "data": {"class_path": "nets.Data"}}  # fmt: skip
    *parts, last = place.split(".")
    inner = tree
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return tree


def told(*args: str) -> tuple[object, str]:
    """Run `drivetrain ARGS`; return its status and what it printed."""
    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out):
            status = main([*args])
    except SystemExit as end:
        status = end.code
    return status, out.getvalue()


def refused(home, place: str, value: object) -> None:
    """Assert that a config is refused, and not passed over in silence."""
    home.write("run.yaml", yaml.safe_dump(config(place, value)))
    status, text = told("fit", "--config", "run.yaml")
    assert not Path("ran").exists(), (place, value)
    assert status in (1, 2), (place, value, text)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_nothing_runs_where_much_is_taken(home, bad):
    for place in OPEN:
        refused(home, place, bad)
    refused(home, "model.init_args.many", [{"within": [bad]}])


@pytest.mark.parametrize("place", PLACES)
def test_nothing_runs_wherever_it_is_named(home, place):
    for name in ("a process", "a class of torch that runs commands"):
        refused(home, place, BAD[name])
    refused(home, place, [BAD["a command"]])


@pytest.mark.parametrize("bad", [BAD["a process"], BAD["a function"], BAD["a class of torch that runs commands"]])
def test_nothing_runs_by_the_command_line_variables_or_a_file_within(home, bad, monkeypatch):
    home.write("run.yaml", yaml.safe_dump(config("model.init_args.anything", None)))
    home.write("part.yaml", yaml.safe_dump(bad))
    for place, value in (("trainer.logger", json.dumps(bad)), ("model.anything", json.dumps(bad)),
                         ("model", "part.yaml"), ("model.function", "part.yaml")):  # fmt: skip
        status, text = told("fit", "--config", "run.yaml", f"--{place}", value)
        assert not Path("ran").exists() and status in (1, 2), (place, value, text)
    tree = config("model.init_args.anything", None)
    del tree["trainer"]["logger"]  # else it wins over the variable
    home.write("run.yaml", yaml.safe_dump(tree))
    monkeypatch.setenv("DRIVETRAIN_TRAINER__LOGGER", json.dumps(bad))
    status, text = told("fit", "--config", "run.yaml")
    assert not Path("ran").exists() and status in (1, 2), text


def test_what_is_declared_is_built(home):
    for place, value in (
        ("model.init_args.kind", {"class_path": "torch.nn.ReLU"}),
        ("model.init_args.kind", {"class_path": "open_nets.relu"}),
        ("model.init_args.function", "torch.sigmoid"),
        ("model.init_args.function", "math.sqrt"),
        ("model.init_args.data", BAD["a function"]),  # data, which nobody here looks into
        ("model.init_args.anything", {"a": [1, {"b": 2}]}),
        ("trainer.profiler", {"class_path": "drivetrain.Profiler", "init_args": {"kind": "simple"}}),
        ("trainer.callbacks", [{"class_path": "nets.Patient", "init_args": {"patience": 2}}]),
    ):
        home.write("run.yaml", yaml.safe_dump(config(place, value)))
        status, text = told("fit", "--config", "run.yaml", "--model.many", "[1]")
        assert status == 0, (place, value, text)


def test_the_errors_say_what_to_do(home):
    home.write("run.yaml", yaml.safe_dump(config("model.init_args.untyped", {"class_path": "torch.nn.ReLU"})))
    assert "Annotate it, such as untyped: torch.nn.Module" in told("fit", "--config", "run.yaml")[1]
    home.write("run.yaml", yaml.safe_dump(config("trainer.logger", {"class_path": "torch.nn.ReLU"})))
    assert "Expected trainer.logger to be a subclass of GeneralTracker" in told("fit", "--config", "run.yaml")[1]
    home.write("run.yaml", yaml.safe_dump(config("model", {"class_path": "os.system"})))
    assert "part of Python's standard library (os)" in told("fit", "--config", "run.yaml")[1]


def test_a_module_of_yours_may_be_called_as_one_of_the_standard_library(home):
    home.write("calendar.py", "from open_nets import Open\nclass Mine(Open):\n    pass\n")
    from drivetrain.trainer.cli.classes import standard_modules

    assert "calendar" not in standard_modules() and "secrets" in standard_modules()


TEXTS = {
    "an object": "!!python/object/apply:os.system ['touch ran']",
    "an object within": "model: !!python/object/new:subprocess.Popen [['touch', 'ran']]",
    "a name": "model: !!python/name:os.system",
    "another file": "model: !include other.yaml",
    "aliases of aliases": "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefghi", "bcdefghij")),
    "itself": "model: &a {class_path: nets.Net, init_args: *a}",
    "depth": "model: " + "[" * 5_000,
    "digits": "seed_everything: " + "9" * 10_000,
    "a zero byte": "model: \0",
    "a list as a key": "? [a, b]\n: c",
    "no mapping": "- 1",
    "a missing alias": "<<: *x",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_hostile_text_is_refused_at_once(home, text):
    home.write("run.yaml", text)
    for command in (("fit", "--config", "run.yaml"), ("launch", "--config_file", "run.yaml", "nets.py")):
        status, said = told(*command)
        assert status == 2 and "run.yaml" in said and not Path("ran").exists(), (command, status, said)


def test_the_limit_counts_what_aliases_stand_for():
    assert len(document.read("a: &a [1, 2]\nb: [*a, *a]")["b"]) == 2
    with pytest.raises(yaml.YAMLError, match="aliases"):
        document.read(TEXTS["aliases of aliases"])


def test_a_checkpoint_names_no_code(home):
    """Hyperparameters that look like a class stay what they are."""
    from drivetrain.strategies.checkpoint import Writer, save_weights
    from drivetrain.tests.loop.models import Line

    class Model(Line):
        def __init__(self, lr=0.01):
            super().__init__(0.01)
            self.given = lr

    with Writer("hostile") as writer:
        save_weights(writer, Line().state_dict())
        writer.commit({"hparams": {"lr": BAD["a command"]}, "class_path": "os.system", "run_id": "../../up"})
    assert Model.load_from_checkpoint("hostile").given == BAD["a command"] and not Path("ran").exists()
