"""Several kinds of parallelism at once: what each rank holds, one file of it all, and options that go together."""

from __future__ import annotations

import pytest
import torch
from drivetrain import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineConfig,
    load_checkpoint_in_model,
)
from drivetrain.strategies import create
from drivetrain.tests.conformance.parallel_cells import CELLS, Sequence, compare, reference, train
from drivetrain.tests.distributed import run
from safetensors.torch import load_file

SHARES = {  # of the weights, what each of the four ranks holds at most
    "pp-1F1B": 0.6, "fsdp+pp": 0.3, "pp+tp": 0.35, "fsdp+ep": 0.26, "pp+ep": 0.55, "fsdp+pp-ZBVZeroBubble": 0.4,
}  # fmt: skip


@pytest.mark.parametrize("name", SHARES)
def test_each_rank_holds_its_part_and_all_of_them_write_one_file(name, tmp_path):
    ranks, make, kind, _ = CELLS[name]
    expected = kind().state_dict()

    def work(rank):
        accelerator = Accelerator(cpu=True, strategy=make())
        module = kind()
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        held = sum(_local(parameter).numel() for parameter in model.parameters())
        assert held == sum(_local(p).numel() for group in optimizer.param_groups for p in group["params"])
        accelerator.save_model(model, tmp_path / "model")
        state = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint_in_model(model, str(tmp_path / "model"))
        again = accelerator.get_state_dict(model)
        assert all(torch.equal(again[key], value) for key, value in state.items()) and again.keys() == state.keys()
        return held, state

    found = run(work, ranks)
    total = sum(value.numel() for value in expected.values())
    assert all(held <= SHARES[name] * total for held, _ in found), [held / total for held, _ in found]
    for written in (load_file(tmp_path / "model" / "model.safetensors"), found[0][1]):
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], value) for key, value in expected.items())


def _local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


OPTIONS = [
    {"activation_checkpointing": True, "transformer_cls_names_to_wrap": ["Block"]},
    {"auto_wrap_policy": "NO_WRAP", "cpu_offload": True},
    {"ignored_modules": r"net\.block0\.norm1"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_stages_are_sharded_with_the_options_of_fsdp(options):
    config = ParallelismConfig(dp_shard_size=2, pp_size=2, pp_handler=PipelineConfig(schedule="GPipe", microbatches=2))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    settings = {"steps": 3, "accumulate": 2, "validate": False}
    found = run(lambda rank: train(plugin.strategy(config), module=Sequence(), **settings), 4)[0]
    compare(found, reference("fsdp+pp", **settings))


@pytest.mark.parametrize("name", ["fsdp+ep", "ep+tp"])
def test_experts_are_what_they_were_after_an_evaluation(name):
    """Their weights stand in for all while they compute; a hook that gathers and shares them out must not see that."""
    ranks, make, kind, more = CELLS[name]
    settings = {"steps": 2, "accumulate": 4}
    found = run(lambda rank: train(make(), module=kind(), **more, **settings), ranks)[0]
    compare(found, reference(name, **settings))


def test_options_that_stages_do_not_have_are_refused():
    config = ParallelismConfig(dp_shard_size=2, pp_size=2)
    whole = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    with pytest.raises(ValueError, match="'FULL_STATE_DICT'.*merge-weights"):
        create(plugins=[whole], parallelism=config)
    with pytest.raises(ValueError, match="dp_shard_size of 2 or more.*pp_size=2"):
        create(plugins=[FullyShardedDataParallelPlugin(fsdp_version=2)], parallelism=ParallelismConfig(pp_size=2))
    with pytest.raises(ValueError, match="fsdp_version=2.*dp_shard_size=2, tp_size=2"):
        create(
            plugins=[FullyShardedDataParallelPlugin(fsdp_version=1)],
            parallelism=ParallelismConfig(dp_shard_size=2, tp_size=2),
        )
