"""DDP: the numbers of one process, methods routed through its forward, evaluation without collectives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain import strategies
from drivetrain.strategies import base
from drivetrain.strategies.ddp import DDPStrategy, Replica
from drivetrain.strategies.environment import detect
from drivetrain.strategies.precision import Full
from drivetrain.strategies.settings import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from drivetrain.tests.distributed import RankFailed, run


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1, bias=False)
        self.norm = nn.BatchNorm1d(1) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.layer(x))

    def training_step(self, batch, index=0):
        return (self.layer(batch) * (index + 1)).mean()

    def manual_step(self, batch, backward):
        for _ in range(2):
            backward(self.layer(batch).mean())

    def validation_step(self, batch):
        return self.layer(batch).sum()


def prepared(model=None, **options):
    strategy = DDPStrategy(**options)
    strategy.setup(detect(), cpu=True)
    return strategy, strategy.prepare_model(model or Net(), Full())


def inputs(rank):
    return torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (rank + 1)


# Names and set-up


def test_names():
    assert type(strategies.create()) is base.SingleDeviceStrategy
    assert type(strategies.create("auto", size=2)) is DDPStrategy
    assert strategies.create("ddp_find_unused_parameters_true").settings.find_unused_parameters
    assert strategies.create("ddp_spawn").start_method == "spawn"
    assert strategies.create("ddp_notebook_find_unused_parameters_false").start_method == "fork"
    with pytest.raises(TypeError, match="Received: 3"):
        strategies.create(3)
    own = DDPStrategy()
    assert strategies.create(own) is own
    assert strategies.DDPStrategy is DDPStrategy
    with pytest.raises(ValueError, match="Received: 'ddpp'. Did you mean 'ddp'"):
        strategies.create("ddpp")
    with pytest.raises(AttributeError):
        strategies.NoSuchStrategy


def test_one_device_refuses_several_processes():
    def work(rank):
        strategies.create("single").setup(detect())

    with pytest.raises(RankFailed, match="strategy='single'. Received: 2 processes started by torchrun"):
        run(work)


def test_ddp_runs_on_a_single_process_without_a_launcher():
    def work(rank):
        strategy, model = prepared()
        loss = strategy.entry(model, "training_step", Full())(inputs(0))
        loss.backward()
        result = model.module.layer.weight.grad.tolist(), strategy.world.size
        strategy.teardown()
        return result

    assert run(work, ranks=1, group=False) == [([[2.0, 3.5]], 1)]


def test_options_are_given_once():
    with pytest.raises(ValueError, match="settings and \\['find_unused_parameters'\\]"):
        DDPStrategy(DistributedDataParallelKwargs(), find_unused_parameters=True)
    with pytest.raises(TypeError, match="find_unused"):
        DDPStrategy(find_unused=True)

    def work(rank):
        handler = DistributedDataParallelKwargs(bucket_cap_mb=1)
        strategy = DDPStrategy()
        strategy.setup(detect(), cpu=True, settings={DistributedDataParallelKwargs: handler})
        assert strategy.settings is handler and strategy.distributed_type is DistributedType.MULTI_CPU
        with pytest.raises(ValueError, match="DDP's options once"):
            other = DDPStrategy(find_unused_parameters=True)
            other.setup(detect(), cpu=True, settings={DistributedDataParallelKwargs: handler})
        with pytest.raises(ValueError, match="backend once. Received: 'nccl' and 'gloo'"):
            group = InitProcessGroupKwargs(backend="gloo")
            DDPStrategy(process_group_backend="nccl").setup(
                detect(), cpu=True, settings={InitProcessGroupKwargs: group}
            )

    run(work)


def test_device_and_cpu_must_agree():
    with pytest.raises(ValueError, match="cpu=True, device='cuda'"):
        base.choose_device("cuda", cpu=True)
    assert base.choose_device("cpu") == torch.device("cpu") == base.choose_device(cpu=True)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="device of this machine \\(cpu\\). Received: device='cuda:1'"):
            base.choose_device("cuda:1")


# Training


def gradient_of_both():
    net = Net()
    torch.cat([net.layer(inputs(0)), net.layer(inputs(1))]).mean().backward()
    return net.layer.weight.grad


def test_training_step_is_reduced_like_forward():
    def work(rank):
        strategy, model = prepared()
        step = strategy.entry(model, "training_step", Full())
        step(inputs(rank)).backward()
        first = model.module.layer.weight.grad.clone()
        model.module.layer.weight.grad = None
        step(inputs(rank), index=1).backward()
        return first, model.module.layer.weight.grad

    expected = gradient_of_both()
    for first, second in run(work):
        assert torch.allclose(first, expected) and torch.allclose(second, expected * 2)


def test_no_sync_keeps_gradients_local_and_the_next_backward_reduces_all():
    def work(rank):
        strategy, model = prepared()
        step = strategy.entry(model, "training_step", Full())
        with strategy.no_sync(model):
            step(inputs(rank)).backward()
        local = model.module.layer.weight.grad.clone()
        step(inputs(rank)).backward()
        return local, model.module.layer.weight.grad

    (local0, both0), (local1, both1) = run(work)
    assert not torch.allclose(local0, local1)
    assert torch.equal(both0, both1) and torch.allclose(both0, gradient_of_both() * 2)


def test_backward_inside_of_the_method_is_reduced_each_time():
    def work(rank):
        strategy, model = prepared()
        entry = strategy.entry(model, "manual_step", Full(), manual=True)
        seen = []

        def backward(loss):
            model.module.layer.weight.grad = None
            strategy.backward(loss, Full())
            seen.append(model.module.layer.weight.grad.clone())

        entry(inputs(rank), backward)
        entry(inputs(rank), backward)
        with strategy.no_sync(model):
            entry(inputs(rank), backward)
        assert model.require_backward_grad_sync and model.require_forward_param_sync
        return seen

    first, second = run(work)
    expected = gradient_of_both()
    for ours, theirs in zip(first[:4], second[:4], strict=True):
        assert torch.equal(ours, theirs) and torch.allclose(ours, expected)
    assert not torch.allclose(first[4], second[4])


def test_manual_backward_with_parts_of_the_model_at_a_time():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def training_step(self, batch, backward):
            backward(self.a(batch).mean())
            backward(self.b(batch).mean())

    def work(rank):
        strategy, model = prepared(Pair(), find_unused_parameters=True)
        entry = strategy.entry(model, "training_step", Full(), manual=True)
        for _ in range(2):
            model.zero_grad()
            entry(torch.tensor([[1.0 + rank]]), lambda loss: strategy.backward(loss, Full()))
        return [p.grad.item() for p in model.parameters()]

    assert run(work) == [[1.5, 1.5]] * 2


def test_sync_can_be_asked_for_after_the_forward():
    def work(rank):
        strategy, model = prepared()
        with strategy.no_sync(model):
            loss = model(inputs(rank)).square().mean()
            loss.backward()
            model.zero_grad()
            loss = strategy.entry(model, "training_step", Full())(inputs(rank))
            with model.sync_in_backward():
                loss.backward()
        return model.module.layer.weight.grad

    first, second = run(work)
    assert torch.equal(first, second) and torch.allclose(first, gradient_of_both())


def test_unused_parameters_are_named_with_advice():
    def work(rank):
        strategy, model = prepared(Net(norm=True))
        step = strategy.entry(model, "training_step", Full())
        for _ in range(2):
            step(inputs(rank)).backward()

    with pytest.raises(RankFailed, match="norm.weight, norm.bias.*find_unused_parameters=True"):
        run(work)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd"])
def test_communication_hooks(hook):
    def work(rank):
        strategy, model = prepared(
            nn.Linear(64, 64, bias=False), comm_hook=hook, comm_state_option={} if hook != "power_sgd" else {
                "matrix_approximation_rank": 64, "start_powerSGD_iter": 2,
            },
        )  # fmt: skip
        for _ in range(3):
            model.zero_grad()
            model(torch.eye(64) * (rank + 1)).sum().backward()
        return model.module.weight.grad

    for gradient in run(work):
        assert torch.allclose(gradient, torch.full((64, 64), 1.5), rtol=1e-2)


def test_model_without_trainable_parameters_is_not_wrapped():
    def work(rank):
        strategy, model = prepared(nn.Linear(1, 1).requires_grad_(False))
        evaluated = strategy.prepare_model(nn.Linear(1, 1), Full(), evaluation=True)
        return type(model).__name__, type(evaluated).__name__

    assert run(work) == [("Linear", "Linear")] * 2


def test_sync_batchnorm_on_the_cpu_is_a_clear_error():
    def work(rank):
        prepared(Net(norm=True), sync_batchnorm=True)

    with pytest.raises(RankFailed, match="sync_batchnorm=True. Received: device='cpu'"):
        run(work)


# Evaluation


def test_evaluation_waits_for_nobody_and_leaves_training_right():
    """Rank 0 evaluates three batches, rank 1 none: DDP's own forward would broadcast buffers and hang."""

    def work(rank):
        strategy, model = prepared(Net(norm=True))
        evaluate = strategy.entry(model, "validation_step", Full())
        assert evaluate.__func__ is Net.validation_step and evaluate.__self__ is model.module
        model(inputs(rank)).square().sum().backward()
        model.eval()
        with torch.no_grad():
            for _ in range(3 * (1 - rank)):
                model(inputs(rank))
                evaluate(inputs(rank))
                strategy.entry(model, "training_step", Full())(inputs(rank))
        model.train()
        model.zero_grad()
        model(inputs(rank)).square().sum().backward()
        return model.module.layer.weight.grad

    first, second = run(work, timeout=120)
    assert torch.equal(first, second)


