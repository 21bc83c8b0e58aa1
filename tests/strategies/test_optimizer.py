"""Prepared optimizers: when they step, and a state that does not depend on the order of parameters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from drivetrain.strategies.contents import parameter_names
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.optimizer import AcceleratedOptimizer, load_named_state, named_state, unwrap_optimizer


@pytest.fixture(autouse=True)
def _fresh():
    GradientState._reset_state()
    yield
    GradientState._reset_state()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(make, steps=3):
    net = model()
    optimizer = make(list(net.parameters()))
    step(net, optimizer, steps)
    return net, optimizer


def step(net, optimizer, steps=1):
    for index in range(steps):
        optimizer.zero_grad()
        net(torch.arange(6.0).reshape(2, 3) + index).square().mean().backward()
        optimizer.step()


def test_inside_a_window_it_neither_steps_nor_clears():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.ones(1)
    GradientState().sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert weight.item() == 0.0 and weight.grad.item() == 1.0
    GradientState().sync_gradients = True
    optimizer.step()
    optimizer.zero_grad()
    assert weight.item() == -1.0 and weight.grad is None


def test_zero_grad_can_keep_the_tensor():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.ones(1)
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.item() == 0.0


def test_closure_reaches_the_optimizer_and_its_result_comes_back():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = AcceleratedOptimizer(torch.optim.LBFGS([weight], lr=1.0))

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert weight.item() == pytest.approx(0.0, abs=1e-3)


def test_it_is_an_optimizer_for_torch_and_shows_the_wrapped_ones_attributes():
    raw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.5)
    optimizer = AcceleratedOptimizer(raw)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is raw.param_groups and optimizer.state is raw.state
    assert optimizer.defaults is raw.defaults
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    schedule.step()
    assert raw.param_groups[0]["lr"] == pytest.approx(0.05)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(raw.param_groups) == 2
    assert calls == [1]
    assert unwrap_optimizer(optimizer) is raw and unwrap_optimizer(raw) is raw


def test_optimizer_with_modes_is_switched_and_others_are_let_off():
    class Moded(torch.optim.SGD):
        mode = None

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    raw = Moded([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer = AcceleratedOptimizer(raw)
    optimizer.train()
    assert raw.mode == "train"
    optimizer.eval()
    assert raw.mode == "eval"
    AcceleratedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)).train()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_steps_as_the_run_does(copied):
    calls = []

    def step(optimizer, closure):
        calls.append(optimizer)
        return False, None

    optimizer = AcceleratedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.25), step=step)
    other = copied(optimizer)
    assert other.param_groups[0]["lr"] == 0.25 and (other.optimizer is optimizer.optimizer) is (copied is copy.copy)
    other.step()
    assert calls == [other.optimizer]


def test_it_can_be_pickled():
    optimizer = AcceleratedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.25), step=lambda *given: (False, None))
    other = pickle.loads(pickle.dumps(optimizer))
    other.param_groups[0]["params"][0].grad = torch.ones(1)
    other.step()
    assert other.param_groups[0]["params"][0].item() == 0.75 and not other.step_was_skipped


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
        lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:], "weight_decay": 0.3}], lr=0.1),
    ],
    ids=["adamw", "amsgrad", "sgd", "adagrad", "rmsprop", "groups"],
)
def test_named_state_goes_on_bit_for_bit(make):
    net, optimizer = trained(make)
    twin = model()
    twin.load_state_dict(net.state_dict())
    fresh = make(list(twin.parameters()))
    load_named_state(fresh, copy.deepcopy(named_state(optimizer, parameter_names([net]))), parameter_names([twin]))
    step(net, optimizer)
    step(twin, fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))


def test_named_state_finds_parameters_in_another_order():
    net, optimizer = trained(lambda p: torch.optim.AdamW(p, lr=0.1))
    state = named_state(optimizer, parameter_names([net]))
    assert sorted(state["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    twin = model()
    twin.load_state_dict(net.state_dict())
    reversed_one = torch.optim.AdamW(list(twin.parameters())[::-1], lr=0.1)
    load_named_state(reversed_one, copy.deepcopy(state), parameter_names([twin]))
    step(net, optimizer)
    step(twin, reversed_one)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))


def test_state_keeps_its_dtype_beside_parameters_of_fewer_digits():
    """torch casts loaded state to the parameter's dtype: float32 moments of bfloat16 parameters would lose digits."""

    class Master(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state.setdefault("master", p.float().clone())
                state.setdefault("nested", {"rows": [torch.ones(2) / 3, "text"], "count": 0})
                state["nested"]["count"] += 1
                state["master"] -= 0.1 * p.grad.float()
                p.copy_(state["master"])

    weight = nn.Parameter(torch.tensor([1 / 3], dtype=torch.bfloat16))
    optimizer = Master([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = copy.deepcopy(named_state(optimizer, {}))
    fresh = Master([nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))])
    load_named_state(fresh, saved, {})
    state = fresh.state[fresh.param_groups[0]["params"][0]]
    assert state["master"].dtype is torch.float32
    assert torch.equal(state["master"], optimizer.state[weight]["master"])
    assert torch.equal(state["nested"]["rows"][0], torch.ones(2) / 3) and state["nested"]["rows"][1] == "text"
    assert state["nested"]["count"] == 1


def test_parameters_that_no_model_has_are_named_by_their_place():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    state = named_state(optimizer, {})
    assert [group["params"] for group in state["param_groups"]] == [["group_0.parameter_0"], ["group_1.parameter_0"]]


def test_names_of_several_models_do_not_collide():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    names = parameter_names([first, second])
    assert sorted(names.values()) == ["bias", "model_1.bias", "model_1.weight", "weight"]


def test_other_parameters_or_groups_are_an_error_that_names_them():
    net, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    state = named_state(optimizer, parameter_names([net]))
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    with pytest.raises(ValueError, match=r"group 0 of optimizer 0 .*unknown here \['1.bias'\]"):
        load_named_state(
            torch.optim.SGD(other.parameters(), lr=0.1), state, parameter_names([other]), label="optimizer 0"
        )
    two = torch.optim.SGD([{"params": list(net.parameters())[:2]}, {"params": list(net.parameters())[2:]}], lr=0.1)
    with pytest.raises(ValueError, match="Expected 2 parameter groups .* Received: 1 in the checkpoint"):
        load_named_state(two, state, parameter_names([net]))
