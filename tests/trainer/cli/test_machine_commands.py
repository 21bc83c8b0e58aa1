"""env, test (of the machine), estimate-memory, to-fsdp2, tpu-config."""

from __future__ import annotations

import json

import pytest
import torch

from drivetrain.trainer.cli import document, estimate, self_check
from drivetrain.trainer.cli.main import main


pytestmark = pytest.mark.timeout(500)  # a test may start several launches, one after another, on a machine that is busy


def failed(capsys, *args) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    assert end.value.code == 2
    return capsys.readouterr().err


def test_env_names_versions_and_the_launch_file(home, capsys):
    place = home.write("xdg/drivetrain/launch.yaml", "num_processes: 3")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"- PyTorch: {torch.__version__}" in shown and "- Communication: gloo" in shown
    assert f"- Launch file: {place} (the default of this machine)\n    - num_processes: 3\n" in shown


def test_the_machine_is_tested_by_two_processes(home):
    done = home.cli("test", HF_HOME=str(home.path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["Processes to check: 2, machines: 1.", "They run on cpu in precision 32-true."]
    assert [line for line in lines if line.startswith("passed: ")] == [f"passed: {text}" for text, _ in self_check._CHECKS]
    assert lines[-1] == "Everything passed."


def test_a_launch_file_can_be_tested(home):
    home.write("mine.yaml", "{use_cpu: true, num_processes: 1, mixed_precision: bf16}")
    done = home.cli("test", "--config_file", "mine.yaml")
    assert done.returncode == 0 and "in precision bf16-mixed." in done.stdout and "Everything passed." in done.stdout


def test_a_launch_file_for_sharding_can_be_tested(home):
    home.write("mine.yaml", "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, use_cpu: true, num_processes: 2}")
    done = home.cli("test", "--config_file", "mine.yaml")
    assert done.returncode == 0 and "Everything passed." in done.stdout, done.stdout + done.stderr


def test_what_fails_is_said(monkeypatch, capsys):
    def broken(accelerator):
        raise ArithmeticError("as asked")

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(self_check, "_CHECKS", (("two and two are four", lambda a: True), ("numbers end", broken)))
    assert self_check.check() == 1
    shown = capsys.readouterr().out
    assert "passed: two and two are four\nFAILED: numbers end (ArithmeticError: as asked)\n1 of 2 checks failed.\n" in shown


SIZES = estimate.Sizes(parameters=1000, trained=800, buffers=24, largest=100)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "strategy", "processes", "size"),
    [
        ("float32", "adam", "single", 1, 4 * 1024 + 4 * 800 * 3),
        ("float32", "sgd", "single", 1, 4 * 1024 + 4 * 800),
        ("float16", "sgd-momentum", "single", 1, 2 * 1024 + 2 * 800 * 2),
        ("float32", "adam", "ddp", 2, 4 * 1024 + 4 * 800 * 4),
        ("float32", "adamw", "fsdp", 4, (4 * 1024 + 4 * 800 * 3) / 4 + 2 * 4 * 100),
        ("bfloat16", "adam", "zero1", 4, 2 * 1024 + 2 * 800 + 2 * 800 * 2 / 4),
        ("float32", "adam", "zero2", 4, 4 * 1024 + 4 * 800 * 3 / 4),
        ("float32", "adam", "zero3", 4, (4 * 1024 + 4 * 800 * 3) / 4 + 2 * 4 * 100),
        ("int8", "adam", "single", 1, None),
    ],
)
def test_bytes_of_training(dtype, optimizer, strategy, processes, size):
    assert estimate.training_bytes(SIZES, dtype, optimizer, strategy, processes) == size


def test_a_model_is_counted_with_shared_weights_once():
    one, two = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    two.weight = one.weight
    frozen = torch.nn.Linear(2, 3).requires_grad_(False)
    model = torch.nn.Sequential(one, two, frozen, torch.nn.BatchNorm1d(2))
    assert estimate.count(model) == estimate.Sizes(parameters=16 + 9 + 4, trained=20, buffers=5, largest=16)
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(3))
    assert estimate.count(blocks).largest == 12


