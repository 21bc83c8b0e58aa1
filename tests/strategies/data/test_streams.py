"""Iterable data on one rank: counting, seeds, resuming by a state or by reading again, workers."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from drivetrain.strategies.data.loader import skip_first_batches
from drivetrain.strategies.settings import DataLoaderConfiguration
from drivetrain.tests.strategies.data.sets import (
    SPLIT,
    NoisyStream,
    Stateful,
    Stream,
    epoch,
    plain,
    prepared,
    take,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORKERS = [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


class Sized(Stream):
    def __len__(self):
        return self.length


class Split(Stream):
    """Worker w of n reads every n-th number."""

    def __iter__(self):
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        yield from range(first, self.length, step)


def test_what_it_tells_of_each_batch():
    loader = prepared(DataLoader(Sized(5), 2))
    assert len(loader) == 3
    told = []
    for batch in loader:
        told.append((plain(batch), loader.samples, loader.global_samples, loader.weight, loader.position,
                     loader.batches, loader.end_of_dataloader, loader.remainder))  # fmt: skip
    assert told == [
        ([0, 1], 2, 2, 1.0, 2, 2, False, -1),
        ([2, 3], 2, 2, 1.0, 4, 1, False, -1),
        ([4], 1, 1, 1.0, 5, 0, True, 1),
    ]


def test_last_full_batch_is_known_as_the_last():
    loader = prepared(DataLoader(Stream(4), 2))
    assert [loader.end_of_dataloader for _ in loader] == [False, True]
    assert loader.batches == 0


def test_wrong_length_of_a_data_set_is_not_believed():
    class Liar(Stream):
        def __len__(self):
            return 2

    loader = prepared(DataLoader(Liar(6), 2))
    assert [(loader.batches, loader.end_of_dataloader) for _ in loader] == [(1, False), (1, False), (0, True)]


def test_drop_last():
    assert epoch(prepared(DataLoader(Stream(5), 2, drop_last=True))) == [[0, 1], [2, 3]]


def test_batch_size_none():
    loader = prepared(DataLoader(Stream(3), batch_size=None))
    told = [(plain(batch), loader.samples, loader.weight, loader.position, loader.end_of_dataloader) for batch in loader]
    assert told == [(0, None, 1.0, 1, False), (1, None, 1.0, 2, False), (2, None, 1.0, 3, True)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("short", ["split", "pad", "fill"])
def test_shares_of_two_ranks(rank, short):
    config = DataLoaderConfiguration(split_last_batch=short == "split", even_batches=short == "pad")
    found = epoch(prepared(DataLoader(Stream(7), 2), rank=rank, size=2, config=config, lockstep=False))
    last = {"split": ([4, 5], [6]), "pad": ([4, 5], [6, 0]), "fill": ([4, 5], [6])}[short]
    assert found == [[[0, 1], last[0]], [[2, 3], last[1]]][rank]


def test_rank_without_a_share():
    loader = prepared(DataLoader(Stream(5), 2), rank=1, size=2, config=SPLIT, lockstep=False)
    assert [(plain(batch), loader.end_of_dataloader) for batch in loader] == [([2, 3], True)]


def test_padding_of_samples_that_collating_takes_apart():
    class Dicts(Stream):
        def __iter__(self):
            return ({"n": number} for number in range(self.length))

    def popping(samples):
        return [sample.pop("n") for sample in samples]

    loader = prepared(DataLoader(Dicts(1), 2, collate_fn=popping), rank=1, size=3, config=DataLoaderConfiguration())
    loader.lockstep = False
    assert epoch(loader) == [[0, 0]]


@pytest.mark.parametrize("options", WORKERS)
def test_draws_are_a_function_of_seed_and_epoch(options):
    loader, again = (prepared(DataLoader(NoisyStream(7), 2, **options)) for _ in range(2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = [epoch(loader) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    again.set_epoch(1)
    assert epoch(again) == found[1] != found[0]


def test_one_worker_is_as_none():
    assert epoch(prepared(DataLoader(NoisyStream(7), 2, num_workers=1))) == epoch(prepared(DataLoader(NoisyStream(7), 2)))


def test_workers_draw_different_numbers():
    loader = prepared(DataLoader(NoisyStream(4), 2, num_workers=2))
    values = [value for batch in loader for value in batch[1].tolist()]
    assert len(set(values)) == len(values) == 8


def test_same_draws_on_more_ranks():
    alone = epoch(prepared(DataLoader(NoisyStream(8), 2)))
    ranks = [epoch(prepared(DataLoader(NoisyStream(8), 2), rank=rank, size=2, lockstep=False)) for rank in range(2)]
    assert [batch for step in zip(*ranks) for batch in step] == alone


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("data", [Stream, NoisyStream, Split, Stateful, Sized])
def test_resumed_anywhere(data, options):
    """Through JSON, in a fresh loader, at each batch, the next epoch included."""
    whole = prepared(DataLoader(data(17), 2, **options))
    epoch(whole)
    full, after = epoch(whole), epoch(whole)
    for count in range(1, len(full) + 1, 1 if not options else 4):
        left = prepared(DataLoader(data(17), 2, **options))
        left.set_epoch(1)
        assert take(left, count) == full[:count]
        state = json.loads(json.dumps(left.state_dict()))
        resumed = prepared(DataLoader(data(17), 2, **options))
        resumed.load_state_dict(state)
        assert epoch(resumed) == full[count:]
        assert epoch(resumed) == after


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("data", [Stream, Split, Stateful])
def test_epoch_after_one_that_was_left_early_begins_at_the_start(data, options):
    loader = prepared(DataLoader(data(17), 2, **options))
    full = epoch(loader)
    take(loader, 2)
    assert epoch(loader) == full
    assert loader.epoch == 3


def test_R8_stream_with_a_state_is_not_read_again(caplog):
    left = prepared(DataLoader(Stateful(100_000), 10))
    take(left, 5000)
    resumed = prepared(DataLoader(Stateful(100_000), 10))
    resumed.load_state_dict(left.state_dict())
    assert take(resumed, 1) == [list(range(50_000, 50_010))]
    assert resumed.dataset.read <= 20  # one batch ahead
    assert not caplog.records


def test_R8_plain_stream_is_read_again_with_a_line_in_the_log(caplog):
    left = prepared(DataLoader(Stream(100), 10))
    take(left, 5)
    resumed = prepared(DataLoader(Stream(100), 10))
    resumed.load_state_dict(left.state_dict())
    with caplog.at_level(logging.INFO):
        assert take(resumed, 1) == [list(range(50, 60))]
    assert "Reading 50 samples of Stream again" in caplog.text and "state_dict" in caplog.text


def test_long_reading_shows_progress(caplog, monkeypatch):
    monkeypatch.setattr("drivetrain.strategies.data.streams.PROGRESS", 0.0)
    resumed = prepared(DataLoader(Stream(100), 10))
    resumed.load_state_dict({"epoch": 0, "samples": 50, "seed": 0})
    take(resumed, 1)
    assert "Read 30 of 50 samples of Stream." in caplog.text


@pytest.mark.parametrize("before", [1, 2])
def test_R6_stream_goes_on_at_another_world_size(before):
    for data in (Stream, Stateful):
        left = prepared(DataLoader(data(16), 2), size=before, config=SPLIT, lockstep=False)
        take(left, 2)
        done, after = 4 * before, 3 - before
        rest = []
        for rank in range(after):
            resumed = prepared(DataLoader(data(16), 2), rank=rank, size=after, config=SPLIT, lockstep=False)
            resumed.load_state_dict(left.state_dict())
            rest += [sample for batch in resumed for sample in batch.tolist()]
        assert sorted(rest) == list(range(done, 16))


@pytest.mark.parametrize("options", WORKERS)
def test_skipping_batches_of_a_stream(options):
    for data in (Stream, Stateful):
        loader = prepared(DataLoader(data(17), 2, **options))
        full = epoch(loader)
        assert epoch(skip_first_batches(loader, 3)) == full[3:]
        assert take(skip_first_batches(loader, 3), 1) == full[3:4]
        state = loader.state_dict()
        assert state["samples"] == 8
        resumed = prepared(DataLoader(data(17), 2, **options))
        resumed.load_state_dict(state)
        assert epoch(resumed) == full[4:]


@pytest.mark.parametrize("options", WORKERS)
def test_position_alone_is_enough_for_a_stream_that_is_read_again(options):
    full = epoch(prepared(DataLoader(Split(17), 2, **options)))
    resumed = prepared(DataLoader(Split(17), 2, **options))
    resumed.load_state_dict({"epoch": 0, "samples": 4, "seed": 0})
    assert epoch(resumed) == full[2:]


def test_another_number_of_workers_is_refused():
    left = prepared(DataLoader(Split(17), 2, num_workers=2))
    take(left, 2)
    resumed = prepared(DataLoader(Split(17), 2, num_workers=3))
    resumed.load_state_dict(left.state_dict())
    with pytest.raises(ValueError, match="Expected num_workers=2"):
        epoch(resumed)


def test_workers_of_very_unequal_length():
    class Uneven(Stream):
        def __iter__(self):
            info = get_worker_info()
            return iter(range(100 * info.id, 100 * info.id + (1, 9)[info.id]))

    loader = prepared(DataLoader(Uneven(0), 2, num_workers=2))
    assert epoch(loader) == [[0], [100, 101], [102, 103], [104, 105], [106, 107], [108]]
    assert epoch(loader)[-1] == [108] and loader.end_of_dataloader


@pytest.mark.parametrize("options", WORKERS[:3])
def test_error_of_the_stream_comes_through(options):
    class Broken(Stream):
        def __iter__(self):
            yield from (0, 1, 2, 3, 4)
            raise OSError("the connection broke")

    loader = prepared(DataLoader(Broken(0), 2, **options))
    found = []
    with pytest.raises(OSError, match="the connection broke"):
        for batch in loader:
            found.append(plain(batch))
    assert found and found[0] == [0, 1]


def test_stop_iteration_of_a_collate_function_is_an_error():
    def ending(samples):
        raise StopIteration

    for options in WORKERS[:3]:
        with pytest.raises(RuntimeError):
            epoch(prepared(DataLoader(Stream(5), 2, collate_fn=ending, **options)))


def test_stream_is_told_the_epoch():
    class Told(Stream):
        epoch = None

        def set_epoch(self, number):
            self.epoch = number

        def __iter__(self):
            return iter([self.epoch])

    for options in WORKERS[:2] + [{"num_workers": 1, "persistent_workers": True}]:
        loader = prepared(DataLoader(Told(0), 2, **options))
        assert [epoch(loader) for _ in range(3)] == [[[0]], [[1]], [[2]]]


def test_endless_stream():
    class Endless(IterableDataset):
        def __iter__(self):
            import itertools

            return itertools.count()

    for options in WORKERS[:2]:
        loader = prepared(DataLoader(Endless(), 2, **options))
        assert take(loader, 3) == [[0, 1], [2, 3], [4, 5]]
        loader.limit = 2
        assert epoch(loader) == [[0, 1], [2, 3]] and loader.end_of_dataloader


def test_state_is_a_copy():
    class Mutable(Stateful):
        def __init__(self, length):
            super().__init__(length)
            self.shared = {"next": 0}

        def state_dict(self):
            self.shared["next"] = self.next
            return self.shared

    loader = prepared(DataLoader(Mutable(12), 2))
    states = [loader.state_dict() for _ in loader]
    assert [state["streams"]["places"][0]["state"]["next"] for state in states] == [2, 4, 6, 8, 10, 12]


def test_data_pipe_is_refused():
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(TypeError, match="a data pipe"):
        prepared(DataLoader(IterableWrapper([1, 2, 3]), 2))


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("data", [Stream, Stateful])
def test_place_before_the_batches_that_were_read(data, options):
    """A step that fails is done again: its samples are taken off the position, and read once more."""
    full = epoch(prepared(DataLoader(data(17), 2, **options)))
    left = prepared(DataLoader(data(17), 2, **options))
    take(left, 4)
    resumed = prepared(DataLoader(data(17), 2, **options))
    resumed.load_state_dict({**left.state_dict(), "samples": 4})
    assert epoch(resumed) == full[2:]


@pytest.mark.parametrize("data", [Stream, Stateful])
def test_batch_that_could_not_be_moved_is_not_counted(data):
    def fail(batch):
        if 4 in batch:
            raise RuntimeError("out of memory")
        return batch

    loader = prepared(DataLoader(data(8), 2))
    loader.transfer = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        epoch(loader)
    resumed = prepared(DataLoader(data(8), 2))
    resumed.load_state_dict(loader.state_dict())
    assert epoch(resumed) == [[4, 5], [6, 7]]
