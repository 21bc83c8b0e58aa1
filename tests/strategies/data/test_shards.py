"""Samplers and data sets that give one process its share, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from drivetrain import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
)


def shards(length, size, *, drop_last=False, **options):
    made = [BatchSamplerShard(BatchSampler(range(length), size, drop_last), 2, rank, **options) for rank in range(2)]
    for shard in made:
        assert len(shard) == len(list(shard))
    return [list(shard) for shard in made]


@pytest.mark.parametrize("length, expected", [
    (12, [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]),
    (11, [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 0]]]),
    (8, [[[0, 1, 2], [6, 7, 0]], [[3, 4, 5], [1, 2, 3]]]),
    (2, [[[0, 1, 0]], [[1, 0, 1]]]),
])  # fmt: skip
def test_batches_in_turn_filled_up(length, expected):
    assert shards(length, 3) == expected


def test_batches_in_turn_as_they_are_or_dropped():
    assert shards(8, 3, even_batches=False) == [[[0, 1, 2], [6, 7]], [[3, 4, 5]]]
    assert shards(8, 3, drop_last=True) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_parts_of_batches():
    assert shards(6, 4, split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    assert shards(8, 4, split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    uneven = [list(BatchSamplerShard(BatchSampler(range(5), 4, False), 2, rank, True, False)) for rank in range(2)]
    assert uneven == [[[0, 1], [4]], [[2, 3]]]
    with pytest.raises(ValueError, match="Take a multiple of 2"):
        shards(6, 3, split_batches=True)


class Stream(IterableDataset):
    epoch = None

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))

    def set_epoch(self, epoch):
        self.epoch = epoch


def stream_shards(length, size, **options):
    made = [IterableDatasetShard(Stream(length), size, num_processes=2, process_index=rank, **options)
            for rank in range(2)]  # fmt: skip
    for shard in made:
        assert len(shard) == len(list(shard))
    return [list(shard) for shard in made]


def test_samples_of_a_stream():
    assert stream_shards(8, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert stream_shards(5, 2) == [[0, 1, 4, 0], [2, 3, 1, 2]]
    assert stream_shards(5, 2, drop_last=True) == [[0, 1], [2, 3]]
    assert stream_shards(1, 2) == [[0, 0], [0, 0]]
    assert stream_shards(5, 4, split_batches=True) == [[0, 1, 4, 0], [2, 3, 1, 2]]
    shard = IterableDatasetShard(Stream(4))
    shard.set_epoch(3)
    assert shard.dataset.epoch == 3


def test_an_order_of_seed_and_epoch():
    sampler = SeedableRandomSampler(range(6), data_seed=5)
    first, second = list(sampler), list(sampler)
    generator = torch.Generator()
    assert first == torch.randperm(6, generator=generator.manual_seed(5)).tolist()
    assert second == torch.randperm(6, generator=generator.manual_seed(6)).tolist()
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_first_batches_are_skipped():
    sampler = SkipBatchSampler(BatchSampler(range(7), 2, False), 2)
    assert list(sampler) == [[4, 5], [6]] and len(sampler) == 2 and sampler.total_length == 4
    loader = SkipDataLoader(list(range(7)), skip_batches=2, batch_size=2)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6]] and len(loader) == 2


def test_the_sampler_of_a_loader():
    sampler = RandomSampler(range(4))
    loader = DataLoader(range(4), batch_sampler=BatchSamplerShard(BatchSampler(sampler, 2, False)))
    assert get_sampler(loader) is sampler
    assert get_sampler(DataLoader(range(4), sampler=sampler)) is sampler


def test_a_loader_for_another_process():
    loader = DataLoader(list(range(8)), 2)
    shares = [[batch.tolist() for batch in prepare_data_loader(loader, None, 2, rank)] for rank in range(2)]
    assert shares == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    halves = [[batch.tolist() for batch in prepare_data_loader(loader, num_processes=2, process_index=rank,
                                                               split_batches=True)] for rank in range(2)]  # fmt: skip
    assert halves == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    with pytest.raises(ValueError, match="process_index=2"):
        prepare_data_loader(loader, num_processes=2, process_index=2)
