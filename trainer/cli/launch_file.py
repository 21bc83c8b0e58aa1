"""Launch files: how processes are started, in the format of Accelerate's config files, YAML or JSON.

A file is read from where the command line says, else from drivetrain's own place
(`$XDG_CONFIG_HOME/drivetrain/launch.yaml`), else from where Accelerate keeps its default
(`$HF_HOME/accelerate/default_config.yaml`). What older versions of Accelerate wrote is read as what it meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...strategies import environment
from . import document
from .launch_settings import SECTIONS, SETTINGS, Setting, nearest, upper
from .sources import UsageError, default_config

_RENAMED = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch", "use_cpu": "cpu",
    # what Accelerate's questionnaire writes, and its launcher has other names for
    "fp8_amax_history_length": "fp8_amax_history_len", "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_optimization_level": "fp8_opt_level",
}  # fmt: skip
_GONE = {"ipex_config", "use_xpu", "tp_config", "fp16", "deepspeed_fields_from_accelerate_config", "use_ipex"}
_PREFIXES = {"fsdp_config": "fsdp_", "megatron_lm_config": "megatron_lm_", "dynamo_config": "dynamo_",
             "parallelism_config": "parallelism_config_", "fp8_config": "fp8_", "ddp_config": "ddp_",
             "mpirun_config": "mpirun_"}  # fmt: skip
_SHARDINGS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_SHARED = ("gradient_accumulation_steps", "gradient_clipping")  # stand in DeepSpeed's section, and count only there


@dataclass(frozen=True)
class LaunchFile:
    """A launch file that was read: its values by the names of settings, and why this file was taken."""

    path: Path
    why: str
    explicit: bool  # the command line names it
    values: dict[str, Any] = field(default_factory=dict)


def find(named: str | None = None) -> tuple[Path, str] | None:
    """Return the launch file that is in force and why; None where there is none."""
    if named:
        return Path(named).expanduser().absolute(), "named by --config_file"
    if (own := own_place()).is_file():
        return own, "the default of this machine"
    accelerate = accelerate_place()
    for path in (accelerate, accelerate.with_suffix(".json")):
        if path.is_file():
            return path, "the default of this machine, in Accelerate's place"
    return None


def own_place() -> Path:
    """Return where drivetrain keeps this machine's launch file."""
    return default_config().with_name("launch.yaml")


def accelerate_place() -> Path:
    """Return where Accelerate keeps its default file: under HF_HOME, else $XDG_CACHE_HOME/huggingface (~/.cache)."""
    variables = environment.child_environment()
    cache = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def load(named: str | None = None) -> LaunchFile | None:
    """Read the launch file in force; raises UsageError for one that is missing or wrong."""
    found = find(named)
    if found is None:
        return None
    path, why = found
    return LaunchFile(path, why, bool(named), values(tree(path), str(path)))


def tree(path: Path) -> dict[str, Any]:
    """Return a launch file as it is written."""
    import yaml

    if not path.is_file():
        raise UsageError(f"Expected a launch file. Received: --config_file={path}, and there is no such file.")
    try:
        written = document.read(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"Expected YAML or JSON. Received: {path}: {error}. Correct it.") from None
    if not isinstance(written, (dict, type(None))):
        raise UsageError(f"Expected keys and values. Received: {path} with {type(written).__name__}.")
    return written or {}


def values(written: dict[str, Any], source: str) -> dict[str, Any]:
    """Return what a file says by the names of settings; raises UsageError for keys and values that do not exist."""
    found: dict[str, Any] = {}
    modern = _modern(written)
    label = modern.get("distributed_type", "DEEPSPEED")
    others = set() if upper(label) == "DEEPSPEED" else {("deepspeed_config", name) for name in _SHARED}
    for key, value in modern.items():
        if key in SECTIONS:
            section = _section(key, value, source)
            found |= {name: read for name, read in section.items() if (key, name) not in others}
        elif key not in _GONE:
            setting = _known(key, _tops(), source)
            found[setting.name] = setting.read(value, source)
    return {name: value for name, value in found.items() if value is not None}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return values by the names of settings in the layout of a file."""
    layout: dict[str, Any] = {}
    for name, value in flat.items():
        setting = SETTINGS[name]
        place = layout.setdefault(setting.section, {}) if setting.section else layout
        place["use_cpu" if name == "cpu" else name] = int(value) if name == "fsdp_version" else value
    return layout


def _tops() -> list[str]:
    return [name for name, setting in SETTINGS.items() if not setting.section]


def _modern(written: dict[str, Any]) -> dict[str, Any]:
    """Return a file's keys as the newest version of Accelerate would write them."""
    new = dict(written)
    if isinstance(new.get("dynamo_backend"), (str, bool)):  # 0.14 to 0.16 had it at the top
        new.setdefault("dynamo_config", {"dynamo_backend": new["dynamo_backend"]})
        del new["dynamo_backend"]
    if new.get("fp16") is True and "mixed_precision" not in new:
        new["mixed_precision"] = "fp16"
    older = new.get("tp_config") or {}  # 1.3 to 1.9
    if "tp_size" in older:
        new["parallelism_config"] = {"tp_size": older["tp_size"], **(new.get("parallelism_config") or {})}
    label = str(new.get("distributed_type")).upper()
    if label == "TPU":
        new["distributed_type"] = "XLA"
    return new


def _section(section: str, content: Any, source: str) -> dict[str, Any]:
    if content is None or content == {}:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"Expected {section} to hold keys and values. Received: {content!r} ({source}).")
    known = [name for name, setting in SETTINGS.items() if setting.section == section]
    known += _SHARED if section == "deepspeed_config" else ()
    prefix = _PREFIXES.get(section, "")
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key in _GONE:
            continue
        full = key if key.startswith(prefix) else f"{prefix}{key}"
        setting = _known(full, known, source, where=f"{section}.")
        found[setting.name] = setting.read(_plain(setting, value), source)
    return found


def _plain(setting: Setting, value: Any) -> Any:
    if setting.name == "fsdp_sharding_strategy":  # a number in older files
        return _SHARDINGS.get(str(value), value)
    if not isinstance(value, (list, tuple)) or not setting.section:
        return value
    return ",".join(str(one).lower() if isinstance(one, bool) else str(one) for one in value)


def _known(key: str, known: list[str], source: str, *, where: str = "") -> Setting:
    name = _RENAMED.get(key, key)
    if name not in known:
        candidates = [*known, *(() if where else (*SECTIONS, "use_cpu"))]
        raise UsageError(f"Expected a known key. Received: {where}{key} ({source}). {nearest(key, candidates)}")
    return SETTINGS[name]
