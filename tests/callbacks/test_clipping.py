"""GradientClipping, by norm and by value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from drivetrain import Callback, GradientClipping
from drivetrain.tests.callbacks.toy import Line, loader, quiet


class Slopes(Line):
    """Two weights from 0 with gradients 3 and 4, whose norm is 5."""

    def __init__(self, lr=1.0):
        super().__init__(lr=lr)
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))])

    def training_step(self, batch, batch_idx):
        return (3 * self.weights[0] + 4 * self.weights[1]).sum()

    def values(self):
        return [round(weight.item(), 5) for weight in self.weights]


def trained(*callbacks, batches=1, model=None, **options):
    model = model or Slopes()
    trainer = quiet(callbacks=list(callbacks), **options)
    trainer.fit(model, loader(batches))
    return trainer, model


@pytest.mark.parametrize(
    ("value", "algorithm", "expected"),
    [(1.0, "norm", [-0.6, -0.8]), (10.0, "norm", [-3, -4]), (3.5, "value", [-3, -3.5]), (math.inf, "norm", [-3, -4])],
)
def test_step(value, algorithm, expected):
    _, model = trained(GradientClipping(value, algorithm))
    assert [weight.item() for weight in model.weights] == pytest.approx(expected, rel=1e-5)


def test_clips_a_whole_window():
    """Two micro-batches of gradients (3, 4) make one mean gradient (3, 4), clipped once."""
    _, model = trained(GradientClipping(1.0), batches=2, accumulate_grad_batches=2)
    assert [weight.item() for weight in model.weights] == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_norm_is_a_tensor():
    callback = GradientClipping(1.0)
    assert callback.norm is None
    trainer, _ = trained(callback)
    assert isinstance(callback.norm, torch.Tensor) and callback.norm.shape == ()
    assert callback.norm.item() == pytest.approx(5.0)
    assert float(trainer.gradient_norm) == pytest.approx(5.0)


def test_norm_is_logged_on_request():
    trainer, _ = trained(GradientClipping(1.0, log_norm=True), log_every_n_steps=1)
    assert trainer.callback_metrics["grad_norm"] == pytest.approx(5.0)
    trainer, _ = trained(GradientClipping(1.0), log_every_n_steps=1)
    assert "grad_norm" not in trainer.callback_metrics


class TwoOptimizers(Slopes):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((3 * self.weights[0] + 4 * self.weights[1]).sum())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=1.0) for weight in self.weights]


def test_several_optimizers_are_clipped_and_logged_apart():
    trainer, model = trained(GradientClipping(2.0, log_norm=True), model=TwoOptimizers(), log_every_n_steps=1)
    assert [weight.item() for weight in model.weights] == pytest.approx([-2, -2], rel=1e-5)
    assert trainer.callback_metrics["grad_norm/0"] == pytest.approx(3.0)
    assert trainer.callback_metrics["grad_norm/1"] == pytest.approx(4.0)


@pytest.mark.parametrize("manual", [False, True])
def test_G4_clips_what_the_scaler_has_unscaled(manual):
    """Gradient 0.5, clip 1.0, lr 1: the step is -0.5 whatever the scale."""

    class Half(Line):
        def __init__(self):
            super().__init__(lr=1.0)
            self.automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            loss = 0.5 * self.layer.weight.sum()
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
                return None
            return loss

    model = Half()
    nn.init.zeros_(model.layer.weight)
    trained(GradientClipping(1.0), model=model, precision="16-mixed")
    assert model.layer.weight.item() == -0.5


def test_the_argument_is_the_callback():
    trainer = quiet(gradient_clip_val=0.5, gradient_clip_algorithm="value")
    (made,) = [c for c in trainer.callbacks if isinstance(c, GradientClipping)]
    assert (made.value, made.algorithm) == (0.5, "value")


def test_reads_no_value_between_rows(monkeypatch):
    """L8 for clipping: the norm stays on its device."""
    reads = []

    class Watch(Callback):
        priority = -10

        def on_before_optimizer_step(self, trainer, module, optimizer):
            monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append("item"))
            monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append("bool") or True)
            monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append("float") or 0.0)

        def on_before_zero_grad(self, trainer, module, optimizer):
            monkeypatch.undo()

    trained(Watch(), GradientClipping(1.0, log_norm=True), batches=3)
    assert reads == []


@pytest.mark.parametrize("value", [0, -1.0, "1", None, True, math.nan])
def test_bad_value(value):
    with pytest.raises(ValueError, match="Received: value="):
        GradientClipping(value)


def test_bad_algorithm():
    with pytest.raises(ValueError, match="Received: algorithm='l2'"):
        GradientClipping(1.0, "l2")
    with pytest.raises(ValueError, match="Received: algorithm='value', log_norm=True"):
        GradientClipping(1.0, "value", log_norm=True)
