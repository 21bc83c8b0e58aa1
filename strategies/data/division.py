"""How ranks divide what a loader gives: all read one order and take their shares of it, or each has its own.

Ranks that share an order know alone where it ends. Where they cannot (streams may differ, own shares may be of
unequal length) they agree after each batch whether all have another one, so that an epoch ends on all together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ..random import derive
from ..settings import DataLoaderConfiguration
from ..subgroup import data
from ..world import World, current
from .fetch import MapData
from .position import Position
from .samplers import Layout, Plan, Share
from .streams import StreamData

log = logging.getLogger(__name__)

RANK = 6  # what a seed is derived for
Pairs = Iterator[tuple[Any, Share]]


class Division:
    """One loader's division among the ranks. `batch_size` is a rank's; None for batches of the user's own making.

    `shared`: all read one order. `even`: fill a short last global batch up, unless it is split. `fewest`: the batches
    of the rank with the fewest, where ranks have shares of their own of known length.
    """

    def __init__(self, data: MapData | StreamData, *, world: World, config: DataLoaderConfiguration) -> None:
        self.data, self.world, self.config, self.even = data, world, config, config.even_batches
        plan = getattr(data, "plan", None)
        distributed = plan.distributed if plan is not None else None
        _check_distributed(distributed, world)
        self.shared = config.shard and distributed is None
        self.batch_size, self.drop_last = data.loader.batch_size, data.loader.drop_last
        if plan is not None:
            self._follow(plan)
        self.batch_size = self._split(self.batch_size)
        self.units = self.batch_size or 1
        self.fewest, self._equal = self._compare()

    def layout(self, lockstep: bool) -> Layout:
        """How this rank cuts what it reads."""
        short = "split" if self.config.split_last_batch else "pad" if self.even else "fill"
        if not self.shared or self.world.size == 1:
            return Layout(self.units, drop_last=self.drop_last)
        return Layout(self.units, self.world.size, self.world.rank, self.drop_last, short, lockstep)

    def key(self, key: int) -> int:
        """The seed of the epoch's batches, another one on each rank where they would be the same otherwise."""
        return derive(key, RANK, self.world.rank) if self.world.rank and not self.shared else key

    def local(self, place: Position) -> Position:
        """The place in what this rank reads."""
        read = sum(stream["samples"] for stream in place.streams["places"]) if place.streams else None
        if self.shared:  # streams that are ahead of the samples (a step failed after reading) have to be read again
            return place if read == place.samples else replace(place, streams=None)
        return replace(place, samples=place.samples // self.world.size if read is None else read, world_size=1)

    def resumed(self, place: Position, skip: int) -> tuple[Position, int]:
        """The place from which this rank reads, and the batches to pass over from there."""
        here = self.local(place)
        sized_by_user = not self.shared and isinstance(self.data, MapData) and not self.data.plan.exact
        if sized_by_user and place.world_size == self.world.size:
            return replace(here, samples=0), place.batches + skip
        return here, skip

    def joined(self, pairs: Pairs, *, lockstep: bool, start: int) -> Pairs:
        """The same batches, ended on all ranks together where that has to be, and counted over all ranks."""
        if self.world.size == 1 or (self.shared and isinstance(self.data, MapData)):
            return pairs
        if self.shared:
            return self._agreed(pairs) if lockstep else pairs
        return self._counted(pairs, start) if lockstep and not self._equal else self._scaled(pairs)

    def _agreed(self, pairs: Pairs) -> Pairs:
        for batch, share in pairs:
            end = self.world.agree(share.end)
            yield batch, share._replace(last=share.last or end, end=end)
            if end:
                return

    def _counted(self, pairs: Pairs, position: int) -> Pairs:
        for batch, share in pairs:
            mine = torch.tensor([share.samples or 0, share.stop - share.offset, share.end], device="cpu")
            samples, used, ended = torch.stack(self.world.all_gather(mine)).sum(0).tolist()
            position += used
            if share.samples is not None:
                share = share._replace(total=samples, weight=_weight(share.samples, samples, self.world))
            yield batch, share._replace(last=ended > 0, end=ended > 0, stop=position)
            if ended:
                return

    def _scaled(self, pairs: Pairs) -> Pairs:
        size = self.world.size
        for batch, share in pairs:
            total = share.samples * size if self._equal and share.samples is not None else None
            yield batch, share._replace(total=total, stop=share.stop * size)

    def _follow(self, plan: Plan) -> None:
        """Take over what the samplers of map-style data decide."""
        plan.whole = plan.kind == "batches" and self.shared and self.config.split_batches and self.world.size > 1
        self.batch_size = plan.batch_size if plan.kind == "samples" or plan.whole else None
        keeps = plan.kind == "batches" and (plan.whole or self.config.split_last_batch)
        self.drop_last = plan.drop_last and not keeps
        if self.shared:
            plan.adopt(current() if self.world is data() else self.world)  # those that share samples too

    def _split(self, batch_size: int | None) -> int | None:
        if not self.config.split_batches or batch_size is None or self.world.size == 1:
            return batch_size
        if not self.shared:
            log.warning("split_batches is left out: each rank's loader holds its own share.")
            return batch_size
        if batch_size % self.world.size:
            raise ValueError(
                f"Expected a batch size that {self.world.size} ranks share evenly, for split_batches=True. Received: "
                f"batch_size={batch_size}. Take a multiple of {self.world.size}."
            )
        return batch_size // self.world.size

    def _compare(self) -> tuple[int | None, bool]:
        """The batches of the rank with the fewest, and whether all have certainly the same; shares of their own."""
        if self.shared or self.world.size == 1:
            return None, True
        units, steps = -1, -1
        with suppress(TypeError, NotImplementedError):
            units, steps = len(self.data), self.data.steps(self.layout(True), Position(0, 0, 0))
        exact = isinstance(self.data, MapData) and self.data.plan.exact
        known = self.world.gather_object((exact, units, steps))
        fewest = min(steps for _, _, steps in known)
        return None if fewest < 0 else fewest, exact and len(set(known)) == 1


def _weight(samples: int, total: int, world: World) -> float:
    return samples * world.size / total if total else 1.0


def _check_distributed(sampler: Any, world: World) -> None:
    if sampler is None or (sampler.num_replicas, sampler.rank) == (world.size, world.rank):
        return
    raise ValueError(
        f"Expected a DistributedSampler for rank {world.rank} of {world.size}. Received: rank {sampler.rank} of "
        f"{sampler.num_replicas}. Leave it out: a prepared loader gives each rank its share of a plain one."
    )
