"""Each example runs, and does what it says."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import Subset

from drivetrain.tests.distributed import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


def test_digits_recognises_97_percent_and_says_where_everything_lies(tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLES / "digits.py")], cwd=tmp_path, capture_output=True, text=True,
                          timeout=240, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"([\d.]+)% of 300 test images", done.stdout)[1])
    assert accuracy >= 97.0

    run = Path(re.search(r"The run +(\S+)", done.stdout)[1])
    assert run.is_relative_to(tmp_path)
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(rows[0])
    assert list(run.glob("events.out.tfevents.*"))
    assert Path(re.search(r"best weights +(\S+)", done.stdout)[1]).is_file()


def test_transformer_is_the_same_by_hand_and_with_the_trainer(example):
    with_trainer, by_hand = example("char_transformer"), example("char_transformer_raw")
    data = Subset(with_trainer.StandardLibrary(characters=50_000), range(300))
    start = torch.manual_seed(with_trainer.SEED) and with_trainer.CharTransformer().state_dict()
    ours = with_trainer.main(data, max_epochs=2, **QUIET).state_dict()
    raw = by_hand.main(data, epochs=2).state_dict()
    assert ours.keys() == raw.keys()
    assert all(torch.equal(ours[name], raw[name]) for name in ours)
    assert any(not torch.equal(ours[name], start[name]) for name in ours)


def test_transformer_by_hand_on_two_processes(example):
    with_trainer, by_hand = example("char_transformer"), example("char_transformer_raw")
    data = Subset(with_trainer.StandardLibrary(characters=50_000), range(128))

    def train(rank: int) -> list[float]:
        return [p.double().sum().item() for p in by_hand.main(data, epochs=1).parameters()]

    first, second = run(train, 2)
    assert first == second != [p.double().sum().item() for p in by_hand.main(data, epochs=1).parameters()]


def test_transformer_learns_and_writes(example):
    module = example("char_transformer")
    data = module.StandardLibrary(characters=60_000)
    model = module.main(data, max_epochs=3, **QUIET).eval()
    pieces = torch.stack([data[index] for index in range(32)])
    assert module.next_character_loss(model, pieces).item() < 3.1  # evenly guessed: ln 96 = 4.56
    text = model.write("def ", count=20)
    assert text.startswith("def ") and len(text) == 24


def test_gan_draws_something_like_digits(example, capsys):
    gan = example("gan")
    module = gan.main(max_epochs=60, **QUIET)
    with torch.no_grad():
        drawn = module(200)
    digits = gan.Digits()
    digits.setup("fit")
    real = digits.train.tensors[0].flatten(1)
    assert drawn.shape == (200, 64) and drawn.isfinite().all()
    assert (drawn.mean(0) - real.mean(0)).abs().mean() < 0.17  # untrained: 0.27
    assert drawn.std(0).mean() > 0.1  # not one picture over and over
    assert len(capsys.readouterr().out.strip("\n").splitlines()) >= 7


def test_config_file_does_what_the_script_does(tmp_path):
    command = [str(Path(sys.executable).parent / "drivetrain"), "fit", "--config", "examples/digits.yaml"]
    done = subprocess.run([*command, f"--trainer.default_root_dir={tmp_path}"], cwd=EXAMPLES.parent,
                          capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    [metrics] = tmp_path.glob("runs/*/metrics.csv")
    accuracies = [float(row["val_accuracy"]) for row in csv.DictReader(metrics.open()) if row.get("val_accuracy")]
    assert max(accuracies) >= 0.97
