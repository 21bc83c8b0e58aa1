"""Feeding XLA devices ahead: the next batches lie on the device, in their places, before a step asks for them.

Batches are read by the thread that trains, in their order, so that what they draw stays exact; another thread copies
them to the device meanwhile. What a loader tells (position, random states, the state of a stream) is that of the batch
handed out, however many were read beyond it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data.fetch import draws
from .data.loader import DataLoaderShard
from .data.preparing import prepare_loader
from .data.samplers import NOTHING, Share
from .data.streams import StreamData
from .nested import recursively_apply
from .world import World

Pairs = Iterator[tuple[Any, Share]]
Rows = tuple[Any, tuple[str, ...]]


def prepare(
    loader: Any, *, world: World, between: Callable[[], None], rows: Rows | None = None, ahead: int = 2, **options: Any
) -> DataLoaderShard:
    """Returns a prepared loader that feeds its device `ahead` batches in advance; `options` are `prepare_loader`'s.

    `between` is called before each batch, at the end, and where a loop is left before. `rows`, a mesh and the names of
    dimensions of it, divides dimension 0 of each tensor over the devices there.
    """
    prepared = prepare_loader(loader, world=world, **options)
    if isinstance(prepared, DataLoaderShard) and prepared.feed is None:
        sharding = None if rows is None else RowSharding(*rows, share=world.size > 1)
        prepared.feed = Feed(prepared, between=between, sharding=sharding, ahead=ahead)
    return prepared


class RowSharding:
    """Where torch_xla is to put the rows of a tensor: dimension 0 over dimensions of a mesh, all else everywhere.

    `share` says that each process brings its part of the rows alone.
    """

    def __init__(self, mesh: Any, dimensions: tuple[str, ...], *, share: bool = False) -> None:
        self.mesh, self.dimensions, self.minibatch = mesh, dimensions, share
        self._divides_all = math.prod(mesh.shape()[name] for name in dimensions) == mesh.size()
        self._specs: dict[int, Any] = {}

    def xla_spec(self, tensor: Tensor) -> Any:
        """Returns the place of one tensor in torch_xla's words; None: the whole of it on every device."""
        if not tensor.ndim or not self.dimensions:
            return None
        if tensor.ndim not in self._specs:
            make = import_module("torch_xla.distributed.spmd").ShardingSpec
            self._specs[tensor.ndim] = make(self.mesh, self._partition(tensor), minibatch=self.minibatch)
        return self._specs[tensor.ndim].xla_spec(tensor)

    def fails(self, tensor: Tensor) -> bool:
        """Whether torch_xla 2.9 cannot divide a tensor while it sends it: a row of numbers of which devices share."""
        return tensor.ndim == 1 and bool(self.dimensions) and not self._divides_all

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns such a tensor on the device; it travels when it is marked, as it is to lie."""
        moved = tensor.to(device)
        import_module("torch_xla.distributed.spmd").mark_sharding(moved, self.mesh, self._partition(tensor))
        return moved

    def _partition(self, tensor: Tensor) -> tuple[Any, ...]:
        first = self.dimensions if len(self.dimensions) > 1 else self.dimensions[0]
        return (first, *[None] * (tensor.ndim - 1))


class Feed:
    """Reads a loader's batches ahead and copies them to its device; what its attribute `feed` is for."""

    def __init__(
        self,
        loader: DataLoaderShard,
        *,
        between: Callable[[], None],
        sharding: RowSharding | None = None,
        ahead: int = 2,
    ) -> None:
        self.loader, self.between, self.sharding, self.ahead = loader, between, sharding, ahead
        self.redraws = isinstance(loader.data, StreamData) or draws(loader.base.dataset, loader.base.collate_fn)

    def __call__(self, pairs: Pairs, most: int | None = None) -> Pairs:
        """Yields the same pairs, at most so many, their batches on the device.

        Where something else moves the batches, or divides them first, they are handed on as they are.
        """
        moved = self.loader.device.type == "xla" and self.loader.transfer is None and self.loader.divide is None
        try:
            self.between()
            for pair in self._ahead(islice(pairs, most)) if moved else pairs:
                yield pair
                self.between()
        except GeneratorExit:  # the loop was left
            self.between()
            raise

    def _ahead(self, pairs: Pairs) -> Pairs:
        waiting: deque[_Read] = deque()
        pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        try:
            for read in self._reads(pairs, pool):
                waiting.append(read)
                if len(waiting) > self.ahead:
                    yield waiting.popleft().handed_out()
                # What was read has to be copied before its source may use the memory for something else.
                wait([read.batch for read in waiting])
            while waiting:
                yield waiting.popleft().handed_out()
        finally:
            pool.shutdown(cancel_futures=True)

    def _reads(self, pairs: Pairs, pool: ThreadPoolExecutor) -> Iterator[_Read]:
        """Each pair on its way to the device; an error of reading is one more of them, to be raised in its turn."""
        while True:
            try:
                batch, share = next(pairs)
            except StopIteration:
                return
            except Exception as error:
                failed: Future[Any] = Future()
                failed.set_exception(error)
                yield _Read(self, failed, None)
                return
            yield _Read(self, pool.submit(self.send, batch), share)

    def send(self, batch: Any) -> Any:
        """Returns a batch on the device: all its tensors in one transfer, whatever else has `.to` by that."""
        if batch is NOTHING:
            return batch
        leaves: dict[int, Any] = {}
        recursively_apply(lambda leaf: leaves.setdefault(id(leaf), leaf), batch, test_type=_moves)
        device, sharding = self.loader.device, self.sharding
        found = {}
        if sharding is not None:
            late = {key: leaf for key, leaf in leaves.items() if _plain(leaf) and sharding.fails(leaf)}
            found = {key: sharding.send(leaf, device) for key, leaf in late.items()}
        together = {key: leaf for key, leaf in leaves.items() if _plain(leaf) and key not in found}
        xla: Any = import_module("torch_xla.core.xla_model")
        sent = xla.send_cpu_data_to_device(list(together.values()), device, sharding)
        found |= dict(zip(together, sent, strict=True))
        found |= {key: leaf.to(device) for key, leaf in leaves.items() if key not in found}
        return recursively_apply(lambda leaf: found[id(leaf)], batch, test_type=_moves)


class _Read:
    """A batch that was read ahead, and what its loader and this process's generators were like after it."""

    def __init__(self, feed: Feed, batch: Future[Any], share: Share | None) -> None:
        self.feed, self.batch, self.share = feed, batch, share
        self.streams = feed.loader.data.streams
        self.generators = (np.random.get_state(legacy=False), random.getstate()) if feed.redraws else None

    def handed_out(self) -> tuple[Any, Share]:
        """Returns the batch and its share; the loader and the generators are as if nothing had been read since."""
        batch = self.batch.result()
        self.feed.loader.data.streams = self.streams
        if self.generators is not None:
            np.random.set_state(self.generators[0])
            random.setstate(self.generators[1])
        assert self.share is not None  # else there was an error in the place of a batch
        return batch, self.share


def _moves(item: Any) -> bool:
    return hasattr(item, "to") and not isinstance(item, Mapping)


def _plain(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.device.type == "cpu" and not leaf.requires_grad
