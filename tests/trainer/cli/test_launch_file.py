"""Launch files: Accelerate's format of every version, where they lie, and what is wrong with one."""

from __future__ import annotations

import json

import pytest

from drivetrain.trainer.cli import launch_file
from drivetrain.trainer.cli.sources import UsageError

ACCELERATE_1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: true
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: BertLayer
mixed_precision: no
num_processes: 2
use_cpu: false
"""
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 1.0, offload_optimizer_device: none,
  offload_param_device: none, zero3_init_flag: false, zero_stage: 2}
distributed_type: DEEPSPEED
fp16: true
main_process_ip: null
"""
OLD = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: NO
fsdp_config: {min_num_params: 2000, offload_params: false, sharding_strategy: 2}
dynamo_backend: 'NO'
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 1
use_cpu: false
"""


def read(text: str) -> dict:
    from drivetrain.trainer.cli import document

    return launch_file.values(document.read(text), "launch.yaml")


def test_a_file_of_accelerate_is_read_by_the_names_of_flags():
    found = read(ACCELERATE_1)
    assert found["num_processes"] == 2 and found["gpu_ids"] == "0,1" and found["mixed_precision"] == "bf16"
    assert found["distributed_type"] == "MULTI_GPU" and found["cpu"] is False and found["downcast_bf16"] is False
    assert found["dynamo_backend"] == "inductor" and found["dynamo_use_fullgraph"] is True
    assert found["same_network"] is True and found["tpu_env"] == []


def test_words_that_yaml_takes_for_truth_values_stay_words():
    assert read("{mixed_precision: no, distributed_type: NO}") == {"mixed_precision": "no", "distributed_type": "NO"}


def test_sections_of_engines_are_read():
    fsdp, deepspeed = read(FSDP), read(DEEPSPEED)
    assert fsdp["fsdp_backward_prefetch"] == "BACKWARD_PRE" and fsdp["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert fsdp["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer"
    assert deepspeed["gradient_accumulation_steps"] == 4 and deepspeed["gradient_clipping"] == 1.0
    assert deepspeed["zero_stage"] == 2 and deepspeed["mixed_precision"] == "fp16" and "main_process_ip" not in deepspeed


def test_a_file_of_accelerate_0_11_is_read_as_what_it_meant():
    found = read(OLD)
    assert found["fsdp_min_num_params"] == 2000 and found["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"
    assert found["dynamo_backend"] == "no" and found["mixed_precision"] == "fp16" and found["distributed_type"] == "NO"


def test_fp8_and_mpi_sections_of_earlier_versions():
    found = read("{mixed_precision: fp8, fp8_config: {backend: TE, fp8_format: E4M3, amax_compute_algo: max,"
                 " override_linear_precision: [false, true, false]}, ipex_config: {ipex: true}, downcast_bf16: 'no',"
                 " mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /hosts}}")  # fmt: skip
    assert found["fp8_backend"] == "te" and found["fp8_format"] == "E4M3" and found["downcast_bf16"] is False
    assert found["fp8_override_linear_precision"] == "false,true,false"
    assert found["mpirun_ccl"] == "1" and found["mpirun_hostfile"] == "/hosts"
    assert read("fp8_config: {backend: MS-AMP}") == {"fp8_backend": "msamp"}


def test_the_tensor_parallel_section_of_earlier_versions():
    found = read("{distributed_type: TP, tp_config: {tp_size: 4}, num_processes: 4}")
    assert found["parallelism_config_tp_size"] == 4 and found["distributed_type"] == "TP"


def test_class_names_in_a_list_keep_their_case():
    found = read("{distributed_type: FSDP, fsdp_config: {fsdp_transformer_layer_cls_to_wrap: [BertLayer, Head]}}")
    assert found["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer,Head"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_proceses: 2", "Received: num_proceses (launch.yaml). Did you mean num_processes?"),
        ("fsdp_config: {fsdp_ofload_params: true}", "fsdp_config.fsdp_ofload_params (launch.yaml). Did you mean fsdp_offload_params?"),
        ("fsdp_confg: {}", "Did you mean fsdp_config?"),
        ("mixed_precision: bf61", "one of no, fp16, bf16, fp8. Received: 'bf61' (launch.yaml). Did you mean bf16?"),
        ("num_processes: two", "Expected num_processes to be a whole number. Received: 'two' (launch.yaml)."),
        ("use_cpu: maybe", "Expected cpu to be true or false. Received: 'maybe'"),
        ("distributed_type: MULTI_GPUS", "Did you mean MULTI_GPU?"),
        ("dynamo_config: 3", "Expected dynamo_config to hold keys and values."),
    ],
)
def test_F3_what_does_not_exist_is_an_error_that_names_the_nearest(text, said):
    with pytest.raises(UsageError) as error:
        read(text)
    assert said in str(error.value)


def test_json_is_read_too(tmp_path):
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"num_processes": 3, "mixed_precision": "no"}))
    assert launch_file.load(str(path)).values == {"num_processes": 3, "mixed_precision": "no"}


def test_the_named_file_comes_first_then_ours_then_accelerates(home, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(home.path / "hf"))
    assert launch_file.find() is None
    other = home.write("hf/accelerate/default_config.json", "{}")
    assert launch_file.find() == (other, "the default of this machine, in Accelerate's place")
    other = home.write("hf/accelerate/default_config.yaml", "{}")
    assert launch_file.find()[0] == other
    own = home.write("xdg/drivetrain/launch.yaml", "{}")
    assert launch_file.find() == (own, "the default of this machine")
    named = home.write("mine.yaml", "num_processes: 2")
    assert launch_file.find("mine.yaml") == (named, "named by --config_file")
    assert launch_file.load("mine.yaml").explicit


def test_accelerates_place_without_hf_home(home, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.path / "cache"))
    assert launch_file.accelerate_place() == home.path / "cache/huggingface/accelerate/default_config.yaml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(home.path))
    assert launch_file.accelerate_place() == home.path / ".cache/huggingface/accelerate/default_config.yaml"


def test_a_named_file_that_is_missing_is_an_error(home):
    with pytest.raises(UsageError, match="there is no such file"):
        launch_file.load("nowhere.yaml")


def test_values_go_back_into_the_layout_of_a_file():
    found = read(ACCELERATE_1)
    assert read(json.dumps(launch_file.nested(found))) == found
