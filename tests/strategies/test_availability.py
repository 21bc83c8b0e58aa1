"""Which packages and devices there are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import drivetrain
from drivetrain.strategies import availability

EVERY = [name for name in vars(availability) if name.startswith("is_") and name != "is_torch_version"]


@pytest.mark.parametrize("name", EVERY)
def test_answers_with_yes_or_no(name):
    assert getattr(drivetrain, name)() in (True, False)


def test_what_this_machine_has():
    assert drivetrain.is_pytest_available() and drivetrain.is_tensorboard_available()
    assert drivetrain.is_pippy_available()
    assert drivetrain.is_megatron_lm_available() is drivetrain.has_package("megatron.core")
    assert drivetrain.has_package("torch.nn") and not drivetrain.has_package("no_such_package.part")
    assert drivetrain.is_cuda_available() is torch.cuda.is_available()
    assert drivetrain.is_bf16_available() or drivetrain.is_cuda_available()
    with pytest.raises(ValueError, match="both are True"):
        drivetrain.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_looking_imports_nothing():
    code = "import sys, drivetrain; drivetrain.is_transformers_available(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "False", done.stderr


def test_versions():
    assert drivetrain.is_torch_version(">=", "2.9") and not drivetrain.is_torch_version("<", "2.9")
    assert drivetrain.compare_versions("pytest", ">", "1.0")
    with pytest.raises(ValueError, match="operation='~'"):
        drivetrain.is_torch_version("~", "2.9")


def test_missing_packages_are_named():
    @drivetrain.deepspeed_required
    def train():
        return "trained"

    if not drivetrain.is_deepspeed_available():
        with pytest.raises(ImportError, match="pip install deepspeed"):
            train()
    assert train.__name__ == "train"
