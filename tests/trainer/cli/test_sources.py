"""Layers of settings: their order, the source of each value, unknown keys."""

from __future__ import annotations

import pytest

from drivetrain.trainer.cli.sources import (
    UsageError,
    check,
    collect,
    default_config,
    outside,
    source_of,
)

KEYS = {"config", "seed_everything", "trainer", "trainer.max_epochs", "trainer.precision", "trainer.callbacks", "model"}


def written(home, name, text):
    return str(home.write(name, text))


def test_F2_layers_come_in_the_order_of_their_precedence(home, monkeypatch):
    machine = written(home, "xdg/drivetrain/default.yaml", "trainer: {precision: bf16-mixed}")
    one, two = written(home, "one.yaml", "model: a.B"), written(home, "two.yaml", "model: a.C")
    monkeypatch.setenv("DRIVETRAIN_TRAINER__MAX_EPOCHS", "3")
    layers = collect(["--trainer.max_epochs=5", "--config", one, "--model", "a.D", "--config=two.yaml"], KEYS)
    expected = [machine, "DRIVETRAIN_TRAINER__MAX_EPOCHS", one, two, "command line", "command line"]
    assert [layer.source for layer in layers] == expected
    assert [token for layer in layers for token in layer.argument] == [
        "--config", machine, "--trainer.max_epochs=3", "--config", one, "--config", two,
        "--trainer.max_epochs=5", "--model", "a.D",
    ]  # fmt: skip


