"""What a launch says of DDP and of process groups, joined with the options that a script gives itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .environment import Group, group
from .settings import DDPCommunicationHookType, DistributedDataParallelKwargs

_PREFIX = "DRIVETRAIN_DDP_"


def _hook(launched: Group, name: str) -> Any:
    return DDPCommunicationHookType(launched.text(name))


_FIELDS: dict[str, Callable[[Group, str], Any]] = {
    "bucket_cap_mb": Group.integer, "find_unused_parameters": Group.flag, "static_graph": Group.flag,
    "gradient_as_bucket_view": Group.flag, "broadcast_buffers": Group.flag, "comm_hook": _hook, "comm_wrapper": _hook,
}  # fmt: skip


def ddp_options(given: DistributedDataParallelKwargs, named: frozenset[str] = frozenset()) -> (
        DistributedDataParallelKwargs):  # fmt: skip
    """The options of DDP: those of a launch (DRIVETRAIN_DDP_…) in the place of what a script leaves at its default.

    `named` are options that a script has given though they may have their default values.

    Raises:
        ValueError: a script says otherwise; the message shows both values and the launch's source.
    """
    launched, defaults = group(_PREFIX), DistributedDataParallelKwargs()
    changes: dict[str, Any] = {}
    for name in set(launched.names()) & set(_FIELDS):
        own = getattr(given, name)
        argument = None if name not in named and own == getattr(defaults, name) else own
        changes[name] = launched.agreed(name, argument, _FIELDS[name](launched, name))
    return dataclasses.replace(given, **changes) if changes else given


def process_group(backend: str | None, timeout: timedelta | float | None) -> tuple[str | None, timedelta | None]:
    """The backend and the timeout (a number is seconds) of the process group, under every engine; as for DDP."""
    launched = group(_PREFIX)
    seconds = launched.number("timeout")
    said = None if seconds is None else timedelta(seconds=seconds)
    own = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    return launched.agreed("backend", backend, launched.text("backend")), launched.agreed("timeout", own, said)
