"""A launch file from a script."""

from __future__ import annotations

import pytest
import torch
import yaml

from drivetrain import write_basic_config
from drivetrain.trainer.cli import launch_file


def test_writes_what_launching_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = write_basic_config("bf16")
    assert path == tmp_path / "drivetrain" / "launch.yaml"
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    written = yaml.safe_load(path.read_text())
    assert (written["mixed_precision"], written["num_processes"]) == ("bf16", max(devices, 1))
    assert launch_file.load().values["mixed_precision"] == "bf16"


def test_leaves_what_is_there(tmp_path, capsys):
    path = tmp_path / "launch.yaml"
    path.write_text("debug: true\n")
    assert write_basic_config(save_location=path) is False
    assert path.read_text() == "debug: true\n" and str(path) in capsys.readouterr().out
    with pytest.raises(ValueError, match="mixed_precision='half'"):
        write_basic_config("half", tmp_path / "other")
