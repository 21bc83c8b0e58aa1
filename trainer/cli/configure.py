"""`drivetrain config`: a launch file from questions, from this machine (default), or from an older one (update)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import launch_file, menu
from .launch_exports import is_here
from .launch_settings import SETTINGS, Setting, several
from .sources import UsageError, plain_errors

_ENGINES = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "TPU (XLA)"}
_SAGEMAKER = ("NO", "DATA_PARALLEL", "MODEL_PARALLEL")
_DEEPSPEEDS = ("gradient_accumulation_steps", "gradient_clipping")  # stand in that engine's section
_VERSION_1 = {"fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_forward_prefetch", "fsdp_sync_module_states",
              "fsdp_backward_prefetch"}  # fmt: skip
_VERSION_2 = {"fsdp_reshard_after_forward", "fsdp_activation_checkpointing_offload"}
_WRITTEN = {  # what Accelerate writes into every file of a machine
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "NO", "downcast_bf16": False,
    "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no",
    "num_machines": 1, "num_processes": 1, "rdzv_backend": "static", "same_network": True, "tpu_env": [],
    "tpu_use_cluster": False, "tpu_use_sudo": False, "cpu": False,
}  # fmt: skip

Answers = dict[str, Any]


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain config [default|update]`."""
    prog = f"drivetrain {command}"
    parser = argparse.ArgumentParser(prog, description="Write this machine's launch file.", allow_abbrev=False)
    parser.add_argument("action", nargs="?", choices=("default", "update"), help="without questions: for this machine, "
                        "or an existing file with all keys of today")  # fmt: skip
    parser.add_argument("--config_file", "--config-file", help="where (default: drivetrain's own place)")
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"), default="no", help="for default")
    taken = parser.parse_args(list(args))
    place = Path(taken.config_file).expanduser() if taken.config_file else launch_file.own_place()
    with plain_errors(prog):
        if taken.action == "default":
            from .basic_config import write_basic_config

            written = write_basic_config(taken.mixed_precision, place)
            return _report(place) if written else 0
        if taken.action == "update":
            return _update(taken.config_file)
        write(questionnaire(), place)
        return _report(place)


def questionnaire() -> Answers:
    """Ask everything that matters for the answers so far, and return them by the names of settings.

    An empty line takes the default; so does the end of the input. A wrong answer is asked for again.
    """
    answers: Answers = {}
    for name, asked in _questions():
        if asked(answers):
            answers[name] = _ask(_adapted(SETTINGS[name], answers))
    engine = _ENGINES.get(answers.get("distributed_type", ""))
    if engine and not is_here(engine):
        print(f"\nThe engine {engine} is not part of this version of drivetrain: it is written, and launch refuses it.")
    return answers


def write(answers: Answers, place: Path) -> None:
    """Write a launch file that Accelerate reads too."""
    import yaml

    asked = {name: value for name, value in answers.items() if value is not None and name != "use_parallelism_config"}
    local = asked.get("compute_environment") != "AMAZON_SAGEMAKER"
    cpu = {"cpu": True} if _kind(asked) == "MULTI_CPU" else {}
    layout = launch_file.nested({**(_WRITTEN if local else {}), **cpu, **asked})
    if _kind(asked) == "DEEPSPEED":
        moved = {name: layout.pop(name) for name in _DEEPSPEEDS if name in layout}
        layout["deepspeed_config"] = {**layout.get("deepspeed_config", {}), **moved}
    if layout.get("dynamo_config", {}).get("dynamo_backend") == "no":
        del layout["dynamo_config"]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(layout, sort_keys=True), encoding="utf-8")


def _update(named: str | None) -> int:
    found = launch_file.load(named)
    if found is None:
        raise UsageError("Expected a launch file. Received: none is there. Run drivetrain config.")
    write(found.values, found.path)
    return _report(found.path)


def _report(place: Path) -> int:
    flag = "" if place == launch_file.own_place() else f" --config_file {place}"
    print(f"Written: {place}. Start a script with drivetrain launch{flag} script.py; --print-config shows more.")
    return 0


