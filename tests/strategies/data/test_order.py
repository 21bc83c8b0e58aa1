"""The order of samples: a function of (seed, epoch), whatever the sampler, and no draw from the global generators."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from drivetrain.strategies.data.samplers import Shuffled
from drivetrain.tests.strategies.data.sets import SPLIT, Numbers, epoch, numbers, plain, prepared, take
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Global(Sampler):
    """Draws from all global generators, some at its start and some at every step; wants to know the epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, []

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)

    def __iter__(self):
        for index in torch.randperm(self.length).tolist():
            yield (index + int(np.random.randint(self.length)) + random.randrange(self.length)) % self.length


class Endless(Sampler):
    """Without a length, without an end; counts what was taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self):
        for number in itertools.count():
            self.taken += 1
            yield number % 10


class Buckets(Sampler):
    """Batches of unequal sizes."""

    SIZES = (3, 1, 2, 4, 2)

    def __len__(self) -> int:
        return len(self.SIZES)

    def __iter__(self):
        start = 0
        for size in self.SIZES:
            yield list(range(start, start + size))
            start += size


def flat(batches) -> list:
    return [sample for batch in batches for sample in batch]


def loaders(**options):
    """Loaders whose order is drawn in every way there is; made anew for each call."""
    data = Numbers(12)
    return {
        "shuffle": DataLoader(data, batch_size=2, shuffle=True, **options),
        "replacement": DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=20), **options),
        "more than there is": DataLoader(data, 2, sampler=RandomSampler(data, num_samples=30), **options),
        "generator": DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(5), **options),
        "weighted": DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 12, 12), **options),
        "subset": DataLoader(data, 2, sampler=SubsetRandomSampler(range(3, 12)), **options),
        "global": DataLoader(data, 2, sampler=Global(12), **options),
        "batch sampler": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, True), **options),
        "own batch sampler": DataLoader(data, batch_sampler=Pairs(Global(12)), **options),
        "keys": DataLoader(data, batch_size=None, sampler=Global(12), **options),
        "batches of keys": DataLoader(
            Rows(12), batch_size=None, sampler=BatchSampler(RandomSampler(data), 3, False), **options
        ),
    }  # fmt: skip


class Pairs(Sampler):
    """A batch sampler of the user's own around another sampler."""

    def __init__(self, sampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler) // 2

    def __iter__(self):
        found = iter(self.sampler)
        while pair := list(itertools.islice(found, 2)):
            yield pair


class Rows(Numbers):
    """Takes lists of indices."""

    def __getitem__(self, indices):
        return torch.tensor(indices)


