"""F1: what the launch file and the script say of accumulation, clipping and precision has to be the same."""

from __future__ import annotations

import json

import pytest
import torch

from drivetrain import Accelerator, GradientAccumulation, GradientAccumulationPlugin, GradientClipping, Trainer

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


def made(**arguments) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **arguments)


def test_F1_the_trainer_takes_what_the_launch_says(launched):
    launched(GRADIENT_ACCUMULATION_STEPS="4", GRADIENT_CLIPPING="0.5", MIXED_PRECISION="bf16")
    trainer = made()
    found = {type(callback): callback for callback in trainer.callbacks}
    assert found[GradientAccumulation].scheduling == {0: 4} and found[GradientClipping].value == 0.5
    assert trainer.precision.name == "bf16-mixed" and trainer.accelerator.gradient_accumulation_steps == 4
    made(accumulate_grad_batches=4, gradient_clip_val=0.5, precision="bf16-mixed")


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({"GRADIENT_ACCUMULATION_STEPS": "4"}, {"accumulate_grad_batches": 2},
         "accumulate_grad_batches=2, ACCELERATE_GRADIENT_ACCUMULATION_STEPS (gradient_accumulation_steps in /a/launch.yaml)=4"),
        ({"GRADIENT_ACCUMULATION_STEPS": "4"}, {"callbacks": [GradientAccumulation(2)]},
         "(gradient_accumulation_steps in /a/launch.yaml)=4 and a GradientAccumulation with {0: 2}"),
        ({"GRADIENT_CLIPPING": "0.5"}, {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0, ACCELERATE_GRADIENT_CLIPPING=0.5"),
        ({"MIXED_PRECISION": "bf16"}, {"precision": "16-mixed"},
         "mixed_precision='16-mixed', ACCELERATE_MIXED_PRECISION (mixed_precision in /a/launch.yaml)='bf16'"),
    ],
)  # fmt: skip
def test_F1_the_trainer_shows_both(launched, variables, arguments, said):
    launched(**variables)
    with pytest.raises(ValueError) as error:
        made(**arguments)
    assert said in str(error.value)


pytestmark = pytest.mark.timeout(500)  # a test may start several launches, one after another, on a machine that is busy

RUN = """
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=1))
words = (trainer.world_size, trainer.global_step, trainer.precision.name)
Path(f"rank-{trainer.global_rank}").write_text(" ".join(map(str, words)))
"""


def told(home) -> dict[str, str]:
    return {path.name: path.read_text() for path in home.path.glob("rank-*")}


def test_F1_a_trainer_script_follows_its_launch_file(home):
    home.write("run.py", RUN)
    home.write("launch.yaml", "{use_cpu: true, num_processes: 2, mixed_precision: bf16, gradient_accumulation_steps: 4}")
    done = home.cli("launch", "--config_file", "launch.yaml", "run.py")
    assert told(home) == {"rank-0": "2 2 bf16-mixed", "rank-1": "2 2 bf16-mixed"}, done.stderr
    home.write("run.py", RUN.replace("= Trainer(", "= Trainer(accumulate_grad_batches=3, "))
    done = home.cli("launch", "--config_file", "launch.yaml", "run.py")
    file = home.path / "launch.yaml"
    assert done.returncode == 1
    report = done.stderr[done.stderr.rindex("failed first: it ended with exit code 1.\nTraceback") :]  # after all have ended
    assert f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS (gradient_accumulation_steps in {file})=4" in report


def test_F1_a_trainer_script_shards_by_its_launch_file(home):
    home.write("run.py", RUN.replace("trainer.precision.name)", "trainer.strategy.name, trainer.strategy.plugin.reshard_after_forward)"))
    home.write("launch.yaml", "{distributed_type: FSDP, use_cpu: true, num_processes: 2,"
               " fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}}")  # fmt: skip
    done = home.cli("launch", "--config_file", "launch.yaml", "run.py")
    assert told(home) == {"rank-0": "2 8 fsdp False", "rank-1": "2 8 fsdp False"}, done.stderr


def test_a_trainer_that_asks_for_more_processes_than_were_launched(home):
    home.write("run.py", RUN.replace("= Trainer(", "= Trainer(accelerator='cpu', devices=2, "))
    done = home.cli("launch", "--cpu", "--num_processes", "1", "run.py")
    assert done.returncode == 1
    assert "Received: devices × num_nodes = 2, and num_processes=1 of the launch." in done.stderr
    done = home.cli("launch", "--cpu", "run.py")  # the number is left to the script
    assert told(home) == {"rank-0": "2 8 32-true", "rank-1": "2 8 32-true"}, done.stderr


def test_a_run_of_the_command_line_in_launched_processes(home):
    done = home.cli("launch", "--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "-m", "drivetrain", "fit",
                    "--config", "run.yaml")  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = next(home.path.glob("runs/*/config.yaml")).read_text()
    assert "max_epochs: 2" in config