# Names, copies, ends


def test_wrapped_model_is_the_users_own_and_keeps_its_names():
    def work(rank):
        net = Net()
        strategy, model = prepared(net)
        assert isinstance(model, DistributedDataParallel) and isinstance(model, Replica)
        assert model.module is net and strategy.unwrap(model) is net and strategy.unwrap(net) is net
        return sorted(strategy.state_dict(model)), sorted(net.state_dict())

    for ours, theirs in run(work):
        assert ours == theirs


def test_compiled_model_is_reduced_and_keeps_its_names():
    def work(rank):
        strategy = DDPStrategy()
        strategy.setup(detect(), cpu=True)
        model = strategy.prepare_model(Net(), Full(), dynamo=TorchDynamoPlugin(backend="eager"))
        model(inputs(rank)).mean().backward()
        return model.module.layer.weight.grad, sorted(strategy.state_dict(model))

    for gradient, names in run(work, timeout=240):
        assert torch.allclose(gradient, gradient_of_both()) and names == ["layer.weight"]


def test_model_is_freed_before_its_group():
    def work(rank):
        strategy, model = prepared()
        strategy.entry(model, "training_step", Full())(inputs(rank)).backward()
        dead = weakref.ref(model)
        del model
        gc.collect()
        assert dead() is None
        strategy, kept = prepared()
        strategy.teardown()
        return kept.reducer is None and strategies.base.World is not None

    assert run(work) == [True, True]


def test_initial_weights_are_rank_zeros():
    def work(rank):
        torch.manual_seed(rank)
        strategy = DDPStrategy()
        strategy.setup(detect(), cpu=True)
        return strategy.prepare_model(nn.Linear(2, 2), Full()).module.weight.detach()

    first, second = run(work)
    assert torch.equal(first, second)