KINDS = list(loaders())


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_a_function_of_seed_and_epoch(kind):
    torch.manual_seed(1)
    first = prepared(loaders()[kind], seed=3)
    found = [epoch(first) for _ in range(3)]
    torch.manual_seed(2), np.random.seed(2), random.seed(2)
    again = prepared(loaders()[kind], seed=3)
    again.set_epoch(2)
    assert epoch(again) == found[2]
    assert found[0] != found[1] != found[2]
    other = epoch(prepared(loaders()[kind], seed=4))
    assert (other == found[0]) == (kind == "generator")  # the user's generator stands for the seed


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drawn_from_the_global_generators(kind):
    loader = prepared(loaders()[kind])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    epoch(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_list_of_data_leaves_numpy_and_random_alone():
    loader = prepared(DataLoader(list(range(12)), batch_size=2, sampler=Global(12)))
    np.random.seed(1), random.seed(1), np.random.standard_normal(), random.gauss(0, 1)
    before = np.random.get_state(), random.getstate()
    epoch(loader)
    after = np.random.get_state(), random.getstate()
    assert before[1] == after[1]
    assert before[0][2:] == after[0][2:] and (before[0][1] == after[0][1]).all()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_give_the_order_of_one(kind, size):
    alone = epoch(prepared(loaders()[kind], config=SPLIT))
    ranks = [epoch(prepared(loaders()[kind], rank=rank, size=size, config=SPLIT, lockstep=False)) for rank in range(size)]
    together = [batch for step in itertools.zip_longest(*ranks) for batch in step if batch is not None]
    if kind in ("keys", "batches of keys", "own batch sampler"):  # batches as they are
        assert together == alone
    else:
        assert flat(together) == flat(alone)


@pytest.mark.parametrize("kind", KINDS)
def test_R1_left_and_resumed_anywhere(kind):
    whole = prepared(loaders()[kind])
    epoch(whole)
    full, after = epoch(whole), epoch(whole)
    for count in range(1, len(full)):
        left = prepared(loaders()[kind])
        epoch(left)
        assert take(left, count) == full[:count]
        resumed = prepared(loaders()[kind])
        resumed.load_state_dict(left.state_dict())
        assert epoch(resumed) == full[count:]
        assert epoch(resumed) == after


def test_order_without_shuffling_is_kept():
    assert flat(epoch(numbers(7))) == list(range(7))
    chosen = DataLoader(Numbers(9), batch_size=2, sampler=[5, 3, 8, 1])
    assert flat(epoch(prepared(chosen))) == [5, 3, 8, 1]


def test_shuffled_epoch_holds_each_sample_once():
    loader = numbers(101, 7, shuffle=True)
    for _ in range(3):
        assert sorted(flat(epoch(loader))) == list(range(101))


def test_longer_than_the_data_set_goes_round():
    order = Shuffled(5, seed=1, length=12)
    found = order.indices(0, 12)
    assert sorted(found[:5]) == sorted(found[5:10]) == list(range(5))
    assert found[:5] != found[5:10]


@pytest.mark.parametrize("replacement", [True, False])
def test_any_part_of_a_shuffled_order_is_the_same_part(replacement, monkeypatch):
    monkeypatch.setattr("drivetrain.strategies.data.samplers._BLOCK", 64)
    whole = Shuffled(7, seed=3, length=1000, replacement=replacement).indices(0, 1000)
    for start, stop in ((0, 1), (63, 65), (500, 700), (999, 1000), (100, 100)):
        assert Shuffled(7, seed=3, length=1000, replacement=replacement).indices(start, stop) == whole[start:stop]
        assert Shuffled(7, seed=3, length=1000, replacement=replacement).rows(start, stop).tolist() == whole[start:stop]
    assert set(whole) == set(range(7))


def test_same_generator_and_epoch_give_torchs_permutation_of_that_seed():
    """Without replacement the order is one torch.randperm."""
    found = flat(epoch(numbers(20, 4, shuffle=True)))
    order = Shuffled(20, seed=9)
    assert sorted(found) == list(range(20)) and sorted(order.indices(0, 20)) == list(range(20))
    assert isinstance(order.rows(0, 20), torch.Tensor)


def test_endless_sampler_is_taken_only_as_far_as_needed():
    sampler = Endless()
    loader = prepared(DataLoader(Numbers(10), batch_size=2, sampler=sampler))
    assert take(loader, 3) == [[0, 1], [2, 3], [4, 5]]
    assert sampler.taken <= 8  # one batch ahead
    assert loader.batches is None and not loader.end_of_dataloader
    with pytest.raises(TypeError):
        len(loader)
    resumed = prepared(DataLoader(Numbers(10), batch_size=2, sampler=Endless()))
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed, 2) == [[6, 7], [8, 9]]
    assert resumed.dataset.fetched == 4


def test_sampler_is_told_the_epoch():
    sampler = Global(12)
    loader = prepared(DataLoader(Numbers(12), batch_size=2, sampler=sampler))
    epoch(loader), epoch(loader)
    assert sampler.epochs == [0, 1]
    nested = Global(12)
    epoch(prepared(DataLoader(Numbers(12), batch_sampler=Pairs(nested))))
    assert nested.epochs == [0]


