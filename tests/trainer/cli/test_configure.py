"""`drivetrain config`: answers in, a launch file out that Accelerate's keys and ours agree on."""

from __future__ import annotations

import io

import pytest

from drivetrain.trainer.cli import document, launch_file
from drivetrain.trainer.cli.launch_settings import SECTIONS, SETTINGS
from drivetrain.trainer.cli.main import main

ACCELERATES = {  # ClusterConfig and SageMakerConfig of Accelerate 1.15
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config",
    "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "sagemaker_inputs_file",
    "sagemaker_metrics_file", "base_job_name", "pytorch_version", "transformers_version", "py_version", "additional_args",
}  # fmt: skip


@pytest.fixture
def answer(home, monkeypatch, capsys):
    """Run the questionnaire: an answer where a question's name is in the mapping, else its default."""

    def run(**answers) -> dict:
        class Typist(io.TextIOBase):
            def readline(self) -> str:
                nonlocal shown
                shown += capsys.readouterr().out
                asked = shown.rstrip().splitlines()
                name = next(line for line in reversed(asked) if line.endswith(")") and "(" in line).rpartition("(")[2][:-1]
                return f"{answers.pop(name, '')}\n"

        shown = ""
        monkeypatch.setattr("sys.stdin", Typist())
        assert main(["config"]) == 0
        assert not answers, f"not asked: {answers}"
        return document.read(launch_file.own_place().read_text())

    return run


def test_every_default(answer, home):
    found = answer()
    assert found["distributed_type"] == "NO" and found["mixed_precision"] == "no" and found["num_processes"] == 1
    assert set(found) <= ACCELERATES


@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_every_default_of_a_kind(answer, kind):
    found = answer(distributed_type=kind)
    assert found["distributed_type"] == kind and set(found) <= ACCELERATES


def test_several_processes_on_the_cpu_over_mpi(answer):
    found = answer(distributed_type="MULTI_CPU", num_processes=4, num_machines=2, main_process_ip="10.0.0.1",
                   mpirun_hostfile="/hosts", mpirun_ccl=2, mixed_precision="bf16", debug="yes")  # fmt: skip
    assert found["use_cpu"] is True and found["num_processes"] == 4 and found["debug"] is True
    assert found["mpirun_config"] == {"mpirun_hostfile": "/hosts", "mpirun_ccl": "2"}
    assert set(found) <= ACCELERATES


def test_several_machines_with_gpus_and_dynamo(answer):
    found = answer(distributed_type="2", num_machines=2, machine_rank=1, main_process_ip="10.0.0.1", main_process_port=29501,
                   same_network="no", rdzv_backend="c10d", dynamo_backend="inductor", dynamo_mode="max-autotune",
                   use_parallelism_config="yes", parallelism_config_tp_size=2, num_processes=16, enable_cpu_affinity="y")  # fmt: skip
    assert found["distributed_type"] == "MULTI_GPU" and found["machine_rank"] == 1 and found["rdzv_backend"] == "c10d"
    assert found["dynamo_config"]["dynamo_mode"] == "max-autotune" and found["parallelism_config"]["parallelism_config_tp_size"] == 2
    assert set(found) <= ACCELERATES and "use_parallelism_config" not in found


def test_fsdp_of_both_versions(answer):
    found = answer(distributed_type="FSDP", fsdp_version=2, fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
                   fsdp_transformer_layer_cls_to_wrap="Block", num_processes=2)["fsdp_config"]  # fmt: skip
    assert found["fsdp_transformer_layer_cls_to_wrap"] == "Block" and "fsdp_sharding_strategy" not in found
    found = answer(distributed_type="FSDP", fsdp_sharding_strategy="SHARD_GRAD_OP")["fsdp_config"]
    assert found["fsdp_sharding_strategy"] == "SHARD_GRAD_OP" and "fsdp_reshard_after_forward" not in found


