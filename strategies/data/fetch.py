"""Fetching batches of map-style data, here or in worker processes, from random states that each batch names.

Before a batch is fetched, torch, numpy and random are seeded by (seed, epoch, the sample that the batch begins with);
so the number of workers, prefetching and interruptions change nothing. Afterwards torch's state in this process is
put back; numpy and random are left as the batch decides, in whichever process it was fetched: saving their states
would cost 70 µs.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from ..random import derive, mix, seed_all
from .position import Position
from .samplers import Layout, Plan, Share
from .untouched import watch

WORKERS = 3  # what a seed is derived for
_COLLATE_TENSOR = default_collate_fn_map[Tensor]


class MapData:
    """The batches of a loader for map-style data."""

    streams = None

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.plan = loader, Plan(loader)
        self._batched = loader.batch_sampler is not None
        worked = Worked(loader.dataset, loader.collate_fn, batched=self._batched)
        self._workers = Workers(loader, worked) if loader.num_workers else None

    def __len__(self) -> int:
        """Samples (of a user's batch sampler: batches) in an epoch; TypeError where the sampler does not know."""
        return len(self.plan)

    def steps(self, layout: Layout, place: Position) -> int:
        """Batches that one rank gets from a place on; TypeError where the sampler does not know."""
        if self.plan.kind == "samples":
            return self.plan.steps(layout, place.samples)
        return self.plan.steps(layout, place.batches * (1 if self.plan.whole else place.world_size))

    def batches(self, layout: Layout, place: Position, *, key: int, skip: int = 0) -> Iterator[tuple[Any, Share]]:
        """One rank's batches of an epoch, from a place and then `skip` global batches on."""
        dataset, collate_fn = self.loader.dataset, self.loader.collate_fn
        named = key if draws(dataset, collate_fn) else None
        self.plan.set_epoch(place.epoch)
        tell_epoch(dataset, place.epoch)
        options: dict[str, Any] = {"seed": place.seed, "epoch": place.epoch, "start": place.samples, "skip": skip}
        if self._workers is not None:
            shares = self.plan.shares(layout, **options)
            return fetched_by(self._workers, shares, named, seed=derive(key, WORKERS), epoch=place.epoch)
        fetch = make_fetch(dataset, collate_fn, batched=self._batched)
        shares = self.plan.shares(layout, rows=isinstance(fetch, Rows), **options)
        if pins(self.loader):
            return fetched_here(shares, lambda content: pinned(fetch(content)), named)
        return fetched_here(shares, fetch, named)


def draws(dataset: Any, collate_fn: Callable) -> bool:
    """Whether fetching may draw random numbers: not from tensors and lists that are collated by default."""
    if collate_fn is not default_collate:
        return True
    if type(dataset) is Subset:
        return draws(dataset.dataset, collate_fn)
    if type(dataset) is ConcatDataset:
        return any(draws(part, collate_fn) for part in dataset.datasets)
    return type(dataset) not in (TensorDataset, Tensor, np.ndarray, list, tuple, range)


def make_fetch(dataset: Any, collate_fn: Callable, *, batched: bool = True) -> Callable[[Any], Any]:
    """The function from indices (not `batched`: from one key) to a batch."""
    if not batched:
        return lambda key: collate_fn(dataset[key])
    if (rows := Rows.of(dataset, collate_fn)) is not None:
        return rows
    if getattr(dataset, "__getitems__", None):
        return lambda indices: collate_fn(dataset.__getitems__(indices))
    together = collating(collate_fn)
    return lambda indices: together([dataset[index] for index in indices])


class Rows:
    """Fetches a batch of a TensorDataset, or of a subset of one, by one index a tensor; what stacking would give."""

    def __init__(self, tensors: tuple[Tensor, ...], chosen: Tensor | None) -> None:
        self.tensors, self.chosen = tensors, chosen

    @classmethod
    def of(cls, dataset: Any, collate_fn: Callable) -> Rows | None:
        """The fetcher for this data set where it can be read so."""
        chosen = None
        if type(dataset) is Subset:
            dataset, chosen = dataset.dataset, dataset.indices
        if type(dataset) is not TensorDataset or collate_fn is not default_collate or not _plain(dataset.tensors):
            return None
        if not all(tensor.is_contiguous() for tensor in dataset.tensors):
            return None  # stacking samples gives other strides than indexing would
        if chosen is not None:
            if not all(type(index) is int for index in chosen):
                return None
            chosen = torch.tensor(chosen, dtype=torch.int64, device="cpu")
        return cls(dataset.tensors, chosen)

    def __call__(self, rows: Any) -> list[Tensor]:
        if type(rows) is list:
            rows = torch.tensor(rows, device="cpu")
        if self.chosen is not None:
            rows = self.chosen[rows]
        if type(rows) is slice:
            return [tensor[rows].clone() for tensor in self.tensors]
        return [tensor[rows] for tensor in self.tensors]


def collating(collate_fn: Callable) -> Callable:
    """The same function, or one that does the same at less cost here (workers collate into shared memory)."""
    return collate if collate_fn is default_collate and get_worker_info() is None else collate_fn


def collate(samples: list) -> Any:
    """What `default_collate` gives, at two thirds of its cost for tuples and dicts of tensors."""
    first = samples[0]
    if type(first) is tuple and first and _plain(first) and len(set(map(len, samples))) == 1:
        return [torch.stack(column) for column in zip(*samples)]
    if type(first) is dict and _plain(first.values()):
        return {key: torch.stack([sample[key] for sample in samples]) for key in first}
    return default_collate(samples)


def seeded(fetch: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """The same fetch from random states named by a number; leaves torch's as they were."""
    generator, untouched = torch.default_generator, watch()

    def call(content: Any, seed: int) -> Any:
        state = generator.get_state()
        try:
            seed_all(seed)
            return fetch(content)
        finally:
            generator.set_state(state)
            if not untouched(seed):
                settle(seed, drawn=True)

    return call


def settle(seed: int, *, drawn: bool) -> None:
    """Leave numpy and random of this process as a batch decides; `drawn`: numbers after its seed have been used."""
    if drawn:
        seed ^= 0xFFFFFFFFFFFFFFFF
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory, which an accelerator copies from without waiting."""
    return pin_memory(batch)


def pins(loader: DataLoader) -> bool:
    """Whether the loader's batches are to be pinned: asked for, and of use here."""
    device = torch.accelerator.current_accelerator(check_available=True) if loader.pin_memory else None
    return device is not None and device.type != "mps"  # which cannot: pytorch issue 86060


class Worked:
    """A data set as its workers see it.

    Takes a ticket (epoch, seed or None, indices), gives the batch and whether it drew from numpy or random.
    """

    def __init__(self, dataset: Any, collate_fn: Callable, *, batched: bool = True) -> None:
        self.dataset, self.collate_fn, self.batched = dataset, collate_fn, batched
        self._fetch: Callable | None = None
        self._epoch: int | None = None
        self._untouched: Callable[[int], bool] | None = None

    def __getitems__(self, ticket: tuple[int, int | None, Any]) -> tuple[Any, bool]:
        epoch, seed, content = ticket
        if self._fetch is None:
            self._fetch = make_fetch(self.dataset, self.collate_fn, batched=self.batched)
        if epoch != self._epoch:
            self._epoch = epoch
            tell_epoch(self.dataset, epoch)
        if seed is None:
            return self._fetch(content), False
        self._untouched = self._untouched or watch()
        seed_all(seed)
        batch = self._fetch(content)
        return batch, not self._untouched(seed)


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Tell the epoch to a data set that wants to know it."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)


class Workers:
    """The worker processes of a loader: hand out tickets, give back what became of them, in order.

    `worked` answers a ticket by `__getitems__`. The user's settings of the loader hold; nothing is drawn from the
    random states of this process.
    """

    def __init__(self, loader: DataLoader, worked: Any) -> None:
        self.loader, self.worked = loader, worked
        self._generator = torch.Generator("cpu")
        self._shared: tuple[DataLoader, _Tickets] | None = None
        self._busy = False

    def run(self, tickets: Iterable[Any], seed: int) -> Iterator[Any]:
        """Results of the tickets; `seed` names the workers' own random states."""
        keep = self.loader.persistent_workers and not self._busy
        if not keep:  # also while an iteration over the persistent ones goes on
            yield from self._results(self._make(persistent=False), tickets, seed)
            return
        self._shared = self._shared or self._make(persistent=True)
        self._busy = True
        try:
            yield from self._results(self._shared, tickets, seed)
        finally:
            self._busy = False

    def _results(self, pair: tuple[DataLoader, _Tickets], tickets: Iterable[Any], seed: int) -> Iterator[Any]:
        inner, source = pair
        source.tickets = tickets
        self._generator.manual_seed(seed)
        return iter(inner)

    def _make(self, *, persistent: bool) -> tuple[DataLoader, _Tickets]:
        base, tickets = self.loader, _Tickets()
        with warnings.catch_warnings():  # the user's own loader has warned already
            warnings.simplefilter("ignore")
            return DataLoader(
                self.worked, batch_sampler=tickets, collate_fn=_same, num_workers=base.num_workers,
                pin_memory=base.pin_memory, timeout=base.timeout, worker_init_fn=_Start(base.worker_init_fn),
                multiprocessing_context=base.multiprocessing_context, generator=self._generator,
                prefetch_factor=base.prefetch_factor, persistent_workers=persistent,
            ), tickets  # fmt: skip


def fetched_here(shares: Iterator[Share], fetch: Callable[[Any], Any], key: int | None) -> Iterator[tuple[Any, Share]]:
    """The batches of these shares, fetched in this process; `key` is None for data that cannot draw."""
    if key is None:
        for share in shares:
            yield fetch(share.content), share
    else:
        call = seeded(fetch)
        for share in shares:
            yield call(share.content, mix(key, share.offset)), share


def fetched_by(workers: Workers, shares: Iterator[Share], key: int | None, *, seed: int,
               epoch: int) -> Iterator[tuple[Any, Share]]:
    """The same, fetched by worker processes; `seed` names their own random states."""
    sent: deque[tuple[Share, int]] = deque()

    def tickets() -> Iterator[tuple[int, int | None, Any]]:
        for share in shares:
            number = 0 if key is None else mix(key, share.offset)
            sent.append((share, number))
            yield epoch, None if key is None else number, share.content

    for batch, drawn in workers.run(tickets(), seed):
        share, number = sent.popleft()
        if key is not None:
            settle(number, drawn=drawn)
        yield batch, share
    if sent:  # a StopIteration of the user's code comes through torch as an end
        raise RuntimeError("Expected a batch from every worker. Received: StopIteration, raised while one was fetched.")


class _Tickets:
    """What stands in for a batch sampler: the tickets of the iteration that begins next."""

    tickets: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tickets)


class _Start:
    """Begins a worker: `get_worker_info().dataset` is the user's, then the user's worker_init_fn is called."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch made it read-only
        if self.function is not None:
            self.function(worker)


def _same(batch: Any) -> Any:
    return batch


def _plain(values: Iterable[Any]) -> bool:
    """Whether these are ordinary dense tensors, and stacking them was not given another meaning."""
    for value in values:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
            return False
    return default_collate_fn_map.get(Tensor) is _COLLATE_TENSOR
