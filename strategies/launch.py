"""Starting ranks: a script once more through torchrun's elastic agent, or a function in fresh processes.

Either way the ranks find torchrun's variables set, the failure that came first is the one reported, and none of them
outlives this process's wait for them.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import environment, rendezvous, xla_launch
from .program import can_relaunch, command
from .world import packed, unpacked

__all__ = ["PATIENCE", "LaunchError", "call", "can_relaunch", "command", "debug_launcher", "notebook_launcher",
           "relaunch", "run_script"]

PATIENCE = 10  # seconds that healthy ranks get to save and end after another has failed
_HANDLED = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", None), getattr(signal, "SIGQUIT", None))


class LaunchError(RuntimeError):
    """A started rank failed. `rank` is the first that did, `exit_code` its own, `traceback` its text or empty."""

    def __init__(self, message: str, *, rank: int, exit_code: int, traceback: str) -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.traceback = rank, exit_code, traceback


def relaunch(processes: int, *, variables: Mapping[str, str | None] | None = None) -> int:
    """Start this program again in `processes` ranks and return its exit code, with which the caller should exit."""
    return run_script(command(), processes, variables=variables)


def run_script(argv: Sequence[Any], processes: int, *, nodes: int = 1, node_rank: int = 0,
               main_address: str | None = None, main_port: int | None = None, max_restarts: int = 0,
               monitor_interval: float = 0.1, variables: Mapping[str, str | None] | None = None, **options: Any) -> int:
    """Run `python argv…` in `processes` ranks on this node, through torchrun's elastic agent; return its exit code.

    The code is 0, that of the rank that failed first (128 + the signal for one that was killed), or 128 + the signal
    that stopped this process. `variables` are added to the ranks' environment (None removes one). On several nodes
    every one calls this with its `node_rank` and rank 0's `main_address` and `main_port`. `options` are further ones of
    torch's LaunchConfig.
    """
    _check_count(processes)
    endpoint = _endpoint(nodes, node_rank, main_address, main_port)
    arguments = ["-u", *map(str, argv)]  # unbuffered, as torchrun runs them: a killed rank loses no line
    try:
        _run_agent(sys.executable, arguments, processes, nodes=nodes, variables=variables, max_restarts=max_restarts,
                   monitor_interval=monitor_interval, **{**endpoint, **options})
    except LaunchError as error:
        print(f"\n{error}", file=sys.stderr, flush=True)
        return error.exit_code if error.exit_code >= 0 else 128 - error.exit_code
    except _Stopped as stopped:
        return 128 + stopped.signal
    return 0


def call(function: Callable[..., Any], *args: Any, processes: int, start_method: str = "fork",
         variables: Mapping[str, str | None] | None = None, main_address: str = "127.0.0.1",
         main_port: int = 0) -> list[Any]:
    """Run `function(*args)` in `processes` freshly started ranks; return their results in rank order.

    A forked rank has a copy of all that is here, and computes on one thread; a spawned one imports `function` anew,
    and gets `args` by pickle. Raises LaunchError when a rank fails, and RuntimeError for a fork where an accelerator
    or a process group is in use already, which no forked process could share.
    """
    # Not the agent's function mode: after a failure it gives healthy ranks 30 s whatever one sets, and it keeps only
    # the failure that it happened to see first.
    _check_count(processes)
    _check_start_method(start_method)
    store = dist.TCPStore(main_address, main_port, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as directory:
        main = (main_address, store.port)
        job = _Job(function, args, processes, start_method, directory, main, dict(variables or {}))
        try:
            job.start()
            return job.wait()
        finally:
            job.end()
            del store  # not to live on in a traceback: a rank forked later would wait for its threads in vain


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None,
                      mixed_precision: str = "no", use_port: str | int | None = None, master_addr: str = "127.0.0.1",
                      node_rank: int = 0, num_nodes: int = 1, rdzv_backend: str = "static", rdzv_endpoint: str = "",
                      rdzv_conf: dict[str, Any] | None = None, rdzv_id: str = "none", max_restarts: int = 0,
                      monitor_interval: float = 0.1, log_line_prefix_template: str | None = None) -> list[Any]:
    """Run a training function from a notebook in `num_processes` forked ranks (default: one per accelerator).

    Where torch_xla is installed and PJRT_DEVICE, TPU_NAME or a launch says so: one for each XLA device.

    Name and parameters are Accelerate's; returns the results of this node's ranks. `use_port=None` takes a free port.
    """
    if mixed_precision.lower() not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(f"Expected mixed_precision no, fp16, bf16 or fp8. Received: {mixed_precision=}.")
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision.lower()}
    if num_nodes == 1 and xla_launch.is_asked_for():
        return xla_launch.call(function, *args, processes=num_processes, start_method="fork", variables=variables)
    processes = num_processes or max(1, torch.accelerator.device_count())
    if processes * num_nodes == 1:
        with environment.exported({**environment.child_environment(threads=0), **variables}):
            return [function(*args)]
    if num_nodes == 1 and max_restarts == 0 and rdzv_backend == "static" and log_line_prefix_template is None:
        return call(function, *args, processes=processes, variables=variables, main_address=master_addr,
                    main_port=int(use_port or 0))
    _check_start_method("fork")
    endpoint = {"rdzv_backend": rdzv_backend, "rdzv_configs": {"rank": node_rank, **(rdzv_conf or {})},
                "rdzv_endpoint": rdzv_endpoint or f"{master_addr}:{use_port or 29500}", "run_id": rdzv_id}
    entry = _InRank(function, variables)

    def function_in_rank(*args: Any) -> Any:  # the agent takes nothing but a function
        return entry(*args)

    results = _run_agent(function_in_rank, list(args), processes, nodes=num_nodes, variables=variables,
                         max_restarts=max_restarts, monitor_interval=monitor_interval, start_method="fork",
                         log_line_prefix_template=log_line_prefix_template, **endpoint)
    return [results[rank] for rank in sorted(results)]


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> list[Any]:
    """Run a training function in forked ranks on the CPU; returns their results. Name and parameters: Accelerate's."""
    return call(function, *args, processes=num_processes, variables={"ACCELERATE_USE_CPU": "yes"})