def test_deepspeed_megatron_tpu_and_fp8(answer):
    found = answer(distributed_type="DEEPSPEED", zero_stage=2, gradient_accumulation_steps=4, gradient_clipping="auto")
    assert found["deepspeed_config"]["gradient_accumulation_steps"] == 4 and "gradient_clipping" not in found
    found = answer(distributed_type="DEEPSPEED", deepspeed_config_file="ds.json")
    assert found["deepspeed_config"] == {"deepspeed_config_file": "ds.json"}
    found = answer(distributed_type="MEGATRON_LM", megatron_lm_tp_degree=2)
    assert found["megatron_lm_config"]["megatron_lm_tp_degree"] == 2
    found = answer(distributed_type="XLA", tpu_use_cluster="yes", tpu_name="pod", tpu_env="A=1,B=2", num_processes=8)
    assert found["tpu_env"] == ["A=1", "B=2"] and found["tpu_name"] == "pod"
    found = answer(mixed_precision="fp8", fp8_backend="ao")
    assert found["fp8_config"]["fp8_backend"] == "ao"
    assert set(found) <= ACCELERATES


def test_sagemaker(answer):
    found = answer(compute_environment="AMAZON_SAGEMAKER", ec2_instance_type="ml.p3.2xlarge", iam_role_name="role",
                   distributed_type="DATA_PARALLEL", num_machines=2)  # fmt: skip
    assert found["ec2_instance_type"] == "ml.p3.2xlarge" and found["distributed_type"] == "DATA_PARALLEL"
    assert set(found) <= ACCELERATES


def test_answers_may_be_piped_and_wrong_ones_are_asked_for_again(home):
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "drivetrain", "config", "--config_file", "mine.yaml"], cwd=home.path, text=True,
                          input="\nMULTI_CPUS\nMULTI_CPU\n", capture_output=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Received: 'MULTI_CPUS' (answer). Did you mean MULTI_CPU?" in done.stdout
    assert "drivetrain launch --config_file mine.yaml script.py" in done.stdout
    assert launch_file.load("mine.yaml").values["distributed_type"] == "MULTI_CPU"


def test_default_and_update(home, capsys):
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert launch_file.load().values["mixed_precision"] == "bf16"
    old = home.write("old.yaml", "{fp16: true, distributed_type: MULTI_CPU, num_processes: 2, dynamo_backend: 'NO'}")
    assert main(["config", "update", "--config_file", "old.yaml"]) == 0
    found = document.read(old.read_text())
    assert found["mixed_precision"] == "fp16" and found["use_cpu"] is True and "fp16" not in found and "debug" in found
    with pytest.raises(SystemExit):
        launch_file.own_place().unlink()
        main(["config", "update"])
    assert "Run drivetrain config." in capsys.readouterr().err


def test_keys_of_accelerate_are_all_known():
    known = {"use_cpu" if name == "cpu" else name for name, row in SETTINGS.items() if not row.section} | SECTIONS
    assert ACCELERATES <= known


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [("\n", "b"), ("\x1b[B\n", "c"), ("\x1b[B\x1b[B\n", "a"), ("\x1bOAk\x1b[A\n", "b"), ("2\n", "c"), ("9jj\r", "a"), ("\x04", "-")],
)
def test_choices_by_arrow_keys_at_a_terminal(home, keys, chosen):
    import os
    import pty
    import sys

    code = ("from drivetrain.trainer.cli import menu\nassert menu.usable()\n"
            "try: print('chosen', 'abc'[menu.choose('abc', 1)])\nexcept KeyboardInterrupt: print('chosen -')")  # fmt: skip
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = ""
    while "chosen" not in shown or not shown.endswith("\n"):
        part = os.read(terminal, 4096).decode()
        if "➔" in part and "➔" not in shown:
            os.write(terminal, keys.encode())
        shown += part
    os.waitpid(child, 0)
    assert shown.split()[-1] == chosen
