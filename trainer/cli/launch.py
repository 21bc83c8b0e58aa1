"""`drivetrain launch`: start a script in its processes, through torchrun's elastic agent, mpirun or as it is."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...strategies import environment
from . import document
from .launch_arguments import Launch, page, parse, resolve
from .launch_commands import mpi_kind, mpirun, tpu_pod
from .launch_file import nested
from .launch_settings import ABSENT_SWITCHES, SETTINGS, engine_is_here
from .reporting import log_to_stderr
from .sources import COMMAND_LINE, DEFAULT, UsageError, plain_errors

logger = logging.getLogger(__name__)

SOURCES = "DRIVETRAIN_LAUNCH_SOURCES"
"""The variable that tells the processes where their settings come from: JSON, variable → "name in file"."""

_RUN = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"  # a program in place of the interpreter
_ENGINE_OF_TYPE = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "XLA": "TPU (XLA)",
                   "TP": "ParallelismConfig"}  # fmt: skip
_VISIBLE = {"MULTI_XPU": "ZE_AFFINITY_MASK", "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
            "MULTI_MLU": "MLU_VISIBLE_DEVICES", "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
            "MULTI_HPU": "HABANA_VISIBLE_MODULES"}  # fmt: skip
_ALWAYS = (
    "distributed_type", "cpu", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "gpu_ids", "num_cpu_threads_per_process", "mixed_precision", "gradient_accumulation_steps", "gradient_clipping",
    "dynamo_backend", "debug", "max_restarts", "rdzv_backend",
)  # fmt: skip


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain launch ARGS`; the exit code is the program's own."""
    with plain_errors(f"drivetrain {command}"):
        taken = parse(args)
        if "help" in taken.switches:
            print(page(), end="")
            return 0
        launch = complete(resolve(taken))
        if "print_config" in taken.switches:
            print(shown(launch), end="")
            return 0
        refuse_absent_engines(launch)
        _check_program(launch)
        log_to_stderr()
        _report_file(launch)
        return start(launch)