def test_users_generator_is_not_used_up():
    generator = torch.Generator().manual_seed(5)
    loader = prepared(DataLoader(Numbers(8), batch_size=2, shuffle=True, generator=generator))
    first = epoch(loader)
    loader.set_epoch(0)
    assert epoch(loader) == first


def test_batches_of_unequal_size_as_they_are():
    found = []
    loader = prepared(DataLoader(Numbers(12), batch_sampler=Buckets()), config=SPLIT)
    for batch in loader:
        found.append((plain(batch), loader.samples, loader.global_samples, loader.position, loader.batches))
    assert found == [
        ([0, 1, 2], 3, 3, 3, 4),
        ([3], 1, 1, 4, 3),
        ([4, 5], 2, 2, 6, 2),
        ([6, 7, 8, 9], 4, 4, 10, 1),
        ([10, 11], 2, 2, 12, 0),
    ]


def test_batches_of_unequal_size_on_two_ranks():
    found = []
    for rank in range(2):
        loader = prepared(DataLoader(Numbers(12), batch_sampler=Buckets()), rank=rank, size=2, config=SPLIT)
        found.append([(plain(b), loader.samples, loader.global_samples, loader.weight, loader.position) for b in loader])
    assert found[0] == [([0, 1, 2], 3, 4, 1.5, 4), ([4, 5], 2, 6, 2 / 3, 10), ([10, 11], 2, 2, 2.0, 12)]
    # the last group holds one batch: rank 1 repeats its first sample, which does not count
    assert found[1] == [([3], 1, 4, 0.5, 4), ([6, 7, 8, 9], 4, 6, 4 / 3, 10), ([10], 0, 2, 0.0, 12)]


def test_batches_of_unequal_size_go_on_at_another_world_size():
    left = prepared(DataLoader(Numbers(12), batch_sampler=Buckets()), size=2, config=SPLIT)
    take(left, 1)
    resumed = prepared(DataLoader(Numbers(12), batch_sampler=Buckets()), config=SPLIT)
    resumed.load_state_dict(left.state_dict())
    assert epoch(resumed) == [[4, 5], [6, 7, 8, 9], [10, 11]]


def test_padding_repeats_whole_batches_of_a_batch_sampler():
    found = [epoch(prepared(DataLoader(Numbers(12), batch_sampler=Buckets()), rank=rank, size=2)) for rank in range(2)]
    assert found[1][-1] == [0, 1, 2]
    assert len(found[0]) == len(found[1]) == 3


def test_split_batches_shares_out_each_batch():
    from drivetrain.strategies.settings import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=True)
    found = [epoch(numbers(8, 4, rank=rank, size=2, config=config)) for rank in range(2)]
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    pairs = DataLoader(Numbers(12), batch_sampler=Buckets())
    config = DataLoaderConfiguration(split_batches=True, split_last_batch=True)
    found = [epoch(prepared(pairs, rank=rank, size=2, config=config)) for rank in range(2)]
    assert [sorted({*a, *b}) for a, b in zip(*found)] == [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]]
    assert len(prepared(pairs, size=2, config=config)) == 5


def test_drop_last_of_a_batch_sampler():
    sampler = BatchSampler(SequentialSampler(Numbers(7)), 2, drop_last=True)
    assert epoch(prepared(DataLoader(Numbers(7), batch_sampler=sampler))) == [[0, 1], [2, 3], [4, 5]]


def test_distributed_sampler_of_the_users_is_its_own_share():
    found = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=rank, shuffle=False)
        loader = DataLoader(Numbers(8), batch_size=2, sampler=sampler)
        assert prepared_share(loader, rank) == 2
        found.append(epoch(loader))
    assert found == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def prepared_share(loader: DataLoader, rank: int) -> int:
    from drivetrain.strategies.data.samplers import Plan

    plan = Plan(loader)
    assert plan.distributed is loader.sampler and plan.distributed.rank == rank
    return len(loader)
