"""Precision: right dtypes, right scales, exactly one unscaling, nothing at all in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from drivetrain.strategies import precision as precisions
from drivetrain.strategies.contexts import NOTHING
from drivetrain.strategies.precision import Autocast, Full, Scaled, TruePrecision
from drivetrain.strategies.settings import AutocastKwargs, GradScalerKwargs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("word", "name", "accelerates", "kind"),
    [
        (None, "32-true", "no", Full), ("no", "32-true", "no", Full), (32, "32-true", "no", Full),
        ("32", "32-true", "no", Full), ("32-true", "32-true", "no", Full), (64, "64-true", "no", TruePrecision),
        ("64-true", "64-true", "no", TruePrecision), ("bf16", "bf16-mixed", "bf16", Autocast),
        ("bf16-mixed", "bf16-mixed", "bf16", Autocast), ("fp16", "16-mixed", "fp16", Scaled),
        ("16-mixed", "16-mixed", "fp16", Scaled), (16, "16-mixed", "fp16", Scaled),
        ("bf16-true", "bf16-true", "no", TruePrecision), ("16-true", "16-true", "no", TruePrecision),
    ],
)  # fmt: skip
def test_words(word, name, accelerates, kind):
    made = precisions.create(word, CPU)
    assert (made.name, made.mixed_precision, type(made)) == (name, accelerates, kind)


def test_unknown_words_name_the_nearest_and_transformer_engine_what_to_use():
    with pytest.raises(ValueError, match="Received: precision='bf16-mixd'. Did you mean 'bf16-mixed'"):
        precisions.create("bf16-mixd", CPU)
    with pytest.raises(NotImplementedError, match="Transformer Engine .* Use precision='fp8-mixed' .torchao. instead"):
        precisions.create("transformer-engine", CPU)


def test_full_precision_touches_nothing():
    model, full = nn.Linear(2, 2), Full()
    loss = torch.ones(())
    assert full.prepare_model(model) is model and "forward" not in vars(model)
    assert full.autocast() is NOTHING and full.scale(loss) is loss
    bound = model.forward
    assert full.entry(bound) is bound


@pytest.mark.parametrize(("word", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_mixed_forward_computes_low_and_returns_float32(word, dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.inside = self.layer(x)
            return {"out": self.inside, "pair": (self.inside, 3), "half": torch.ones(1, dtype=torch.float64)}

    model = precisions.create(word, CPU).prepare_model(Model())
    outputs = model(torch.ones(2, 4))
    assert model.inside.dtype is dtype and model.layer.weight.dtype is torch.float32
    assert outputs["out"].dtype is torch.float32 and outputs["pair"][0].dtype is torch.float32
    assert outputs["pair"][1] == 3 and outputs["half"].dtype is torch.float64


@pytest.mark.parametrize("word", ["bf16-mixed", "bf16-true"])
def test_a_deep_copy_of_a_prepared_model_runs_its_own_parameters(word):
    model = precisions.create(word, CPU).prepare_model(nn.Linear(1, 1, bias=False))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.fill_(1.0)
        twin.weight.fill_(2.0)
    assert model(torch.ones(1, 1)).item() == 1.0 and twin(torch.ones(1, 1)).item() == 2.0


def test_forward_can_be_given_back_as_it_was():
    made = precisions.create("bf16", CPU)
    model = nn.Linear(2, 2)
    made.restore_model(made.prepare_model(model))
    assert "forward" not in vars(model) and model(torch.ones(1, 2)).dtype is torch.float32

    model.forward = own = lambda x: x * 2
    made.restore_model(made.prepare_model(model))
    assert model.forward is own


@pytest.mark.parametrize(
    ("word", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
)
def test_true_precision_converts_parameters_inputs_and_new_tensors(word, dtype):
    made = precisions.create(word, CPU)
    model = made.prepare_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert model(torch.ones(2, 3)).dtype is dtype
    seen = {}

    def step(batch, index):
        seen.update(x=batch["x"].dtype, y=batch["y"].dtype, index=index)

    made.entry(step)({"x": torch.ones(1), "y": torch.ones(1, dtype=torch.int64)}, 5)
    assert seen == {"x": dtype, "y": torch.int64, "index": 5}
    with made.autocast():
        with made.autocast():
            assert torch.ones(1).dtype is dtype
        assert torch.ones(1).dtype is dtype
    assert torch.ones(1).dtype is torch.float32
    with made.init_context():
        assert nn.Linear(1, 1).weight.dtype is dtype


def test_autocast_is_one_object_that_nests():
    made = precisions.create("bf16", CPU)
    assert made.autocast() is made.autocast()
    a = torch.ones(2, 2)
    with made.autocast():
        with made.autocast():
            assert (a @ a).dtype is torch.bfloat16
        assert (a @ a).dtype is torch.bfloat16
        with made.autocast(AutocastKwargs(enabled=False)):
            assert (a @ a).dtype is torch.float32
    assert (a @ a).dtype is torch.float32
    with pytest.raises(KeyError), made.autocast():
        raise KeyError
    assert (a @ a).dtype is torch.float32 and not torch.is_autocast_enabled("cpu")


def test_autocast_options_hold():
    made = precisions.create("bf16", CPU, autocast=AutocastKwargs(enabled=False))
    with made.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def scaled(init_scale=1024.0, **options):
    return precisions.create("16-mixed", CPU, scaler=GradScalerKwargs(init_scale=init_scale, **options))


def parameter(value=0.0, lr=1.0):
    weight = nn.Parameter(torch.tensor([value]))
    return weight, torch.optim.SGD([weight], lr=lr)


def test_loss_is_scaled_and_gradients_unscaled_once():
    made = scaled()
    weight, optimizer = parameter()
    made.register(optimizer)
    made.scale((weight * 0.5).sum()).backward()
    assert weight.grad.item() == 512.0
    made.unscale(optimizer)
    made.unscale(optimizer)
    assert weight.grad.item() == 0.5
    assert made.step(optimizer) == (False, None)
    assert weight.item() == -0.5


def test_overflow_skips_the_step_halves_the_scale_and_is_counted():
    made = scaled()
    weight, optimizer = parameter()
    made.register(optimizer)
    for expected in (512.0, 256.0):
        made.scale((weight * float("inf")).sum()).backward()
        assert made.step(optimizer)[0]
        optimizer.zero_grad()
        assert made.scaler.get_scale() == expected
    assert weight.item() == 0.0 and made.skipped_steps == 2


def test_scale_grows_after_its_interval():
    made = scaled(growth_interval=2)
    weight, optimizer = parameter()
    made.register(optimizer)
    for _ in range(2):
        made.scale((weight * 0.5).sum()).backward()
        made.step(optimizer)
        optimizer.zero_grad()
    assert made.scaler.get_scale() == 2048.0


def test_one_optimizers_overflow_does_not_change_the_scale_of_the_others_gradients():
    """Both losses were scaled by 1024; unscaling the second by the halved scale would double its step."""
    made = scaled()
    first, first_optimizer = parameter()
    second, second_optimizer = parameter()
    made.register(first_optimizer)
    made.register(second_optimizer)
    made.scale((first * float("inf")).sum()).backward()
    made.scale((second * 0.5).sum()).backward()
    made.unscale(second_optimizer)
    assert made.step(first_optimizer)[0] and not made.step(second_optimizer)[0]
    assert first.item() == 0.0 and second.item() == -0.5
    made.scale((second * 0.5).sum())
    assert made.scaler.get_scale() == 512.0


def test_optimizer_without_gradients_is_no_error_and_changes_no_scale():
    made = scaled()
    _, optimizer = parameter()
    made.register(optimizer)
    for _ in range(2):
        made.unscale(optimizer)
        assert made.step(optimizer) == (False, None)
    assert made.scaler.get_scale() == 1024.0


def test_fused_optimizer_is_skipped_like_any_other():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    made = scaled()
    made.register(optimizer)
    made.scale((weight * float("inf")).sum()).backward()
    assert made.step(optimizer)[0] and weight.tolist() == [0.0] * 4
    optimizer.zero_grad()
    made.scale((weight * 0.5).sum()).backward()
    assert not made.step(optimizer)[0] and weight.tolist() == [-0.5] * 4


def test_closure_under_a_scaler_is_refused():
    with pytest.raises(ValueError, match="Expected no closure under 16-mixed"):
        scaled().step(parameter()[1], lambda: 0)


def test_switched_off_scaler_scales_nothing():
    made = scaled(enabled=False)
    weight, optimizer = parameter()
    made.scale((weight * 0.5).sum()).backward()
    made.step(optimizer)
    assert weight.item() == -0.5


def test_scaler_state_survives():
    made, again = scaled(), scaled()
    weight, optimizer = parameter()
    made.register(optimizer)
    made.scale((weight * float("inf")).sum()).backward()
    made.step(optimizer)
    again.load_state_dict(made.state_dict())
    assert again.scaler.get_scale() == 512.0 and again.skipped_steps == 1
