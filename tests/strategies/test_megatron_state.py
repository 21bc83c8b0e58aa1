"""Megatron's checkpoints: what is in them, from one arrangement of ranks to another, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.tests.distributed import RankFailed, run

pytest.importorskip("megatron.core")

from drivetrain import Accelerator, MegatronLMDummyScheduler, MegatronModel, MegatronStrategy  # noqa: E402
from drivetrain.strategies.checkpoint import Checkpoint, merging  # noqa: E402
from drivetrain.strategies.contents import load_module, load_state  # noqa: E402
from drivetrain.strategies.megatron_models import architecture  # noqa: E402
from drivetrain.strategies.megatron_state_parts import locals_of  # noqa: E402
from drivetrain.tests.conformance.megatron_cells import FIELDS, fill, preload  # noqa: E402
from drivetrain.tests.conformance.parallel_cells import Tokens  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(600)
SMALL = {**FIELDS, "num_layers": 2}
EXPERTS = {**SMALL, "num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "gated_linear_unit": True,
           "activation_func": "silu"}  # fmt: skip
preload()


class Run:
    """A model in training by a loop of Accelerate's kind, on this rank."""

    def __init__(self, fields: Any, *, groups: int = 1, precision: str = "no", **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, strategy=MegatronStrategy(**options), mixed_precision=precision)
        model = MegatronModel(fields)
        fill(model.chunks)
        parameters = [parameter for parameter in model.parameters()]
        parts = [{"params": [one for one in parameters if (one.ndim > 1) == bool(index)]} for index in range(2)]
        optimizer = torch.optim.AdamW(parts if groups == 2 else parameters, lr=1e-2, eps=1e-3)
        scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=4)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def step(self, number: int) -> float:
        """Train on a batch that depends on its number alone."""
        world = self.accelerator.strategy.data_world
        rows = range(8 * number + world.rank, 8 * number + 8, world.size)
        samples = [Tokens(64)[row] for row in rows]
        self.model.train()
        return float(self.model({name: torch.stack([one[name] for one in samples]) for name in ("tokens", "labels")}))

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the whole weights, on the first rank."""
        return {name: one.clone() for name, one in self.accelerator.get_state_dict(self.model).items()}


def on_ranks(function: Any, ranks: int = 2) -> list[Any]:
    def inside(rank: int) -> Any:
        with OnCPU():
            return function(rank)

    return run(inside, ranks, group=ranks > 1, timeout=300)


def saved(folder: Path, fields: dict[str, Any] = SMALL, *, ranks: int = 2, **options: Any) -> dict[str, torch.Tensor]:
    """Save after two steps; return the whole weights."""

    def rank(index: int) -> Any:
        made = Run(fields, **options)
        made.step(0), made.step(1)
        made.accelerator.save_state(folder)
        return made.whole()

    return on_ranks(rank, ranks)[0]


def gone_on(folder: Path, fields: dict[str, Any] = SMALL, *, ranks: int = 2, **options: Any) -> tuple[Any, float]:
    """Load; return the whole weights, and the loss of the third step and that after it."""

    def rank(index: int) -> Any:
        made = Run(fields, **options)
        made.accelerator.load_state(folder)
        return made.whole(), made.step(2), made.step(3), made.scheduler.get_last_lr()

    return on_ranks(rank, ranks)[0]


# What is in a checkpoint


def test_a_checkpoint_has_the_whole_model_by_its_own_names_and_no_pickle(tmp_path):
    weights = saved(tmp_path / "c", tp_degree=2)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert {Path(name).suffix for name in checkpoint.files} == {".json", ".safetensors"}
    stored = load_module(checkpoint)
    assert set(stored) == set(weights) and stored["embedding.word_embeddings.weight"].shape == (32, 16)
    assert stored["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (48, 16)
    for name, value in weights.items():
        assert torch.equal(stored[name], value), name
    state = load_state(checkpoint, "optimizer-0")
    assert set(state["state"]) == set(weights) and set(state["param_groups"][0]["params"]) == set(weights)
    moments = state["state"]["decoder.layers.1.mlp.linear_fc2.weight"]
    assert float(moments["step"]) == 2 and moments["exp_avg"].shape == moments["exp_avg_sq"].shape == (16, 32)
    assert checkpoint.has("rank-00001-megatron.json")
    merging.merge(merging.find(tmp_path / "c"), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(merged) == set(weights) and all(torch.equal(merged[name], value) for name, value in weights.items())
    parts = checkpoint.json("model.shards.json")["tensors"]["decoder.layers.0.mlp.linear_fc1.weight"]["parts"]
    assert sorted(part[1:] for part in parts) == [[[0, 0], [16, 16]], [[16, 0], [16, 16]]]


def test_weights_are_those_in_float32_that_the_optimizer_trains(tmp_path):
    half = saved(tmp_path / "c", precision="bf16", use_distributed_optimizer=True)
    stored = load_module(Checkpoint.open(tmp_path / "c"))
    assert {one.dtype for one in half.values()} == {torch.bfloat16}
    assert {one.dtype for one in stored.values()} == {torch.float32}
    assert all(torch.equal(stored[name].bfloat16(), value) for name, value in half.items())
    assert any(not torch.equal(stored[name], value.float()) for name, value in half.items())


def test_a_model_is_saved_as_others_read_it_and_loaded_again(tmp_path):
    def rank(index: int) -> Any:
        made = Run(SMALL, pp_degree=2)
        made.step(0)
        whole = made.whole()
        made.accelerator.save_model(made.model, tmp_path / "model", max_shard_size="20KB")
        everywhere = made.accelerator.world.broadcast_object(whole)
        made.step(1)
        made.accelerator.strategy.load_state_dict(made.model, everywhere)
        assert bool(whole) == (index == 0)
        return whole, made.whole()

    (whole, again), _ = on_ranks(rank)
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "model").glob("model-*.safetensors"):
        stored |= load_file(file)
    assert set(stored) == set(whole) == set(again) and len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert all(torch.equal(stored[name], value) and torch.equal(again[name], value) for name, value in whole.items())


def test_states_of_the_optimizer_are_left_out_where_the_options_say_so(tmp_path):
    def rank(index: int, folder: str, **options: Any) -> Any:
        made = Run(SMALL, use_distributed_optimizer=True, **options)
        made.step(0)
        made.accelerator.save_state(tmp_path / folder)

    on_ranks(functools.partial(rank, folder="without", no_save_optim=True))
    on_ranks(functools.partial(rank, folder="with"))
    state = load_state(Checkpoint.open(tmp_path / "without"), "optimizer-0")
    assert state["state"] == {} and len(state["param_groups"][0]["params"]) == 28

    def steps(index: int, folder: str, **options: Any) -> Any:
        made = Run(SMALL, use_distributed_optimizer=True, **options)
        made.accelerator.load_state(tmp_path / folder)
        made.step(1)
        inner = made.accelerator.strategy.engine_of(made.model).optimizer.chained_optimizers[0].optimizer
        return {float(state["step"]) for state in inner.state.values()}

    assert on_ranks(functools.partial(steps, folder="without")) == [{1.0}] * 2
    assert on_ranks(functools.partial(steps, folder="with", no_load_optim=True)) == [{1.0}] * 2
    assert on_ranks(functools.partial(steps, folder="with")) == [{2.0}] * 2


# From one arrangement to another


@functools.cache
def going_on(experts: bool = False) -> tuple[Any, float]:
    """The steps after the checkpoint, on one process without one."""

    def rank(index: int) -> Any:
        made = Run(EXPERTS if experts else SMALL)
        made.step(0), made.step(1)
        return made.whole(), made.step(2), made.step(3), made.scheduler.get_last_lr()

    return on_ranks(rank, 1)[0]


WAYS = {
    "layers": {"tp_degree": 2, "sequence_parallelism": True},
    "stages": {"pp_degree": 2, "num_micro_batches": 2},
    "replicas": {"use_distributed_optimizer": True},
}


@pytest.mark.parametrize(("first", "second"), [("layers", "stages"), ("stages", "replicas"), ("replicas", "layers")])
def test_from_one_arrangement_to_another(first, second, tmp_path):
    saved(tmp_path / "c", **WAYS[first])
    weights, *rest = gone_on(tmp_path / "c", **WAYS[second])
    expected, *others = going_on()
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-6
    assert rest[:2] == pytest.approx(others[:2], rel=1e-5) and rest[2] == others[2]


SHARED_EXPERTS = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}


@pytest.mark.parametrize(("first", "second"), [(SHARED_EXPERTS, {}), ({}, SHARED_EXPERTS)], ids=["from", "to"])
def test_experts_that_ranks_share_go_over(first, second, tmp_path):
    saved(tmp_path / "c", EXPERTS, **first)
    stored = load_module(Checkpoint.open(tmp_path / "c"))
    assert stored["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"].shape == (64, 16)
    weights, *rest = gone_on(tmp_path / "c", EXPERTS, **second)
    expected, *others = going_on(experts=True)
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-6
    assert rest[:2] == pytest.approx(others[:2], rel=1e-5)


def test_a_module_that_is_held_twice_is_saved_once(tmp_path):
    """T5's own output layer has two names."""
    fields = architecture({**SMALL, "positions": "relative", "tied": False}, "t5")

    def rank(index: int, **options: Any) -> Any:
        made = Run(fields, **options)
        made.accelerator.save_state(tmp_path / "c") if options else made.accelerator.load_state(tmp_path / "c")
        return made.whole()

    whole = on_ranks(functools.partial(rank, tp_degree=2))[0]
    stored = load_module(Checkpoint.open(tmp_path / "c"))
    assert stored["output_layer.weight"] is stored["lm_head.output_layer.weight"]
    again = on_ranks(rank, 1)[0]
    assert set(again) == set(whole) and all(torch.equal(again[name], value) for name, value in whole.items())


