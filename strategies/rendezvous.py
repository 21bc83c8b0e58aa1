"""How ranks meet and part: the process group's beginning, its end, and word of a rank that fails.

The failure of one rank has to end all of them, quickly, and with the first cause on top. So a rank that ends by an
exception writes it to the elastic agent's error file and to the store that all ranks share; `peer_failure` asks there.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from . import environment
from .launched import process_group

if TYPE_CHECKING:
    from .environment import Placement

_FAILURE = "drivetrain/failure"
_store: dist.Store | None = None
_rank = 0
_previous_hook: Any = None
_listening = False
_retired: Any = None


def select_device(device: torch.device, local_rank: int) -> torch.device:
    """Make an accelerator the current one of this process, by local rank where `device` has no index."""
    if device.type in ("cpu", "meta", "xla"):
        return device
    index = local_rank % torch.accelerator.device_count() if device.index is None else device.index
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def join(placement: Placement, device: torch.device, *, backend: str | None = None,
         timeout: timedelta | float | None = None, init_method: str | None = None) -> None:
    """Initialise the default process group; returns when every rank has come.

    `backend` defaults to the device's own with gloo beside it for CPU tensors, `timeout` (seconds) to torch's,
    `init_method` to a TCP store at the placement's address. Raises ValueError where that address is unknown.
    """
    if init_method is None:
        init_method = _address(placement)
    backend, timeout = process_group(backend, timeout)
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, size = next(rendezvous(init_method, placement.rank, placement.size, **limit))
    # The elastic agent keeps its store over a restart, where gloo would find the addresses of the ranks that died.
    store = dist.PrefixStore(f"attempt-{placement.attempt}", store)
    dist.init_process_group(backend or _backend(device), store=store, rank=rank, world_size=size, **limit)
    _listen(store, rank)


def leave(group: dist.ProcessGroup | None = None) -> None:
    """Destroy `group`, or the default group with all others, without waiting for the ranks that remain."""
    settle()
    dist.destroy_process_group(group)


def settle() -> None:
    """Let gloo's threads finish with the last collectives before anything joins these threads.

    To release a collective's Python state such a thread needs the interpreter's lock. A group whose last reference
    goes with a DistributedDataParallel joins them while holding it, which deadlocks; at exit the same thread aborts
    the process. So give way for a moment, and keep the group itself until the next one is left.
    """
    global _retired
    gc.collect()
    time.sleep(0.01)
    _retired = dist.group.WORLD


def store() -> dist.Store | None:
    """The store that all ranks share, if this library made the group: for words that nobody waits for."""
    return _store


def report_uncaught() -> None:
    """Let the agent that started this process, if one did, hear of an exception that ends it before it has joined."""
    if environment.text("TORCHELASTIC_ERROR_FILE"):
        _install_hook()


def report_failure(error: BaseException) -> None:
    """Tell the elastic agent and the other ranks that this one ends by `error`; the first report is the one kept."""
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    _write_report(message, "".join(traceback.format_exception(type(error), error, error.__traceback__)))
    if _store is not None:
        with suppress(RuntimeError):  # the store may have gone with rank 0
            _store.compare_set(_FAILURE, "", json.dumps({"rank": _rank, "message": message}))


def peer_failure() -> str | None:
    """What another rank has reported, as "rank 1: ValueError: …"; None while all are well. Never waits."""
    if _store is None:
        return None
    try:
        if not _store.check([_FAILURE]):
            return None
        failure = json.loads(_store.get(_FAILURE))
    except RuntimeError:
        return "rank 0: it no longer answers" if _rank else None
    return None if failure["rank"] == _rank else f"rank {failure['rank']}: {failure['message']}"


def _address(placement: Placement) -> str:
    if not placement.main_address:
        raise ValueError(
            f"Expected the address of rank 0's machine. Received: {placement.num_nodes} nodes under "
            f"{placement.launcher}, and no MASTER_ADDR. Export MASTER_ADDR (and MASTER_PORT) on every node."
        )
    host = f"[{placement.main_address}]" if ":" in placement.main_address else placement.main_address
    return f"tcp://{host}:{placement.main_port}"


def _backend(device: torch.device) -> str:
    own = dist.get_default_backend_for_device(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def _listen(store: dist.Store, rank: int) -> None:
    """From now on what ends this process is reported."""
    global _store, _rank, _listening
    _store, _rank = store, rank
    _install_hook()
    if not _listening:
        _listening = True
        atexit.register(_report_exit, os.getpid())


def _install_hook() -> None:
    global _previous_hook
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    report_failure(error)
    _previous_hook(kind, error, trace)


def _report_exit(process: int) -> None:
    """When a rank ended by itself; the agent looks at it only if the exit code is not 0."""
    if os.getpid() == process:
        _write_report("sys.exit", "It ended without an exception.")


def _write_report(message: str, trace: str) -> None:
    """Where the agent looks, in its format (torch's `ErrorHandler`); with the moment, for which it has seconds only."""
    path = environment.text("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        moment = time.time()
        details = {"py_callstack": trace, "timestamp": str(int(moment))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}, "moment": moment}))
