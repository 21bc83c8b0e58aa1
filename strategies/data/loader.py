"""The prepared loader: one rank's share of a DataLoader's batches, on its device, exact and resumable.

Order, random states and position are functions of (seed, epoch, samples consumed): see `samplers`, `fetch`, `streams`
and `position`. An epoch ends when its last batch was taken, or when the next iteration begins; leaving a loop early
keeps the position, so that `state_dict` still tells it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from inspect import isgenerator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe

from ..gradients import GradientState
from ..nested import send_to_device
from ..random import derive, run_seed
from ..settings import DataLoaderConfiguration
from ..world import World
from .division import Division, Pairs
from .fetch import MapData
from .position import Position, SkippedLoader, skip_first_batches
from .samplers import NOTHING, Share
from .streams import StreamData

__all__ = ["DataLoaderShard", "SkippedLoader", "prepare_data_loader", "skip_first_batches"]

log = logging.getLogger(__name__)

BATCH = 2  # what a seed is derived for


def prepare_data_loader(dataloader: Any, *, world: World, device: torch.device | str | None = None,
                        put_on_device: bool = True, seed: int = 0, config: DataLoaderConfiguration | None = None,
                        gradient_state: Any = None, non_blocking: bool = False,
                        kind: type[DataLoaderShard] | None = None) -> DataLoaderShard:
    """A loader of this rank's share of the batches of a DataLoader, or of any other iterable of batches.

    `seed` is the same on every rank, `kind` the class of what is made. Collective where the user's generators, or
    loaders with a share of their own, have to be agreed on. Raises TypeError for what is no loader, ValueError for an
    empty one and for settings that exclude each other.
    """
    if isinstance(dataloader, (DataLoaderShard, SkippedLoader)):
        return dataloader  # type: ignore[return-value]  # a view has all that its loader has
    config = config or DataLoaderConfiguration()
    loader = dataloader if _ordinary(dataloader) else _wrapped(dataloader)
    shard = (kind or DataLoaderShard)(loader, device=device if put_on_device else None, world=world, config=config,
                                      gradient_state=gradient_state, _non_blocking=non_blocking or config.non_blocking,
                                      seed=seed if config.data_seed is None else config.data_seed)
    if loader is not dataloader:
        shard.base, shard.dataset = dataloader, getattr(dataloader, "dataset", dataloader)
    return shard


class DataLoaderShard(DataLoader[Any]):
    """One rank's share of a loader's batches. Its attributes tell of the batch that was yielded last.

    `end_of_dataloader`: this rank gets no further one. `samples`: in this rank's batch, `global_samples`: in those of
    all ranks, `weight`: samples * world size / global samples, `position`: samples that all ranks consumed in this
    epoch, `batches`: how many are left, `remainder`: real samples of a short last global batch, else -1; each None
    where it cannot be known. Settable: `lockstep` (True: a rank without samples in the last global batch repeats one
    with weight 0; False: it gets no batch), `limit` (this rank's batches of an epoch, if it is to end before its data
    do), `transfer` (replaces the move to the device), `feed` (hands out what it is given, at most so many, read ahead
    of their turn), `divide` (cuts this rank's part out of a batch that several ranks share, and tells its share in a
    mean over all of them, times their number; `measure` is `samples` times that).
    """

    __setattr__ = object.__setattr__  # type: ignore[assignment]  # torch's own compares names on each store

    def __init__(self, dataset: Any, device: torch.device | str | None = None, rng_types: Any = None,
                 synchronized_generator: Any = None, skip_batches: int = 0, use_stateful_dataloader: bool = False,
                 _drop_last: bool = False, _non_blocking: bool = False, torch_device_mesh: Any = None,
                 iteration: int = 0, *, world: World | None = None, config: DataLoaderConfiguration | None = None,
                 seed: int | None = None, gradient_state: Any = None, **options: Any) -> None:
        """Takes a DataLoader, or as in Accelerate a data set with DataLoader's options, which this process has alone.

        `prepare_data_loader` makes loaders that share a data set. `rng_types`, `synchronized_generator`,
        `use_stateful_dataloader` and `_drop_last` have nothing to do: order is a function of seed and epoch, and every
        loader has a state.
        """
        base = DataLoader(dataset, **options) if options or not isinstance(dataset, DataLoader) else dataset
        config = config or DataLoaderConfiguration()
        if world is None:
            world, gradient_state = World(), gradient_state or GradientState()
        self.base, self.world, self.config, self.gradient_state = base, world, config, gradient_state
        self.dataset, self.sampler, self.batch_sampler = base.dataset, base.sampler, base.batch_sampler
        self.collate_fn, self.num_workers = base.collate_fn, base.num_workers
        self.seed, self.epoch, self.lockstep = run_seed() if seed is None else seed, iteration, True
        self.skip_batches = skip_batches
        self.limit: int | None = None
        self.transfer: Callable[[Any], Any] | None = None
        self.feed: Callable[[Pairs, int | None], Pairs] | None = None
        self.divide: Callable[[Any], tuple[Any, float]] | None = None
        self.measure: float | None = None
        self.move: Callable[[Any], Any] | None = None
        self.data = StreamData(base) if isinstance(base.dataset, IterableDataset) else MapData(base)
        self._ranks = Division(self.data, world=world, config=config)
        self.batch_size, self.drop_last = self._ranks.batch_size, self._ranks.drop_last
        self._open: int | None = None  # the epoch of an iteration that has not come to its end
        self._pending: Position | None = None
        self._running = self._done = 0
        self._reset(0)
        self._place_on(device, _non_blocking)
        self._check_filled()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator
        return self.iterate(self.skip_batches)

    def __len__(self) -> int:
        """Batches in an epoch of this rank; TypeError where sampler or data set do not know."""
        steps = self._steps(Position(self.epoch, 0, self.seed))
        return steps if self.limit is None else min(steps, self.limit)

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not there yet
            raise AttributeError(name)
        return getattr(self.base, name)

    @property
    def even_batches(self) -> bool:
        """Whether a short last global batch is filled up with repeated samples (settable)."""
        return self._ranks.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._ranks.even = even

    @property
    def done(self) -> int:
        """This rank's batches of the epoch before the place where the next iteration begins."""
        return self._before(self._next_place())

    @property
    def counted(self) -> bool:
        """Whether `samples` is the size of a batch: not where the data set makes batches itself (batch_size=None)."""
        return isinstance(self.data, StreamData) or self.data.plan.kind != "keys"

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full global batch; None for batches of the user's own making."""
        return None if self.batch_size is None else self.batch_size * self.world.size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set; TypeError where it does not know."""
        return getattr(self.dataset, "total_length", None) or len(self.dataset)  # type: ignore[arg-type]

    def iterate(self, skip: int = 0) -> Iterator[Any]:
        """The batches of an epoch, or what is left of it after `load_state_dict`, without the first `skip`."""
        place = self._begin()
        left, done, seen = self._known_steps(place), self._done + skip, bool(place.samples or skip)
        most = None if self.limit is None else max(self.limit - done, 0)
        if left is not None:
            left = left - skip if most is None else min(left - skip, most)
        move, state = self.transfer or self.move, self.gradient_state
        self._running += 1
        if state is not None:
            state.enter(self)
        try:
            pairs = self._batches(place, skip) if most != 0 else iter(())
            for batch, share in self.feed(pairs, most) if self.feed is not None else pairs:
                seen = True
                if batch is NOTHING:
                    done += 1  # a step of the others
                    continue
                part = None
                if self.divide is not None:
                    batch, part = self.divide(batch)
                if move is not None:
                    batch = move(batch)  # should it fail, the place is still that of the batch before
                _, _, self.samples, self.global_samples, self.weight, self.position, last, _, self.remainder = share
                self.measure = self.samples
                if part is not None and self.samples is not None:
                    self.weight, self.measure = self.weight * part, self.samples * part
                if left is not None:
                    left = left - 1 if left > 1 else 1  # more may come than the data set said
                done += 1
                last = last or done == self.limit
                self.end_of_dataloader, self.batches = last, 0 if last else left
                self._done, self._streams = done, self.data.streams
                yield batch
                if done == self.limit:
                    break
            self._finish(place.epoch, empty=not seen and left != 0 and most != 0)
        finally:
            self._running -= 1
            if state is not None:
                state.leave(self)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; a position that was loaded for another one is dropped."""
        if not (self._running and self._open == epoch):
            self._open = None
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: {"epoch", "samples", "seed", …}; the epoch's place of the batch yielded last."""
        length = self._known(lambda: len(self.data))
        if self._open == self.epoch:
            place = Position(self.epoch, self.position, self.seed, length, self._done, self.world.size, self._streams)
        else:
            place = replace(self._next_place(), length=length)
        return place.to_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue exactly there, at any world size. TypeError, ValueError for another dict."""
        place = Position.from_state(state)
        length = self._known(lambda: len(self.data))
        if None not in (place.length, length) and place.length != length:
            log.warning("The position is that of an epoch of %s samples; now it has %s. Some are repeated or missed.",
                        place.length, length)  # fmt: skip
        if place.seed != self.seed:
            log.warning("The data goes on in the order of the checkpoint's seed %d, not of %d.", place.seed, self.seed)
        self.epoch, self.seed, self._pending, self._open = place.epoch, place.seed, place, None
        self._reset(place.samples)

    def _place_on(self, device: torch.device | str | None, overlap: bool) -> None:
        self.device = torch.device("cpu" if device is None else device)
        if self.device.type != "cpu":
            self.move = lambda batch: send_to_device(batch, self.device, overlap)

    def _next_place(self) -> Position:
        """Where the next iteration begins."""
        if self._pending is not None and self._pending.epoch == self.epoch:
            return self._pending
        return Position(self.epoch, 0, self.seed)

    def _begin(self) -> Position:
        if self._open == self.epoch:  # left before its end
            self.epoch += 1
        place = self._next_place()
        self._pending, self._open = None, place.epoch
        self._reset(place.samples)
        self._done, self._streams = self._before(place), place.streams
        return place

    def _finish(self, epoch: int, *, empty: bool) -> None:
        if empty:
            raise ValueError(
                f"Expected at least one batch. Received: none from {type(self.dataset).__name__} in epoch {epoch}. "
                "Check that it, or its sampler, can be iterated more than once and is not empty."
            )
        if self._open == epoch == self.epoch:
            self._open, self.epoch = None, epoch + 1

    def _reset(self, position: int) -> None:
        self.end_of_dataloader, self.remainder, self.position, self.weight = False, -1, position, 1.0
        self.samples = self.global_samples = self.batches = None
        self._done, self._streams = 0, None

    def _batches(self, place: Position, skip: int) -> Iterator[tuple[Any, Share]]:
        here, skip = self._ranks.resumed(place, skip)
        key = self._ranks.key(derive(self.seed, place.epoch, BATCH))
        batches = self.data.batches(self._ranks.layout(self.lockstep), here, key=key, skip=skip)
        return self._ranks.joined(batches, lockstep=self.lockstep, start=place.samples)

    def _steps(self, place: Position) -> int:
        steps = self.data.steps(self._ranks.layout(self.lockstep), self._ranks.local(place))
        fewest = self._ranks.fewest if self.lockstep else None
        return steps if fewest is None else min(steps, max(fewest - place.batches, 0))

    def _before(self, place: Position) -> int:
        """This rank's batches before a place, which another number of ranks may have counted."""
        if place.world_size == self.world.size:
            return place.batches
        if self.total_batch_size is not None:
            return -(-place.samples // self.total_batch_size)
        return -(-place.batches * place.world_size // self.world.size)

    def _known_steps(self, place: Position) -> int | None:
        return self._known(lambda: self._steps(place))

    def _known(self, length: Callable[[], int]) -> int | None:
        try:
            return length()
        except (TypeError, NotImplementedError):
            return None

    def _check_filled(self) -> None:
        length = self._known(lambda: len(self.data))
        layout = replace(self._ranks.layout(True), rank=0)
        if length is None or self.data.steps(layout, Position(0, 0, 0)):
            return
        raise ValueError(
            f"Expected a loader with at least one batch of {layout.batch_size} on {layout.world_size} rank(s). "
            f"Received: {length} in {type(self.dataset).__name__}, drop_last={layout.drop_last}. "
            "Give it data, or lower batch_size, or set drop_last=False."
        )


class _Iterable(IterableDataset[Any]):
    """Batches that something else makes: a loader of another kind, a list of batches."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # not there yet
            raise AttributeError(name)
        return getattr(self.batches, name)


def _ordinary(loader: Any) -> bool:
    """Whether this is torch's DataLoader (or torchdata's with a state), iterated as torch does."""
    if not isinstance(loader, DataLoader):
        return False
    stateful = type(loader).__module__.startswith("torchdata.stateful_dataloader")
    if type(loader).__iter__ is not DataLoader.__iter__ and not stateful:
        return False
    if isinstance(loader.dataset, IterDataPipe):
        raise TypeError(
            f"Expected an IterableDataset or a map-style one. Received: {type(loader.dataset).__name__}, a data pipe. "
            "Iterate the pipe in an IterableDataset of your own."
        )
    if not getattr(loader, "in_order", True):
        log.warning("in_order=False would let timing decide the order of batches: they come in order.")
    return True


def _wrapped(batches: Any) -> DataLoader[Any]:
    wrong = isinstance(batches, (str, bytes, dict, torch.Tensor, Dataset)) or isgenerator(batches)
    if wrong or not isinstance(batches, Iterable):
        raise TypeError(
            "Expected a DataLoader, or batches that can be iterated more than once. Received: "
            f"{type(batches).__name__}. Put a data set into torch.utils.data.DataLoader, a generator into a list."
        )
    return DataLoader(_Iterable(batches), batch_size=None, collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch
