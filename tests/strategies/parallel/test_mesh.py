"""ParallelismConfig: degrees, what may be combined, what a launch says, and which engine they ask for."""

from __future__ import annotations

import json

import pytest
from drivetrain import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    PipelineConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from drivetrain.strategies import create

ENGINES = [
    ({"tp_size": 2}, "TensorParallelStrategy", "tp"),
    ({"cp_size": 2}, "ContextParallelStrategy", "cp"),
    ({"sp_size": 2}, "SequenceParallelStrategy", "sp"),
    ({"ep_size": 2}, "ExpertParallelStrategy", "ep"),
    ({"pp_size": 2}, "PipelineStrategy", "pp"),
    ({"pp_size": 2, "dp_replicate_size": 2}, "PipelineStrategy", "pp+dp_replicate"),
    ({"dp_replicate_size": 2}, "ParallelStrategy", "dp_replicate"),
    ({"dp_replicate_size": 2, "tp_size": 2}, "ParallelStrategy", "dp_replicate+tp"),
    ({"dp_shard_size": 2}, "FSDPStrategy", "fsdp"),
    ({"dp_shard_size": 2, "dp_replicate_size": 2}, "FSDPStrategy", "hsdp"),
    ({"dp_shard_size": 2, "tp_size": 2}, "ParallelFSDPStrategy", "fsdp+tp"),
    ({"dp_shard_size": 2, "dp_replicate_size": 2, "cp_size": 2}, "ParallelFSDPStrategy", "hsdp+cp"),
    ({"dp_shard_size": 2, "ep_size": 2}, "ParallelFSDPStrategy", "fsdp+ep"),
    ({"dp_shard_size": 2, "pp_size": 2, "tp_size": 2}, "PipelineStrategy", "pp+dp_shard+tp"),
    ({"ep_size": 2, "cp_size": 2, "tp_size": 2}, "ParallelStrategy", "ep+cp+tp"),
]


@pytest.mark.parametrize(("sizes", "engine", "name"), ENGINES, ids=[case[2] for case in ENGINES])
def test_degrees_ask_for_an_engine(sizes, engine, name):
    made = create(parallelism=ParallelismConfig(**sizes))
    assert (type(made).__name__, made.name) == (engine, name)
    assert create(ParallelismConfig(**sizes)).name == name  # as strategy=


@pytest.mark.parametrize(
    ("word", "dimension"),
    [("tp", "tp"), ("tensor_parallel", "tp"), ("cp", "cp"), ("context_parallel", "cp"), ("sp", "sp"), ("ulysses", "sp"),
     ("pp", "pp"), ("pipeline", "pp"), ("ep", "ep"), ("expert_parallel", "ep")],
)  # fmt: skip
def test_a_word_takes_all_processes(word, dimension):
    made = create(word)
    assert made.parallelism.active_mesh_dims == [dimension]
    assert made.parallelism.resolved(6).sizes[dimension] == 6


def test_names_of_accelerate():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=5, cp_size=7)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (210, 6, 35)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"] and set(config.non_dp_dim_names) == {"tp", "cp"}
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.tp_enabled and config.cp_enabled and config.dp_shard_enabled and config.dp_replicate_enabled
    assert not config.sp_enabled and config.active_mesh_dims == ["dp_replicate", "dp_shard", "cp", "tp"]
    assert json.loads(config.to_json())["tp_size"] == 5
    assert ParallelismConfig().sizes == dict.fromkeys(config.sizes, 1)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"cp_size": 2, "sp_size": 4}, ["cp_size=2", "sp_size=4"]),
        ({"tp_size": 0}, ["tp_size=0"]),
        ({"tp_size": "two"}, ["tp_size='two'"]),
        ({"tp_size": -1, "cp_size": -1}, ["tp_size=-1", "cp_size=-1"]),
        ({"cp_backend": "other"}, ["cp_backend='other'"]),
        ({"sp_size": 2, "sp_backend": "other"}, ["sp_backend='other'"]),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_sizes(sizes, said):
    with pytest.raises(ValueError, match="Expected") as caught:
        ParallelismConfig(**sizes)
    assert all(part in str(caught.value) for part in said)


def test_degrees_that_do_not_make_up_the_processes_are_refused_with_the_sizes():
    with pytest.raises(ValueError, match=r"tp_size=2, .* for 3 processes|tp_size=2 for 3 processes"):
        ParallelismConfig(tp_size=2).resolved(3)
    with pytest.raises(ValueError, match="dp_replicate_size=2, tp_size=-1 for 5 processes"):
        ParallelismConfig(dp_replicate_size=2, tp_size=-1).resolved(5)
    assert ParallelismConfig(dp_replicate_size=2, tp_size=-1).resolved(6).tp_size == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TorchContextParallelConfig("around"), "cp_comm_strategy='around'"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), "sp_attn_implementation='eager'"),
        (lambda: PipelineConfig(schedule="2F2B"), "schedule='2F2B'"),
        (lambda: PipelineConfig(schedule="1f1b", stages_per_rank=2), "stages_per_rank=2"),
        (lambda: PipelineConfig(schedule="ZBVZeroBubble", stages_per_rank=3), "stages_per_rank=3"),
        (lambda: PipelineConfig(microbatches=0), "Received: 0"),
        (lambda: TorchTensorParallelPlugin(tp_size=0), "tp_size=0"),
        (lambda: ParallelismConfig(sp_size=2, sp_backend="deepspeed").strategy(), "sp_size=2"),
    ],
)
def test_options_that_do_not_exist_are_refused(make, said):
    with pytest.raises(ValueError, match="Expected") as caught:
        make()
    assert said in str(caught.value)


def test_a_launch_gives_degrees(monkeypatch):
    for name, value in {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    config = create().parallelism
    assert config.sizes == {"pp": 1, "dp_replicate": 3, "dp_shard": 1, "ep": 1, "cp": 1, "sp": 1, "tp": 2}
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    assert ParallelismConfig(tp_size=5).tp_size == 5  # nobody has said 2
    monkeypatch.setenv("DRIVETRAIN_LAUNCH_SOURCES", '{"PARALLELISM_CONFIG_TP_SIZE": "tp_size in run.yaml"}')
    with pytest.raises(ValueError, match="tp_size=5.*tp_size in run.yaml"):
        ParallelismConfig(tp_size=5)


def test_the_plugin_and_the_degrees_agree():
    made = create(plugins=[TorchTensorParallelPlugin(tp_size=2, plan={"up": "colwise"})])
    assert made.name == "tp" and made.plugin.tp_size == 2 and made.parallelism.tp_handler.plan == {"up": "colwise"}
    assert create("tp", plugins=[TorchTensorParallelPlugin(tp_size=2)]).name == "tp"
    with pytest.raises(ValueError, match="torch_tp_plugin.tp_size=2 and parallelism_config.tp_size=4"):
        create(plugins=[TorchTensorParallelPlugin(tp_size=2)], parallelism=ParallelismConfig(tp_size=4))
    with pytest.raises(ValueError, match="strategy='cp'"):
        create("cp", plugins=[TorchTensorParallelPlugin(tp_size=2)])
    assert TorchTensorParallelConfig().plan is None
