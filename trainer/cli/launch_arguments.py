"""What a launch comes to: command line > launch file > environment > default file of the machine > default."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...strategies import environment
from . import launch_file
from .launch_settings import SETTINGS, Setting, nearest, truth
from .sources import COMMAND_LINE, DEFAULT, UsageError

_OTHER_FLAGS = {  # flag → (setting, value that it stands for, None: the value that follows)
    "tpu_cluster": ("tpu_use_cluster", True), "no_tpu_cluster": ("tpu_use_cluster", False),
    "vm": ("tpu_vm", None), "env": ("tpu_env", None),
}  # fmt: skip
_SWITCHES = {"module", "no_python", "quiet", "help", "print_config", "dry_run"}
_SHORT = {"m": "module", "q": "quiet", "h": "help", "t": "tee"}
_ELSEWHERE = {"main_process_ip": "MASTER_ADDR", "main_process_port": "MASTER_PORT", "machine_rank": "NODE_RANK"}
_TITLES = {"": "processes and training:", "dynamo_config": "compilation:", "fsdp_config": "FSDP:",
           "deepspeed_config": "DeepSpeed:", "megatron_lm_config": "Megatron-LM:", "parallelism_config": "parallelism:",
           "fp8_config": "fp8:", "ddp_config": "DDP, and every process group:", "mpirun_config": "MPI:"}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command line taken apart: settings, switches of the command itself, and the program that is started."""

    given: dict[str, Any] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    config_file: str | None = None
    program: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """Resolved settings: each value with its source, the file that was read, and the program with its arguments."""

    values: dict[str, Any]
    sources: dict[str, str]
    command: Command
    file: launch_file.LaunchFile | None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def kind(self) -> str | None:
        """The label of the distribution that a file asks for, as Accelerate spells it."""
        return self.values["distributed_type"]

    def given(self, name: str) -> bool:
        """Whether somebody has said it."""
        return not self.sources[name].startswith(DEFAULT)

    def shown(self, name: str) -> str:
        """Return a value with its source, for messages."""
        return f"{name}={self[name]} ({self.sources[name]})"

    def with_value(self, name: str, value: Any, source: str) -> Launch:
        """Return this launch with another value."""
        return replace(self, values={**self.values, name: value}, sources={**self.sources, name: source})


def parse(args: Sequence[str]) -> Command:
    """Take a command line apart; what follows the program is the program's. Raises UsageError for unknown flags."""
    given: dict[str, Any] = {}
    switches: set[str] = set()
    config = None
    rest = list(args)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        flag = rest.pop(0)
        name, value = _name(flag)
        if name in _SWITCHES:
            switches.add(name)
        elif name == "config_file":
            config = _value(flag, value, rest)
        else:
            setting, fixed = _setting(name, flag)
            value = fixed if fixed is not None else _value(flag, value, rest)
            read = setting.read(value, f"{COMMAND_LINE}, {flag}")
            given[setting.name] = [*given.get(setting.name, []), *read] if isinstance(read, list) else read
    return Command(given, frozenset(switches), config, tuple(rest[1:] if rest[:1] == ["--"] else rest))


def resolve(command: Command) -> Launch:
    """Return every setting's value and source; raises UsageError for files and variables that are wrong."""
    file = launch_file.load(command.config_file)
    of_file = {name: (value, str(file.path)) for name, value in file.values.items()} if file else {}
    said = {name: (value, COMMAND_LINE) for name, value in command.given.items()}
    # a file that is named stands above the environment, the machine's default below
    layers = (_variables(), of_file, said) if file and file.explicit else (of_file, _variables(), said)
    merged = {name: (setting.default, DEFAULT) for name, setting in SETTINGS.items()}
    for layer in layers:
        merged |= {name: found for name, found in layer.items() if not _unset(name, found[0])}
    values = {name: value for name, (value, _) in merged.items()}
    return Launch(values, {name: source for name, (_, source) in merged.items()}, command, file)


