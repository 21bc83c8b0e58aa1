"""Run a function on real gloo ranks, quickly: `from drivetrain.tests.distributed import run`.

Ranks are forked from the test process, which has torch imported already: two ranks that meet in a collective cost
about 0.1 s, where starting two interpreters costs seconds. Being forked, `function` may be a closure. What a rank
prints is shown when something fails. A forked rank always leaves by `os._exit`, so that no destructor of a process
group and no exit handler of the test runner runs in it.

Forking after torch has computed something is safe on the CPU as long as the child opens no OpenMP team of its own:
the parent's threads do not exist in it. So every child goes to one thread first (a test shows that it then works).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..strategies import environment
from ..strategies import world as worlds

_SHOW_STACKS = signal.SIGQUIT  # sent to a rank that hangs; faulthandler then writes where each thread stands
_NOTICED_LATE = 0.2  # seconds between a rank's death, of which its peers hear at once, and our noticing it


class RankFailed(Exception):
    """A rank raised, died or hung. `rank` is the first that did, `details` its traceback (empty if it raised none)."""

    def __init__(self, message: str, *, rank: int, details: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details


def run(function: Callable[..., Any], ranks: int = 2, *args: Any, timeout: float = 200, group: bool = True,
        group_timeout: float | None = None, patience: float = 0.0) -> list[Any]:
    """Call `function(rank, *args)` on `ranks` forked gloo ranks and return what they returned, in rank order.

    Each rank finds RANK, WORLD_SIZE and their like set as torchrun sets them, and, unless `group=False`, the process
    group initialised and `world.current()` set. Results come back by pickle. After the first failure the other ranks
    get `patience` seconds to end by themselves; then they are killed. `group_timeout` is that of a collective.
    Raises `RankFailed` for a rank that raises, dies or has not returned after `timeout` seconds.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "Expected no process group in the process that forks ranks: its threads would be missing in them. "
            "Received: one that is initialised. Destroy it first, or run that test on ranks of its own."
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        job = _Job(function, args, ranks, Path(directory), group=group, timeout=timeout,
                   group_timeout=group_timeout or timeout)
        try:
            job.start()
            job.wait(patience)
            return [outcome.value for outcome in job.outcomes.values()]
        finally:
            job.kill()