def test_padding_of_a_vocabulary_is_no_part_of_the_model(tmp_path):
    fields = {**SMALL, "vocab_size": 33}
    saved(tmp_path / "c", fields, tp_degree=2)
    stored = load_module(Checkpoint.open(tmp_path / "c"))
    assert stored["embedding.word_embeddings.weight"].shape == (33, 16)
    alone = gone_on(tmp_path / "c", fields, ranks=1)
    shared = gone_on(tmp_path / "c", fields, tp_degree=2)
    assert shared[1:3] == pytest.approx(alone[1:3], rel=1e-5)


def test_random_states_go_on_where_ranks_stand_as_they_did(tmp_path):
    """Dropout in layers that ranks share goes on; in another arrangement it begins anew, with a warning."""
    fields = {**SMALL, "attention_dropout": 0.3, "hidden_dropout": 0.3}

    def rank(index: int) -> Any:
        made = Run(fields, tp_degree=2)
        made.step(0)
        made.accelerator.save_state(tmp_path / "c")
        whole = made.step(1)
        made.accelerator.load_state(tmp_path / "c")
        return whole, made.step(1)

    def other(index: int) -> Any:
        from drivetrain.strategies import megatron_random

        told: list[Any] = []
        megatron_random.logger.warning = lambda text, *values: told.append(text % values)  # type: ignore[method-assign]
        made = Run(fields, pp_degree=2)
        made.accelerator.load_state(tmp_path / "c")
        return told

    for whole, again in on_ranks(rank):
        assert whole == again
    told, nothing = on_ranks(other)
    assert len(told) == 1 and "begin anew" in told[0] and not nothing


