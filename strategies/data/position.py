"""Where a loader stands in an epoch, and passing over its first batches.

A position is counted in samples that all ranks together consumed, so that it means the same on any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


@dataclass(frozen=True)
class Position:
    """A place in an epoch. What `samples` cannot say of a user's own samplers and streams, the other fields do."""

    epoch: int
    samples: int
    seed: int
    length: int | None = None  # units of the epoch, where they are known: another number is another order
    batches: int = 0  # of each rank, in this epoch, by as many ranks as `world_size` says
    world_size: int = 1
    streams: dict[str, Any] | None = None  # where the readers of iterable data stand

    def to_state(self) -> dict[str, Any]:
        """A tree of JSON values (and of what an iterable data set's own state holds)."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """The position that `to_state` gave. Raises TypeError or ValueError for anything else."""
        if not isinstance(state, dict):
            raise TypeError(f"Expected the dict that a loader's state_dict() gave. Received: {type(state).__name__}.")
        known = [field.name for field in fields(cls)]
        if not {"epoch", "samples", "seed"} <= set(state) <= set(known):
            raise ValueError(
                f"Expected a loader's state with {', '.join(known)} (the first three at least). Received keys: "
                f"{', '.join(map(str, state)) or 'none'}. Pass what its state_dict() gave."
            )
        for name in ("epoch", "samples", "seed", "batches", "world_size"):
            value = state.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"Expected a whole number that is not negative. Received: {name}={value!r}.")
        return cls(**state)


class SkippedLoader:
    """A loader without its first batches: a view; epoch, position and all else are the loader's own."""

    def __init__(self, base: Any, count: int) -> None:
        self.base, self.count = base, count

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.base, "iterate"):
            return self.base.iterate(self.count)
        return _skip_plain(self.base, self.count)

    def __len__(self) -> int:
        return max(len(self.base) - self.count, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not there yet: while it is copied
            raise AttributeError(name)
        return getattr(self.base, name)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippedLoader:
    """The loader without its first batches, of which none is fetched where the data is map-style.

    For one epoch, and for any DataLoader, prepared or not. The epoch that it iterates is the loader's next one.
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise ValueError(f"Expected a number of batches, 0 or more. Received: num_batches={num_batches!r}.")
    if not hasattr(dataloader, "__iter__"):
        raise TypeError(f"Expected a DataLoader. Received: {type(dataloader).__name__}.")
    if isinstance(dataloader, SkippedLoader):
        return SkippedLoader(dataloader.base, dataloader.count + num_batches)
    return SkippedLoader(dataloader, num_batches)


class _After:
    """A sampler without the first of what it yields."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler, self.count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.count, None)


def _skip_plain(loader: Any, count: int) -> Iterator[Any]:
    """torch's own loader: the samples that are skipped are drawn, but not fetched."""
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.dataset, IterableDataset):
        return islice(iter(loader), count, None)
    if loader.batch_sampler is None:
        batching: dict[str, Any] = {"sampler": _After(loader.sampler, count), "batch_size": None}
    else:
        batching = {"batch_sampler": _After(loader.batch_sampler, count)}
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
             "generator", "prefetch_factor", "in_order")  # fmt: skip
    return iter(DataLoader(loader.dataset, **batching, **{name: getattr(loader, name) for name in names}))