def complete(launch: Launch) -> Launch:
    """Fill in what follows from the rest: the CPU, the number of processes and their threads."""
    if launch.kind == "MULTI_CPU" and not launch["multi_gpu"]:
        launch = launch.with_value("cpu", True, launch.sources["distributed_type"])
    if launch["mpirun_hostfile"]:
        launch = launch.with_value("cpu", True, launch.sources["mpirun_hostfile"])
    if any(launch.given(name) for name, row in SETTINGS.items() if row.section == "parallelism_config"):
        launch = launch.with_value("use_parallelism_config", True, launch.sources["use_parallelism_config"])
    if launch["num_processes"] is None:
        count, reason = _count(launch)
        launch = launch.with_value("num_processes", count, f"{DEFAULT}: {reason}")
    _check_counts(launch)
    if launch["num_cpu_threads_per_process"] is None and launch["cpu"]:
        local, cores = local_processes(launch), os.cpu_count() or 1
        reason = f"{DEFAULT}: {cores} cores / {local} processes"
        launch = launch.with_value("num_cpu_threads_per_process", max(1, cores // local), reason)
    return launch


def start(launch: Launch) -> int:
    """Start the processes, wait for them and return the exit code; a single process takes this one's place."""
    variables = exports(launch)
    if launch["tpu_use_cluster"]:
        print("\n".join(map(shlex.join, tpu_pod(launch, program(launch)))))
        return 0
    if launch["mpirun_hostfile"]:
        kind = mpi_kind()
        if kind is None:
            raise UsageError("Expected mpirun. Received: mpirun_hostfile, and no mpirun on the PATH. Install an MPI.")
        _become(mpirun(launch, program(launch), local=local_processes(launch), variables=variables, kind=kind), {})
    if launch["num_processes"] == 1 and launch["max_restarts"] == 0:
        alone = {"DRIVETRAIN_NUM_PROCESSES": "1"} if launch.given("num_processes") else {}
        _become(program(launch), {**variables, **alone})
    from ...strategies.launch import run_script

    quiet = "quiet" in launch.command.switches
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
        return run_script(_python_arguments(launch), local_processes(launch), variables=variables, **agent(launch))


def program(launch: Launch) -> list[str]:
    """Return the command line of one process."""
    words = list(launch.command.program)
    return words if "no_python" in launch.command.switches else [sys.executable, *_python_arguments(launch)]


def local_processes(launch: Launch) -> int:
    """Return how many processes run on each machine."""
    return launch["num_processes"] // launch["num_machines"]


def exports(launch: Launch) -> dict[str, str]:
    """Return the variables by which the processes learn of the settings: Accelerate's names, and where they are from.

    What nobody has set is left to the script. An engine's settings are handed on only to that engine.
    """
    engine = used_engine(launch)
    named = {name: row for name, row in SETTINGS.items() if row.variable and _is_handed_on(launch, name, engine)}
    variables = {str(row.variable): _as_text(name, launch[name]) for name, row in named.items()}
    sources = {str(row.variable): f"{name} in {launch.sources[name]}" for name, row in named.items()}
    if engine is not None:
        switch = next(name for name, title in ABSENT_SWITCHES.items() if title == engine)
        variables[f"ACCELERATE_{switch.upper()}"] = "true"
    if launch["cpu"]:
        variables["ACCELERATE_USE_CPU"] = "true"
    elif launch["gpu_ids"] not in (None, "all"):
        variables[_VISIBLE.get(launch.kind or "", "CUDA_VISIBLE_DEVICES")] = launch["gpu_ids"]
    return {**variables, SOURCES: json.dumps(sources)}


def agent(launch: Launch) -> dict[str, Any]:
    """Return the options of the elastic agent."""
    machines = launch["num_machines"]
    port = launch["main_process_port"] or (29500 if machines > 1 else None)
    options: dict[str, Any] = {
        "nodes": machines, "node_rank": launch["machine_rank"], "main_address": launch["main_process_ip"],
        "main_port": port, "max_restarts": launch["max_restarts"], "monitor_interval": launch["monitor_interval"],
        "role": launch["role"],
    }  # fmt: skip
    if launch["rdzv_backend"] != "static" and machines > 1:
        options |= {"rdzv_backend": launch["rdzv_backend"], "run_id": "none"}
        options["rdzv_configs"] = _pairs(launch["rdzv_conf"])
    elif launch["rdzv_conf"]:
        options["rdzv_configs"] = {"rank": launch["machine_rank"], **_pairs(launch["rdzv_conf"])}
    if launch["log_dir"] or launch["tee"] != "0":
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

        if launch["log_dir"]:
            Path(launch["log_dir"]).mkdir(parents=True, exist_ok=True)
        options["logs_specs"] = DefaultLogsSpecs(log_dir=launch["log_dir"], tee=Std.from_str(launch["tee"]))
    if launch["enable_cpu_affinity"] and not launch["cpu"]:
        from torch.numa.binding import AffinityMode, NumaOptions

        options["numa_options"] = NumaOptions(affinity_mode=AffinityMode.NODE)
    return options


def used_engine(launch: Launch) -> str | None:
    """Return the engine that a switch or the distributed type asks for; --multi_gpu is plain DDP."""
    for switch, engine in ABSENT_SWITCHES.items():
        if launch[switch]:
            return engine
    return None if launch["multi_gpu"] else _ENGINE_OF_TYPE.get(launch.kind or "")


def refuse_absent_engines(launch: Launch) -> None:
    """Raise UsageError for what this version cannot run, by the engine's name."""
    if launch["compute_environment"] == "AMAZON_SAGEMAKER" or launch["aws_access_key_id"]:
        received = _who(launch, "compute_environment")
        raise UsageError(f"Expected this machine. Received: {received}. {_absent('SageMaker')}")
    if launch["tpu_use_cluster"]:
        return
    engine = used_engine(launch)
    flags = [name for name in launch.command.given if SETTINGS[name].engine and SETTINGS[name].engine != engine]
    if flags:
        raise UsageError(_unused_flag(flags[0]))
    if engine is not None and not engine_is_here(engine):
        name = next((one for one in ABSENT_SWITCHES if launch[one]), "distributed_type")
        raise UsageError(f"Expected an engine that is here. Received: {_who(launch, name)}. {_absent(engine)}")


def shown(launch: Launch) -> str:
    """Return what --print-config prints: a launch file with the source of each value, then what would be started."""
    names = [name for name in SETTINGS if name in _ALWAYS or launch.given(name)]
    tree = nested({name: launch[name] for name in names})
    text = document.write(tree, lambda path: launch.sources[{"use_cpu": "cpu"}.get(path[-1], path[-1])])
    file = "none" if launch.file is None else f"{launch.file.path} ({launch.file.why})"
    notes = [f"launch file: {file}"]
    engine = used_engine(launch)
    if engine is not None and not engine_is_here(engine):
        notes.append(_absent(engine))
    notes += [f"{name}={value}" for name, value in exports(launch).items() if name != SOURCES]
    return text + "".join(f"# {note}\n" for note in [*notes, *_commands(launch)])


def _commands(launch: Launch) -> list[str]:
    if not launch.command.program:
        return []
    if launch["tpu_use_cluster"]:
        return [shlex.join(words) for words in tpu_pod(launch, program(launch))]
    if launch["mpirun_hostfile"]:
        variables = {name: value for name, value in exports(launch).items() if name != SOURCES}
        options: dict[str, Any] = {"local": local_processes(launch), "kind": mpi_kind() or "openmpi"}
        return [shlex.join(mpirun(launch, program(launch), variables=variables, **options))]
    count = local_processes(launch)
    return [f"{count} process{'es' if count > 1 else ''} on this machine: {shlex.join(program(launch))}"]


def _count(launch: Launch) -> tuple[int, str]:
    machines = launch["num_machines"]
    if launch.kind == "NO" and not launch["multi_gpu"]:
        return machines, "nothing is distributed"
    if launch["cpu"]:
        return machines, "one per machine on the CPU"
    if launch["gpu_ids"] not in (None, "all"):
        return len(_ids(launch)) * machines, f"gpu_ids {launch['gpu_ids']}"
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return max(1, count) * machines, f"{count} accelerators on this machine"


def _ids(launch: Launch) -> list[str]:
    return [one.strip() for one in launch["gpu_ids"].split(",") if one.strip()]


def _check_counts(launch: Launch) -> None:
    processes, machines = launch["num_processes"], launch["num_machines"]
    if processes < 1 or machines < 1 or processes % machines:
        raise UsageError(
            f"Expected processes in all that the machines share evenly. Received: {_who(launch, 'num_processes')}, "
            f"{_who(launch, 'num_machines')}. Make one a multiple of the other."
        )
    if machines > 1 and not launch["main_process_ip"] and not launch["mpirun_hostfile"]:
        raise UsageError(
            f"Expected machine 0's address for several machines. Received: {_who(launch, 'num_machines')}, "
            "main_process_ip=None. Set --main_process_ip (and --machine_rank) on every machine."
        )
    local = local_processes(launch)
    if not launch["cpu"] and launch["gpu_ids"] not in (None, "all") and len(_ids(launch)) < local:
        raise UsageError(
            f"Expected a GPU for each of {local} processes. Received: {_who(launch, 'gpu_ids')}. Name more, "
            "or start fewer processes."
        )


def _check_program(launch: Launch) -> None:
    words, switches = launch.command.program, launch.command.switches
    if not words:
        raise UsageError("Expected a script. Received: none. Write drivetrain launch [FLAGS] script.py.")
    if {"module", "no_python"} <= switches:
        raise UsageError("Expected a module or a program. Received: --module and --no_python. Give one.")
    if not switches & {"module", "no_python"} and not Path(words[0]).exists():
        raise UsageError(f"Expected a script. Received: {words[0]}, and there is no such file. For a module add -m.")
    if launch["multi_gpu"] and not launch["cpu"]:
        import torch

        if not torch.accelerator.is_available():
            raise UsageError("Expected GPUs. Received: --multi_gpu on a machine without one. Use --cpu.")


def _report_file(launch: Launch) -> None:
    """Say which file is in force, and what it changes unless the command line asked for it."""
    if launch.file is None:
        return
    path = str(launch.file.path)
    changed = [f"{name}={launch[name]}" for name, source in launch.sources.items()
               if source == path and launch[name] != SETTINGS[name].default]  # fmt: skip
    logger.info("Launch file: %s (%s)%s", path, launch.file.why, f": {', '.join(changed)}" if changed else "")


def _python_arguments(launch: Launch) -> list[str]:
    words = list(launch.command.program)
    if "no_python" in launch.command.switches:
        return ["-c", _RUN, *words]
    return ["-m", *words] if "module" in launch.command.switches else words


def _is_handed_on(launch: Launch, name: str, engine: str | None) -> bool:
    row, value = SETTINGS[name], launch[name]
    if value is None or value == "auto":
        return False
    if row.engine is not None:
        return row.engine == engine
    if row.section == "fp8_config":
        return launch["mixed_precision"] == "fp8" and launch.given(name)
    return launch.given(name) or name == "num_cpu_threads_per_process"


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).upper() if name in ("dynamo_backend", "fp8_backend") else str(value)


def _become(words: Sequence[str], variables: dict[str, str]) -> None:
    """Let a program take this process's place: its exit code, signals and terminal are then its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    environ = environment.child_environment(variables, threads=0)
    if environ["OMP_NUM_THREADS"] == "0":
        del environ["OMP_NUM_THREADS"]
    try:
        os.execvpe(words[0], list(words), environ)
    except OSError as error:
        raise UsageError(f"Expected a program. Received: {words[0]}: {error.strerror}.") from None


def _pairs(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _who(launch: Launch, name: str) -> str:
    return f"{name}={launch[name]} ({launch.sources[name]})"


def _absent(engine: str) -> str:
    return f"The engine {engine} is not part of this version of drivetrain. Use DDP: --multi_gpu, or --cpu."


def _unused_flag(name: str) -> str:
    engine = SETTINGS[name].engine or ""
    switch = next(one for one, title in ABSENT_SWITCHES.items() if title == engine)
    if not engine_is_here(engine):
        return f"Expected flags of engines that are here. Received: --{name} ({COMMAND_LINE}). {_absent(engine)}"
    return f"Expected --{name} together with its engine. Received: it alone. Add --{switch}."
