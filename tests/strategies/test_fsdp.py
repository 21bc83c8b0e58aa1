"""FSDP: options and launches, what is sharded, where weights come from, steps that are not plain, and failures."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from drivetrain import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs, Trainer, TrainModule, strategies
from drivetrain.strategies import wrapping
from drivetrain.strategies.deferred import Deferred, Recording
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies.fsdp1 import FSDP1Strategy
from drivetrain.tests.conformance.cells import Block, Transformer, loss_of, tokens
from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.loop.models import quiet
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, StateDictType
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

# Options


def test_words_and_options_make_the_engine():
    assert type(strategies.create("fsdp")) is type(strategies.create("fsdp2")) is FSDPStrategy
    assert strategies.create("hsdp").name == "hsdp"
    assert type(strategies.create("fsdp1")) is FSDP1Strategy
    assert type(strategies.create(FullyShardedDataParallelPlugin(fsdp_version=2))) is FSDPStrategy
    assert type(strategies.create(plugins=[FullyShardedDataParallelPlugin()])) is FSDP1Strategy
    hybrid = FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="HYBRID_SHARD")
    assert strategies.create(hybrid).name == "hsdp"
    with pytest.raises(ValueError, match="Expected one engine. Received: strategy='fsdp', and fsdp_plugin"):
        strategies.create("fsdp", plugins=[FullyShardedDataParallelPlugin(fsdp_version=1)])
    with pytest.raises(ValueError, match="Expected fsdp_version=2. Received: 1"):
        FSDPStrategy(FullyShardedDataParallelPlugin(fsdp_version=1))


def test_options_come_from_a_launch(monkeypatch):
    said = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    plugin = strategies.create(size=2).plugin
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is False
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) and plugin.offloads
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT and plugin.full_state
    assert plugin.activation_checkpointing and plugin.cpu_ram_efficient_loading
    assert [type(unit) for unit in wrapping.units(Transformer(), plugin.policy_for(Transformer()))] == [Block, Block]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3"),
        ({"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}, "Use strategy='ddp'"),
        ({"sharding_strategy": "SOME"}, "Received: sharding_strategy='SOME'"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "Use SHARDED_STATE_DICT"),
        ({"auto_wrap_policy": "big"}, "auto_wrap_policy='big'"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "sync_module_states=False"),
        ({"fsdp_version": 1, "mixed_precision_policy": MixedPrecisionPolicy()}, "for fsdp_version=1"),
        ({"mixed_precision_policy": "bf17"}, "Received: 'bf17'"),
        ({"fsdp_version": 2, "reshard_after_forward": "maybe"}, "Received: 'maybe'"),
    ],
)
def test_values_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FullyShardedDataParallelPlugin(**options)


def test_a_word_gives_all_dtypes_of_a_policy():
    policy = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16").mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    fields = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    policy = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=fields).mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def test_an_option_without_effect_in_version_2_is_told(caplog):
    FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=False, limit_all_gathers=False)
    assert "use_orig_params=False has no effect" in caplog.text and "limit_all_gathers=False" in caplog.text


# Units


class Named(nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_units_are_found_by_class_size_hand_or_the_model_itself():
    model, named = Transformer(), Named()
    assert wrapping.units(model) == [model.layers[1], model.layers[0]]
    assert wrapping.units(named) == [named.body[2], named.body[0]]
    assert wrapping.units(model, False) == []
    assert wrapping.units(model, [model.layers[0]]) == [model.layers[0]]
    assert wrapping.units(model, {nn.LayerNorm}, ignored=[model.layers]) == [model.norm]
    assert wrapping.units(model, lambda module: isinstance(module, nn.Embedding)) == []  # it shares its weight
    large = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=3000)
    assert set(wrapping.units(model, large.policy_for(model))) <= set(model.layers)
    wrong = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Layer"])
    with pytest.raises(ValueError, match=r"Received: \['Layer'\]; it has Block"):
        wrong.policy_for(model)


def test_what_is_sharded():
    def work(rank):
        accelerator = Accelerator(strategy=FSDPStrategy(ignored_modules=r"norm"))
        model = accelerator.prepare(Transformer())
        kinds = {name: isinstance(p, DTensor) for name, p in model.named_parameters()}
        plugin = accelerator.state.fsdp_plugin is accelerator.strategy.plugin
        seen = accelerator.is_fsdp2, accelerator.distributed_type.value, accelerator.data_parallel_shard_rank, plugin
        return kinds, seen, model.embedding.weight is model.head.weight

    for rank, (kinds, seen, tied) in enumerate(run(work)):
        assert {name for name, sharded in kinds.items() if not sharded} == {"norm.weight", "norm.bias"}
        assert seen == (True, "FSDP", rank, True) and tied


def test_sizes_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(RankFailed, match="Received: replicate=2, shard=2 for 2 processes") as failure:
        run(lambda rank: Accelerator(strategy=FSDPStrategy(replicate=2, shard=2)))
    assert "ValueError" in failure.value.details


# Where weights come from


class Initialized(nn.Module):
    """Initialized in ways that constructors use."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 20)
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(20, 40)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 20), std=0.02))
        self.random = nn.Parameter(torch.randn(30, 30) * 0.1)
        self.unit = nn.Parameter(nn.init.eye_(torch.empty(30, 30)))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 500)]
        self.register_buffer("mask", torch.tril(torch.ones(30, 30)), persistent=False)
        self.table = torch.rand(30, 30)
        self.apply(self._initialize)
        with torch.no_grad():
            self.layers[0].weight.copy_(self.layers[1].weight).mul_(2)
            self.embedding.weight[0].zero_()

    def _initialize(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def test_deferred_values_are_those_of_building_at_once():
    torch.manual_seed(3)
    expected, after = Initialized(), torch.rand(3)
    torch.manual_seed(3)
    recording = Recording()
    with Deferred(recording, least=1000):
        model = Initialized()
    assert torch.equal(torch.rand(3), after) and model.rates == expected.rates
    assert recording.knows(model.orthogonal) and recording.knows(model.mask) and recording.knows(model.table)
    from drivetrain.strategies import deferred

    deferred.materialize(model, recording)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(model.mask, expected.mask) and torch.equal(model.table, expected.table)


def peak() -> int:
    """The most memory of this process since `forget_peak`, in MiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


class Wide(TrainModule):
    """128 MiB of weights in 32 layers."""

    def configure_model(self):
        layers = (nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Tanh()) for _ in range(32))
        self.layers = nn.ModuleList(layers)


def test_a_model_is_built_sharded_and_gathered_without_being_whole_anywhere(tmp_path):
    def build(strategy):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(7)
        module = Wide()
        before = forget_peak()
        with accelerator.strategy.init_context():
            module.configure_model()
        model = accelerator.prepare(module)
        return accelerator, model, peak() - before

    def work(rank):
        accelerator, model, built = build("fsdp")
        before = forget_peak()
        accelerator.save_model(model, tmp_path / "whole", max_shard_size="50MB")
        saved = peak() - before
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        before = forget_peak()
        from drivetrain import load_checkpoint_in_model

        load_checkpoint_in_model(model, tmp_path / "whole", strict=True)
        loaded = peak() - before
        total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
        return built, saved, loaded, total

    def alone(rank):
        _, model, built = build(None)
        return built, sum(parameter.double().sum().item() for parameter in model.parameters())

    ((whole, expected),) = run(alone, 1, group=False)
    assert whole >= 96  # 128 MiB, less what this process had freed before
    for built, saved, loaded, total in run(work):
        assert built <= 64 + 36  # its half, and a layer at a time
        assert saved <= 64 and loaded <= 64
        assert total == expected


def test_weights_of_the_first_rank_fill_models_that_are_on_meta_elsewhere():
    def work(rank):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
        accelerator = Accelerator(fsdp_plugin=plugin)
        if rank == 0:
            model = Transformer()
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        else:
            with torch.device("meta"):
                model = Transformer()
            expected = {}
        found = accelerator.get_state_dict(accelerator.prepare(model))
        return all(torch.equal(found[name], value) for name, value in expected.items()), len(found)

    assert run(work) == [(True, 29), (True, 0)]


# Steps


def weights(accelerator, model):
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def weighted(rank, strategy, ranks):
    """Windows of three micro-batches, each loss with another weight."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=3)
    model = Transformer()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for number, rows in enumerate(tokens(24).tensors[0].split(4)):
        rows = rows.chunk(ranks)[rank if ranks > 1 else 0]
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows), weight=(number % 3 + 1) * len(rows))
            optimizer.step()
            optimizer.zero_grad()
    return weights(accelerator, model)


