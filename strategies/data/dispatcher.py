"""Batches that the first rank reads for all: for data that only it can read, or that is dear to read.

Rank 0 reads one batch for each rank, as one process would, and sends them; so each rank gets what it would have read
itself. A short last global batch is put together and shared out evenly, filled up from the first batch (the
filling does not count), or in parts that differ by one sample where `split_last_batch` asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..gradients import GradientState
from ..nested import concatenate, ignorant_find_batch_size, recursively_apply, slice_tensors
from ..random import derive
from ..settings import DataLoaderConfiguration
from ..world import World, current
from .loader import BATCH, DataLoaderShard
from .position import Position
from .samplers import NOTHING, Layout, Share

Pair = tuple[Any, Share]


class DataLoaderDispatcher(DataLoaderShard):
    """A loader whose data rank 0 reads and splits; on the other ranks the data set is not touched.

    `slice_fn(batch, slice, process_index=…, num_processes=…)`, if one is given, cuts a rank's part out of the ranks'
    batches put together. An error on rank 0 ends the iteration on all.
    """

    def __init__(self, dataset: Any, split_batches: bool = False, skip_batches: int = 0,
                 use_stateful_dataloader: bool = False, _drop_last: bool = False, _non_blocking: bool = False,
                 slice_fn: Callable[..., Any] | None = None, torch_device_mesh: Any = None, iteration: int = 0,
                 *, device: Any = None, world: World | None = None, config: DataLoaderConfiguration | None = None,
                 gradient_state: Any = None, **options: Any) -> None:
        """Takes a DataLoader, or as in Accelerate a data set with DataLoader's options, which rank 0 reads for all."""
        config = config or DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=True)
        gradient_state = gradient_state if world is not None else gradient_state or GradientState()
        self.slice_fn = slice_fn
        super().__init__(dataset, device, skip_batches=skip_batches, _non_blocking=_non_blocking, iteration=iteration,
                         world=world or current(), config=config, gradient_state=gradient_state, **options)

    def _batches(self, place: Position, skip: int) -> Iterator[Pair]:
        if self.world.size == 1:
            yield from super()._batches(place, skip)
            return
        if not self._ranks.shared:
            raise ValueError(
                "Expected data that is not divided yet, for dispatch_batches=True. Received: a DistributedSampler, or "
                "shard=False. Leave it out: rank 0 reads all batches."
            )
        source = self._read(place, skip) if self.world.rank == 0 else None
        while (dealt := self._sent(source)) is not None:
            yield dealt[self.world.rank]

    def _steps(self, place: Position) -> int:
        layout = self._ranks.layout(True)
        return self.data.steps(replace(layout, short="pad"), self._ranks.local(place))

    def _sent(self, source: Iterator[list[Pair]] | None) -> list[Pair] | None:
        """The next global batch, a part for each rank; None after the last. Collective."""
        dealt, problem = None, None
        if source is not None:
            try:
                dealt = next(source, None)
            except Exception as error:
                problem = error
        dealt, told = self.world.broadcast_object((dealt, None if problem is None else repr(problem)))
        if problem is not None:
            raise problem
        if told is not None:
            raise RuntimeError(f"Expected batches from rank 0, which reads for all. Received: {told} there.")
        return dealt

    def _read(self, place: Position, skip: int) -> Iterator[list[Pair]]:
        """Rank 0: the global batches, one looked ahead, so that each knows whether it is a rank's last."""
        self._first: Any = None
        ahead: list[Pair] | None = None
        for group in self._groups(place, skip):
            dealt = self._dealt(group)
            if ahead is not None:
                yield _ending(ahead, dealt)
            ahead = dealt
        if ahead is not None:
            yield _ending(ahead, None)

    def _groups(self, place: Position, skip: int) -> Iterator[list[Pair]]:
        size, whole = self.world.size, self.config.split_batches
        here, skip = self._ranks.resumed(place, skip)
        units = self._ranks.units * (size if whole and self.batch_size else 1)
        layout = Layout(units, drop_last=self._ranks.drop_last)
        key = self._ranks.key(derive(self.seed, place.epoch, BATCH))
        group: list[Pair] = []
        for pair in self.data.batches(layout, here, key=key, skip=skip if whole else skip * size):
            group.append(pair)
            if whole or len(group) == size:
                yield group
                group = []
        if group and not self._ranks.drop_last:
            yield group

    def _dealt(self, group: list[Pair]) -> list[Pair]:
        """One global batch as a part for each rank."""
        batches = [batch for batch, _ in group]
        if self._first is None:
            self._first = batches[0]
        short = any(share.remainder != -1 for _, share in group)
        full = len(group) == self.world.size and not short and self.slice_fn is None
        if full and not self.config.split_batches:
            return self._as_read(group, -1)
        joined = _joined(batches)
        rows = ignorant_find_batch_size(joined)
        if rows is None:
            return self._as_read(group, sum(share.samples or 0 for _, share in group))
        expected = self.batch_size * self.world.size if self.batch_size else rows
        return self._cut(joined, rows, group, -1 if rows >= expected and rows % self.world.size == 0 else rows)

    def _as_read(self, group: list[Pair], remainder: int) -> list[Pair]:
        """Each rank gets a batch as it was read; ranks without one repeat the first, which does not count."""
        sizes = [share.samples for _, share in group]
        total = sum(size or 0 for size in sizes) if None not in sizes else None
        parts = [(batch, size) for (batch, _), size in zip(group, sizes)]
        spare = (group[0][0] if self.lockstep else NOTHING, 0)
        parts += [spare] * (self.world.size - len(parts))
        return [(batch, self._share(group, size, total, remainder)) for batch, size in parts]

    def _cut(self, joined: Any, rows: int, group: list[Pair], remainder: int) -> list[Pair]:
        size, split = self.world.size, self.config.split_last_batch and remainder != -1
        if not split:
            joined, rows = self._filled(joined, rows)
        each, more = divmod(rows, size)
        dealt, start = [], 0
        for rank in range(size):
            count = each + (rank < more)
            part = slice(start, start + count) if count or not self.lockstep else slice(0, 1)
            content = self._sliced(joined, part, rank) if count or self.lockstep else NOTHING
            dealt.append((content, self._share(group, count, rows, remainder)))
            start += count
        return dealt

    def _sliced(self, joined: Any, part: slice, rank: int) -> Any:
        if self.slice_fn is not None:
            return self.slice_fn(joined, part, process_index=rank, num_processes=self.world.size)
        return recursively_apply(lambda leaf: leaf[part].clone(), joined)  # the others' rows are not to travel along

    def _filled(self, joined: Any, rows: int) -> tuple[Any, int]:
        """The rows and as many of the first batch as it takes to give all ranks equally many."""
        while missing := -rows % self.world.size:
            head = slice_tensors(self._first, slice(missing))
            joined, rows = concatenate([joined, head]), rows + (ignorant_find_batch_size(head) or missing)
        return joined, rows

    def _share(self, group: list[Pair], samples: int | None, total: int | None, remainder: int) -> Share:
        last = group[-1][1]
        weight = samples * self.world.size / total if samples is not None and total else 1.0
        return Share(None, group[0][1].offset, samples, total, weight, last.stop, False, False, remainder)


def _joined(batches: list[Any]) -> Any:
    """All batches in one; None where their shapes differ, or something in them is no tensor."""
    try:
        return concatenate(batches)
    except (RuntimeError, TypeError, KeyError, IndexError, ValueError):
        return None


def _ending(dealt: list[Pair], following: list[Pair] | None) -> list[Pair]:
    """The parts of a global batch, each marked where it is its rank's last one."""
    marked = []
    for rank, (content, share) in enumerate(dealt):
        last = following is None or following[rank][0] is NOTHING
        marked.append((content, share._replace(last=last, end=following is None)))
    return marked