@dataclass
class _Failure:
    rank: int
    exit_code: int
    seen: float  # when it was noticed, in seconds
    report: Mapping[str, Any] = field(default_factory=dict)  # what the rank wrote before it ended (see rendezvous)

    def __post_init__(self) -> None:
        self.seen = self.report.get("moment", self.seen)

    @property
    def traceback(self) -> str:
        message = self.report.get("message")
        return message.get("extraInfo", {}).get("py_callstack", "") if isinstance(message, dict) else ""

    @property
    def how(self) -> str:
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"ended with exit code {self.exit_code}"


def _error(failures: list[_Failure], size: int) -> LaunchError:
    """One error for all failures, the cause on top."""
    first = _first(failures)
    lines = [f"Rank {first.rank} of {size} failed first: it {first.how}."]
    lines.append(first.traceback.rstrip() or "It recorded no exception; look at what it wrote above.")
    lines += [f"Then rank {one.rank} {one.how}." for one in failures if one is not first]
    return LaunchError("\n".join(lines), rank=first.rank, exit_code=first.exit_code, traceback=first.traceback)


def _first(failures: list[_Failure]) -> _Failure:
    """The one that others followed: a rank that died without a word is never a consequence, but noticed a bit late."""
    own = [one for one in failures if one.exit_code != -signal.SIGTERM] or failures  # that signal came from here
    earliest = min(one.seen for one in own)
    died = [one for one in own if "moment" not in one.report and one.seen <= earliest + 1]
    return min(died or own, key=lambda one: one.seen)


