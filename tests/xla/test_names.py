"""Accelerate's names and the rest of the library where the device is XLA's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.tests.xla.running import run


def test_what_is_there_is_told():
    def tell():
        import drivetrain

        return (drivetrain.is_torch_xla_available(), drivetrain.is_torch_xla_available(check_is_tpu=True),
                drivetrain.is_torch_xla_available(check_is_gpu=True), drivetrain.is_bf16_available(True))  # fmt: skip

    assert run(tell) == (True, False, False, True)


def test_states_and_functions_know_the_device():
    def use():
        from drivetrain import (
            Accelerator,
            DistributedType,
            GradientState,
            PartialState,
            broadcast,
            set_seed,
            synchronize_rng_states,
        )

        accelerator = Accelerator(strategy="xla")
        state, numbers = PartialState(), torch.arange(3.0, device=accelerator.device)
        state.set_device()
        set_seed(3, device_specific=True)
        synchronize_rng_states(["torch", "xla"])
        assert accelerator.distributed_type is DistributedType.XLA and GradientState().is_xla_gradients_synced
        used = [accelerator.gather(numbers), accelerator.reduce(numbers, "mean"), broadcast(numbers),
                accelerator.pad_across_processes(numbers), accelerator.gather_for_metrics(numbers)]  # fmt: skip
        accelerator.free_memory()
        return state.device.type, [value.cpu().tolist() for value in used]

    assert run(use) == ("xla", [[0.0, 1.0, 2.0]] * 5)


@pytest.mark.parametrize("word", ["openxla", "AOT_TORCHXLA_TRACE_ONCE"])
def test_a_model_compiled_for_xla_trains_as_plain_torch(word):
    def train():
        from drivetrain import Accelerator

        torch.manual_seed(0)
        accelerator = Accelerator(strategy="xla", dynamo_backend=word)
        model = nn.Linear(2, 1)
        right = nn.Linear(2, 1)
        right.load_state_dict(model.state_dict())
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        plain = torch.optim.SGD(right.parameters(), lr=0.1)
        x = torch.randn(4, 2)
        for _ in range(3):
            accelerator.backward(model(x.to(accelerator.device)).square().mean())
            optimizer.step(), optimizer.zero_grad()
            right(x).square().mean().backward()
            plain.step(), plain.zero_grad()
        return accelerator.get_state_dict(model), dict(right.state_dict())

    found, right = run(train)
    torch.testing.assert_close(found, right)


def test_another_compiler_is_refused():
    def compile_it():
        from drivetrain import Accelerator

        with pytest.raises(ValueError, match="'openxla' or 'openxla_eval'. Received: dynamo_backend='inductor'"):
            Accelerator(strategy="xla", dynamo_backend="inductor").prepare(nn.Linear(2, 1))

    run(compile_it)


@pytest.mark.parametrize("words", [["plan", "--config", "run.yaml"], ["fit", "--config", "run.yaml", "--print-config"]])
def test_commands_that_look_at_a_run_of_xla(tmp_path, monkeypatch, capfd, words):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "from drivetrain import DataModule, TrainModule\n\n"
        "class Net(TrainModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = nn.Linear(4, 1)\n"
        "    def training_step(self, batch, batch_idx):\n        return self.net(batch[0]).mean()\n"
        "    def configure_optimizers(self):\n        return torch.optim.SGD(self.parameters(), lr=0.1)\n\n"
        "class Lines(DataModule):\n"
        "    def train_dataloader(self):\n        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)\n"
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(
        "model: {class_path: net.Net}\ndata: {class_path: net.Lines}\ntrainer: {strategy: xla, max_steps: 2}\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)

    def command():
        import sys

        from drivetrain.trainer.cli.main import main

        sys.path.insert(0, str(tmp_path))
        try:
            return main(words)
        except SystemExit as ended:
            return ended.code

    assert run(command) in (0, None)