def test_the_state_of_an_optimizer_is_whole_for_scripts(tmp_path):
    def rank(index: int, **options: Any) -> Any:
        made = Run(SMALL, **options)
        made.step(0)
        made.accelerator.save_state(tmp_path / "-".join(options))
        state = made.optimizer.state_dict()
        everywhere = made.accelerator.world.broadcast_object(state)
        kept, loss = made.whole(), made.step(1)
        made.accelerator.strategy.load_state_dict(made.model, made.accelerator.world.broadcast_object(kept))
        made.optimizer.load_state_dict(everywhere)
        return state, loss, made.step(1)

    for options in ({"tp_degree": 2}, {"pp_degree": 2}, {"use_distributed_optimizer": True}):
        (state, loss, again), (nothing, *_) = on_ranks(functools.partial(rank, **options))
        saved = load_state(Checkpoint.open(tmp_path / "-".join(options)), "optimizer-0")
        assert nothing == {} and loss == again and len(state["param_groups"][0]["params"]) == 28
        assert set(state["state"]) == set(saved["state"])
        for name, one in saved["state"].items():
            assert all(torch.equal(state["state"][name][key], value) for key, value in one.items()), name


def test_a_save_in_the_background_holds_what_was_there(tmp_path):
    def rank(index: int) -> Any:
        made = Run(SMALL, use_distributed_optimizer=True)
        made.step(0)
        whole = made.whole()
        made.accelerator.save_state(tmp_path / "c", asynchronous=True)
        made.step(1)
        made.accelerator.wait_for_saves()
        return whole

    whole = on_ranks(rank)[0]
    stored = load_module(Checkpoint.open(tmp_path / "c"))
    assert all(torch.equal(stored[name], value) for name, value in whole.items())