def page() -> str:
    """Return what `drivetrain launch --help` prints."""
    lines = [
        "usage: drivetrain launch [FLAGS] SCRIPT [ARGUMENTS OF THE SCRIPT]", "",
        "Starts a training script in its processes. Flags stand before the script.", "",
        *_line("--config_file FILE", "launch file (default: drivetrain's own place, else Accelerate's)"),
        *_line("--print-config", "show every resolved value with its source, and stop"),
        *_line("--dry_run", "show only what would be started: command lines, or SageMaker's request as JSON"),
        *_line("-m, --module", "SCRIPT is a module, as in python -m"),
        *_line("--no_python", "SCRIPT is a program of any kind"),
        *_line("-q, --quiet", "no report about a rank that failed"),
    ]  # fmt: skip
    for section, title in _TITLES.items():
        rows = [row for row in SETTINGS.values() if row.flag and row.section == section]
        lines += ["", title, *(line for row in rows for line in _described(row))]
    lines += ["", "Command line > launch file > environment (ACCELERATE_...) > default file of the machine > default."]
    return "\n".join(lines) + "\n"


def _name(flag: str) -> tuple[str, str | None]:
    name, equals, value = flag.partition("=")
    plain = name.lstrip("-").replace("-", "_")
    if not name.startswith("--"):
        plain = _SHORT.get(plain, plain)
    return plain, value if equals else None


def _value(flag: str, value: str | None, rest: list[str]) -> str:
    if value is not None:
        return value
    if not rest:
        raise UsageError(f"Expected a value after {flag}. Received: the end of the command line.")
    return rest.pop(0)


def _setting(name: str, flag: str) -> tuple[Setting, Any]:
    """Return the setting that a flag is about, and the value that the flag alone stands for."""
    if name in _OTHER_FLAGS:
        setting, fixed = _OTHER_FLAGS[name]
        return SETTINGS[setting], fixed
    flags = {row.name: row for row in SETTINGS.values() if row.flag}
    if name not in flags:
        known = [*flags, *_OTHER_FLAGS, *_SWITCHES, "config_file"]
        raise UsageError(
            f"Expected a known flag before the script. Received: {flag} ({COMMAND_LINE}). {nearest(name, known)}"
        )
    return flags[name], True if flags[name].switch else None


def _variables() -> dict[str, tuple[Any, str]]:
    """Return what the environment says, each value with the variable that says it."""
    environ = environment.child_environment(threads=0)
    found: dict[str, tuple[Any, str]] = {}
    for name, setting in SETTINGS.items():
        own = () if name == "debug" else (f"DRIVETRAIN_{name.upper()}", f"ACCELERATE_{name.upper()}")
        candidates = (*own, setting.variable, _ELSEWHERE.get(name))
        variable = next((one for one in candidates if one and environ.get(one)), None)
        if variable and (variable, environ[variable]) != ("OMP_NUM_THREADS", "0"):  # that is: nobody has set it
            found[name] = setting.read(environ[variable], variable), variable
    return found


def _unset(name: str, value: Any) -> bool:
    return value is None or (name == "num_processes" and value == -1)


def _described(row: Setting) -> list[str]:
    short = f"{row.short}, " if row.short else ""
    flag = f"{short}--{row.name}{'' if row.switch else ' ' + row.name.split('_')[-1].upper()}"
    parts = [row.text, f"one of {', '.join(row.choices)}" if row.choices else ""]
    known = row.default not in (None, False, "") and row.kind is not truth
    text = "; ".join(part for part in parts if part) + (f" (default: {row.default})" if known else "")
    return _line(flag, text)


def _line(flag: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, 78) or [""]
    if len(flag) > 36:
        return [f"  {flag}", *(f"{'':39}{line}".rstrip() for line in wrapped)]
    return [f"  {flag:<36} {wrapped[0]}".rstrip(), *(f"{'':39}{line}" for line in wrapped[1:])]
