"""Reading iterable data: every rank reads the stream and takes its share of each global batch, or has its own stream.

A data set that offers `state_dict` and `load_state_dict` is asked for its state after each global batch, so that a
resumed run continues there; any other is read again from the start of the epoch, with a line in the log.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate

from ..random import derive, mix, seed_all
from .fetch import WORKERS, Workers, collating, pinned, pins, settle, tell_epoch
from .position import Position
from .samplers import NOTHING, Layout, Share, cut

log = logging.getLogger(__name__)

START, COLLATE = 4, 5  # what a seed is derived for
PROGRESS = 10.0  # seconds between two lines about reading again
_READ = "read"


class StreamData:
    """The batches of a loader for iterable data. `streams` is where its readers stand after the batch yielded last."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.batched = loader, loader.batch_size is not None
        self.streams: dict[str, Any] | None = None
        self._reader = Reader(loader.dataset, loader.collate_fn, batched=self.batched)
        self._workers = Workers(loader, WorkedStream(self._reader)) if loader.num_workers else None

    def __len__(self) -> int:
        """Samples in an epoch as the data set says; TypeError where it does not."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def steps(self, layout: Layout, place: Position) -> int:
        """Batches that one rank gets from a place on; TypeError where the data set does not say."""
        return layout.steps(max(len(self) - place.samples, 0))

    def batches(self, layout: Layout, place: Position, *, key: int, skip: int = 0) -> Iterator[tuple[Any, Share]]:
        """One rank's batches of an epoch, from a place and then `skip` global batches on."""
        streams = self.streams = self._checked(place.streams)
        start = Start(layout, key, place.epoch, place.samples, skip=skip)
        if self._workers is not None:
            pieces = read_by(self._workers, start, streams)
        else:
            start = replace(start, **streams["places"][0]) if streams else start
            pieces = read_here(self._reader, start, pinned if pins(self.loader) else None)
        for piece, self.streams in looked_ahead(pieces, key, place.samples):
            yield piece.batch, piece.share

    def _checked(self, streams: dict[str, Any] | None) -> dict[str, Any] | None:
        number = max(self.loader.num_workers, 1)
        if streams is not None and len(streams["places"]) != number:
            raise ValueError(
                f"Expected num_workers={len(streams['places'])}, by which the iterable data was split when its "
                f"position was saved. Received: num_workers={self.loader.num_workers}. Resume with as many workers."
            )
        return streams


@dataclass(frozen=True)
class Start:
    """Where and how an iteration over a stream begins."""

    layout: Layout
    key: int
    epoch: int
    samples: int = 0
    state: Any = None  # the data set's own state there
    ended: bool = False  # nothing follows
    skip: int = 0  # global batches to pass over from there


class Piece(NamedTuple):
    """One batch of a stream; `place` ({"samples", "state", "ended"}) is where its reader stands after it."""

    batch: Any
    share: Share
    place: dict[str, Any]


class Reader:
    """Reads one iterable data set, global batch by global batch, for one rank."""

    def __init__(self, dataset: Any, collate_fn: Callable, *, batched: bool = True) -> None:
        self.dataset, self.collate_fn, self.batched = dataset, collate_fn, batched
        self._stateful = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._initial: Any = None
        self._begun = self._ended = False

    def begin(self, start: Start) -> None:
        """Go to where an iteration begins; what the one before left unread is forgotten."""
        self.layout, self.key, self._collate = start.layout, start.key, collating(self.collate_fn)
        self._head: list = []
        tell_epoch(self.dataset, start.epoch)
        seed_all(derive(start.key, START))
        loaded = self._load(start.state)  # of a stream that has ended too: the next epoch begins from there
        self.position = start.samples if loaded or start.ended else 0
        self._begun, self._ended = True, start.ended
        self._iterator = iter(self.dataset)
        self._pass_over(start.samples - self.position + start.skip * self.layout.stride)

    def read(self) -> Piece | None:
        """The next batch; None at the end of the stream."""
        chunk = self._chunk()
        if not chunk or (self.layout.drop_last and len(chunk) < self.layout.stride):
            return None
        self._remember(chunk)
        share = cut(chunk, self.layout, self.position, head=self._head, size=None if self.batched else _one)
        self.position = share.stop
        state = copy.deepcopy(self.dataset.state_dict()) if self._stateful else None
        place = {"samples": self.position, "state": state, "ended": self._ended}
        if not self.batched:
            share = share._replace(samples=None if share.samples else 0, total=None)
        if share.content is NOTHING:
            return Piece(NOTHING, share, place)
        if self.collate_fn is not default_collate:  # which would not draw
            seed_all(derive(self.key, COLLATE, share.offset))
        content = share.content
        if len(chunk) < self.layout.stride and self.batched:
            content = [copy.copy(sample) for sample in content]  # the same one may be there twice
        return Piece(self._collate(content), share._replace(content=None), place)

    def _chunk(self) -> list:
        """The samples of the next global batch, each rank's part drawn from a random state that its place names."""
        chunk: list = []
        for _ in range(self.layout.world_size):
            chunk += self._take(self.layout.batch_size, self.position + len(chunk))
        return chunk

    def _take(self, number: int, position: int) -> list:
        if self._ended:
            return []
        seed_all(mix(self.key, position))
        samples = list(islice(self._iterator, number))
        self._ended = len(samples) < number
        return samples

    def _remember(self, samples: list) -> None:
        """Keep what the epoch began with, for a short end to be filled up from."""
        missing = self.layout.stride - len(self._head)
        if missing and (self.layout.short == "pad" or not self._head):
            self._head += [copy.copy(sample) for sample in samples[:missing]]  # collating may take samples apart

    def _load(self, state: Any) -> bool:
        """Put the data set where it has to begin; whether that is where `state` was taken."""
        if not self._stateful:
            return False
        if not self._begun:
            self._initial = copy.deepcopy(self.dataset.state_dict())
        if state is not None:
            self.dataset.load_state_dict(copy.deepcopy(state))
        elif self._begun and not self._ended:
            self.dataset.load_state_dict(copy.deepcopy(self._initial))
        return state is not None

    def _pass_over(self, samples: int) -> None:
        """Read so many samples in the steps in which they would have been used, and drop them."""
        if samples <= 0:
            return
        name, until, told = type(self.dataset).__name__, self.position + samples, time.monotonic()
        advice = "" if self._stateful else " Give it state_dict and load_state_dict to continue at once."
        log.warning("Reading %d samples of %s again, to continue after them.%s", samples, name, advice)
        while self.position < until and not self._ended:
            part = self._take(min(self.layout.batch_size, until - self.position), self.position)
            self._remember(part)
            self.position += len(part)
            if time.monotonic() - told > PROGRESS:
                told = time.monotonic()
                log.warning("Read %d of %d samples of %s.", self.position, until, name)


