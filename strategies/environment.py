"""Where this process stands among the launched ones: the only reader of the process environment.

One row of `_LAUNCHERS` describes one launcher: which variables say that it started this process, and which say rank
and size. `detect` returns plain values, each with the variable that it came from, so that nothing else has to know
a launcher's name. The order of rows matters: torchrun inside a SLURM job is torchrun, and `mpirun` inside one is MPI
(SLURM then counts mpirun's daemons, not the ranks).
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DEFAULT_PORT = 29500  # torchrun's, and what most examples export
_LOCALHOST = "127.0.0.1"
_PREFIXES = ("DRIVETRAIN_", "ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "HF_", "SLURM_",
             "TORCHELASTIC_")
_TRUE, _FALSE = ("1", "true", "yes", "y", "t", "on"), ("0", "false", "no", "n", "f", "off")
SOURCES = "DRIVETRAIN_LAUNCH_SOURCES"
"""The variable by which `drivetrain launch` tells what somebody has said: JSON, variable → "setting in file"."""


@dataclass(frozen=True)
class Placement:
    """Where this process stands: ranks count from 0, `local_*` within a node; `sources` names each value's variable.

    `launched` is true when a launcher has started all the processes already, so that nobody must start them again.
    `attempt` counts the restarts by an elastic agent. `main_address` is empty where no variable tells it.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    main_address: str = _LOCALHOST
    main_port: int = _DEFAULT_PORT
    launcher: str = "none"
    launched: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    attempt: int = 0


def detect(environ: Mapping[str, str] | None = None) -> Placement:
    """Read a launcher's variables (default: this process's); one process when none is set.

    Raises ValueError for a value that is no number, or a rank that does not fit its size.
    """
    variables = _Variables(os.environ if environ is None else environ)
    for launcher, started, columns in _LAUNCHERS:
        if started(variables):
            return _placement(launcher, columns, variables)
    return Placement(**_main(variables, Placement()), sources=variables.sources)


def under_test_runner() -> bool:
    """Whether this process runs tests itself (a program that a test has started does not)."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    unittest = spec is not None and spec.name.split(".")[0] == "unittest"
    return unittest or ("pytest" in sys.modules and bool({"PYTEST_CURRENT_TEST", "PYTEST_VERSION"} & set(os.environ)))


def interactive() -> bool:
    """Whether this is a notebook, an IPython shell, or Python's own prompt."""
    ipython = sys.modules.get("IPython")
    return bool((ipython and ipython.get_ipython()) or hasattr(sys, "ps1") or sys.flags.interactive)


def text(name: str, default: str | None = None) -> str | None:
    """The value of a variable, read now; an empty one counts as unset.

    A name without a known prefix stands for `DRIVETRAIN_<name>` and then `ACCELERATE_<name>`.
    """
    candidates = (name,) if name.startswith(_PREFIXES) else (f"DRIVETRAIN_{name}", f"ACCELERATE_{name}")
    return next((os.environ[one] for one in candidates if os.environ.get(one)), default)


def flag(name: str, default: bool = False) -> bool:
    """A variable as a truth value (1 true yes y t on / 0 false no n f off); names as for `text`."""
    return _truth(name, text(name) or str(default))


def integer(name: str, default: int | None = None) -> int | None:
    """A variable as an integer; names as for `text`."""
    value = text(name)
    return default if value is None else _integer(name, value)