def test_machine_default_lies_in_the_home_folder_unless_xdg_says_otherwise(home, monkeypatch):
    assert default_config() == home.machine
    monkeypatch.setenv("HOME", str(home.path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert default_config() == home.path / ".config" / "drivetrain" / "default.yaml"


FILE = """
trainer:
  max_epochs: 3
  callbacks:
    - class_path: a.First
      init_args: {patience: 5}
    - a.Second
model:
  class_path: a.Net
  init_args:
    lr: 0.1
    inner: {class_path: a.Inner, init_args: {size: 2}}
"""
ARGS = [
    "--trainer.precision=16-mixed", "--model.lr=1", "--model.init_args.width", "7", "--trainer.callbacks.patience=9",
    "--trainer.callbacks+=a.Third", "--trainer.callbacks.monitor=x",
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("trainer max_epochs", "file"),
        ("trainer precision", "command line"),
        ("trainer strategy", "default"),
        ("model class_path", "file"),
        ("model init_args lr", "command line"),
        ("model init_args width", "command line"),
        ("model init_args depth", "default"),
        ("model init_args inner init_args size", "file"),
        ("trainer callbacks 0 class_path", "file"),
        ("trainer callbacks 0 init_args patience", "file"),
        ("trainer callbacks 0 init_args monitor", "default"),
        ("trainer callbacks 1 class_path", "file"),
        ("trainer callbacks 1 init_args patience", "command line"),
        ("trainer callbacks 2 class_path", "command line"),
        ("trainer callbacks 2 init_args monitor", "command line"),
        ("trainer callbacks 2 init_args patience", "default"),
    ],
)
def test_source_of_each_value(home, path, source):
    file = written(home, "run.yaml", FILE)
    layers = collect(["--config", file, *ARGS], KEYS)
    steps = tuple(int(part) if part.isdigit() else part for part in path.split())
    assert source_of(steps, layers) == (file if source == "file" else source)


def test_source_in_a_file_that_a_config_includes(home):
    inner = written(home, "parts/model.yaml", "class_path: a.Net\ninit_args: {lr: 1}")
    layers = collect(["--config", written(home, "parts/run.yaml", "model: model.yaml"), "--model.width=3"], KEYS)
    assert source_of(("model", "init_args", "lr"), layers) == inner
    assert source_of(("model", "init_args", "width"), layers) == "command line"


def test_a_later_list_replaces_an_earlier_one(home):
    one = written(home, "one.yaml", "trainer: {callbacks: [a.A, a.B]}")
    two = written(home, "two.yaml", "trainer: {callbacks: [a.C]}")
    layers = collect(["--config", one, "--config", two], KEYS)
    assert source_of(("trainer", "callbacks", 0, "class_path"), layers) == two


def test_F2_what_machine_and_environment_decide_is_told_apart(home, monkeypatch):
    machine = written(home, "xdg/drivetrain/default.yaml", "trainer: {precision: bf16-mixed, max_epochs: 7}")
    monkeypatch.setenv("DRIVETRAIN_SEED_EVERYTHING", "4")
    layers = collect(["--trainer.max_epochs=2"], KEYS)
    tree = {"seed_everything": 4, "trainer": {"precision": "bf16-mixed", "max_epochs": 2}}
    assert outside(tree, layers) == {
        machine: ["trainer.precision=bf16-mixed"],
        "DRIVETRAIN_SEED_EVERYTHING": ["seed_everything=4"],
    }


@pytest.mark.parametrize(
    ("args", "received", "advice"),
    [
        (["--trainer.max_epoch=3"], "trainer.max_epoch (command line)", "Did you mean trainer.max_epochs?"),
        (["--max_epochs=3"], "max_epochs (command line)", "Did you mean trainer.max_epochs?"),
        (["--modle", "a.B"], "modle (command line)", "Did you mean model?"),
        (["--trainer={max_epoch: 3}"], "trainer.max_epoch (command line)", "Did you mean trainer.max_epochs?"),
        (["--trainer.xyzzy=3"], "trainer.xyzzy (command line)", "Use one of trainer.callbacks, trainer.max_epochs, trainer.p"),
    ],
)
def test_F3_unknown_key_is_an_error_with_the_nearest_one(home, args, received, advice):
    with pytest.raises(UsageError) as caught:
        check(collect(args, KEYS), KEYS)
    assert f"Received: {received}. {advice}" in str(caught.value)


def test_F3_unknown_key_in_a_file_or_a_variable_names_its_place(home, monkeypatch):
    file = written(home, "run.yaml", "trainer: {max_epoch: 3}")
    with pytest.raises(UsageError, match=r"trainer.max_epoch \(.*run.yaml\). Did you mean trainer.max_epochs"):
        check(collect(["--config", file], KEYS), KEYS)
    monkeypatch.setenv("DRIVETRAIN_TRAINER__MAX_EPOCH", "3")
    with pytest.raises(UsageError, match="DRIVETRAIN_TRAINER__MAX_EPOCH .* Did you mean DRIVETRAIN_TRAINER__MAX_EPOCHS"):
        collect([], KEYS)


@pytest.mark.parametrize("args", [["--model.anything=1"], ["--model.init_args.a.b=1"], ["--model", "a.B"],
                                  ["--trainer.callbacks+=a.B"], ["--trainer.callbacks.patience=3"], ["--model.help"]])  # fmt: skip
def test_keys_of_classes_are_left_to_the_classes(home, args):
    check(collect(args, KEYS), KEYS)


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        (["--model.lr", "-1"], [("--model.lr", "-1")]),
        (["--model.sizes", "1", "2", "3", "--flag", "--model=a.B"], [("--model.sizes", "1", "2", "3"), ("--flag",), ("--model=a.B",)]),
        (["--print-config", "--model.lr=--x", "-h"], [("--model.lr=--x",)]),
    ],
)  # fmt: skip
def test_the_command_line_reaches_the_parser_as_it_is(home, args, tokens):
    assert [layer.argument for layer in collect(args, KEYS)] == tokens


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "broken.yaml", "other.yaml"], "Write --config other.yaml."),
        (["run.yaml"], "Write --config run.yaml."),
        (["fast"], "Write --key=value."),
        (["--config", "nowhere.yaml"], "there is no file .*nowhere.yaml"),
        (["--config"], "there is no file"),
        (["--config", "broken.yaml"], "Expected YAML. Received: .*broken.yaml:1:6: expected"),
        (["--config", "list.yaml"], "Expected keys and values. Received: .*list.yaml with list"),
    ],
)
def test_wrong_usage(home, args, message):
    written(home, "broken.yaml", "a: [1")
    written(home, "list.yaml", "- 1")
    with pytest.raises(UsageError, match=message):
        collect(args, KEYS)
