"""Data sets that the tests of loaders read, and short ways to prepare and read them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from drivetrain.strategies.data.loader import DataLoaderShard, prepare_data_loader
from drivetrain.strategies.settings import DataLoaderConfiguration
from drivetrain.strategies.world import World
from torch.utils.data import DataLoader, Dataset, IterableDataset

SPLIT = DataLoaderConfiguration(split_last_batch=True)  # as the Trainer has it


class Numbers(Dataset):
    """Item i is the number i; counts what is fetched."""

    def __init__(self, length: int) -> None:
        self.length, self.fetched = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.fetched += 1
        return index


class Noisy(Numbers):
    """Item i is i with a draw from each of the global generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


class Stream(IterableDataset):
    """The numbers 0 … n-1 as a stream without a state; counts what is read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self):
        for number in range(self.length):
            self.read += 1
            yield number


class NoisyStream(Stream):
    """The same with a draw from each of the global generators."""

    def __iter__(self):
        for number in super().__iter__():
            yield number, torch.rand(()).item(), float(np.random.rand()), random.random()


class Stateful(IterableDataset):
    """A stream that can be put where it was; its workers take every n-th number."""

    def __init__(self, length: int) -> None:
        self.length, self.next, self.read = length, 0, 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        while self.next * step + first < self.length:
            self.next += 1
            self.read += 1
            yield (self.next - 1) * step + first
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Seat(World):
    """A rank of so many, without the others: enough where nothing has to be agreed on."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = self.local_rank = rank
        self.size = self.local_size = size


def prepared(loader: Any, *, rank: int = 0, size: int = 1, config: DataLoaderConfiguration | None = None,
             lockstep: bool = True, **options: Any) -> DataLoaderShard:
    """The loader of one rank."""
    shard = prepare_data_loader(loader, world=Seat(rank, size), config=config, **options)
    shard.lockstep = lockstep
    return shard


def numbers(length: int, batch_size: int = 2, *, rank: int = 0, size: int = 1, seed: int = 0,
            config: DataLoaderConfiguration | None = SPLIT, lockstep: bool = True, **options: Any) -> DataLoaderShard:
    """A prepared loader of the numbers 0 … length - 1."""
    loader = DataLoader(Numbers(length), batch_size=batch_size, **options)
    return prepared(loader, rank=rank, size=size, seed=seed, config=config, lockstep=lockstep)


def plain(batch: Any) -> Any:
    """A batch as lists and numbers, which compare by `==`."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, (list, tuple)):
        return [plain(part) for part in batch]
    return batch


def epoch(loader: Any) -> list[Any]:
    """The batches of one iteration."""
    return [plain(batch) for batch in loader]


def take(loader: Any, count: int) -> list[Any]:
    """The first batches of an iteration that is left after them."""
    found = []
    for batch in loader:
        found.append(plain(batch))
        if len(found) == count:
            break
    return found