def _questions() -> list[tuple[str, Callable[[Answers], bool]]]:
    """Return every question in its order with the condition under which it is asked."""
    sections = {section: [n for n, row in SETTINGS.items() if row.section == section] for section in _SECTIONS}
    asked: list[tuple[str, Callable[[Answers], bool]]] = [("compute_environment", lambda a: True)]
    asked += [(name, _remote) for name in _REMOTE]
    asked += [("distributed_type", lambda a: True), ("num_machines", lambda a: _several(a) or _remote(a))]
    asked += [(name, _machines) for name in ("machine_rank", "main_process_ip", "main_process_port", "same_network")]
    asked += [("rdzv_backend", lambda a: _machines(a) and not a["same_network"])]
    asked += [("cpu", lambda a: _kind(a) == "NO"), ("mpirun_hostfile", lambda a: _kind(a) == "MULTI_CPU")]
    asked += [("mpirun_ccl", lambda a: bool(a.get("mpirun_hostfile"))), ("debug", _several)]
    asked += [(name, _dynamo(name)) for name in sections["dynamo_config"]]
    asked += [(name, _deepspeed(name)) for name in (*sections["deepspeed_config"], *_DEEPSPEEDS)]
    asked += [(name, _fsdp(name)) for name in sections["fsdp_config"] if name != "fsdp_ignored_modules"]
    asked += [("use_parallelism_config", lambda a: _kind(a) in {"FSDP", "MULTI_GPU"})]
    asked += [(name, lambda a: bool(a.get("use_parallelism_config"))) for name in sections["parallelism_config"]]
    asked += [(name, lambda a: _kind(a) == "MEGATRON_LM") for name in sections["megatron_lm_config"]]
    asked += [("num_processes", _several), ("gpu_ids", lambda a: _gpus(a) and not _machines(a))]
    asked += [("enable_cpu_affinity", _gpus)]
    asked += [(name, _tpu(name)) for name in ("main_training_function", "downcast_bf16", "tpu_use_cluster", *_POD)]
    asked += [("mixed_precision", lambda a: _kind(a) != "XLA")]
    asked += [(name, lambda a: a.get("mixed_precision") == "fp8") for name in sections["fp8_config"]]
    return asked


_SECTIONS = ("dynamo_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config",
             "fp8_config")  # fmt: skip
_REMOTE = ("ec2_instance_type", "iam_role_name", "profile", "region", "image_uri", "sagemaker_inputs_file",
           "sagemaker_metrics_file")  # fmt: skip
_POD = ("tpu_name", "tpu_zone", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands")


def _kind(answers: Answers) -> str:
    return answers.get("distributed_type") or "NO"


def _remote(answers: Answers) -> bool:
    return answers.get("compute_environment") == "AMAZON_SAGEMAKER"


def _several(answers: Answers) -> bool:
    return _kind(answers) != "NO" and not _remote(answers)


def _machines(answers: Answers) -> bool:
    return answers.get("num_machines", 1) > 1 and not _remote(answers)


def _gpus(answers: Answers) -> bool:
    return _several(answers) and _kind(answers) not in ("MULTI_CPU", "XLA")


def _dynamo(name: str) -> Callable[[Answers], bool]:
    return lambda a: name == "dynamo_backend" or a["dynamo_backend"] != "no"


def _deepspeed(name: str) -> Callable[[Answers], bool]:
    """DeepSpeed's own file says the rest, where there is one; hosts matter for several machines."""
    hosts = name in ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
                     "deepspeed_multinode_launcher")  # fmt: skip

    def asked(answers: Answers) -> bool:
        if _kind(answers) != "DEEPSPEED":
            return False
        if hosts:
            return _machines(answers)
        return name == "deepspeed_config_file" or not answers["deepspeed_config_file"]

    return asked


def _fsdp(name: str) -> Callable[[Answers], bool]:
    policies = {
        "fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP",
        "fsdp_min_num_params": "SIZE_BASED_WRAP",
    }

    def asked(answers: Answers) -> bool:
        if _kind(answers) != "FSDP":
            return False
        if name in policies:
            return answers["fsdp_auto_wrap_policy"] == policies[name]
        version = "1" if name in _VERSION_1 else "2" if name in _VERSION_2 else None
        return version in (None, answers.get("fsdp_version"))

    return asked


def _tpu(name: str) -> Callable[[Answers], bool]:
    return lambda a: _kind(a) == "XLA" and (name not in _POD or a["tpu_use_cluster"])


def _adapted(row: Setting, answers: Answers) -> Setting:
    """Return a setting with the text, choices and default that fit the answers so far."""
    here = tuple(one for one in row.choices if one not in _SAGEMAKER[1:])
    changes: dict[str, dict[str, Any]] = {
        "distributed_type": {"choices": _SAGEMAKER if _remote(answers) else here, "default": "NO"},
        "mixed_precision": {"default": "no"},
        "same_network": {"text": "all machines are in one network", "default": True},
    }
    if row.name == "num_processes":
        return replace(row, text="processes in all", default=_devices(answers))
    return replace(row, **changes.get(row.name, {}))


def _devices(answers: Answers) -> int:
    machines = answers.get("num_machines", 1)
    if not _gpus(answers):
        return machines
    import torch

    return machines * max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 1)


def _ask(row: Setting) -> Any:
    print(f"\n{row.text or row.name} ({row.name})")
    if row.choices and menu.usable():
        return row.choices[menu.choose(row.choices, row.choices.index(row.default) if row.default else 0)]
    for number, choice in enumerate(row.choices):
        print(f"  [{number}] {choice}")
    default = {"True": "yes", "False": "no", "None": "none", "": "none"}.get(str(row.default), row.default)
    while True:
        print(f"[{default}]: ", end="", flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            print("" if line else "\n", end="")
            return row.default
        try:
            return row.read(_chosen(row, line.strip()), "answer")
        except UsageError as error:
            print(error)


def _chosen(row: Setting, answer: str) -> Any:
    """Return the choice that a number stands for, or the items of a list."""
    if row.choices and answer.isdigit() and answer not in row.choices and int(answer) < len(row.choices):
        return row.choices[int(answer)]
    return [one.strip() for one in answer.split(",")] if row.kind is several else answer