@dataclass(frozen=True)
class Group:
    """What a launch says to one engine: the variables that begin with `prefix`; names here are without it, in any case.

    An option object reads them as it is made, each beside its own argument:

        launched = environment.group("FSDP_")
        self.version = launched.agreed("version", version, launched.integer("version", 1))       # FSDP_VERSION
        self.offload = launched.agreed("offload_params", offload, launched.flag("offload_params"))

    The switches of the engines are `environment.flag("USE_FSDP")`, `USE_DEEPSPEED`, `USE_MEGATRON_LM`,
    `USE_PARALLELISM_CONFIG` and `USE_XLA`; the groups FSDP_, ACCELERATE_DEEPSPEED_, MEGATRON_LM_, PARALLELISM_CONFIG_,
    ACCELERATE_FP8_, ACCELERATE_DYNAMO_ and DRIVETRAIN_DDP_. docs/launching.md lists every variable.
    """

    prefix: str

    def text(self, name: str, default: str | None = None) -> str | None:
        """A variable as it is; an empty one, or Python's None, counts as unset."""
        value = os.environ.get(self.variable(name))
        return default if value in (None, "", "None") else value

    def flag(self, name: str, default: bool = False) -> bool:
        """A variable as a truth value."""
        return _truth(self.variable(name), self.text(name) or str(default))

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A variable as an integer."""
        value = self.text(name)
        return default if value is None else _integer(self.variable(name), value)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A variable as a number."""
        value = self.text(name)
        return default if value is None else _number(self.variable(name), value)

    def names(self) -> list[str]:
        """Which of them are set, in lower case."""
        return sorted(one.removeprefix(self.prefix).lower() for one in os.environ if one.startswith(self.prefix))

    def variable(self, name: str) -> str:
        """The whole name of a variable."""
        return f"{self.prefix}{name.upper()}"

    def source(self, name: str) -> str | None:
        """The setting and file (or command line) that a variable is from; None for what nobody has said."""
        own = "environment" if self.prefix.startswith("DRIVETRAIN_") and self.text(name) is not None else None
        return sources().get(self.variable(name), own)

    def agreed(self, name: str, argument: Any, launched: Any) -> Any:
        """The argument, or (None) what the launch says; ValueError where somebody has said two different things.

        A variable that `drivetrain launch` did not get from anybody gives way to the argument, as in Accelerate.
        """
        source = self.source(name)
        if argument is None or argument == launched or source is None:
            return launched if argument is None else argument
        raise ValueError(
            f"Expected one value for {name}. Received: {name}={argument!r}, {self.variable(name)}={launched!r} "
            f"({source}). Set it in one place."
        )


def group(prefix: str) -> Group:
    """The variables of one engine, by their prefix (see Group)."""
    return Group(prefix)


def sources() -> dict[str, str]:
    """Where `drivetrain launch` has its settings from: variable → "setting in file", for those that somebody set."""
    return dict(json.loads(os.environ.get(SOURCES) or "{}"))


def live() -> MutableMapping[str, str]:
    """This process's variables themselves, for Accelerate's functions that read and change them (see variables.py)."""
    return os.environ


def child_environment(variables: Mapping[str, str | None] | None = None, *, threads: int = 1) -> dict[str, str]:
    """This process's environment as a launched child gets it: `variables` on top (None removes one).

    OMP_NUM_THREADS becomes `threads` where nobody has set it, as torchrun does: n processes with a thread for every
    core each would fight for the cores.
    """
    merged = {"OMP_NUM_THREADS": str(threads), **os.environ, **(variables or {})}
    return {name: value for name, value in merged.items() if value is not None}


@contextmanager
def exported(environ: Mapping[str, str]) -> Iterator[None]:
    """Let `environ` be this process's environment while children are started that can only inherit it."""
    before = dict(os.environ)
    try:
        _replace(environ)
        yield
    finally:
        _replace(before)


def expand_hosts(hosts: str) -> list[str]:
    """The host names in a SLURM list such as `node[01-03,7],gpu1`, in order, zeros kept.

    Format: https://slurm.schedmd.com/scontrol.html, "show hostnames" (expanded here, so that no program is needed).
    """
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts) for name in _expand(part.strip())]


