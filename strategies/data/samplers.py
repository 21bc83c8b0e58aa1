"""The order of an epoch's samples, and which rank takes which of them in which step.

The order is a function of (seed, epoch) alone. With `B` samples a rank and `W` ranks, global batch `g` is the samples
`[g*B*W, (g+1)*B*W)` of that order and rank `r` takes the r-th `B` of them, so that the ranks' batches one after the
other are the order itself, whatever W is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..random import Stream, derive
from ..world import World

ORDER = 1  # what a seed is derived for
_LISTS = (list, tuple, range)
_DRAWN_AT_ONCE = (WeightedRandomSampler, SubsetRandomSampler, DistributedSampler)
_BLOCK = 1 << 18


class NOTHING:
    """Stands for the content of a share, for a rank that gets none of a global batch."""


class Share(NamedTuple):
    """What one rank takes of one global batch."""

    content: Any  # indices or raw samples; NOTHING where the rank has none
    offset: int  # the sample of the epoch that it begins with: names its random stream
    samples: int | None  # those that count, of this rank
    total: int | None  # of all ranks
    weight: float  # samples * world size / total
    stop: int  # samples of the epoch that all ranks consumed, this global batch included
    last: bool  # this rank gets no further one
    end: bool  # no global batch follows
    remainder: int  # real samples of a short global batch; -1 for a full one


@dataclass(frozen=True)
class Layout:
    """How global batches are cut for one rank; a unit is a sample, or a whole batch of a user's batch sampler.

    `short` says what becomes of a short last global batch of m units: "split" gives every rank its contiguous part
    by divmod(m, W), and in lockstep a rank without any repeats the first unit, which does not count; "pad" repeats
    units from the start of the epoch until it is full; "fill" gives full shares in rank order while there are units.
    """

    batch_size: int
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    short: str = "fill"
    lockstep: bool = True

    @property
    def stride(self) -> int:
        """Units in a full global batch."""
        return self.batch_size * self.world_size

    def steps(self, units: int) -> int:
        """Batches that this rank gets out of so many units."""
        full, rest = divmod(units, self.stride)
        return full + (self.count(rest) > 0)

    def fit(self, units: int) -> Layout:
        """The layout for a global batch that may be larger than usual (of a batch sampler, with split_batches)."""
        return self if units <= self.stride else replace(self, batch_size=-(-units // self.world_size))

    def count(self, units: int) -> int:
        """Units that this rank handles of a global batch of so many, a repeated one included."""
        if units >= self.stride:
            return self.batch_size
        if units == 0 or self.drop_last:
            return 0
        if self.short == "pad":
            return self.batch_size
        if self.short == "fill":
            return min(max(units - self.rank * self.batch_size, 0), self.batch_size)
        return units // self.world_size + (self.rank < units % self.world_size) or int(self.lockstep)

    def padded(self, chunk: list, head: list) -> list:
        """The units of one global batch, filled up from those that the epoch began with where that is the rule."""
        if self.short != "pad":
            return chunk
        return chunk + [head[i % len(head)] for i in range(self.stride - len(chunk))]

    def take(self, chunk: list) -> tuple[list, int, bool]:
        """This rank's units of a global batch, where they begin in it, and whether they count (else: a repetition)."""
        units, size = len(chunk), self.batch_size
        if units == self.stride or self.short != "split":
            first = self.rank * size
            return chunk[first : first + size], first, True
        each, more = divmod(units, self.world_size)
        first = self.rank * each + min(self.rank, more)
        mine = chunk[first : first + each + (self.rank < more)]
        return (mine, first, True) if mine or not self.lockstep else (chunk[:1], units, False)


