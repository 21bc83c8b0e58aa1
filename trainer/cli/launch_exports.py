"""What a launch tells its processes: Accelerate's variables, names and values, and where each setting is from.

A setting that nobody has set is left to the script. An engine's settings are handed on only to that engine, and then
all of them with their defaults, as Accelerate's launcher does: its option objects have other defaults than its flags.
"""

from __future__ import annotations

import json
from typing import Any

from ...strategies import environment
from .launch_arguments import Launch
from .launch_settings import SETTINGS, SWITCHES, truth
from .sources import UsageError

_ENGINE_OF_TYPE = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "TPU (XLA)",
                   "TP": "ParallelismConfig"}  # fmt: skip
_VARIABLE_OF_ENGINE = {
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED", "FSDP": "ACCELERATE_USE_FSDP", "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
    "ParallelismConfig": "ACCELERATE_USE_PARALLELISM_CONFIG", "TPU (XLA)": "ACCELERATE_USE_XLA",
}  # fmt: skip
_VISIBLE = {"MULTI_XPU": "ZE_AFFINITY_MASK", "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
            "MULTI_MLU": "MLU_VISIBLE_DEVICES", "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
            "MULTI_SDAA": "SDAA_VISIBLE_DEVICES", "MULTI_NEURON": "NEURON_RT_VISIBLE_CORES",
            "MULTI_HPU": "HABANA_VISIBLE_MODULES"}  # fmt: skip
_WITH_CP = ("parallelism_config_cp_comm_strategy",)
_WITH_SP = tuple(f"parallelism_config_sp_{name}" for name in ("seq_length", "seq_length_is_variable",
                                                             "attn_implementation"))  # fmt: skip
_IN_CAPITALS = ("dynamo_backend", "fp8_backend")
_PRECISION_OF_LAYERS = "fp8_override_linear_precision"


def exports(launch: Launch) -> dict[str, str]:
    """Return the variables by which the processes learn of the settings, and which of these somebody has set."""
    engines = used_engines(launch)
    named = {name: row for name, row in SETTINGS.items() if row.variable and _is_handed_on(launch, name, engines)}
    variables = {str(row.variable): _as_text(name, launch[name]) for name, row in named.items()}
    sources = {str(row.variable): f"{name} in {launch.sources[name]}" for name, row in named.items()
               if launch.given(name)}  # fmt: skip
    for engine in engines:
        variables[_VARIABLE_OF_ENGINE[engine]] = "true"
        sources[_VARIABLE_OF_ENGINE[engine]] = _asked_by(launch, engine)
    if launch["cpu"]:
        variables["ACCELERATE_USE_CPU"] = "true"
    elif launch["gpu_ids"] not in (None, "all"):
        variables[_VISIBLE.get(launch.kind or "", "CUDA_VISIBLE_DEVICES")] = launch["gpu_ids"]
    variables |= _of_layers(variables)
    variables |= _of_deepspeed(launch) if "DeepSpeed" in engines else {}
    variables |= _of_xla(launch) if "TPU (XLA)" in engines else {}
    return {**variables, environment.SOURCES: json.dumps(sources)}


def used_engines(launch: Launch) -> list[str]:
    """Return the engines that a switch or the distributed type asks for; none is plain DDP, as --multi_gpu is."""
    found = [engine for switch, engine in SWITCHES.items() if launch[switch]]
    if set(found) <= {"ParallelismConfig"} and not launch["multi_gpu"] and launch.kind in _ENGINE_OF_TYPE:
        found.append(_ENGINE_OF_TYPE[launch.kind])
    return list(dict.fromkeys(found))


def _asked_by(launch: Launch, engine: str) -> str:
    """Return which setting asks for an engine, and where it was made."""
    name = next((one for one in SWITCHES if SWITCHES[one] == engine and launch[one]), "distributed_type")
    return f"{name} in {launch.sources[name]}"


def is_here(engine: str) -> bool:
    """Whether this version of drivetrain has that engine, and follows a launch that asks for it."""
    from ...strategies import choice

    return _VARIABLE_OF_ENGINE[engine].removeprefix("ACCELERATE_") in {
        name.removeprefix("ACCELERATE_") for name in choice.followed()
    }


def check(launch: Launch) -> None:
    """Raise UsageError for settings of engines that do not fit together."""
    loading, synced = launch["fsdp_cpu_ram_efficient_loading"], launch["fsdp_sync_module_states"]
    if "FSDP" in used_engines(launch) and launch["fsdp_version"] == "1" and loading and not synced:
        raise UsageError(
            "Expected fsdp_sync_module_states with fsdp_cpu_ram_efficient_loading. Received: "
            f"{launch.shown('fsdp_cpu_ram_efficient_loading')}, {launch.shown('fsdp_sync_module_states')}. Set both."
        )
    if len(set(used_engines(launch)) - {"ParallelismConfig"}) > 1:
        raise UsageError(f"Expected one engine. Received: {', '.join(used_engines(launch))}. Ask for one.")


def _is_handed_on(launch: Launch, name: str, engines: list[str]) -> bool:
    row, value = SETTINGS[name], launch[name]
    if value is None or value == "auto":
        return False
    if row.engine == "DDP":
        return not engines
    if name in _WITH_CP or name in _WITH_SP:
        degree = "parallelism_config_cp_size" if name in _WITH_CP else "parallelism_config_sp_size"
        return "ParallelismConfig" in engines and launch[degree] > 1
    if row.engine is not None:
        return row.engine in engines
    if row.section == "fp8_config":
        return bool(launch["mixed_precision"] == "fp8")
    return launch.given(name) or name == "num_cpu_threads_per_process"


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).upper() if name in _IN_CAPITALS else str(value)


def _of_layers(variables: dict[str, str]) -> dict[str, str]:
    """Return the three variables that Accelerate has for fp8_override_linear_precision, which goes."""
    text = variables.pop(str(SETTINGS[_PRECISION_OF_LAYERS].variable), None)
    if text is None:
        return {}
    words = [truth(word) for word in text.split(",")]
    if len(words) != 3:
        raise UsageError(f"Expected three of true and false. Received: {_PRECISION_OF_LAYERS}={text}.")
    names = (f"ACCELERATE_FP8_OVERRIDE_{part}" for part in ("FPROP", "DGRAD", "WGRAD"))
    return {name: str(word).lower() for name, word in zip(names, words)}


def _of_deepspeed(launch: Launch) -> dict[str, str]:
    """Return which settings a file decides, as DeepSpeed's own file must not contradict them."""
    file = None if launch.file is None else str(launch.file.path)
    said = [name for name, row in SETTINGS.items() if launch.sources[name] == file and (
        row.section == "deepspeed_config" or name in (
            "mixed_precision", "gradient_accumulation_steps", "gradient_clipping"))]  # fmt: skip
    return {"ACCELERATE_CONFIG_DS_FIELDS": ",".join(said)} if said else {}


def _of_xla(launch: Launch) -> dict[str, str]:
    """Return what torch_xla reads itself.

    Not XLA_USE_BF16, which would make weights and optimizer states bfloat16 in silence: precision is the engine's.
    """
    device = environment.child_environment().get("PJRT_DEVICE") or ("CPU" if launch["cpu"] else "TPU")
    downcast = launch["mixed_precision"] == "bf16" and device == "TPU" and launch["downcast_bf16"]
    return {"PJRT_DEVICE": device, **({"XLA_DOWNCAST_BF16": "1"} if downcast else {})}
