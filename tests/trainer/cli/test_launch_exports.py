"""What a launch tells its processes: each key of a launch file ends in the variable that Accelerate 1.15 has for it."""

from __future__ import annotations

import json

import pytest

from drivetrain.strategies import environment
from drivetrain.trainer.cli import document
from drivetrain.trainer.cli.launch import complete
from drivetrain.trainer.cli.launch_arguments import parse, resolve
from drivetrain.trainer.cli.launch_exports import exports, used_engines
from drivetrain.trainer.cli.launch_settings import SETTINGS

FSDP = {  # key in the file: (what is written there, variable, its value)
    "fsdp_version": (2, "FSDP_VERSION", "2"),
    "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", "FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"),
    "fsdp_offload_params": (True, "FSDP_OFFLOAD_PARAMS", "true"),
    "fsdp_min_num_params": (2000, "FSDP_MIN_NUM_PARAMS", "2000"),
    "fsdp_sharding_strategy": ("HYBRID_SHARD", "FSDP_SHARDING_STRATEGY", "HYBRID_SHARD"),
    "fsdp_reshard_after_forward": (False, "FSDP_RESHARD_AFTER_FORWARD", "false"),
    "fsdp_transformer_layer_cls_to_wrap": ("Block,Head", "FSDP_TRANSFORMER_CLS_TO_WRAP", "Block,Head"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"),
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
    "fsdp_forward_prefetch": (True, "FSDP_FORWARD_PREFETCH", "true"),
    "fsdp_use_orig_params": (False, "FSDP_USE_ORIG_PARAMS", "false"),
    "fsdp_cpu_ram_efficient_loading": (False, "FSDP_CPU_RAM_EFFICIENT_LOADING", "false"),
    "fsdp_sync_module_states": (False, "FSDP_SYNC_MODULE_STATES", "false"),
    "fsdp_activation_checkpointing": (True, "FSDP_ACTIVATION_CHECKPOINTING", "true"),
    "fsdp_activation_checkpointing_offload": (True, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true"),
    "fsdp_ignored_modules": ("head|embedding", "FSDP_IGNORED_MODULES", "head|embedding"),
}
DEEPSPEED = {
    "deepspeed_config_file": ("ds.json", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json"),
    "zero_stage": (3, "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
    "offload_optimizer_device": ("cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
    "offload_param_device": ("nvme", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme"),
    "offload_optimizer_nvme_path": ("/fast/a", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/fast/a"),
    "offload_param_nvme_path": ("/fast/b", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/fast/b"),
    "zero3_init_flag": (True, "ACCELERATE_DEEPSPEED_ZERO3_INIT", "true"),
    "zero3_save_16bit_model": (False, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false"),
    "deepspeed_moe_layer_cls_names": ("Experts", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Experts"),
    "gradient_accumulation_steps": (4, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
    "gradient_clipping": (1.0, "ACCELERATE_GRADIENT_CLIPPING", "1.0"),
}
MEGATRON = {
    f"megatron_lm_{name}": (value, f"MEGATRON_LM_{name.upper()}", text)
    for name, value, text in (
        ("tp_degree", 2, "2"), ("use_custom_fsdp", True, "true"), ("no_load_optim", True, "true"),
        ("eod_mask_loss", True, "true"), ("overlap_cpu_optimizer_d2h_h2d", True, "true"), ("no_save_optim", True, "true"),
        ("optimizer_cpu_offload", True, "true"), ("use_precision_aware_optimizer", True, "true"),
        ("decoder_last_pipeline_num_layers", 3, "3"), ("pp_degree", 2, "2"), ("num_micro_batches", 4, "4"),
        ("sequence_parallelism", True, "true"), ("recompute_activations", True, "true"),
        ("use_distributed_optimizer", True, "true"), ("gradient_clipping", 0.5, "0.5"),
        ("recompute_granularity", "full", "full"), ("recompute_method", "uniform", "uniform"),
        ("recompute_num_layers", 2, "2"), ("attention_backend", True, "true"), ("expert_model_parallel_size", 2, "2"),
        ("context_parallel_size", 2, "2"), ("attention_dropout", 0.1, "0.1"), ("hidden_dropout", 0.2, "0.2"),
        ("attention_softmax_in_fp32", True, "true"), ("expert_tensor_parallel_size", 2, "2"),
        ("calculate_per_token_loss", True, "true"), ("use_rotary_position_embeddings", True, "true"),
    )
}  # fmt: skip
PARALLELISM = {
    f"parallelism_config_{name}": (value, f"PARALLELISM_CONFIG_{name.upper()}", text)
    for name, value, text in (
        ("dp_replicate_size", 2, "2"), ("dp_shard_size", 2, "2"), ("tp_size", 3, "3"), ("cp_size", 2, "2"),
        ("cp_backend", "torch", "torch"), ("cp_comm_strategy", "alltoall", "alltoall"), ("sp_size", 2, "2"),
        ("sp_backend", "deepspeed", "deepspeed"), ("sp_seq_length", 512, "512"),
        ("sp_seq_length_is_variable", False, "false"), ("sp_attn_implementation", "flash_attention_2", "flash_attention_2"),
    )
}  # fmt: skip
FP8 = {
    f"fp8_{name}": (value, f"ACCELERATE_FP8_{name.upper()}", text)
    for name, value, text in (
        ("backend", "TE", "TE"), ("use_autocast_during_eval", True, "true"), ("margin", 1, "1"), ("interval", 2, "2"),
        ("format", "E4M3", "E4M3"), ("amax_history_len", 16, "16"), ("amax_compute_algo", "max", "max"),
        ("opt_level", "O1", "O1"), ("enable_fsdp_float8_all_gather", False, "false"), ("pad_inner_dim", False, "false"),
        ("use_mxfp8_block_scaling", True, "true"),
    )
}  # fmt: skip
DYNAMO = {
    f"dynamo_{name}": (value, f"ACCELERATE_DYNAMO_{name.upper()}", text)
    for name, value, text in (
        ("backend", "INDUCTOR", "INDUCTOR"), ("mode", "max-autotune", "max-autotune"), ("use_fullgraph", True, "true"),
        ("use_dynamic", True, "true"), ("use_regional_compilation", True, "true"),
    )
}  # fmt: skip
DDP = {
    f"ddp_{name}": (value, f"DRIVETRAIN_DDP_{name.upper()}", text)
    for name, value, text in (
        ("bucket_cap_mb", 7, "7"), ("find_unused_parameters", True, "true"), ("static_graph", False, "false"),
        ("gradient_as_bucket_view", True, "true"), ("broadcast_buffers", False, "false"), ("comm_hook", "bf16", "bf16"),
        ("comm_wrapper", "fp16", "fp16"), ("backend", "gloo", "gloo"), ("timeout", 90, "90.0"),
    )
}  # fmt: skip
CASES = {  # the section: (what the rest of the file says, switches of engines that are on, the section's keys)
    "fsdp_config": ({"distributed_type": "FSDP"}, {"ACCELERATE_USE_FSDP"}, FSDP),
    "deepspeed_config": ({"distributed_type": "DEEPSPEED"}, {"ACCELERATE_USE_DEEPSPEED"}, DEEPSPEED),
    "megatron_lm_config": ({"distributed_type": "MEGATRON_LM"}, {"ACCELERATE_USE_MEGATRON_LM"}, MEGATRON),
    "parallelism_config": ({"distributed_type": "FSDP"}, {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"}, PARALLELISM),
    "fp8_config": ({"mixed_precision": "fp8"}, set(), FP8),
    "dynamo_config": ({"distributed_type": "NO"}, set(), DYNAMO),
    "ddp_config": ({"distributed_type": "MULTI_CPU"}, set(), DDP),
}
SWITCHES = {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_XLA",
            "ACCELERATE_USE_PARALLELISM_CONFIG"}  # fmt: skip


@pytest.fixture
def told(home, monkeypatch):
    """What a launch file and a command line come to in the processes."""
    monkeypatch.setenv("HF_HOME", str(home.path / "hf"))

    def read(tree: dict, *args: str) -> dict[str, str]:
        home.write("launch.json", json.dumps({"num_processes": 8, "use_cpu": True, **tree}))
        return exports(complete(resolve(parse(["--config_file", "launch.json", *args, "script.py"]))))

    return read


@pytest.mark.parametrize("section", CASES)
def test_every_key_of_a_section_ends_in_its_variable(told, section):
    rest, switches, keys = CASES[section]
    variables = told({**rest, section: {name: value for name, (value, _, _) in keys.items()}})
    assert {name: variables.get(name) for _, name, _ in keys.values()} == {name: text for _, name, text in keys.values()}
    assert {name for name in SWITCHES if variables.get(name) == "true"} == switches
    sources = json.loads(variables[environment.SOURCES])
    assert all(sources[name].startswith(f"{key} in ") and sources[name].endswith("launch.json") for key, (_, name, _) in keys.items())


def test_no_key_is_forgotten():
    left_out = {"deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher",
                "fp8_override_linear_precision", "mpirun_hostfile", "mpirun_ccl"}  # fmt: skip
    listed = {name for _, _, keys in CASES.values() for name in keys}
    assert {name for name, row in SETTINGS.items() if row.section} - left_out <= listed


def test_an_engine_is_told_its_defaults_as_accelerate_tells_them(told):
    fsdp = told({"distributed_type": "FSDP"})
    assert {name: value for name, value in fsdp.items() if name.startswith("FSDP_")} == {
        "FSDP_VERSION": "1", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    }  # fmt: skip
    sources = json.loads(fsdp[environment.SOURCES])
    assert not any(name.startswith("FSDP_") for name in sources)  # nobody has said it
    assert sources["ACCELERATE_USE_FSDP"].startswith("distributed_type in ")
    megatron = told({"distributed_type": "MEGATRON_LM"})
    assert megatron["MEGATRON_LM_TP_DEGREE"] == megatron["MEGATRON_LM_PP_DEGREE"] == "1"
    assert megatron["MEGATRON_LM_GRADIENT_CLIPPING"] == "1.0" and "MEGATRON_LM_NUM_MICRO_BATCHES" not in megatron
    mesh = told({"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_dp_shard_size": 8}})
    assert {name for name in mesh if name.startswith("PARALLELISM_")} == {
        f"PARALLELISM_CONFIG_{name}" for name in
        ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "CP_BACKEND", "SP_SIZE", "SP_BACKEND")
    }  # fmt: skip
    fp8 = told({"mixed_precision": "fp8"})
    assert fp8["ACCELERATE_FP8_FORMAT"] == "HYBRID" and fp8["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "1024"


def test_only_the_engine_in_use_is_told(told):
    plain = told({"distributed_type": "MULTI_CPU", "fsdp_config": {"fsdp_version": 2}, "fp8_config": {"fp8_backend": "te"}})
    assert not [name for name in plain if name.startswith(("FSDP_", "ACCELERATE_FP8_", "ACCELERATE_USE_FSDP"))]
    assert not [name for name in told({"distributed_type": "MULTI_GPU", "megatron_lm_config": {}}) if "MEGATRON" in name]


def test_precision_of_layers_is_three_variables(told):
    fp8 = told({"mixed_precision": "fp8", "fp8_config": {"override_linear_precision": [True, False, True]}})
    assert [fp8[f"ACCELERATE_FP8_OVERRIDE_{part}"] for part in ("FPROP", "DGRAD", "WGRAD")] == ["true", "false", "true"]
    assert "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION" not in fp8


def test_what_accelerates_questionnaire_calls_otherwise(told):
    fp8 = told({"mixed_precision": "fp8", "fp8_config": {"amax_history_length": 8, "amax_compute_algorithm": "max",
                                                         "optimization_level": "O1"}})  # fmt: skip
    assert fp8["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "8" and fp8["ACCELERATE_FP8_OPT_LEVEL"] == "O1"
    assert fp8["ACCELERATE_FP8_AMAX_COMPUTE_ALGO"] == "max"


def test_deepspeed_learns_what_the_file_decides(told):
    found = told({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
                  "deepspeed_config": {"zero_stage": 2, "gradient_clipping": "auto"}})  # fmt: skip
    assert set(found["ACCELERATE_CONFIG_DS_FIELDS"].split(",")) == {"mixed_precision", "zero_stage", "gradient_clipping"}
    assert "ACCELERATE_GRADIENT_CLIPPING" not in found  # auto: DeepSpeed's own file says it
    assert "ACCELERATE_CONFIG_DS_FIELDS" not in told({}, "--use_deepspeed")


def test_tpus(told, monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert told({"distributed_type": "XLA"})["PJRT_DEVICE"] == "CPU"
    tpu = told({"distributed_type": "XLA", "use_cpu": False, "mixed_precision": "bf16"})
    assert (tpu["ACCELERATE_USE_XLA"], tpu["PJRT_DEVICE"]) == ("true", "TPU")
    assert not {"XLA_USE_BF16", "XLA_DOWNCAST_BF16"} & set(tpu)  # weights stay float32
    tpu = told({"distributed_type": "TPU", "use_cpu": False, "mixed_precision": "bf16", "downcast_bf16": "yes"})
    assert tpu["XLA_DOWNCAST_BF16"] == "1" and "XLA_USE_BF16" not in tpu


def test_engines_that_a_launch_asks_for(told, home):
    def engines(text: str, *args: str) -> list[str]:
        home.write("one.json", json.dumps(document.read(text)))
        return used_engines(complete(resolve(parse(["--config_file", "one.json", *args]))))

    assert engines("{distributed_type: FSDP, num_processes: 2}") == ["FSDP"]
    assert engines("{distributed_type: FSDP, num_processes: 2}", "--multi_gpu") == []
    assert engines("{distributed_type: DEEPSPEED, num_processes: 2, parallelism_config: {sp_size: 2}}") == ["ParallelismConfig", "DeepSpeed"]
    assert engines("{distributed_type: TP, num_processes: 2, parallelism_config: {tp_size: 2}}") == ["ParallelismConfig"]
    assert engines("{num_processes: 2}", "--use_megatron_lm") == ["Megatron-LM"]