class _Stopped(Exception):
    """This process was told by a signal to stop, and has ended the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def _run_agent(entrypoint: Any, arguments: list[Any], processes: int, *, nodes: int,
               variables: Mapping[str, str | None] | None, **options: Any) -> dict[int, Any]:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = 1 if processes > 1 else 0
    config = LaunchConfig(min_nodes=nodes, max_nodes=nodes, nproc_per_node=processes, **options)
    with ExitStack() as scope:
        scope.enter_context(environment.exported(environment.child_environment(variables, threads=threads)))
        scope.enter_context(_handlers_kept())
        scope.enter_context(_patience_kept())
        try:
            return elastic_launch(config, entrypoint)(*arguments)
        except ChildFailedError as error:
            failures = [_Failure(rank, one.exitcode, one.timestamp, one.error_file_data)
                        for rank, one in error.failures.items()]
            raise _error(failures, processes * nodes) from None
        except SignalException as stopped:
            raise _Stopped(int(stopped.sigval)) from None


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """The agent sets handlers and leaves them there; only the main thread can (and has to) set them back."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _HANDLED if number is not None} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python
                signal.signal(number, handler)


@contextmanager
def _patience_kept() -> Iterator[None]:
    """Let the agent wait for healthy ranks as long as we say: its own 30 s after a failure have no setting."""
    from torch.distributed.elastic.multiprocessing import PContext

    close = PContext.close

    def close_in_time(self: Any, death_sig: Any = None, timeout: int | None = None) -> None:
        usual = PATIENCE if death_sig is None else 30
        close(self, death_sig, usual if timeout is None else timeout)

    setattr(PContext, "close", close_in_time)
    try:
        yield
    finally:
        setattr(PContext, "close", close)


def _endpoint(nodes: int, node_rank: int, address: str | None, port: int | None) -> dict[str, Any]:
    if nodes == 1:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{port or 0}", "local_addr": "127.0.0.1",
                "run_id": uuid.uuid4().hex}
    if address is None or port is None or not 0 <= node_rank < nodes:
        raise ValueError(
            "Expected the address and port of rank 0 and a node rank below the number of nodes. Received: "
            f"main_address={address}, main_port={port}, node_rank={node_rank}, nodes={nodes}. Set them on every node."
        )
    return {"rdzv_backend": "static", "rdzv_endpoint": f"{address}:{port}", "rdzv_configs": {"rank": node_rank},
            "run_id": "none"}


