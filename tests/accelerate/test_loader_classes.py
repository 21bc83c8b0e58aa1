"""Accelerate's loader classes made by hand: a data set and DataLoader's options, as its own tests make them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    DataLoaderDispatcher,
    DataLoaderShard,
    GradientState,
    SkipDataLoader,
)
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import run


@pytest.fixture(autouse=True)
def _fresh():
    GradientState._reset_state()
    yield
    GradientState._reset_state()
    PartialState._reset_state()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(16))


RIGHT = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
@pytest.mark.parametrize("data", [list(range(16)), Stream()], ids=["list", "stream"])
def test_one_process_reads_all_of_it(kind, data):
    loader = kind(data, batch_size=4)
    assert isinstance(loader, DataLoader)
    for _ in range(2):
        seen = []
        for index, batch in enumerate(loader):
            assert loader.end_of_dataloader is (index == 3) is GradientState().end_of_dataloader
            seen.append(batch.tolist())
        assert seen == RIGHT


def test_options_are_torchs_and_accelerates():
    loader = DataLoaderShard(list(range(16)), batch_size=4, skip_batches=2, iteration=3, rng_types=["generator"])
    assert [batch.tolist() for batch in loader] == RIGHT[2:] == [batch.tolist() for batch in loader]
    shuffled = DataLoaderShard(list(range(16)), batch_size=4, shuffle=True)
    first, second = [[batch.tolist() for batch in shuffled] for _ in range(2)]
    assert first != second and sorted(sum(first, [])) == list(range(16))
    with pytest.raises(TypeError, match="unexpected keyword"):
        DataLoaderShard(list(range(16)), batch_sise=4)


def test_a_shard_leaves_the_division_to_whoever_made_it():
    def rank(rank):
        Accelerator(cpu=True)
        shard = [batch.tolist() for batch in DataLoaderShard(list(range(16)), batch_size=4)]
        dispatched = [batch.tolist() for batch in DataLoaderDispatcher(list(range(16)), batch_size=4)]
        split = [batch.tolist() for batch in DataLoaderDispatcher(list(range(16)), batch_size=4, split_batches=True)]
        return shard, dispatched, split

    first, second = run(rank, 2)
    assert first == (RIGHT, RIGHT[::2], [batch[:2] for batch in RIGHT])
    assert second == (RIGHT, RIGHT[1::2], [batch[2:] for batch in RIGHT])


def test_ready_loaders_are_prepared_as_they_are():
    loader = DataLoaderShard(list(range(16)), batch_size=4)
    assert Accelerator(cpu=True).prepare(loader) is loader
    skipping = SkipDataLoader(list(range(16)), batch_size=4, skip_batches=2)
    assert [batch.tolist() for batch in skipping] == RIGHT[2:] and len(skipping) == 2


def test_a_slice_function_cuts_the_parts():
    def rank(rank):
        def every_other(batch, part, process_index=None, num_processes=None):
            return batch[process_index::num_processes]

        loader = DataLoaderDispatcher(list(range(16)), split_batches=True, batch_size=4, slice_fn=every_other)
        return [batch.tolist() for batch in loader]

    assert run(rank, 2) == [[[0, 2], [4, 6], [8, 10], [12, 14]], [[1, 3], [5, 7], [9, 11], [13, 15]]]


def test_batches_of_unequal_shape_are_dispatched():
    """The first process reads; each gets a batch as it was read."""
    class Ragged(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2, 3), torch.ones(2, 5), torch.ones(2, 2), torch.ones(2, 4)])

    def rank(rank):
        return [tuple(batch.shape) for batch in DataLoaderDispatcher(Ragged(), batch_size=None)]

    assert run(rank, 2) == [[(2, 3), (2, 2)], [(2, 5), (2, 4)]]


class Ten(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_the_first_process_reads_iterable_data_unless_told_otherwise():
    """As in Accelerate: a short last batch is shared out evenly, and filled up only as far as that takes."""
    def rank(rank, dispatch):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(Ten(), batch_size=4))
        return type(loader).__name__, [batch.tolist() for batch in loader]

    first, second = run(rank, 2, None)
    assert first == ("DataLoaderDispatcher", [[0, 1, 2, 3], [8]])
    assert second == ("DataLoaderDispatcher", [[4, 5, 6, 7], [9]])
    first, second = run(rank, 2, False)
    assert first == ("DataLoaderShard", [[0, 1, 2, 3], [8, 9, 0, 1]])
    assert second == ("DataLoaderShard", [[4, 5, 6, 7], [2, 3, 4, 5]])
