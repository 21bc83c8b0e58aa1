"""The command lines of other launchers: MPI's mpirun, DeepSpeed's, and gcloud for TPU pods."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...strategies.environment import SOURCES
from ...strategies.ports import get_free_port
from .launch_arguments import Launch
from .launch_exports import exports, used_engines
from .sources import UsageError

_OF_HERE = (SOURCES, "OMP_NUM_THREADS")  # mean nothing on another machine


def mpi_kind() -> str | None:
    """Return which MPI `mpirun` belongs to, openmpi, mpich (Intel's too) or mvapich; None where there is none."""
    if shutil.which("mpirun") is None:
        return None
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False)
    text = (said.stdout + said.stderr).lower()
    if "open mpi" in text or "openrte" in text:
        return "openmpi"
    return "mvapich" if "mvapich" in text else "mpich"


def mpirun(launch: Launch, program: Sequence[str], *, local: int, variables: Mapping[str, str], kind: str) -> list[str]:
    """Return the command that starts `program` on all hosts of the hostfile, `local` processes on each.

    Open MPI takes `--hostfile`, `-npernode` and `-x NAME=VALUE`; MPICH and Intel MPI `-f`, `-ppn` and
    `-genv NAME VALUE`; MVAPICH `-hostfile`, `-ppn` and `-genv`.
    """
    address = launch["main_process_ip"] or "127.0.0.1"
    port = launch["main_process_port"] or (29500 if launch["num_machines"] > 1 else get_free_port())
    everywhere = {"MASTER_ADDR": address, "MASTER_PORT": str(port), **variables}
    if launch["mpirun_ccl"]:
        everywhere["CCL_WORKER_COUNT"] = launch["mpirun_ccl"]
    hostfile, per_node = {
        "openmpi": ("--hostfile", "-npernode"), "mpich": ("-f", "-ppn"), "mvapich": ("-hostfile", "-ppn"),
    }[kind]  # fmt: skip
    words = ["mpirun", hostfile, launch["mpirun_hostfile"], "-n", str(launch["num_processes"]), per_node, str(local)]
    for name, value in sorted(everywhere.items()):
        words += ["-x", f"{name}={value}"] if kind == "openmpi" else ["-genv", name, value]
    return [*words, *program]


def deepspeed_launcher(launch: Launch) -> str | None:
    """Return which of DeepSpeed's launchers is asked for: pdsh, openmpi, …; None where torchrun's agent does it."""
    if launch["num_machines"] == 1 or "DeepSpeed" not in used_engines(launch):
        return None
    named = launch["deepspeed_multinode_launcher"] or ("pdsh" if launch["deepspeed_hostfile"] else "standard")
    return None if named == "standard" else str(named)


def deepspeed(launch: Launch, *, local: int) -> list[str]:
    """Return the command by which DeepSpeed's launcher starts the program on all hosts of its hostfile."""
    name, switches = deepspeed_launcher(launch), launch.command.switches
    if not launch["deepspeed_hostfile"]:
        raise UsageError(f"Expected a hostfile for DeepSpeed's launcher {name}. Received: none. Set it.")
    words = ["deepspeed", "--hostfile", launch["deepspeed_hostfile"]]
    alone = ["--node_rank", str(launch["machine_rank"]), "--no_ssh"]
    words += alone if name == "nossh" else ["--no_local_rank", "--launcher", str(name)]
    if launch["deepspeed_exclusion_filter"]:
        words += ["--exclude", launch["deepspeed_exclusion_filter"]]
    elif launch["deepspeed_inclusion_filter"]:
        words += ["--include", launch["deepspeed_inclusion_filter"]]
    else:
        words += ["--num_gpus", str(local)]
    words += ["--master_addr", launch["main_process_ip"]] if launch["main_process_ip"] else []
    words += ["--master_port", str(launch["main_process_port"] or 29500)]
    return [*words, *(f"--{one}" for one in ("module", "no_python") if one in switches), *launch.command.program]


def tpu_pod(launch: Launch, program: Sequence[str]) -> list[list[str]]:
    """Return the commands that start `program` on every worker of a TPU pod, or on each named TPU VM.

    The settings of the launch go with it as variables; the interpreter is the python3 that is there.
    """
    told = [f"{name}={value}" for name, value in exports(launch).items() if name not in _OF_HERE]
    exported = [f"export {shlex.quote(one)}" for one in [*(launch["tpu_env"] or []), *told]]
    words = ["python3" if word == sys.executable else word for word in program]
    start = shlex.join([*(["sudo", "-E"] if launch["tpu_use_sudo"] else []), *words])
    zone = ["--zone", launch["tpu_zone"]] if launch["tpu_zone"] else []
    remote = "; ".join([*exported, start])
    if launch["tpu_name"]:
        return [_gcloud(launch["tpu_name"], zone, remote, everywhere=True)]
    if not launch["tpu_vm"]:
        raise UsageError("Expected a TPU pod. Received: no name. Write tpu_name in the launch file, or --vm NAME.")
    return [_gcloud(name, zone, remote, everywhere=False) for name in launch["tpu_vm"]]


def on_pod(name: str, zone: str | None, commands: Sequence[str], *, alpha: bool = False) -> list[str]:
    """Return the command that runs shell commands on every worker of a TPU pod."""
    return _gcloud(name, ["--zone", zone] if zone else [], "; ".join(commands), everywhere=True, alpha=alpha)


def _gcloud(name: str, zone: list[str], remote: str, *, everywhere: bool, alpha: bool = False) -> list[str]:
    worker = ["--worker", "all"] if everywhere else []
    tool = ["gcloud", "alpha"] if alpha else ["gcloud"]
    return [*tool, "compute", "tpus", "tpu-vm", "ssh", name, *zone, "--command", remote, *worker]
