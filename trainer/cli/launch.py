"""`drivetrain launch`: start a script in its processes, through torchrun's elastic agent, mpirun or as it is.

Other ways are the commands of other programs (TPU pods, DeepSpeed's launcher) and a job on SageMaker.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...strategies import environment
from ...strategies.variables import convert_dict_to_env_variables
from . import document, sagemaker, sagemaker_options
from .launch_arguments import Launch, page, parse, resolve
from .launch_commands import deepspeed, deepspeed_launcher, mpi_kind, mpirun, tpu_pod
from .launch_exports import check as check_options
from .launch_exports import exports, is_here, used_engines
from .launch_file import nested
from .launch_settings import SETTINGS, SWITCHES
from .reporting import log_to_stderr
from .sources import COMMAND_LINE, DEFAULT, UsageError, plain_errors

logger = logging.getLogger(__name__)

_RUN = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"  # a program in place of the interpreter
_CALL = {  # a function of a script, or of a module
    False: "import runpy, sys; name = sys.argv.pop(1); del sys.argv[0]; runpy.run_path(sys.argv[0])[name]()",
    True: "import importlib, sys; name = sys.argv.pop(1); del sys.argv[0]; "
          "getattr(importlib.import_module(sys.argv[0]), name)()",
}  # fmt: skip
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
        check(launch)
        if "dry_run" in taken.switches:
            print("\n".join(_commands(launch)))
            return 0
        log_to_stderr()
        _report_file(launch)
        return start(launch)


def complete(launch: Launch) -> Launch:
    """Fill in what follows from the rest: the CPU, the number of processes and their threads."""
    if sagemaker.is_asked_for(launch):
        return launch  # the machines over there decide
    if launch.kind == "MULTI_CPU" and not launch["multi_gpu"]:
        launch = launch.with_value("cpu", True, launch.sources["distributed_type"])
    if launch["mpirun_hostfile"]:
        launch = launch.with_value("cpu", True, launch.sources["mpirun_hostfile"])
    degrees = [name for name, row in SETTINGS.items() if row.section == "parallelism_config" and launch.given(name)]
    if degrees:
        launch = launch.with_value("use_parallelism_config", True, launch.sources[degrees[0]])
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
    if sagemaker.is_asked_for(launch):
        return sagemaker.submit(launch)
    variables = exports(launch)
    if deepspeed_launcher(launch) is not None:
        return _deepspeed(launch, variables)
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


def check(launch: Launch) -> None:
    """Raise UsageError for what cannot be started."""
    if sagemaker.is_asked_for(launch):
        return sagemaker_options.check(launch)
    if launch["aws_access_key_id"]:
        raise UsageError("Expected AWS's keys for SageMaker. Received: them alone. Set compute_environment.")
    check_engines(launch)
    _check_program(launch)


def check_engines(launch: Launch) -> None:
    """Raise UsageError for engines that this version does not have, by name, and for options of engines not in use."""
    if launch["tpu_use_cluster"]:
        return
    engines = used_engines(launch)
    for name, row in SETTINGS.items():
        if row.engine not in (None, "DDP") and row.engine not in engines and name in launch.command.given:
            raise UsageError(_unused_flag(name, row.engine or ""))
        if row.engine == "DDP" and engines and launch.given(name):
            raise UsageError(f"Expected options of DDP with DDP. Received: {launch.shown(name)}, and {engines[0]}.")
    for engine in engines:
        if not is_here(engine):
            name = next((one for one in SWITCHES if SWITCHES[one] == engine and launch[one]), "distributed_type")
            raise UsageError(f"Expected an engine that is here. Received: {launch.shown(name)}. {_absent(engine)}")
    check_options(launch)


def shown(launch: Launch) -> str:
    """Return what --print-config prints: a launch file with the source of each value, then what would be started."""
    names = [name for name in SETTINGS if name in _ALWAYS or (launch.given(name) and not name.startswith("aws_"))]
    tree = nested({name: launch[name] for name in names})
    text = document.write(tree, lambda path: launch.sources[_setting(path)])
    file = "none" if launch.file is None else f"{launch.file.path} ({launch.file.why})"
    notes = [f"launch file: {file}"]
    notes += [_absent(engine) for engine in used_engines(launch) if not is_here(engine)]
    notes += [f"{name}={value}" for name, value in exports(launch).items() if name != environment.SOURCES]
    return text + "".join(f"# {note}\n" for note in [*notes, *_commands(launch)])


def _setting(path: tuple[Any, ...]) -> str:
    """Return the setting that a place in a launch file belongs to."""
    names = [{"use_cpu": "cpu"}.get(part, part) for part in path]
    return next(name for name in reversed(names) if name in SETTINGS)


def _commands(launch: Launch) -> list[str]:
    if not launch.command.program:
        return []
    if sagemaker.is_asked_for(launch):
        return json.dumps(sagemaker.dry(launch), indent=2).splitlines()
    if deepspeed_launcher(launch) is not None:
        return [shlex.join(deepspeed(launch, local=local_processes(launch)))]
    if launch["tpu_use_cluster"]:
        return [shlex.join(words) for words in tpu_pod(launch, program(launch))]
    if launch["mpirun_hostfile"]:
        variables = {name: value for name, value in exports(launch).items() if name != environment.SOURCES}
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
    if "TPU (XLA)" in used_engines(launch):
        if "ParallelismConfig" in used_engines(launch):
            return machines, "one per machine, which has all its XLA devices (SPMD)"
        chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
        return max(1, len(chips)) * machines, f"{len(chips)} TPU chips on this machine"
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
            f"Expected processes in all that the machines share evenly. Received: {launch.shown('num_processes')}, "
            f"{launch.shown('num_machines')}. Make one a multiple of the other."
        )
    if machines > 1 and not launch["main_process_ip"] and not launch["mpirun_hostfile"]:
        raise UsageError(
            f"Expected machine 0's address for several machines. Received: {launch.shown('num_machines')}, "
            "main_process_ip=None. Set --main_process_ip (and --machine_rank) on every machine."
        )
    local = local_processes(launch)
    if not launch["cpu"] and launch["gpu_ids"] not in (None, "all") and len(_ids(launch)) < local:
        raise UsageError(
            f"Expected a GPU for each of {local} processes. Received: {launch.shown('gpu_ids')}. Name more, "
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
    if "TPU (XLA)" in used_engines(launch) and "main_training_function" in launch.command.given:
        return ["-c", _CALL["module" in launch.command.switches], launch["main_training_function"], *words]
    return ["-m", *words] if "module" in launch.command.switches else words


def _deepspeed(launch: Launch, variables: dict[str, str]) -> int:
    """Let DeepSpeed's own launcher start the processes on all hosts; they get their variables by a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".env") as told:
        told.writelines(convert_dict_to_env_variables(variables))
        told.flush()
        environ = environment.child_environment({**variables, "DS_ENV_FILE": told.name})
        words = deepspeed(launch, local=local_processes(launch))
        try:
            return subprocess.run(words, env=environ, check=False).returncode
        except FileNotFoundError:
            raise UsageError(f"Expected DeepSpeed's launcher. Received: no {words[0]} on the PATH.") from None


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


def _absent(engine: str) -> str:
    return f"The engine {engine} is not part of this version of drivetrain. Use DDP: --multi_gpu, or --cpu."


def _unused_flag(name: str, engine: str) -> str:
    if not is_here(engine):
        return f"Expected flags of engines that are here. Received: --{name} ({COMMAND_LINE}). {_absent(engine)}"
    switch = next(one for one, title in SWITCHES.items() if title == engine)
    return f"Expected --{name} together with its engine. Received: it alone. Add --{switch}."
