"""`drivetrain plan`."""

from __future__ import annotations

import pytest

from drivetrain.trainer.cli.main import main

MODULE = """
import torch
from drivetrain import TrainModule

class Net(TrainModule):
    def __init__(self, width: int = 1000):
        super().__init__()
        self.layer = torch.nn.Linear(width, width, bias=False)
        self.width = width

    def training_step(self, x, i):
        return self.layer(x).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(8, self.width), batch_size=4)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"planned_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(f"model:\n  class_path: {name}.Net\n")
    return "run.yaml"


def test_a_plan_names_what_fits_and_why(config, capsys):
    """4 MB of weights: DDP needs weights, gradients and buckets, 12 MB and more; shared by 4 it is a quarter."""
    assert main(["plan", "--config", config, "--devices", "4", "--memory", "12MB", "--strategies", "ddp", "fsdp"]) == 0
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()[1:4]}
    assert rows["ddp"][1:3] == ["3.8", "MiB"] and rows["ddp"][-1] == "no" and rows["fsdp"][-1] == "yes"
    assert rows["fsdp"][1:3] == ["976.6", "KiB"]
    assert "fsdp: only shared by all devices it fits." in out and "--trainer.devices=4 --trainer.strategy=fsdp" in out


def test_nothing_fits(config, capsys):
    assert main(["plan", "--config", config, "--memory", "1MB"]) == 1
    assert "Nothing fits: single takes least." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "much"], "a size such as"),
        (["--strategies", "magic"], "Received: --strategies magic"),
        (["--devices", "0"], "Received: --devices 0"),
    ],
)
def test_wrong_usage(config, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--config", config, *words])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_config_without_data_is_told(config, tmp_path, capsys):
    name = next(tmp_path.glob("planned*.py"))
    name.write_text(MODULE[: MODULE.index("    def train_dataloader")])
    with pytest.raises(SystemExit):
        main(["plan", "--config", config])
    assert "Expected training data in the config" in capsys.readouterr().err


def test_help(capsys):
    assert main(["plan", "--help"]) == 0
    assert "--memory SIZE" in capsys.readouterr().out