class _Variables:
    """A look at an environment that remembers which variable gave which value."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.sources: dict[str, str] = {}

    def has(self, *names: str) -> bool:
        return all(map(self.environ.get, names))

    def first(self, value: str, names: tuple[str, ...]) -> str | None:
        for name in names:
            if self.environ.get(name):
                self.sources[value] = name
                return self.environ[name]
        return None

    def number(self, value: str, names: tuple[str, ...]) -> int | None:
        return None if (found := self.first(value, names)) is None else _integer(self.sources[value], found)


def _all(*names: str) -> Callable[[_Variables], bool]:
    return lambda variables: variables.has(*names)


def _slurm(variables: _Variables) -> bool:
    """Whether `srun` started this process, rather than a person's shell or a batch script inside an allocation."""
    counted = variables.has("SLURM_NTASKS") or variables.has("SLURM_STEP_NUM_TASKS")
    if not counted or not variables.has("SLURM_PROCID"):
        return False  # `salloc` gives a shell that has an allocation, but is no task of it
    step = variables.environ.get("SLURM_STEP_ID") or variables.environ.get("SLURM_STEPID") or ""
    if variables.has("SLURM_PTY_PORT") or (step.isdigit() and int(step) >= 0xFFFFFFF0):
        return False  # `srun --pty`, and the special steps: interactive, batch, extern
    if variables.has("SLURM_TASK_PID") and not step:  # a batch script that calls python without srun
        if variables.environ.get("SLURM_NTASKS", "1") != "1":
            warnings.warn("SLURM has allotted several tasks, and started only this process. Use srun.", stacklevel=4)
        return False
    if variables.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return variables.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"  # `srun python` typed into that shell
    return True


