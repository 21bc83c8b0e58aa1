"""Names of checkpoints."""

from __future__ import annotations

import math

import pytest

from drivetrain.callbacks.checkpoint import ModelCheckpoint
from drivetrain.callbacks.filenames import Template


@pytest.mark.parametrize(
    ("text", "insert", "values", "expected"),
    [
        ("checkpoint-{step:06d}", False, {"step": 120}, "checkpoint-000120"),
        ("{epoch}-{step}-{val_loss:.2f}", True, {"epoch": 2, "step": 300, "val_loss": 0.1234}, "epoch=2-step=300-val_loss=0.12"),
        ("{epoch}-{step}-{val_loss:.2f}", False, {"epoch": 2, "step": 300, "val_loss": 0.1234}, "2-300-0.12"),
        ("{epoch:02d}", True, {"epoch": 3}, "epoch=03"),
        ("{val/loss:.1f}", True, {"val/loss": 0.25}, "val_loss=0.2"),
        ("loss={val/loss:.1f}", False, {"val/loss": 0.75}, "loss=0.8"),
        ("a\\b".replace("\\", "-"), True, {}, "a-b"),
        ("{val_loss:.2f}", True, {}, "val_loss=nan"),
        ("{count:03d}", False, {"count": 7.0}, "007"),
        ("{count:03d}", False, {"count": math.nan}, "nan"),
        ("fixed", True, {"epoch": 1}, "fixed"),
    ],
)  # fmt: skip
def test_rendered(text, insert, values, expected):
    assert Template(text, insert=insert).render(values) == expected


@pytest.mark.parametrize("text", ["", "a/b", "../{epoch}", "{epoch", "}", ".hidden", "a\\b", 3])
def test_refused(text):
    with pytest.raises(ValueError, match="without folders.*Received: filename="):
        Template(text)


def test_format_checkpoint_name_has_lightnings_arguments(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.1f}", monitor="val_loss")
    values = {"epoch": 1, "step": 2, "val_loss": 0.5}
    assert callback.format_checkpoint_name(values) == str(tmp_path / "epoch=1-val_loss=0.5")
    assert callback.format_checkpoint_name(values, ver=2) == str(tmp_path / "epoch=1-val_loss=0.5-v2")
    assert callback.format_checkpoint_name(values, filename="{step}") == str(tmp_path / "step=2")
    assert ModelCheckpoint(tmp_path).format_checkpoint_name(values) == str(tmp_path / "checkpoint-000002")


def test_another_sign_between_name_and_value(tmp_path):
    class Colon(ModelCheckpoint):
        CHECKPOINT_EQUALS_CHAR = ":"

    assert Colon(tmp_path, "{epoch}").format_checkpoint_name({"epoch": 1}) == str(tmp_path / "epoch:1")
