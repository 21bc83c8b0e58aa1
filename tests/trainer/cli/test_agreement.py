"""F1: what the launch file and the script say of accumulation, clipping and precision has to be the same."""

from __future__ import annotations

import json

import pytest
import torch

from drivetrain import Accelerator, GradientAccumulationPlugin

SOURCES = json.dumps({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps in /a/launch.yaml",
                      "ACCELERATE_MIXED_PRECISION": "mixed_precision in /a/launch.yaml"})  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Set what a launcher would."""

    def variables(**values):
        monkeypatch.setenv("DRIVETRAIN_LAUNCH_SOURCES", SOURCES)
        for name, value in values.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)

    return variables


def test_F1_accumulation_of_file_and_script(launched):
    launched(GRADIENT_ACCUMULATION_STEPS="4")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 4
    assert Accelerator(cpu=True, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    with pytest.raises(ValueError) as error:
        Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))
    assert "gradient_accumulation_plugin.num_steps=2" in str(error.value)
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS (gradient_accumulation_steps in /a/launch.yaml)=4" in str(error.value)


def test_F1_precision_of_file_and_script(launched):
    launched(MIXED_PRECISION="bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True, mixed_precision="bf16-mixed").mixed_precision == "bf16"
    with pytest.raises(ValueError) as error:
        Accelerator(cpu=True, mixed_precision="no")
    assert "mixed_precision='no', ACCELERATE_MIXED_PRECISION (mixed_precision in /a/launch.yaml)='bf16'" in str(error.value)
    launched(MIXED_PRECISION="no")  # what every file says that asks for no precision
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"


def test_F1_clipping_of_file_and_script(launched):
    launched(GRADIENT_CLIPPING="0.5")
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    accelerator = Accelerator(cpu=True)
    assert accelerator.clip_grad_norm_([weight], float("inf")) == 5
    with pytest.raises(ValueError, match=r"Received: max_norm=1.0, ACCELERATE_GRADIENT_CLIPPING=0.5"):
        accelerator.clip_grad_norm_([weight], 1.0)
    assert weight.grad.tolist() == [3, 4]
    accelerator.clip_grad_norm_([weight], 0.5)
    assert torch.allclose(weight.grad, torch.tensor([0.3, 0.4]))
