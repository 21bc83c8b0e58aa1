"""Processes of an XLA run, one for each device of a machine: started by torch_xla, or by another launcher.

torch_xla decides how many there are. On the CPU there is one: those of several would not see each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from . import environment, xla_runtime
from .availability import has_package
from .environment import Placement
from .world import packed, unpacked


def is_asked_for() -> bool:
    """Whether a function that a notebook starts belongs on XLA devices: torch_xla is there, and a variable says so."""
    named = environment.group("PJRT_").text("DEVICE") or environment.group("TPU_").text("NAME")
    return (bool(named) or environment.flag("USE_XLA")) and has_package("torch_xla")


def call(
    function: Callable[..., Any],
    *args: Any,
    processes: int | None = None,
    start_method: str = "spawn",
    variables: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Runs `function(*args)` in a process for each XLA device of this machine; returns their results in rank order.

    The function has to be importable, as every started process gets it by its name. `processes=1` runs it in this
    process, on one device.

    Raises:
        ValueError: another number of processes than there are devices.
    """
    torch_xla = xla_runtime.package()
    if processes not in (None, 1) and xla_runtime.kind() == "CPU":
        raise ValueError(
            f"Expected one process for XLA on the CPU. Received: num_processes={processes}. torch_xla gives each of "
            "them a world of its own there. Leave num_processes out; with CPU_NUM_DEVICES=n and strategy='xla_spmd' "
            "one process has n devices."
        )
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        entry = _Entry(function, folder, processes)
        with environment.exported(environment.child_environment(variables)):
            torch_xla.launch(entry, args, start_method=start_method, debug_single_process=processes == 1)
        answers = {int(path.name): unpacked(path.read_bytes()) for path in Path(folder).iterdir()}
    return [answers[rank] for rank in sorted(answers)]


def join(placement: Placement) -> None:
    """Tells torch_xla which device is this process's, where another launcher than its own has started several."""
    if placement.local_size > 1 and placement.launcher != "xla":
        pjrt: Any = import_module("torch_xla._internal.pjrt")
        pjrt.initialize_multiprocess(placement.local_rank, placement.local_size)


class _Entry:
    """A function as torch_xla calls it in a started process: its result comes back by a file."""

    def __init__(self, function: Callable[..., Any], folder: str, processes: int | None) -> None:
        self.function, self.folder, self.processes = function, folder, processes

    def __call__(self, index: int, *args: Any) -> None:
        size = xla_runtime.part("runtime").world_size()
        if self.processes not in (None, size):
            raise ValueError(
                f"Expected as many processes as XLA devices. Received: num_processes={self.processes}, and {size} "
                "devices. Leave num_processes out."
            )
        (Path(self.folder) / str(index)).write_bytes(packed(self.function(*args)))