class WorkedStream:
    """A stream as its worker sees it. Tickets: a Start (begin, then read), "read", or None (not this worker's turn)."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.dataset = reader.dataset

    def __getitems__(self, ticket: Start | str | None) -> Piece | None:
        if ticket is None:
            return None
        if isinstance(ticket, Start):
            self.reader.begin(ticket)
        return self.reader.read()


def read_here(reader: Reader, start: Start, pin: Callable[[Any], Any] | None) -> Iterator[tuple[Piece, dict]]:
    """The batches of a stream, read in this process, each with the place after it; torch's random state stays."""
    generator = torch.default_generator

    def alone(function: Callable[..., Any], *args: Any) -> Any:
        state = generator.get_state()
        try:
            return function(*args)
        finally:
            generator.set_state(state)

    alone(reader.begin, start)
    while (piece := alone(reader.read)) is not None:
        if pin is not None and piece.batch is not NOTHING:
            piece = piece._replace(batch=pin(piece.batch))
        yield piece, {"next": 0, "places": [piece.place]}


def read_by(workers: Workers, start: Start, streams: dict | None) -> Iterator[tuple[Piece, dict]]:
    """The same with a stream in each worker, which take turns; a stream that ends is left out.

    `streams` is what came with the batch before, `start.samples` the place over all workers.
    """
    number = workers.loader.num_workers
    if streams is None:
        known = start.samples if number == 1 else 0
        streams = {"next": 0, "places": [{"samples": known, "state": None, "ended": False}] * number}
    first, places = streams["next"], list(streams["places"])
    keys = [derive(start.key, WORKERS, worker) if worker else start.key for worker in range(number)]
    skip = start.skip if number == 1 else 0
    begins = [replace(start, key=key, skip=skip, **place) for key, place in zip(keys, places)]
    position, ended = sum(place["samples"] for place in places), set()
    missing = start.samples - position + (start.skip - skip) * start.layout.stride
    if missing:
        log.warning("Reading %d samples again, to continue after them.", missing)

    def tickets() -> Iterator[Start | str | None]:
        yield from [None] * first
        yield from begins[first:] + begins[:first]
        yield from repeat(_READ)

    for turn, piece in enumerate(workers.run(tickets(), derive(start.key, WORKERS))):
        worker = turn % number
        if turn >= first and piece is None:
            ended.add(worker)
        if len(ended) == number:
            return
        if piece is None:
            continue
        used = piece.place["samples"] - places[worker]["samples"]
        places[worker] = piece.place
        position, missing = position + used, missing - used
        if missing < 0:
            share = piece.share._replace(stop=position)
            yield piece._replace(share=share), {"next": (worker + 1) % number, "places": list(places)}
    raise RuntimeError("Expected each worker to read to its end. Received: StopIteration, raised by a collate_fn.")


def looked_ahead(pieces: Iterator[tuple[Piece, dict]], key: int, start: int) -> Iterator[tuple[Piece, dict]]:
    """The same pieces, from the sample `start` on, each knowing whether this rank, or any, gets another one."""
    pending = deque(islice(pieces, 1))
    if not pending and start:  # to find the end has drawn: leave numpy and random as the last batch did
        settle(mix(key, start), drawn=True)
    while pending:
        piece, streams = pending.popleft()
        while (not pending or pending[-1][0].batch is NOTHING) and (following := next(pieces, None)) is not None:
            pending.append(following)
        last = not pending or pending[-1][0].batch is NOTHING
        settle(mix(key, piece.share.stop), drawn=True)
        yield piece._replace(share=piece.share._replace(last=last, end=not pending)), streams


def _one(unit: Any) -> int:
    return 1
