"""Run a function in a fresh process on XLA's CPU devices: `from drivetrain.tests.xla.running import run`.

torch_xla starts its runtime at the first use of a device, and what is chosen then (how many devices, SPMD) holds for
the life of the process. So each test runs in a fork of its own of this process, which has torch_xla imported and
never touches a device: that costs 0.2 s, where an interpreter that imports it costs 6.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from drivetrain.tests import distributed

_OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")  # fmt: skip


def run(function: Callable[..., Any], *args: Any, devices: int = 1, timeout: float = 200,
        env: dict[str, str] | None = None) -> Any:
    """Call `function(*args)` in a forked process with `devices` virtual XLA devices; return what it returned.

    The function may be a closure; its result comes back by pickle, so tensors have to be on the CPU. Whether it uses
    SPMD is up to the function (`xr.use_spmd()`, or an engine that does). Raises `distributed.RankFailed` when it
    raises, dies or hangs; the message has what it printed.
    """
    import torch_xla  # noqa: F401  # in the parent, once; it starts no runtime and no thread that a fork would miss

    def child(rank: int) -> Any:
        for name in _OF_A_LAUNCH:
            os.environ.pop(name, None)
        os.environ.update({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), **(env or {})})
        return function(*args)

    return distributed.run(child, 1, group=False, timeout=timeout)[0]