def test_megatrons_own_checkpoints_by_name(tmp_path):
    """Only where they are asked for: they are loaded by unpickling."""

    def rank(index: int) -> Any:
        made = Run(SMALL, tp_degree=2)
        made.step(0)
        made.accelerator.strategy.save_native(made.model, tmp_path / "native")
        return made.whole(), made.step(1)

    def other(index: int) -> Any:
        made = Run(SMALL, pp_degree=2)
        made.accelerator.strategy.load_native(made.model, tmp_path / "native")
        return made.whole(), made.step(1)

    (whole, loss), _ = on_ranks(rank)
    (again, other_loss), _ = on_ranks(other)
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert other_loss == pytest.approx(loss, rel=1e-5)


# What is refused


def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    saved(tmp_path / "c", tp_degree=2)
    (file,) = (tmp_path / "c").glob("optimizer-0.shard-00001.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def rank(index: int) -> Any:
        made = Run(SMALL, pp_degree=2)
        before = made.whole()
        try:
            made.accelerator.load_state(tmp_path / "c")
        except Exception as error:
            return f"{type(error).__name__}: {error}", before, made.whole()

    for said, before, after in on_ranks(rank):
        assert said.startswith("CheckpointError") and "optimizer-0.shard-00001.safetensors" in said
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_layers_that_megatron_rearranges_are_refused(tmp_path):
    """Megatron's experts in one tensor: their checkpoints have them transposed, so no box of them is a view."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    weight = torch.nn.Parameter(torch.zeros(4, 6))

    def build(key: str, tensor: torch.Tensor, replica: Any, flattened: Any) -> Any:
        return ShardedTensor.from_rank_offsets(key, tensor.detach().t().contiguous(), replica_id=replica)

    class Chunk:
        def sharded_state_dict(self, metadata: Any) -> Any:
            return {"experts.weight1": ShardedTensorFactory("experts.weight1", weight, build, None, (0, 0, 0))}

    with pytest.raises(ValueError, match=r"Received: experts\.weight1, .* Use moe_grouped_gemm=False"):
        locals_of([Chunk()])


def test_a_state_without_names_is_refused(tmp_path):
    def rank(index: int) -> Any:
        Run(SMALL).optimizer.load_state_dict({"in_order": True, "state": {}, "param_groups": [{"params": [0]}]})

    with pytest.raises(RankFailed, match="Expected parameters by name in the optimizer for Megatron"):
        on_ranks(rank, 1)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({**SMALL, "num_layers": 4}, {}, "Expected the weights of MegatronModel. Received: missing .*layers.2"),
        ({**SMALL, "ffn_hidden_size": 64}, {}, r"linear_fc1.* to have the shape \[64.*Received: \[32"),
        (SMALL, {"groups": 2}, r"the groups of parameters of optimizer 0: \[18, 10\] parameters. Received: \[28\]"),
    ],
    ids=["layers", "shape", "groups"],
)
def test_another_model_or_optimizer_is_refused_by_name(fields, options, message, tmp_path):
    saved(tmp_path / "c", tp_degree=2)
    with pytest.raises(RankFailed, match=message):
        gone_on(tmp_path / "c", fields, tp_degree=2, **options)
