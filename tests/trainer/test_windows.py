"""Accumulation windows that something else than their last batch ends, and optimizers that evaluate them again."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, ModelCheckpoint, Trainer, TrainModule
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import Line, Slope, loader, quiet

X = torch.linspace(-1, 1, 16, dtype=torch.float64).unsqueeze(1)
Y = torch.sin(2 * X) + 0.5


class Newton(TrainModule):
    """A small network trained by LBFGS."""

    def __init__(self, line_search=None):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        self.line_search, self.evaluations = line_search, 0

    def loss(self, x, y):
        self.evaluations += 1
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.net.parameters(), lr=0.5, max_iter=5, line_search_fn=self.line_search)


def plain_lbfgs(windows, line_search):
    """Each window as one batch, by plain torch."""
    module = Newton(line_search)
    optimizer = module.configure_optimizers()
    for x, y in windows:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = module.loss(x, y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return module


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.net.parameters()])


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_lbfgs_evaluates_every_micro_batch_of_its_window(line_search, ranks):
    def rank(rank):
        module = Newton(line_search)
        data = DataLoader(TensorDataset(X, Y), batch_size=4 // ranks)
        quiet(max_epochs=2, accumulate_grad_batches=3, precision="64-true").fit(module, data)
        return weights(module).tolist(), module.evaluations

    windows = [(X[:12], Y[:12]), (X[12:], Y[12:])] * 2
    right = plain_lbfgs(windows, line_search)
    for found, evaluations in run(rank, ranks) if ranks > 1 else [rank(0)]:
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), weights(right), rtol=1e-7, atol=1e-9)
        assert evaluations > right.evaluations  # each of a window of three is three of ours


class Breaking(Callback):
    """Ends the first epoch before its batch `at`."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        return -1 if trainer.current_epoch == 0 and batch_idx == self.at else None


@pytest.mark.parametrize(("at", "right", "told"), [(0, -2.0, 0), (2, -2.0, 1), (4, -3.0, 0), (5, -3.0, 1)])
def test_a_window_that_an_early_end_leaves_open_is_dropped_and_told(at, right, told, caplog):
    """Eight batches in windows of four: the second epoch makes two steps of 1, the first one if it came so far."""
    module = Slope()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=4, callbacks=[Breaking(at)])
    trainer.fit(module, loader(8, 1))
    assert module.weight.item() == right and trainer.global_step == -right
    assert sum("not finished" in record.message for record in caplog.records) == told


def test_sharded_gradients_of_an_open_window_are_dropped_too():
    def rank(rank, strategy):
        torch.manual_seed(1)
        module = Line()
        trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=4,
                          callbacks=[Breaking(2)], logger=False, enable_progress_bar=False, enable_model_summary=False,
                          enable_checkpointing=False)  # fmt: skip
        trainer.fit(module, loader(16, 1))
        return {name: value.item() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()}

    (right, _), (found, _) = run(rank, 2, "ddp"), run(rank, 2, "fsdp")
    assert found == {name: pytest.approx(value) for name, value in right.items()}
    assert right != {name: value.item() for name, value in Line().state_dict().items()}


def test_resuming_behind_an_early_end_is_the_same(tmp_path):
    def fit(epochs, ckpt_path=None):
        module = Slope(lambda index: 1.0 + index)
        saver = ModelCheckpoint(dirpath=tmp_path / f"{epochs}", save_last=True, every_n_epochs=1)
        trainer = quiet(max_epochs=epochs, accumulate_grad_batches=4, callbacks=[Breaking(6), saver],
                        enable_checkpointing=True)  # fmt: skip
        trainer.fit(module, loader(8, 1), ckpt_path=ckpt_path)
        return module.weight.item(), saver.last_model_path

    whole, _ = fit(2)
    _, last = fit(1)
    assert fit(2, ckpt_path=last)[0] == whole


def test_a_batch_without_a_loss_is_told_once():
    class Empty(Line):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.warns(UserWarning, match="Empty.training_step to return a loss. Received: None") as caught:
        quiet(max_epochs=2).fit(Empty(), loader(8))
    assert sum("to return a loss" in str(one.message) for one in caught) == 1


def test_an_optimizer_of_something_else_is_told():
    class Foreign(Line):
        def configure_optimizers(self):
            return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="parameters of Foreign. Received: SGD over none of them"):
        quiet(max_epochs=1).fit(Foreign(), loader(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=1).fit(Line(), loader(4))


# How many steps a run takes


class Asking(Line):
    def configure_optimizers(self):
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("options", [
    {"max_steps": "10sa"}, {"max_steps": "11sa", "accumulate_grad_batches": 2}, {"max_epochs": "9sa"},
    {"max_steps": "30sa", "max_epochs": 2}, {"max_steps": "25sa", "accumulate_grad_batches": 3}, {"max_steps": "18sa"},
    {"max_steps": "10sa", "limit_train_batches": 2}, {"max_epochs": 3, "accumulate_grad_batches": 2},
])  # fmt: skip
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_estimate_is_the_number_of_steps(options, drop_last):
    module = Asking()
    trainer = quiet(**{"max_epochs": -1, **options})
    trainer.fit(module, loader(9, 2, drop_last=drop_last))
    assert module.estimate == trainer.global_step > 0


# A compiled module


class Called(Line):
    """Its step calls the module, as compiling it asks for."""

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return (self(batch / 10) - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("mean", self(batch).mean())


def test_a_compiled_module_is_trained_and_runs_what_was_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    module, right = Called(), Called()
    compiled = torch.compile(module, backend=backend)
    trainer = quiet(max_epochs=2)
    trainer.fit(compiled, loader(8), loader(4))
    assert graphs and trainer.module is module
    quiet(max_epochs=2).fit(right, loader(8), loader(4))
    assert torch.equal(module.layer.weight, right.layer.weight)
    assert set(compiled.state_dict()) == {"_orig_mod.layer.weight", "_orig_mod.layer.bias"}
    assert trainer.validate(compiled, loader(4), verbose=False)[0]["mean"] == trainer.callback_metrics["mean"]


def test_a_compiled_module_that_nothing_calls_is_told():
    with pytest.warns(UserWarning, match="Line to have a forward for torch.compile"):
        quiet(max_epochs=1).fit(torch.compile(Line(), backend="eager"), loader(4))


def test_the_parent_of_forked_ranks_tells_their_number(tmp_path):
    module = Line()
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, logger=False,
                      enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)  # fmt: skip
    assert trainer.world_size == trainer.num_devices == 2
    trainer.fit(module, loader(8))
    assert trainer.world_size == 2 and trainer.num_nodes == 1 and trainer.global_step == 2
