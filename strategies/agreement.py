"""Meeting the other processes, and agreeing on random numbers: rank 0's states of generators, brought to all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import random
from . import world as worlds
from .settings import RNGType


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Gives every process rank 0's states of these generators; call it on all processes.

    Raises:
        ValueError: there is no such type, or "generator" comes without a generator.
    """
    for rng_type in rng_types:
        synchronize_rng_state(RNGType(rng_type), generator=generator)


def synchronize_rng_state(rng_type: RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Gives every process rank 0's state of one generator: torch's, a device's, or the given one.

    Without a type nothing happens. Raises ValueError for a generator that is not given or not there.
    """
    if rng_type is None:
        return
    source = _Device(rng_type.value) if rng_type not in (RNGType.TORCH, RNGType.GENERATOR) else generator
    if rng_type is RNGType.TORCH:
        source = torch.default_generator
    if source is None:
        raise ValueError("Expected a generator for rng_types 'generator'. Received: None. Pass generator=...")
    world = worlds.current()
    if world.size > 1:
        source.set_state(world.broadcast_object(source.get_state()))


def wait_for_everyone() -> None:
    """Waits until every process has come here."""
    worlds.current().barrier("wait_for_everyone")


class _Device:
    """The generator of one kind of device, with a torch.Generator's methods."""

    def __init__(self, kind: str) -> None:
        own = random.registered(kind)
        self.module: Any = own or getattr(torch, kind, None)
        if own is None and (self.module is None or not self.module.is_available()):
            raise ValueError(f"Expected a device of this machine. Received: rng_types {kind!r}. Leave it out.")

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state)
