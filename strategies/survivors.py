"""What ranks can still do together when others have failed: find each other in limited time, and agree on something.

A collective over the group waits for the dead. So everything here goes through the store that all ranks share, and no
wait is longer than it was told to be. An engine uses it where its ranks have to end something without one of them::

    survivors = Survivors.meet(world, "rescue", {"step": 12}, seconds=5, gone=lambda rank: rank in dead, choose=choose)
    if survivors is not None:
        survivors.gather_object(...)   # a World of the chosen ranks, for words and small tensors

Only state that every rank holds as a whole can be saved so (`Strategy.replicates`): the parts of a rank that is gone
are gone with it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import rendezvous
from .world import World, packed, unpacked

Value = TypeVar("Value")
_PAUSE = 0.02  # seconds between two looks at the store
_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0), "mean": lambda parts: parts.mean(0), "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0), "product": lambda parts: parts.prod(0),
}  # fmt: skip
_meetings: Counter[str] = Counter()


class Survivors(World):
    """Some ranks of a world, which talk through the store: `members` are their ranks there, `rank` counts among them.

    Every collective ends after `seconds` by RuntimeError when one of them does not come.
    """

    backend = "store"

    def __init__(self, world: World, members: Sequence[int], *, name: str, seconds: float, store: Any) -> None:
        super().__init__(world.device)
        self.members, self.seconds, self.whole = list(members), seconds, world
        self.rank, self.size = self.members.index(world.rank), len(self.members)
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.node_rank, self.num_nodes = world.node_rank, world.num_nodes
        self._name, self._store, self._count = name, store, 0

    @classmethod
    def meet(
        cls,
        world: World,
        name: str,
        proposal: Any,
        *,
        seconds: float,
        gone: Callable[[int], bool],
        choose: Callable[[dict[int, Any]], list[int]],
    ) -> Survivors | None:
        """Meet those that come within `seconds`, and return those of them that `choose` takes; None for the others.

        `proposal` (JSON) is what this rank says of itself; `choose` makes ranks of everybody's, by rank, and the answer
        of whoever has waited first counts for all. Ranks of which `gone` is true are not waited for. None as well where
        there is no store (the process group is the user's own), or where it is gone too.
        """
        store = rendezvous.store()
        if store is None or world.size == 1:
            return None
        _meetings[name] += 1
        key = f"drivetrain/meeting/{name}/{_meetings[name]}"
        with suppress(RuntimeError):
            store.set(f"{key}/{world.rank}", json.dumps(proposal))
            found = _await(store, key, world, time.monotonic() + seconds, gone)
            members = json.loads(store.compare_set(f"{key}/plan", "", json.dumps(sorted(choose(found)))))
            if world.rank in members:
                return cls(world, members, name=key, seconds=seconds, store=store)
        return None

    def gather_object(self, value: Value) -> list[Value]:
        self._count += 1
        keys = [f"{self._name}/{self._count}/{member}" for member in range(self.size)]
        self._store.set(keys[self.rank], packed(value))
        self._store.wait(keys, timedelta(seconds=self.seconds))
        return [unpacked(self._store.get(key)) for key in keys]

    def placed(self, values: list[Value], missing: Value) -> list[Value]:
        """Values of the members by their ranks in the whole world, `missing` for those that are not here."""
        there = dict(zip(self.members, values, strict=True))
        return [there.get(rank, missing) for rank in range(self.whole.size)]

    def barrier(self, name: str = "") -> None:
        self.gather_object(None)

    def broadcast_object(self, value: Value, src: int = 0) -> Value:
        return self.gather_object(value if self.rank == src else None)[src]  # type: ignore[return-value]

    def agree(self, flag: bool, *, how: str = "any") -> bool:
        votes = self.gather_object(bool(flag))
        return any(votes) if how == "any" else all(votes)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = self.gather_object(tensor.detach().cpu())
        return [part.to(tensor.device) for part in parts]

    def all_gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        return self.all_gather(tensor)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        super().all_reduce(tensor, op)
        stacked = torch.stack(self.all_gather(tensor))
        return tensor.copy_(_OPS[op](stacked.int() if tensor.dtype is torch.bool else stacked))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor.copy_(self.all_gather(tensor)[src])

    def report_failure(self, error: BaseException) -> None:
        self.whole.report_failure(error)

    def peer_failure(self) -> str | None:
        return self.whole.peer_failure()


def _await(store: Any, key: str, world: World, deadline: float, gone: Callable[[int], bool]) -> dict[int, Any]:
    """Return the proposals by rank, once nobody is to be waited for any more."""
    found: dict[int, Any] = {}
    while True:
        for rank in set(range(world.size)) - found.keys():
            if store.check([f"{key}/{rank}"]):
                found[rank] = json.loads(store.get(f"{key}/{rank}"))
        missing = [rank for rank in range(world.size) if rank not in found and not gone(rank)]
        if not missing or time.monotonic() > deadline or store.check([f"{key}/plan"]):
            return found
        time.sleep(_PAUSE)
