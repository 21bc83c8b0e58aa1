"""Samplers and data sets that give one process its share, and loaders without their first batches.

Prepared loaders use none of these; they are for scripts that put loaders together by Accelerate's classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is a function of a seed and the epoch, which each iteration advances.

    `data_seed` is the seed (default: one that torch's generator draws); all else is RandomSampler's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if seed is None else seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = vars(self)["generator"] or torch.Generator("cpu")
        self.generator: Any = generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is in the order of this epoch."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """One process's share of the batches of another batch sampler.

    Without `split_batches` processes take batches in turn; with it each takes its part of every batch. Where that does
    not come out even at the end, `even_batches` fills up from the first samples; else some processes get fewer, or
    none. A sampler with `drop_last` drops what is left.

    Raises:
        ValueError: with `split_batches`, the batch size is no multiple of the number of processes.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size: int = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if split_batches and (self.batch_size or 0) % num_processes:
            raise ValueError(
                f"Expected a batch size that {num_processes} processes share evenly. Received: batch_size="
                f"{self.batch_size}. Take a multiple of {num_processes}."
            )
        if self.batch_size is None and even_batches:
            raise ValueError("Expected a batch sampler with a batch_size, for even_batches=True. Received: none.")

    @property
    def total_length(self) -> int:
        """Batches of all processes together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total
        rounds, rest = divmod(total, self.num_processes)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[int]]:
        return self._parts() if self.split_batches else self._turns()

    def _parts(self) -> Iterator[list[int]]:
        first: list[int] = []
        each = self.batch_size // self.num_processes
        for batch in map(list, self.batch_sampler):
            first = first or batch
            if len(batch) < self.batch_size and self.even_batches:
                batch += islice(cycle(first), self.batch_size - len(batch))
            if part := batch[self.process_index * each : (self.process_index + 1) * each]:
                yield part

    def _turns(self) -> Iterator[list[int]]:
        first: list[int] = []
        batches = map(list, self.batch_sampler)
        while turn := list(islice(batches, self.num_processes)):
            samples = [index for batch in turn for index in batch]
            first = first or samples
            whole = len(turn) == self.num_processes
            full = whole and (self.batch_size is None or len(turn[-1]) == self.batch_size)
            if not full and self.drop_last:
                return
            if not full and self.even_batches:
                stride = self.batch_size * self.num_processes
                samples += islice(cycle(first), stride - len(samples))
                turn = [samples[start : start + self.batch_size] for start in range(0, stride, self.batch_size)]
            if self.process_index < len(turn):
                yield turn[self.process_index]


class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of the samples of an iterable data set: a contiguous part of each global batch.

    The global batch is `batch_size` samples with `split_batches`, else as many for each process. A short last one is
    filled up from the first samples, or dropped with `drop_last`.

    Raises:
        ValueError: with `split_batches`, the batch size is no multiple of the number of processes.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"Expected a batch size that {num_processes} processes share evenly. Received: {batch_size=}. "
                f"Take a multiple of {num_processes}."
            )
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = num_processes, process_index, split_batches

    @property
    def _share(self) -> int:
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch to a data set that wants to know it."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds = len(self.dataset) / (self._share * self.num_processes)  # type: ignore[arg-type]
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self._share

    def __iter__(self) -> Iterator[Any]:
        stride, start = self._share * self.num_processes, self.process_index * self._share
        samples, first = iter(self.dataset), []  # type: ignore[var-annotated]
        while chunk := list(islice(samples, stride)):
            first = first or chunk
            if len(chunk) < stride:
                if self.drop_last:
                    return
                chunk = chunk + list(islice(cycle(first), stride - len(chunk)))
            yield from chunk[start : start + self._share]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Iterable[list[int]], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    @property
    def total_length(self) -> int:
        """Batches with those that are skipped."""
        return len(self.batch_sampler)


class SkipDataLoader(DataLoader[Any]):
    """A DataLoader without its first batches; they are read and dropped. Arguments: DataLoader's, and how many."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader

    def __iter__(self) -> Any:
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


def get_sampler(dataloader: Any) -> Any:
    """The sampler of a loader's samples, whatever stands around it; None for iterable data."""
    sampler = getattr(dataloader, "batch_sampler", None)
    while sampler is not None and hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    inner = getattr(sampler, "sampler", None)
    return inner if inner is not None else getattr(dataloader, "sampler", None)