class Order:
    """The samples of an epoch, any part of which is there at once; this one: 0 … n-1."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._pulled = 0

    def __len__(self) -> int:
        return self.length

    def indices(self, start: int, stop: int) -> list[int]:
        """The samples at these positions."""
        return list(range(start, stop))

    def rows(self, start: int, stop: int) -> Any:
        """The same as whatever indexes a tensor fastest."""
        return slice(start, stop)

    def pull(self, count: int) -> list[int]:
        """The next samples, fewer at the end."""
        start, self._pulled = self._pulled, min(self._pulled + count, self.length)
        return self.indices(start, self._pulled)

    def put_back(self, units: list) -> None:
        """Let the units that were pulled last be pulled once more."""
        self._pulled -= len(units)


class Listed(Order):
    """An order that is there as a list."""

    def __init__(self, items: list) -> None:
        super().__init__(len(items))
        self.items = items

    def indices(self, start: int, stop: int) -> list[int]:
        return self.items[start:stop]

    rows = indices


class Shuffled(Order):
    """What RandomSampler means, with or without replacement; drawn in blocks, so that every position is near."""

    def __init__(self, population: int, *, seed: int, length: int | None = None, replacement: bool = False) -> None:
        super().__init__(population if length is None else length)
        self.population, self.seed, self.replacement = population, seed, replacement
        self._rounds = max(1, min(_BLOCK, self.length) // population)  # permutations in a block
        self._size = _BLOCK if replacement else self._rounds * population
        self._number = self._window = -1

    def rows(self, start: int, stop: int) -> torch.Tensor:
        number = start // self._size
        edge = (number + 1) * self._size
        if stop > edge:
            return torch.cat([self.rows(start, edge), self.rows(edge, stop)])
        if number != self._number:
            self._number, self._block = number, self._draw(derive(self.seed, number))
        return self._block[start - edge + self._size : stop - edge + self._size]

    def indices(self, start: int, stop: int) -> list[int]:
        window = start // _BLOCK
        edge = (window + 1) * _BLOCK
        if stop > edge:
            return self.indices(start, edge) + self.indices(edge, stop)
        if window != self._window:
            self._window, self._list = window, self.rows(window * _BLOCK, min(edge, self.length)).tolist()
        return self._list[start - edge + _BLOCK : stop - edge + _BLOCK]

    def _draw(self, seed: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        if self.replacement:
            return torch.randint(self.population, (self._size,), generator=generator, device="cpu")
        draws = [torch.randperm(self.population, generator=generator, device="cpu") for _ in range(self._rounds)]
        return draws[0] if len(draws) == 1 else torch.cat(draws)


class Drawn:
    """What a user's sampler yields, taken only as far as asked; its draws come from random states of its own."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler, self.stream = sampler, Stream(seed)
        self._iterator: Iterator | None = None
        self._ahead: list = []

    def pull(self, count: int) -> list:
        """The next units, fewer at the end."""
        units, self._ahead = self._ahead[:count], self._ahead[count:]
        if len(units) == count:
            return units
        with self.stream:
            if self._iterator is None:
                self._iterator = iter(self.sampler)
            return units + list(islice(self._iterator, count - len(units)))

    def put_back(self, units: list) -> None:
        """Let the units that were pulled last be pulled once more."""
        self._ahead = units + self._ahead


def shares(order: Order, layout: Layout, start: int = 0, *, rows: bool = False) -> Iterator[Share]:
    """One rank's shares of an order from position `start` on; nothing before it is touched."""
    take = order.rows if rows else order.indices
    size, stride = layout.batch_size, layout.stride
    full, rest = divmod(max(len(order) - start, 0), stride)
    short = layout.count(rest) > 0
    at, stop = start + layout.rank * size, start
    for left in range(full - 1, -1, -1):
        stop += stride
        last = not left and not short
        yield Share(take(at, at + size), at, size, stride, 1.0, stop, last, last, -1)
        at += stride
    if short:
        head = order.indices(0, min(stride, len(order)))
        yield from divided(iter([order.indices(stop, stop + rest)]), layout, stop, head=head)


def divided(chunks: Iterator[list], layout: Layout, start: int = 0, *, head: list | None = None,
            size: Callable[[Any], int] | None = None) -> Iterator[Share]:
    """One rank's shares of global batches that come one by one; looks one of them ahead.

    `size`: how many samples a unit is (default: it is one). `head`: the units that the epoch began with.
    """
    chunk = next(chunks, None)
    while chunk:
        following = next(chunks, None)
        head = head or chunk
        last = not following or not layout.fit(len(following)).count(len(following))
        share = cut(chunk, layout.fit(len(chunk)), start, head=head, size=size)
        if share.content is not NOTHING:
            yield share._replace(last=last, end=last)
        start, chunk = share.stop, following


def cut(chunk: list, layout: Layout, start: int, *, head: list, size: Callable[[Any], int] | None = None) -> Share:
    """This rank's share of one global batch that begins at sample `start`; for `head` and `size` see `divided`."""

    def measure(units: list) -> int:
        return sum(map(size, units)) if size else len(units)

    whole = layout.padded(chunk, head)
    mine, first, counts = layout.take(whole)
    samples, total = measure(mine) if counts else 0, measure(whole)
    content: Any = mine if mine else NOTHING
    if size and mine:
        content = mine[0] if counts or size(mine[0]) == 1 else mine[0][:1]
    return Share(
        content, start + measure(whole[:first]), samples, total, samples * layout.world_size / total,
        start + measure(chunk), False, False, measure(chunk) if len(chunk) < layout.stride else -1,
    )


class Plan:
    """How the samples of a loader for map-style data are ordered and put into batches.

    `kind`: "samples" make batches of `batch_size`; "batches" come from a user's batch sampler as they are; "keys"
    (batch_size=None) go to the data set one by one, each giving a batch. `whole`: each batch is a global one, to be
    split among the ranks.
    """

    whole = False

    def __init__(self, loader: DataLoader) -> None:
        self.sampler: Any = loader.sampler
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        batches: Any = loader.batch_sampler
        self.kind = "keys" if batches is None else "samples" if type(batches) is BatchSampler else "batches"
        if batches is not None:
            self.sampler = batches.sampler if self.kind == "samples" else batches
            self.batch_size = getattr(batches, "batch_size", None)
            self.drop_last = bool(getattr(batches, "drop_last", False))
        self._bases = {id(generator): generator.initial_seed() for generator in self._generators()}

    def adopt(self, world: World) -> None:
        """Take the seeds of the user's generators from rank 0, so that the order is the same on every rank."""
        if self._bases:
            self._bases = dict(zip(self._bases, world.broadcast_object(list(self._bases.values()))))

    def __len__(self) -> int:
        """Units in an epoch; TypeError where the sampler does not know."""
        return len(self.sampler)

    @property
    def distributed(self) -> DistributedSampler | None:
        """The user's DistributedSampler, which already gives this rank its share."""
        return next((part for part in self._samplers() if isinstance(part, DistributedSampler)), None)

    @property
    def exact(self) -> bool:
        """Whether the number of samples in an epoch is known for certain beforehand."""
        known = (SequentialSampler, RandomSampler, *_LISTS, *_DRAWN_AT_ONCE)
        return self.kind == "samples" and type(self.sampler) in known

    def steps(self, layout: Layout, taken: int = 0) -> int:
        """Batches that one rank gets after so many units; TypeError where the sampler does not know."""
        left = max(len(self) - taken, 0)
        return left if self.whole else layout.steps(left)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to those samplers that want to know it."""
        for part in self._samplers():
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def shares(self, layout: Layout, *, seed: int, epoch: int, start: int = 0, skip: int = 0,
               rows: bool = False) -> Iterator[Share]:
        """One rank's shares of an epoch, from `start` samples and then `skip` global batches on."""
        source = self._source(seed, epoch)
        if self.kind == "samples" and isinstance(source, Order):
            return shares(source, layout, start + skip * layout.stride, rows=rows)
        return self._pulled(source, layout, start, skip)

    def _pulled(self, source: Order | Drawn, layout: Layout, start: int, skip: int) -> Iterator[Share]:
        size = None if self.kind == "samples" else _size
        width = 1 if self.whole else layout.stride
        head, position = _pass_over(source, start, width, size=size)
        chunks = _chunks(source, width, drop_last=layout.drop_last)
        if self.whole:
            chunks, head, size = (list(chunk[0]) for chunk in chunks), list(head[0]) if head else [], None
        for chunk in islice(chunks, skip):
            head = head or chunk
            position += sum(map(size, chunk)) if size else len(chunk)
        found = divided(chunks, layout, position, head=head, size=size)
        return map(_uncounted, found) if self.kind == "keys" else found

    def _source(self, seed: int, epoch: int) -> Order | Drawn:
        sampler = self.sampler
        if type(sampler) is SequentialSampler:
            return Order(len(sampler.data_source))
        if type(sampler) in _LISTS:
            return Listed(list(sampler))
        if type(sampler) is RandomSampler:
            base = derive(self._bases.get(id(sampler.generator), seed), epoch, ORDER)
            return Shuffled(len(sampler.data_source), seed=base, length=len(sampler), replacement=sampler.replacement)
        for generator in self._generators():
            generator.manual_seed(derive(self._bases.get(id(generator), seed), epoch, ORDER))
        drawn = Drawn(sampler, derive(seed, epoch, ORDER))
        return Listed(drawn.pull(len(sampler))) if type(sampler) in _DRAWN_AT_ONCE else drawn

    def _samplers(self) -> list:
        """The sampler, and the one that it takes its samples from."""
        parts = [self.sampler, getattr(self.sampler, "sampler", None)]
        return [part for part in parts if part is not None]

    def _generators(self) -> list[torch.Generator]:
        found = (getattr(part, "generator", None) for part in self._samplers())
        return [generator for generator in found if isinstance(generator, torch.Generator)]


def _uncounted(share: Share) -> Share:
    """Leave open how many samples are behind a single key."""
    if isinstance(share.content, (list, tuple)):
        return share
    return share._replace(samples=None if share.samples else 0, total=None)


def _size(unit: Any) -> int:
    """Samples behind one unit of a batch sampler, or of a sampler with batch_size=None."""
    return len(unit) if isinstance(unit, (list, tuple)) else 1


def _chunks(source: Order | Drawn, width: int, *, drop_last: bool) -> Iterator[list]:
    while chunk := source.pull(width):
        if drop_last and len(chunk) < width:
            return
        yield chunk


def _pass_over(source: Order | Drawn, samples: int, width: int, *,
               size: Callable[[Any], int] | None) -> tuple[list, int]:
    """Take so many samples from the source; returns the first units (at most `width`) and how far that went."""
    head: list = []
    position, largest = 0, samples if size else 1
    while position < samples and (units := source.pull(max(1, min((samples - position) // largest, _BLOCK)))):
        sizes = [1] * len(units) if size is None else [size(unit) for unit in units]
        reached = list(accumulate(sizes, initial=position))
        taken = next((count for count, place in enumerate(reached) if place >= samples), len(units))
        source.put_back(units[taken:])
        head += units[: min(taken, width - len(head))]
        position, largest = reached[taken], max(1, *sizes)
    return head, position