def test_windows_are_rescaled_while_gradients_wait_for_their_reduction():
    expected = run(weighted, 1, None, 1, group=False)[0]
    found = run(weighted, 2, "fsdp", 2)[0]
    assert largest_difference(found, expected) <= 1e-5


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_made_before_or_after_and_already_stepped(before):
    def work(rank, strategy, ranks):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        model = Transformer()
        if before:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            loss_of(model, tokens(4).tensors[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer, model = accelerator.prepare(optimizer, model)
        else:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        rows = tokens(8, seed=5).tensors[0]
        accelerator.backward(loss_of(model, rows.chunk(ranks)[rank]))
        optimizer.step()
        return weights(accelerator, model)

    expected = run(work, 1, None, 1, group=False)[0]
    assert largest_difference(run(work, 2, "fsdp", 2)[0], expected) <= 1e-5


class Manual(TrainModule):
    """Steps twice a batch, with its own layers called directly."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = Transformer()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(loss_of(self.net, batch[0]))
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def test_manual_steps_see_the_weights_that_they_have_just_changed(tmp_path):
    def work(rank, strategy, ranks):
        module = Manual()
        trainer = quiet(max_epochs=1, seed=1, strategy=strategy, default_root_dir=tmp_path / str(strategy))
        trainer.fit(module, DataLoader(tokens(16), 8 // ranks))
        return weights(trainer.accelerator, module)

    expected = run(work, 1, "auto", 1)[0]
    assert largest_difference(run(work, 2, "fsdp", 2)[0], expected) <= 1e-5
    with pytest.raises(RankFailed, match="automatic_optimization=False. Use strategy='fsdp'"):
        run(work, 2, "fsdp1", 2)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def work(rank):
        accelerator = Accelerator(
            strategy="fsdp", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
        )
        model = Transformer()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        before = weights(accelerator, model)
        accelerator.backward(loss_of(model, tokens(4).tensors[0]))
        if rank == 1:
            next(model.parameters()).grad._local_tensor.fill_(float("inf"))
        optimizer.step()
        after = weights(accelerator, model)
        return accelerator.optimizer_step_was_skipped, max([0, *((before[name] != after[name]).sum() for name in after)])

    assert run(work) == [(True, 0), (True, 0)]


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x, which):
        return self.frozen(self.first(x) if which == 0 else self.second(x))


def test_parameters_that_only_some_ranks_use_count_as_zero_on_the_others():
    def work(rank, strategy):
        accelerator = Accelerator(strategy=strategy)
        model = Branches()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4) * (rank + 1), rank).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return weights(accelerator, model)

    expected = run(work, 2, "ddp_find_unused_parameters_true")[0]
    assert largest_difference(run(work, 2, "fsdp")[0], expected) <= 1e-6


def several(rank, strategy, folder):
    """Two models with an optimizer each, their blocks compiled, saved and loaded between two steps."""
    accelerator = Accelerator(cpu=True, strategy=strategy, dynamo_backend="eager")
    models = [Transformer(), Transformer(1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)

    def step():
        rows = tokens(8).tensors[0].chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(sum(loss_of(model, rows) for model in models))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        return [weights(accelerator, model) for model in models]

    step()
    accelerator.save_state(folder)
    found = step()
    accelerator.load_state(folder)
    again = step()
    return found, all(torch.equal(a[name], b[name]) for a, b in zip(found, again) for name in a)


def test_several_models_with_compiled_blocks(tmp_path):
    expected, _ = run(several, 1, None, tmp_path / "one", group=False)[0]
    found, same = run(several, 2, "fsdp", tmp_path / "two")[0]
    assert same and all(largest_difference(one, other) <= 1e-5 for one, other in zip(found, expected))
    assert (tmp_path / "two" / "model_1.shards.json").exists()


def test_uneven_batches_are_refused_where_they_would_hang():
    def work(rank):
        accelerator = Accelerator(strategy="fsdp")
        with accelerator.join_uneven_inputs([accelerator.prepare(Transformer())]):
            pass

    with pytest.raises(RankFailed, match="join_uneven_inputs. Leave it out"):
        run(work)


# Evaluation, interruption, failure


class Language(TrainModule):
    def __init__(self, dies_at=None):
        super().__init__()
        self.net, self.seen, self.dies_at = Transformer(), [], dies_at

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch[0])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.seen.extend(batch[0][:, 0].tolist())
        self.log("val", loss_of(self.net, batch[0]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0][:, :-1]).argmax(-1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize(("rows", "engine"), [(1, "fsdp"), (9, "fsdp"), (1, "fsdp1")])
def test_evaluation_sees_each_sample_once_though_all_ranks_pass_equally_often(tmp_path, rows, engine):
    def work(rank, strategy, ranks):
        module = Language()
        trainer = quiet(strategy=strategy, default_root_dir=tmp_path)
        data = DataLoader(tokens(rows, seed=3), 4 // ranks)
        (metrics,) = trainer.validate(module, data, verbose=False)
        predicted = trainer.predict(module, data)
        return metrics["val"], len(module.seen), sum(len(part) for part in predicted)

    ((expected, _, _),) = run(work, 1, "auto", 1)
    found = run(work, 2, engine, 2)
    assert all(abs(value - expected) <= 1e-6 for value, _, _ in found)
    assert sum(seen for _, seen, _ in found) == rows == sum(count for _, _, count in found)


def fit(rank, folder, resume, die):
    module = Language()
    if die is not None:
        forward = module.net.layers[1].forward
        calls = iter(range(1_000_000))

        def dying(x):  # inside of the gathering of this block's weights, while the others go on to the next
            if rank == 1 and next(calls) == die:
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(x)

        module.net.layers[1].forward = dying
    trainer = Trainer(
        strategy="fsdp", max_epochs=3, seed=4, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(tokens(24), 4, shuffle=True), resume=resume)
    return weights(trainer.accelerator, module), trainer.global_step


def test_a_rank_lost_in_a_gather_ends_all_and_what_was_saved_goes_on_bit_for_bit(tmp_path):
    expected, steps = run(fit, 2, tmp_path / "whole", None, None)[0]
    assert steps == 9
    with pytest.raises(RankFailed, match="Rank 1 of 2 was killed by SIGKILL") as failure:
        run(fit, 2, tmp_path / "killed", None, 5, patience=30)
    assert "Then rank 0 " in str(failure.value)  # it ended by itself, and said why
    found, steps = run(fit, 2, tmp_path / "killed", "last", None)[0]
    assert steps == 9 and all(torch.equal(found[name], value) for name, value in expected.items())
