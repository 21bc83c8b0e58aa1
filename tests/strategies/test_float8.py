"""8-bit floats by torchao: which layers, which numbers, checkpoints that do not tell, and what cannot be."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Accelerator, AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs, TrainModule
from drivetrain.strategies import availability, float8
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import quiet


@pytest.fixture(autouse=True)
def _fresh():
    yield
    GradientState._reset_state()
    PartialState._reset_state()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.inner, self.odd = nn.Linear(32, 32), nn.Linear(32, 32)
        self.narrow, self.last = nn.Linear(32, 20), nn.Linear(20, 1)

    def forward(self, x):
        x = torch.relu(self.inner(self.norm(self.first(x))))
        return self.last(self.narrow(self.odd(x)))


def data(count=48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x[:, :1] * 2)


def converted(model):
    return sorted(name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear")


def train(accelerator, model, optimizer, loader):
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def parts():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), DataLoader(data(), batch_size=12)


def flat(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


# Which layers


def test_the_first_the_last_and_layers_of_other_sizes_stay():
    model = Net()
    assert drivetrain.find_first_last_linear_layers(model) == ("first", "last")
    assert drivetrain.find_first_last_linear_layers(nn.ReLU()) == (None, None)
    assert not drivetrain.has_ao_layers(model)
    for given in ({}, {"module_filter_func": drivetrain.filter_first_and_last_linear_layers}):
        assert converted(drivetrain.convert_model_to_fp8_ao(copy.deepcopy(model), **given)) == ["inner", "odd"]
    chosen = drivetrain.convert_model_to_fp8_ao(copy.deepcopy(model), module_filter_func=lambda part, name: name == "odd")
    assert converted(chosen) == ["odd"] and drivetrain.has_ao_layers(chosen)
    assert drivetrain.filter_linear_layers(model.inner, "inner", ["first"])
    assert not drivetrain.filter_linear_layers(model.inner, "inner", ["inner"])
    assert not drivetrain.filter_linear_layers(model.narrow, "narrow", [])
    assert not drivetrain.filter_linear_layers(model.norm, "norm", [])


def test_parameters_hooks_and_modes_stay(caplog):
    model, calls = Net().eval(), []
    model.inner.register_forward_hook(lambda *given: calls.append("inner"))
    weight = model.inner.weight
    result = drivetrain.convert_model_to_fp8_ao(model)
    assert result is model and model.inner.weight is weight and not model.inner.training
    model(torch.ones(16, 8))
    assert calls == ["inner"] and "No linear layer" not in caplog.text
    drivetrain.convert_model_to_fp8_ao(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert "No linear layer of Sequential is converted" in caplog.text


# Which numbers


def test_training_is_that_of_torchao_under_autocast():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    right = Net()
    convert_to_float8_training(
        right, config=Float8LinearConfig(pad_inner_dim=True), module_filter_fn=lambda part, name: name in ("inner", "odd")
    )
    optimizer = torch.optim.SGD(right.parameters(), lr=0.05, momentum=0.5)
    for x, y in DataLoader(data(), batch_size=12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = right(x)
        nn.functional.mse_loss(output.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.mixed_precision == "fp8" and accelerator.fp8_backend.value == "AO"
    assert accelerator.precision.name == "fp8-mixed" and accelerator.scaler is None
    model, *rest = accelerator.prepare(*parts())
    train(accelerator, model, *rest)
    assert converted(model) == ["inner", "odd"] and model.inner.weight.dtype == torch.float32
    assert torch.equal(flat(model), flat(right))
    exact = Accelerator(cpu=True)
    plain, *rest = exact.prepare(*parts())
    train(exact, plain, *rest)
    assert not torch.equal(flat(plain), flat(model)) and torch.allclose(flat(plain), flat(model), atol=0.02)


def test_two_ranks_train_the_same_model():
    def rank(rank):
        accelerator = Accelerator(cpu=True, mixed_precision="fp8")
        model, optimizer, _ = parts()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=6))
        train(accelerator, model, optimizer, loader)
        return flat(accelerator.unwrap_model(model)).tolist(), converted(accelerator.unwrap_model(model))

    one = Accelerator(cpu=True, mixed_precision="fp8")
    model, *rest = one.prepare(*parts())
    train(one, model, *rest)
    (first, layers), (second, _) = run(rank, 2)
    assert first == second and layers == ["inner", "odd"]
    assert torch.allclose(torch.tensor(first), flat(model), atol=0.02)


@pytest.mark.parametrize("gathers", [False, True])
def test_sharded_weights(gathers, tmp_path):
    def rank(rank):
        recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=gathers)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", strategy="fsdp", kwargs_handlers=[recipe])
        model, optimizer, _ = parts()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=6))
        train(accelerator, model, optimizer, loader)
        accelerator.save_model(model, tmp_path / "weights")
        state = accelerator.get_state_dict(model)
        return {name: value.tolist() for name, value in state.items()}, converted(model)

    one = Accelerator(cpu=True, mixed_precision="fp8")
    model, *rest = one.prepare(*parts())
    train(one, model, *rest)
    (found, layers), _ = run(rank, 2)
    assert layers == ["inner", "odd"] and list(found) == list(Net().state_dict())
    assert all(torch.allclose(torch.tensor(found[name]), value, atol=0.02) for name, value in model.state_dict().items())
    plain = Net()
    drivetrain.load_checkpoint_in_model(plain, tmp_path / "weights", strict=True)
    assert torch.equal(plain.inner.weight, torch.tensor(found["inner.weight"]))


@pytest.mark.parametrize("saving, loading", [("fp8", "no"), ("no", "fp8"), ("fp8", "fp8")])
def test_a_checkpoint_does_not_tell_its_precision(saving, loading, tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision=saving)
    model, optimizer, loader = accelerator.prepare(*parts())
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True, mixed_precision=loading)
    again, optimizer, loader = other.prepare(*parts())
    other.load_state(tmp_path / "state")
    assert torch.equal(flat(again), flat(model)) and list(again.state_dict()) == list(Net().state_dict())
    train(other, again, optimizer, loader)


def test_the_trainer_takes_the_word(tmp_path):
    class Module(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    for word in ("fp8", "fp8-mixed"):
        module = Module()
        trainer = quiet(max_epochs=1, precision=word)
        trainer.fit(module, DataLoader(data(), batch_size=12))
        assert trainer.precision.name == "fp8-mixed" and converted(module) == ["net.inner", "net.odd"]
        trainer.save_checkpoint(tmp_path / word)
        quiet(max_epochs=2).fit(Module(), DataLoader(data(), batch_size=12), ckpt_path=tmp_path / word)


def test_options_hold():
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(module_filter_func=lambda part, name: name == "odd", pad_inner_dim=False)
    model = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe]).prepare(Net())
    assert converted(model) == ["odd"] and not model.odd.config.pad_inner_dim
    config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])
    assert accelerator.prepare(Net()).odd.config is config


def test_what_a_launch_says(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    model = Accelerator(cpu=True).prepare(Net())
    assert not model.odd.config.pad_inner_dim
    with pytest.raises(ValueError, match="pad_inner_dim=True, ACCELERATE_FP8_PAD_INNER_DIM=False"):
        Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs(pad_inner_dim=True)])
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.raises(NotImplementedError, match="Transformer Engine"):
        Accelerator(cpu=True)
    with pytest.raises(ValueError, match="AORecipeKwargs.*ACCELERATE_FP8_BACKEND"):
        Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()])


# What cannot be


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (TERecipeKwargs(), "Transformer Engine"), (FP8RecipeKwargs(backend="te"), "Transformer Engine"),
        (MSAMPRecipeKwargs(opt_level="O1"), "MS-AMP"), (FP8RecipeKwargs(backend="MSAMP"), "MS-AMP"),
    ],
)  # fmt: skip
def test_other_libraries_are_answered_with_what_to_use(recipe, message):
    with pytest.raises(NotImplementedError, match=f"{message}.* AORecipeKwargs.*mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])


def test_the_older_settings_without_a_library_are_torchaos():
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs()])
    assert accelerator.fp8_backend.value == "AO"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TERecipeKwargs(fp8_format="E3M4"), "fp8_format to be one of E4M3, E5M2, HYBRID. Received: fp8_format='E3M4'"),
        (lambda: TERecipeKwargs(amax_compute_algo="least"), "max, most_recent"),
        (lambda: MSAMPRecipeKwargs(opt_level="O3"), "O1, O2"),
        (lambda: FP8RecipeKwargs(backend="apex"), "AO, TE, MSAMP"),
        (lambda: Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()]), "mixed_precision='fp8'.*Received: 'no'"),
        (lambda: Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(), TERecipeKwargs()]),
         "one recipe for fp8"),
    ],
)  # fmt: skip
def test_wrong_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_filter_is_a_function():
    with pytest.raises(TypeError, match="module_filter_func"):
        AORecipeKwargs(module_filter_func="inner")


def test_devices_that_cannot():
    with pytest.raises(ValueError, match="multiplies 8-bit floats.*device='mps'.*Use 'bf16-mixed'"):
        float8.require_float8(torch.device("mps"))


def test_without_the_package():
    def rank(rank):
        sys.modules["torchao"] = None  # in a process of its own
        availability.has_package.cache_clear()
        try:
            Accelerator(cpu=True, mixed_precision="fp8")
        except ImportError as error:
            return str(error)

    assert "Install drivetrain[fp8]" in run(rank, 1)[0]