def test_memory_of_a_train_module_in_a_run_file(home, capsys):
    home.write("large.yaml", "{model: {class_path: nets.Net, init_args: {width: 1000000000}}, trainer: {max_epochs: 3}}")
    assert main(["estimate-memory", "large.yaml", "--dtypes", "float32", "int4", "--optimizer", "sgd"]) == 0
    shown = capsys.readouterr().out
    assert "1,000,000,001 parameters" in shown  # not one of which was made
    assert shown.splitlines()[2].split("  ")[0] == "dtype" and "sgd, ddp × 2" in shown
    assert "float32  3.73 GiB       3.73 GiB    7.45 GiB     11.18 GiB     11.18 GiB" in shown
    assert "int4     476.84 MiB     476.84 MiB  -" in shown


def test_strategies_are_chosen(home, capsys):
    home.write("small.yaml", "{model: {class_path: nets.Net}}")
    assert main(["estimate-memory", "small.yaml", "--dtypes", "float32", "--strategies", "zero2", "--num_processes", "5"]) == 0
    shown = capsys.readouterr().out
    assert "float32  20 B           20 B     32 B\n" in shown and "adam, zero2 × 5\n" in shown and "ddp" not in shown


def test_memory_of_a_hugging_face_config(home, capsys):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2,
              "vocab_size": 11, "n_positions": 16}  # fmt: skip
    home.write("gpt/config.json", json.dumps(config))
    block = 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
    whole = 11 * 8 + 16 * 8 + 2 * block + 16  # the head is the embedding
    for named in ("gpt", "gpt/config.json"):
        assert main(["estimate-memory", named]) == 0
        assert f"{whole:,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize(("named", "said"), [("nowhere", "which is not here."), ("bare.yaml", "a run file with a model")])
def test_models_that_are_not_there(home, capsys, named, said):
    home.write("bare.yaml", "trainer: {max_epochs: 3}")
    assert said in failed(capsys, "estimate-memory", named)


FSDP1 = """
distributed_type: FSDP
num_processes: 2
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_use_orig_params: true, fsdp_backward_prefetch: BACKWARD_PRE,
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_state_dict_type: SHARDED_STATE_DICT}
"""


def test_fsdp_1_becomes_2(home, capsys):
    home.write("one.yaml", FSDP1)
    assert main(["to-fsdp2", "--config_file", "one.yaml", "--output_file", "two.yaml"]) == 0
    assert document.read((home.path / "two.yaml").read_text()) == {
        "distributed_type": "FSDP", "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "fsdp_use_orig_params is left out: " in shown
    assert "fsdp_sharding_strategy SHARD_GRAD_OP is fsdp_reshard_after_forward False" in shown
    assert "Add --overwrite." in failed(capsys, "to-fsdp2", "--config_file", "one.yaml", "--output_file", "two.yaml")
    assert "Write --output_file" in failed(capsys, "to-fsdp2", "--config_file", "one.yaml")
    assert "for version 2" in failed(capsys, "to-fsdp2", "--config_file", "two.yaml", "--overwrite")
    home.write("asked.yaml", FSDP1.replace("fsdp_sharding_strategy", "fsdp_reshard_after_forward"))  # by Accelerate's questionnaire
    assert main(["to-fsdp2", "--config_file", "asked.yaml", "--overwrite"]) == 0
    assert document.read((home.path / "asked.yaml").read_text())["fsdp_config"]["fsdp_reshard_after_forward"] is False
    home.write("ddp.yaml", FSDP1.replace("SHARD_GRAD_OP", "NO_SHARD"))
    assert "a strategy that shards" in failed(capsys, "to-fsdp2", "--config_file", "ddp.yaml", "--overwrite")


def test_commands_for_a_tpu_pod(home, capsys):
    home.write("pod.yaml", "{tpu_name: pod, tpu_zone: z, commands: [ls, pwd]}")
    assert main(["tpu-config", "--config_file", "pod.yaml", "--debug", "--use_alpha"]) == 0
    said = "gcloud alpha compute tpus tpu-vm ssh pod --zone z --command 'cd /usr/share; ls; pwd' --worker all\n"
    assert capsys.readouterr().out == said
    assert "no name" in failed(capsys, "tpu-config", "--command", "ls")
    assert "Expected commands." in failed(capsys, "tpu-config", "--tpu_name", "pod")