@dataclass
class _Job:
    """The ranks of one `call`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    processes: int
    start_method: str
    directory: str
    main: tuple[str, int]
    variables: dict[str, str | None]

    def start(self) -> None:
        context = multiprocessing.get_context(self.start_method)
        self.others = multiprocessing.active_children()
        pipes = [context.Pipe(duplex=False) for _ in range(self.processes)]
        self.receivers = [receiver for receiver, _ in pipes]
        self.answers: dict[int, bytes] = {}
        self.ends: dict[int, float] = {}
        entry = _InRank(self.function, self.variables, forked=self.start_method == "fork")
        ranks = [_variables(rank, self.processes, *self.main, self._report(rank)) for rank in range(self.processes)]
        sys.stdout.flush()
        sys.stderr.flush()
        with environment.exported(environment.child_environment(self.variables)):
            self.context = torch.multiprocessing.start_processes(
                _answer, (entry, self.args, ranks, [sender for _, sender in pipes]), self.processes, join=False,
                start_method=self.start_method)
        for _, sender in pipes:
            sender.close()

    def wait(self) -> list[Any]:
        """Until every rank has ended; raises for the failure that came first."""
        from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

        try:
            while not self.context.join(timeout=0, grace_period=PATIENCE / 2):
                connection.wait([process.sentinel for process in self.context.processes if process.is_alive()], 0.02)
                self._receive()
                self._note_ends()
            self._receive()
        except (ProcessRaisedException, ProcessExitedException):
            self._receive()
        self._note_ends()
        if any(self.context.processes[rank].exitcode or rank not in self.answers for rank in range(self.processes)):
            raise self._failed()
        return [unpacked(self.answers[rank])[1] for rank in range(self.processes)]

    def end(self) -> None:
        """End what still runs (after Ctrl-C here, say, which may come while ranks are being started)."""
        known = getattr(self, "context", None)
        born = [one for one in multiprocessing.active_children() if one not in self.others]
        started = born if known is None else [process for process in known.processes if process.is_alive()]
        for process in started:
            process.terminate()
        for process in started:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def _receive(self) -> None:
        for rank, receiver in enumerate(self.receivers):
            if rank not in self.answers and receiver.poll():
                with suppress(EOFError):
                    self.answers[rank] = receiver.recv_bytes()

    def _note_ends(self) -> None:
        for rank, process in enumerate(self.context.processes):
            if process.exitcode is not None:
                self.ends.setdefault(rank, time.time())

    def _failed(self) -> LaunchError:
        failures = [self._failure(rank) for rank in range(self.processes)]
        error = _error([one for one in failures if one.exit_code or one.rank not in self.answers], self.processes)
        with suppress(Exception):  # what was raised there may not be made again here
            fine, cause = unpacked(self.answers[error.rank])
            error.__cause__ = None if fine else cause
        return error

    def _failure(self, rank: int) -> _Failure:
        report = Path(self._report(rank))
        code = self.context.processes[rank].exitcode or 0
        return _Failure(rank, code, self.ends[rank], json.loads(report.read_text()) if report.exists() else {})

    def _report(self, rank: int) -> str:
        return str(Path(self.directory) / f"{rank}.json")


@dataclass
class _InRank:
    """A function as it is called in a started rank."""

    function: Callable[..., Any]
    variables: Mapping[str, str | None]
    forked: bool = True

    def __call__(self, *args: Any) -> Any:
        if self.forked:
            gc.freeze()  # what was garbage in the parent may hold threads and sockets that are not this process's
            torch.set_num_threads(1)  # the parent's OpenMP threads do not exist here, and waiting for them hangs
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with environment.exported(environment.child_environment(self.variables)):
            return self.function(*args)


def _answer(rank: int, entry: _InRank, args: tuple[Any, ...], ranks: list[dict[str, str]], senders: list[Any]) -> None:
    """What a rank of `call` does: compute, send the result, or report and send what went wrong."""
    sender = senders[rank]
    with environment.exported(environment.child_environment(ranks[rank])):
        try:
            data = packed((True, entry(*args)))
        except BaseException as error:
            rendezvous.report_failure(error)
            with suppress(Exception):  # not every exception can be sent
                sender.send_bytes(packed((False, error)))
            # After a KeyboardInterrupt torch would let the process end by 0: it takes it for the parent's.
            raise SystemExit(128 + signal.SIGINT) if isinstance(error, KeyboardInterrupt) else error
    sender.send_bytes(data)


def _variables(rank: int, size: int, address: str, port: int, report: str) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "call", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_ERROR_FILE": report,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's, and outlives every rank
    }


def _check_count(processes: int) -> None:
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise ValueError(f"Expected a number of processes from 1. Received: processes={processes!r}.")


def _check_start_method(start_method: str) -> None:
    if start_method not in ("fork", "spawn", "forkserver"):
        raise ValueError(f"Expected start_method fork, spawn or forkserver. Received: start_method={start_method!r}.")
    if start_method != "fork":
        return
    accelerator = torch.accelerator.current_accelerator()
    name = "" if accelerator is None else accelerator.type
    if getattr(getattr(torch, name, None), "is_initialized", lambda: False)():
        raise RuntimeError(
            f"Expected {name} untouched before ranks are forked. Received: it is initialised in this "
            "process. Restart the notebook and use the device only inside the function, or use start_method='spawn'."
        )
    if dist.is_initialized():
        raise RuntimeError(
            "Expected no process group in the process that forks ranks. Received: one that is initialised. "
            "Close it first, or use start_method='spawn'."
        )