def torchrun(script: str | Path, *args: Any, ranks: int = 2, timeout: float = 240,
             env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Start `script` under torchrun with `ranks` processes; returns its exit code and what it wrote (text)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    return execute(command + [str(arg) for arg in args], timeout=timeout, env=env)


def execute(command: list[str], *, timeout: float = 240, env: dict[str, str] | None = None,
            cwd: str | Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, end the whole session at the timeout, return code and output."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables,
                               cwd=cwd, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        sys.stderr.write(f"{command} did not end in time.\n{output}\n{errors}\n")
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def free_port() -> int:
    """A TCP port that nobody listens on now, and that no connection is given by itself in the meantime."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # below those that Linux gives to connections
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class _Outcome:
    ok: bool
    value: Any = None
    summary: str = ""
    details: str = ""
    died: bool = False


class _Job:
    """The forked ranks of one `run`: their ids, their outcomes, and the folder through which they report."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], ranks: int, directory: Path, *,
                 group: bool, timeout: float, group_timeout: float) -> None:
        self.function, self.args, self.ranks, self.directory = function, args, ranks, directory
        self.group, self.timeout, self.group_timeout = group, timeout, group_timeout
        self.port = free_port()
        self.pids: dict[int, int] = {}
        self.outcomes: dict[int, _Outcome] = {}
        self.release: int | None = None

    def start(self) -> None:
        importlib.import_module("torch._dynamo")  # what DistributedDataParallel imports: once here, not in every rank
        reading, self.release = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.ranks):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at every fork
                pid = os.fork()
            if pid == 0:
                _be_rank(self, rank, reading)
            self.pids[rank] = pid
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)
        os.close(reading)

    def wait(self, patience: float) -> None:
        """Until every rank has reported; raises for the first that did not report well."""
        deadline = time.monotonic() + self.timeout
        failed: dict[int, float] = {}  # when each failure was noticed
        pause = 0.001
        while len(self.outcomes) < self.ranks and time.monotonic() < deadline:
            for rank in sorted(set(range(self.ranks)) - set(self.outcomes)):
                outcome = self._look(rank)
                if outcome is not None:
                    self.outcomes[rank] = outcome
                if outcome is not None and not outcome.ok:
                    failed[rank] = time.monotonic()
                    deadline = min(deadline, failed[rank] + max(patience, _NOTICED_LATE))
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        if failed:
            raise self._error(self._first(failed))
        if len(self.outcomes) < self.ranks:
            raise self._error(self._hung())
        self.outcomes = dict(sorted(self.outcomes.items()))

    def _first(self, failed: dict[int, float]) -> int:
        """The one noticed first; but a rank that died without a word did so before those that missed it reported."""
        soon = min(failed.values()) + _NOTICED_LATE
        died = [rank for rank, moment in failed.items() if self.outcomes[rank].died and moment <= soon]
        return min(died or failed, key=failed.__getitem__)

    def kill(self) -> None:
        """End and reap every rank with all that it started (each is a process group of its own)."""
        if self.release is not None:
            os.close(self.release)  # the ranks that have reported wait for this, so that none leaves its peers early
            self.release = None
        healthy = len(self.outcomes) == self.ranks and all(outcome.ok for outcome in self.outcomes.values())
        for pid in self.pids.values():
            if not healthy:
                _signal_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _signal_group(pid, signal.SIGKILL)
        self.pids.clear()

    def _look(self, rank: int) -> _Outcome | None:
        report = self.directory / f"{rank}.result"
        if report.exists():
            return pickle.loads(report.read_bytes())
        state = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None or report.exists():
            return None
        if state.si_code == os.CLD_EXITED:
            how = f"exited with code {state.si_status} before it returned"
        else:
            how = f"was killed by {signal.Signals(state.si_status).name}"
        return _Outcome(ok=False, summary=how, died=True)

    def _hung(self) -> int:
        late = sorted(set(range(self.ranks)) - set(self.outcomes))
        for rank in late:
            _signal_group(self.pids[rank], _SHOW_STACKS)
        time.sleep(0.3)
        for rank in late:
            how = f"did not return within {self.timeout:g} s"
            self.outcomes[rank] = _Outcome(ok=False, summary=how)
        return late[0]

    def _error(self, failed: int) -> RankFailed:
        first = self.outcomes[failed]
        parts = [f"Rank {failed} of {self.ranks} {first.summary}.", *filter(None, [first.details])]
        for rank, outcome in sorted(self.outcomes.items()):
            if rank != failed and not outcome.ok:
                parts.append(f"Then rank {rank} {outcome.summary}.")
        for rank in range(self.ranks):
            output = self.directory / f"{rank}.output"
            written = output.read_text(errors="replace").strip() if output.exists() else ""
            if written:
                parts.append(f"---- output of rank {rank} ----\n{written[-20_000:]}")
        return RankFailed("\n".join(parts), rank=failed, details=first.details)


def _be_rank(job: _Job, rank: int, reading: int) -> None:
    """The whole life of a forked rank; never returns."""
    try:
        gc.freeze()  # garbage of the parent may hold threads and sockets that this process does not have
        os.close(job.release)
        os.setpgid(0, 0)  # here and in the parent: whoever comes first, a signal to the group arrives
        _die_with_parent()
        _redirect(job.directory / f"{rank}.output")
        outcome = _outcome(job, rank)
        _report(outcome, job.directory / f"{rank}.result")
        sys.stdout.flush()
        sys.stderr.flush()
        os.read(reading, 1)  # ends when the parent has heard from all ranks, or is gone
        os._exit(0)
    finally:
        os._exit(70)


def _die_with_parent() -> None:
    """A test run that is killed leaves no ranks behind (Linux; elsewhere they end at the group's timeout)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _redirect(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=output)
    faulthandler.register(_SHOW_STACKS, file=output, all_threads=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _outcome(job: _Job, rank: int) -> _Outcome:
    try:
        torch.set_num_threads(1)
        _set_environment(rank, job.ranks, job.port)
        if job.group:
            _set_world(job)
        return _Outcome(ok=True, value=job.function(rank, *job.args))
    except BaseException as error:
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        return _Outcome(ok=False, summary=f"raised {last}", details=traceback.format_exc())


def _report(outcome: _Outcome, path: Path) -> None:
    try:
        data = pickle.dumps(outcome)
    except Exception as error:
        data = pickle.dumps(_Outcome(ok=False, summary=f"returned what cannot be pickled: {error}"))
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(data)
    unfinished.rename(path)


def _set_environment(rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="tests", TORCHELASTIC_RESTART_COUNT="0",
    )


def _set_world(job: _Job) -> None:
    world = worlds.TorchWorld.create(
        environment.detect(), torch.device("cpu"),
        timeout=timedelta(seconds=job.group_timeout), init_method=f"file://{job.directory / 'store'}",
    )
    worlds.set_current(world)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