_SLURM_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_LAUNCHERS = (
    ("torchrun", _all("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"), {
        "rank": ("RANK",), "size": ("WORLD_SIZE",), "local_rank": ("LOCAL_RANK",), "local_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",), "num_nodes": ("GROUP_WORLD_SIZE",), "attempt": ("TORCHELASTIC_RESTART_COUNT",)}),
    ("lsf", _all("LSB_JOBID", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), {
        "rank": ("JSM_NAMESPACE_RANK",), "size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",), "local_size": ("JSM_NAMESPACE_LOCAL_SIZE",)}),
    ("mpi", _all("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), {  # Open MPI
        "rank": ("OMPI_COMM_WORLD_RANK",), "size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",), "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",)}),
    ("mpi", _all("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), {  # MVAPICH2
        "rank": ("MV2_COMM_WORLD_RANK",), "size": ("MV2_COMM_WORLD_SIZE",),
        "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK",), "local_size": ("MV2_COMM_WORLD_LOCAL_SIZE",)}),
    ("mpi", _all("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), {  # Intel MPI, MPICH
        "rank": ("PMI_RANK",), "size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",), "local_size": ("MPI_LOCALNRANKS",)}),
    ("kubeflow", _all("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), {
        "rank": ("RANK",), "size": ("WORLD_SIZE",), "local_rank": ("LOCAL_RANK",), "local_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK", "NODE_RANK"), "num_nodes": ("GROUP_WORLD_SIZE",)}),
    ("slurm", _slurm, {
        "rank": ("SLURM_PROCID",), "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",), "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")}),
    ("mpi", _all("PMI_RANK", "PMI_SIZE"), {  # other process managers: PALS, PMI
        "rank": ("PMI_RANK",), "size": ("PMI_SIZE",), "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "local_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")}),
    ("xla", _all("PJRT_DEVICE", "PJRT_LOCAL_PROCESS_RANK"), {
        "local_rank": ("PJRT_LOCAL_PROCESS_RANK",), "local_size": ("PJRT_LOCAL_PROCESS_COUNT",),
        "node_rank": ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")}),
)


def _placement(launcher: str, columns: Mapping[str, tuple[str, ...]], variables: _Variables) -> Placement:
    found = {value: variables.number(value, names) for value, names in columns.items()}
    values: dict[str, Any] = {value: number for value, number in found.items() if number is not None}
    complete = {"slurm": _complete_slurm, "xla": _complete_xla}.get(launcher)
    if complete is not None:
        complete(values, variables)
    rank, size = values["rank"], values["size"]
    # A launcher that tells no local size runs one process a node when it tells no local rank either.
    nodes = values.get("num_nodes") or (size if "local_rank" not in values else 1)
    local = values.get("local_size") or max(1, size // nodes)
    values.setdefault("local_rank", rank % local)
    values.setdefault("node_rank", rank // local)  # true for ranks laid out node by node, the default everywhere
    values["num_nodes"] = values.get("num_nodes") or max(1, -(-size // local))
    values["local_size"] = local
    _check(rank, size, variables.sources)
    known = Placement(**values, launcher=launcher, launched=True)
    return Placement(**{**vars(known), **_main(variables, known), "sources": variables.sources})


def _complete_slurm(values: dict[str, int], variables: _Variables) -> None:
    """How many tasks this node has, from a list such as `4(x2),3`."""
    hosts = variables.first("num_nodes", _SLURM_HOSTS) if "num_nodes" not in values else None
    values["num_nodes"] = values.get("num_nodes") or len(expand_hosts(hosts or "localhost"))
    counts: list[int] = []
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.first("local_size", names) or ""):
        counts.extend([int(count)] * int(times or 1))
    node = values.get("node_rank", 0)
    if len(counts) == values["num_nodes"] and sum(counts) == values["size"] and node < len(counts):
        values["local_size"] = counts[node]


def _complete_xla(values: dict[str, int], variables: _Variables) -> None:
    hosts = variables.first("num_nodes", ("TPU_WORKER_HOSTNAMES",)) or "localhost"
    values["num_nodes"] = len(hosts.split(","))
    local = values.setdefault("local_size", 1)
    values["size"] = values["num_nodes"] * local
    values["rank"] = values.get("node_rank", 0) * local + values["local_rank"]


def _main(variables: _Variables, known: Placement) -> dict[str, Any]:
    """Address and port of rank 0: as exported, else from what the launcher tells of hosts and job."""
    port = variables.number("main_port", ("MASTER_PORT",))
    address = variables.first("main_address", ("MASTER_ADDR",))
    if address is None:
        address = _LOCALHOST if known.num_nodes == 1 else _first_host(variables, known)
    if port is None and known.launched and (job := variables.first("main_port", ("SLURM_JOB_ID", "LSB_JOBID"))):
        digits = [int(found) for found in (job, variables.environ.get("SLURM_STEP_ID", "")) if found.isdigit()]
        # Every rank has to come to the same port, and two jobs on one node to two; below the ephemeral range.
        port = 15000 + sum(digits) % 10000
    port = _DEFAULT_PORT if port is None else port
    return {"main_address": address, "main_port": port}


def _first_host(variables: _Variables, known: Placement) -> str:
    hosts = expand_hosts(variables.first("main_address", _SLURM_HOSTS) or "")
    if not hosts:
        path = variables.first("main_address", ("LSB_DJOB_RANKFILE", "PBS_NODEFILE"))
        hosts = list(dict.fromkeys(Path(path).read_text().split())) if path and Path(path).exists() else []
        if known.launcher == "lsf" and len(hosts) > known.num_nodes:
            hosts = hosts[1:]  # the launch node stands first, and no rank runs there
    return hosts[0] if hosts else ""


def _expand(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part] if part else []
    ranges, _, tail = rest.partition("]")
    names: list[str] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        middles = [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
        names += [f"{head}{middle}{end}" for middle in middles for end in _expand(tail) or [""]]
    return names


def _check(rank: int, size: int, sources: Mapping[str, str]) -> None:
    if not 0 <= rank < size:
        raise ValueError(
            f"Expected a rank from 0 to the number of processes less one. Received: {sources.get('rank')}={rank}, "
            f"{sources.get('size')}={size}. Unset both to run one process, or start all of them with one launcher."
        )


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"Expected an integer. Received: {name}={value!r}. Correct or unset it.") from None


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"Expected a number. Received: {name}={value!r}. Correct or unset it.") from None


def _truth(name: str, value: str) -> bool:
    word = value.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"Expected yes or no. Received: {name}={value!r}. Set it to 1 or 0.")
    return word in _TRUE


def _replace(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
