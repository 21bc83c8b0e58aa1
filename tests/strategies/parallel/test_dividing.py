"""What dividing a model or its sequences refuses before training starts, and what it computes."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from drivetrain import (
    Accelerator,
    ContextParallelStrategy,
    ExpertParallelStrategy,
    ParallelismConfig,
    PipelineConfig,
    PipelineStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from drivetrain.strategies.context_parallel import Sequences
from drivetrain.strategies.sequence_attention import Exchanged, Gathered, Ring
from drivetrain.strategies.stages import check_apart, cut_of, find_part
from drivetrain.tests.conformance.parallel_cells import (
    PLAN,
    Block,
    Language,
    Mixed,
    Sequence,
    Tokens,
    compare,
    placed,
    train,
)
from drivetrain.tests.distributed import RankFailed, run
from torch import nn
from torch.nn import functional as F


def refusal(strategy, module) -> str:
    """What preparing says on the first of two ranks."""

    def work(rank):
        with pytest.raises(ValueError, match="Expected") as caught:
            train(strategy(), module=module(), steps=1, validate=False)
        return str(caught.value)

    return run(work, 2)[0]


class Narrow(Language):
    def __init__(self):
        super().__init__()
        self.net.layers[0].up = nn.Linear(16, 33)
        self.net.layers[0].down = nn.Linear(33, 16)


class Handmade(Language):
    """Attention that nothing can see into."""

    def __init__(self):
        super().__init__()
        self.net.layers = nn.ModuleList([nn.Linear(16, 16)])


@pytest.mark.parametrize(
    ("strategy", "module", "said"),
    [
        (lambda: "tp", Language, ["Expected a plan", "none"]),
        (lambda: TensorParallelStrategy(2, {}), Language, ["an empty one"]),
        (lambda: TensorParallelStrategy(2, {"net.layer.*.up": "colwise"}), Language, ["'net.layer.*.up'", "Nearest"]),
        (lambda: TensorParallelStrategy(2, {"net.head": "columns"}), Language, ["net.head: 'columns'", "colwise"]),
        (lambda: TensorParallelStrategy(2, {"net.layers.*.up": "colwise"}), Narrow, ["33", "tp_size=2", "layers.0.up"]),
        (lambda: TensorParallelStrategy(3, {"net.head": "colwise"}), Language, ["tp_size=3 for 2 processes"]),
        (lambda: ContextParallelStrategy(), Handmade, ["scaled_dot_product_attention", "never calls it"]),
        (lambda: ContextParallelStrategy(sequence_dims={"words": 1}), Language, ["['words']"]),
        (lambda: ExpertParallelStrategy(2), Language, ["modules of experts", "Received: none"]),
        (lambda: PipelineStrategy(2), Language, ["pipeline_stage", "Transformer"]),
        (lambda: PipelineStrategy(2, split=["head", "embed"]), Sequence, ["split=['head', 'embed']"]),
        (lambda: PipelineStrategy(2, module="body"), Sequence, ["module='body'"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(strategy, module, said):
    message = refusal(strategy, module)
    assert all(part in message for part in said), message


def test_experts_and_heads_that_do_not_divide_are_refused():
    class Odd(Mixed):
        def __init__(self):
            super().__init__()
            self.net.layers[2] = type(self.net.layers[2])(3)

    assert "3 experts" in refusal(lambda: ExpertParallelStrategy(2), Odd)

    def heads(rank):
        exchanged = Exchanged(dist.group.WORLD)
        with pytest.raises(ValueError, match="3 heads, sp_size=2"):
            exchanged(*torch.randn(3, 1, 3, 4, 8))

    run(heads, 2)


def test_lengths_that_do_not_divide_are_refused_with_the_shape():
    def work(rank):
        with pytest.raises(ValueError, match=r"tokens of shape \[8, 15\].*cp_size=2") as caught:
            train(ContextParallelStrategy(), steps=1, data=Tokens(length=15), validate=False)
        return str(caught.value)

    assert "multiple of 2" in run(work, 2)[0]


# Attention


@pytest.mark.parametrize("kind", ["gathered", "ring", "around", "exchanged"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_over_parts_equals_that_over_the_whole(kind, causal, heads):
    torch.manual_seed(0)
    query = torch.randn(2, heads[0], 12, 8)
    key, value = torch.randn(2, 2, heads[1], 12, 8)
    given = [tensor.requires_grad_() for tensor in (query, key.clone(), value.clone())]
    weights = torch.randn(2, heads[0], 12, 8)
    gqa = {"enable_gqa": True} if heads[0] != heads[1] else {}
    whole = F.scaled_dot_product_attention(*given, is_causal=causal, **gqa)
    (whole * weights).sum().backward()

    def work(rank):
        group = dist.group.WORLD
        attention = {
            "gathered": lambda: Gathered(group), "exchanged": lambda: Exchanged(group),
            "ring": lambda: Ring(group, "allgather"), "around": lambda: Ring(group, "alltoall"),
        }[kind]()  # fmt: skip
        parts = [tensor.detach().chunk(2, 2)[rank].clone().requires_grad_() for tensor in given]
        found = attention(*parts, is_causal=causal, **gqa)
        (found * weights.chunk(2, 2)[rank]).sum().backward()
        torch.testing.assert_close(found, whole.detach().chunk(2, 2)[rank])
        for part, tensor in zip(parts, given):
            torch.testing.assert_close(part.grad, tensor.grad.chunk(2, 2)[rank])

    run(work, 2)


def test_a_mask_is_for_all_keys():
    def work(rank):
        gathered, part = Gathered(dist.group.WORLD), torch.randn(3, 1, 2, 4, 8)
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        found = gathered(*part, attn_mask=mask.chunk(2)[rank])
        torch.testing.assert_close(found, gathered(*part, is_causal=True))
        with pytest.raises(ValueError, match=r"\[4, 4\] for 8 keys"):
            gathered(*part, attn_mask=mask[:4, :4])

    run(work, 2)


def test_weights_of_attention_cannot_be_had_from_parts():
    def work(rank):
        sequences = Sequences("cp", dist.group.WORLD, TorchContextParallelConfig(), torch.device("cpu"))
        layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8)
        with sequences.attention():
            layer(x, x, x, need_weights=False)
            with pytest.raises(ValueError, match="need_weights=True"):
                layer(x, x, x)
        assert layer(x, x, x)[1] is not None

    run(work, 2)


# Loops of one's own


@pytest.mark.parametrize("strategy", [ContextParallelStrategy, SequenceParallelStrategy])
def test_buffers_are_cut_and_put_back(strategy):
    torch.manual_seed(1)
    layer = Block()
    x, y = torch.randn(2, 2, 6, 16)
    F.mse_loss(layer(x), y).backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()

    def work(rank):
        accelerator = Accelerator(cpu=True, strategy=strategy())
        model = accelerator.prepare(layer)
        inputs, targets, kept = x.clone(), y.clone(), torch.arange(6)
        with accelerator.maybe_context_parallel([inputs, targets, kept], [1, 1, 0], {kept}):
            assert inputs.shape == targets.shape == (2, 3, 16)
            accelerator.backward(F.mse_loss(model(inputs), targets))
        assert torch.equal(inputs, x) and torch.equal(targets, y)
        assert kept.tolist() == ([0, 1, 2] if rank == 0 else [3, 4, 5])
        for parameter, gradient in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.grad, gradient)

    run(work, 2)


def test_without_degrees_nothing_is_cut():
    accelerator = Accelerator(cpu=True, strategy="single")
    x = torch.randn(2, 6)
    with accelerator.maybe_context_parallel([x], [1]):
        assert x.shape == (2, 6)


# Stages


def test_stages_of_a_sequence():
    part = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    even, named = [["0"], ["1", "2"], ["3", "4"]], [["0"], ["1", "2", "3"], ["4"]]
    for split, expected in ((None, even), (["1", "4"], named)):
        cut = cut_of(part, PipelineConfig(split=split), 3)
        assert [list(cut(part, stage, 3)._modules) for stage in range(3)] == expected
    with pytest.raises(ValueError, match="5 layers for 6 stages"):
        cut_of(part, PipelineConfig(), 6)
    part[4].weight = part[0].weight
    with pytest.raises(ValueError, match="share a weight"):
        check_apart(part, cut_of(part, PipelineConfig(), 3), 3)
    with pytest.raises(ValueError, match="in none"):
        check_apart(part, lambda part, stage, stages: part[stage : stage + 1] if stage else part[:1], 1)
    assert find_part(part, None) == ("", part)


def test_each_rank_holds_its_stages_only():
    def work(rank):
        accelerator = Accelerator(cpu=True, strategy=PipelineStrategy(2))
        module = Sequence()
        total = sum(p.numel() for p in module.parameters())
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        held = sum(p.numel() for p in model.parameters())
        assert held == sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        with pytest.raises(RuntimeError, match="through the pipeline"):
            model.net(torch.zeros(2, 16, dtype=torch.long))
        return held, total, accelerator.pipeline_parallel_rank, sorted(accelerator.get_state_dict(model))

    (first, total, place, names), (second, _, other, none) = run(work, 2)
    assert first + second == total and (place, other) == (0, 1) and none == []
    assert names == sorted(Sequence().state_dict())


def test_a_function_cuts_what_is_no_sequence():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.second(self.first(x))

    class Half(nn.Module):
        def __init__(self, name, layer):
            super().__init__()
            self.add_module(name, layer)
            self.layer = lambda x: layer(x)

        def forward(self, x):
            return self.layer(x)

    def cut(part, stage, stages):
        name = ("first", "second")[stage]
        return Half(name, getattr(part, name))

    def work(rank):
        accelerator = Accelerator(cpu=True, strategy=PipelineStrategy(2, split=cut))
        torch.manual_seed(0)
        model = accelerator.prepare(nn.ModuleDict({"net": Halves()}))
        model["net"].eval()
        with torch.no_grad():
            found = model["net"](torch.ones(3, 4))
        torch.manual_seed(0)
        torch.testing.assert_close(found, Halves()(torch.ones(3, 4)).detach())

    run(work, 2)


def test_a_step_that_never_calls_the_part_is_told_so():
    class Never(Sequence):
        def training_step(self, batch, batch_idx):
            return torch.zeros((), requires_grad=True)

    with pytest.raises(RankFailed, match="a step that calls the part"):
        run(lambda rank: train(PipelineStrategy(2), module=Never(), steps=1, validate=False), 2)


def test_weights_of_losses_go_through_a_pipeline():
    """Two micro-batches with 1 and 3 items: the loss and the gradients are those of the mean over 4."""

    class Weighted(Sequence):
        def training_step(self, batch, batch_idx):
            logits = self.net(placed(batch)).flatten(0, 1)
            labels = batch["labels"].flatten()
            valid = int((labels != -100).sum())
            return {"loss": F.cross_entropy(logits, labels), "weight": valid}

    class Some(Tokens):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            item["labels"] = item["labels"].clone()
            item["labels"][1 + 3 * (index % 3) :] = -100
            return item

    options = {"steps": 3, "validate": False, "data": Some()}
    (expected,) = run(lambda rank: train(module=Weighted(), **options), 1, group=False)
    found = run(lambda rank: train(PipelineStrategy(2, microbatches=4), module=Weighted(), **options), 2)[0]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-5, atol=1e-6)


def test_a_mesh_that_does_not_match_the_ranks_is_refused_with_the_sizes():
    def work(rank):
        with pytest.raises(ValueError, match="dp_replicate_size=2, tp_size=2 for 2 processes"):
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2))

    run(work, 2)


# Losses, gradients, processes that are started


def test_losses_on_a_divided_vocabulary():
    class Loss(Language):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch)[0])

    plan = {**PLAN, "net.head": "colwise_loss_parallel"}
    (expected,) = run(lambda rank: train(module=Loss(), steps=3), 1, group=False)
    strategy = TensorParallelStrategy(2, plan, loss_parallel=True)
    found = run(lambda rank: train(strategy, module=Loss(), steps=3, inference_mode=False), 2)[0]
    compare(found, expected)


def test_parameters_that_some_ranks_leave_out_count_as_zero_there():
    def work(rank):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
        layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1)])
        model = accelerator.prepare(layers)
        accelerator.backward(model[rank](torch.ones(1, 1)).sum())
        return [None if p.grad is None else p.grad.item() for p in model.parameters()]

    assert run(work, 2) == [[0.5, 0.5, None, None]] * 2


def test_gradients_of_a_window_are_reduced_once():
    def work(rank):
        accelerator = Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2), gradient_accumulation_steps=2
        )
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        seen = []
        for value in (1.0, 2.0):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor([[value * (1 + rank)]])).sum())
            seen.append(model.weight.grad.item())
        return seen

    assert run(work, 2) == [[0.5, 2.25], [1.0, 2.25]]


def test_stages_on_meta_are_made_where_they_are_kept():
    def work(rank):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, pp_size=2))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model = accelerator.prepare_model(model)
        return {name: value.tolist() for name, value in model.named_parameters()}

    first, second, third, fourth = run(work, 4)
    assert first == second and third == fourth  # replicas of one stage
    assert sorted(first) == ["0.bias", "0.weight", "1.bias", "1.weight"] and "3.weight" in third


@pytest.mark.parametrize("make", [TensorParallelStrategy, ContextParallelStrategy, PipelineStrategy])
def test_strategies_go_to_processes_that_are_started(make):
    sent = pickle.loads(pickle.dumps(make(2)))
    assert sent.parallelism.total_size == 2 and sent.world.size == 1


def test_async_tensor_parallel_needs_cuda():
    handler = TorchTensorParallelConfig(enable_async_tp=True, plan=PLAN)
    strategy = ParallelismConfig(tp_size=2, tp_handler=handler)
    assert "'cpu'" in refusal(lambda: strategy, Language)


def test_a_rank_that_fails_is_named():
    class Fails(Sequence):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and torch.distributed.get_rank() == 1:
                raise KeyError("a step of rank 1")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RankFailed, match="Rank 1 of 2 raised KeyError") as caught:
        run(lambda rank: train(PipelineStrategy(2), module=Fails(), validate=False), 2, patience=0.0)
    assert caught.value.rank == 1
