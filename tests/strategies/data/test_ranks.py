"""Loaders on real ranks: what has to be agreed on, and that nobody waits for a rank that has nothing left."""

from __future__ import annotations

import torch
from drivetrain.strategies.data.loader import prepare_data_loader
from drivetrain.strategies.settings import DataLoaderConfiguration
from drivetrain.strategies.world import current
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies.data.sets import SPLIT, Noisy, Numbers, Stateful, Stream, epoch, plain, take
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

OWN = DataLoaderConfiguration(split_last_batch=True, shard=False)


def on_rank(loader, config=SPLIT, *, lockstep=True):
    shard = prepare_data_loader(loader, world=current(), config=config)
    shard.lockstep = lockstep
    return shard


def told(loader):
    return [(plain(batch), loader.samples, loader.global_samples, loader.weight, loader.position,
             loader.end_of_dataloader) for batch in loader]  # fmt: skip


def in_step(loader):
    """The batches of an epoch with a collective between them, as training has it."""
    found = []
    for batch in loader:
        current().all_reduce(torch.ones(1))
        found.append(plain(batch))
    return found


def test_D1_streams_of_unequal_length_end_together():
    """4 batches on rank 0, 6 on rank 1, each rank reading its own."""

    def rank_has(rank):
        loader = on_rank(DataLoader(Stream((8, 12)[rank]), 2), OWN)
        first = in_step(loader)
        return first, loader.end_of_dataloader, loader.position, loader.batches, in_step(loader), loader.epoch

    for first, end, position, left, second, number in run(rank_has):
        assert first == second == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert (end, position, left, number) == (True, 16, 0, 2)


def test_D1_with_workers():
    def rank_has(rank):
        return in_step(on_rank(DataLoader(Stream((8, 12)[rank]), 2, num_workers=1), OWN))

    assert run(rank_has) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


def test_D1_streams_that_should_be_the_same_and_are_not():
    """Every rank reads "the" stream, which is shorter on one: the epoch ends where that ends."""

    def rank_has(rank):
        return in_step(on_rank(DataLoader(Stream((8, 12)[rank]), 2)))

    assert run(rank_has) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_short_ends_of_own_streams_are_weighted_by_what_all_have():
    def rank_has(rank):
        return told(on_rank(DataLoader(Stream((4, 3)[rank]), 2), OWN))

    assert run(rank_has) == [
        [([0, 1], 2, 4, 1.0, 4, False), ([2, 3], 2, 3, 4 / 3, 7, True)],
        [([0, 1], 2, 4, 1.0, 4, False), ([2], 1, 3, 2 / 3, 7, True)],
    ]


def test_own_stream_resumes_from_its_own_state():
    def rank_has(rank):
        left = on_rank(DataLoader(Stateful((12, 10)[rank]), 2), OWN)
        take(left, 2)
        resumed = on_rank(DataLoader(Stateful((12, 10)[rank]), 2), OWN)
        resumed.load_state_dict(left.state_dict())
        return in_step(resumed), resumed.position, resumed.dataset.read

    assert run(rank_has) == [([[4, 5], [6, 7], [8, 9]], 20, 8), ([[4, 5], [6, 7], [8, 9]], 20, 6)]


def test_shared_stream_in_lockstep():
    def rank_has(rank):
        return told(on_rank(DataLoader(Stream(9), 2)))

    found = run(rank_has)
    assert found[0] == [
        ([0, 1], 2, 4, 1.0, 4, False), ([4, 5], 2, 4, 1.0, 8, False), ([8], 1, 1, 2.0, 9, True)]  # fmt: skip
    assert found[1] == [
        ([2, 3], 2, 4, 1.0, 4, False), ([6, 7], 2, 4, 1.0, 8, False), ([8], 0, 1, 0.0, 9, True)]  # fmt: skip


def test_shared_stream_filled_in_order_ends_earlier_on_late_ranks():
    """Accelerate's even_batches=False: rank 1 has nothing of the last global batch, and nobody waits."""
    config = DataLoaderConfiguration(even_batches=False)

    def rank_has(rank):
        return told(on_rank(DataLoader(Stream(6), 2), config))

    found = run(rank_has)
    assert found[0] == [([0, 1], 2, 4, 1.0, 4, False), ([4, 5], 2, 2, 2.0, 6, True)]
    assert found[1] == [([2, 3], 2, 4, 1.0, 4, True)]


def test_evaluating_own_shares_of_unequal_length_asks_nobody():
    def rank_has(rank):
        map_style = epoch(on_rank(DataLoader(Numbers((2, 6)[rank]), 2), OWN, lockstep=False))
        return map_style, epoch(on_rank(DataLoader(Stream((2, 6)[rank]), 2), OWN, lockstep=False))

    assert run(rank_has) == [([[0, 1]],) * 2, ([[0, 1], [2, 3], [4, 5]],) * 2]


def test_own_shares_of_unequal_length_end_together():
    def rank_has(rank):
        loader = on_rank(DataLoader(Numbers((5, 8)[rank]), 2), OWN)
        return len(loader), told(loader), loader.epoch

    assert run(rank_has) == [
        (3, [([0, 1], 2, 4, 1.0, 4, False), ([2, 3], 2, 4, 1.0, 8, False), ([4], 1, 3, 2 / 3, 11, True)], 1),
        (3, [([0, 1], 2, 4, 1.0, 4, False), ([2, 3], 2, 4, 1.0, 8, False), ([4, 5], 2, 3, 4 / 3, 11, True)], 1),
    ]


def test_own_shares_of_equal_length_need_no_agreement():
    def rank_has(rank):
        loader = on_rank(DataLoader(Numbers(4), 2), OWN)
        loader.world.agree = loader.world.all_gather = None  # would fail if it were called
        return told(loader)

    assert run(rank_has) == [[([0, 1], 2, 4, 1.0, 4, False), ([2, 3], 2, 4, 1.0, 8, True)]] * 2


def test_own_shares_are_augmented_differently():
    def rank_has(rank):
        return epoch(on_rank(DataLoader(Noisy(4), 2), OWN))

    first, second = run(rank_has)
    assert first != second


def test_users_distributed_sampler():
    def rank_has(rank):
        sampler = DistributedSampler(Numbers(9), shuffle=True, seed=3)
        loader = on_rank(DataLoader(Numbers(9), 2, sampler=sampler))
        epochs = [epoch(loader) for _ in range(2)]
        left = on_rank(DataLoader(Numbers(9), 2, sampler=DistributedSampler(Numbers(9), shuffle=True, seed=3)))
        left.set_epoch(1)
        take(left, 1)
        resumed = on_rank(DataLoader(Numbers(9), 2, sampler=DistributedSampler(Numbers(9), shuffle=True, seed=3)))
        resumed.load_state_dict(left.state_dict())
        return epochs, epoch(resumed), left.state_dict()["samples"]

    found = run(rank_has)
    for rank, (epochs, rest, position) in enumerate(found):
        for number, batches in enumerate(epochs):
            expected = DistributedSampler(Numbers(9), num_replicas=2, rank=rank, shuffle=True, seed=3)
            expected.set_epoch(number)
            assert sum(batches, []) == list(expected)
        assert rest == epochs[1][1:] and position == 4


def test_order_is_that_of_rank_0s_generator():
    def rank_has(rank):
        loader = DataLoader(Numbers(12), 2, shuffle=True, generator=torch.Generator().manual_seed(rank))
        return epoch(on_rank(loader))

    first, second = run(rank_has)
    assert sorted(sum(first + second, [])) == list(range(12))


def test_R6_left_on_two_ranks_and_resumed_on_one():
    """16 items, batch 2, stopped after 2 batches on each rank: one rank sees exactly the other 8."""

    def rank_has(rank):
        loader = on_rank(DataLoader(Numbers(16), 2, shuffle=True))
        return take(loader, 2), loader.state_dict()

    (first, state), (second, other) = run(rank_has)
    assert state == other
    resumed = prepare_data_loader(DataLoader(Numbers(16), 2, shuffle=True), world=current(), config=SPLIT)
    resumed.load_state_dict(state)
    rest = sum(epoch(resumed), [])
    assert len(rest) == 8 and sorted(sum(first + second, []) + rest) == list(range(16))


def test_different_streams_of_a_data_set_that_divides_itself():
    """What datasets.distributed.split_dataset_by_node gives: each rank its own part, of any length."""

    class Part(IterableDataset):
        def __init__(self, rank):
            self.rank = rank

        def __iter__(self):
            return iter(range(self.rank, 7, 2))

    def rank_has(rank):
        train = in_step(on_rank(DataLoader(Part(rank), 2), OWN))
        return train, epoch(on_rank(DataLoader(Part(rank), 2), OWN, lockstep=False))

    assert run(rank_has) == [([[0, 2], [4, 6]], [[0, 2], [4, 6]]), ([[1, 3], [5]], [[1, 3], [5]])]


def test_own_batches_of_unequal_size_resume_by_their_number():
    """Each rank's own batch sampler, batches of other sizes on each: the position is the same number of batches."""
    sizes = ([3, 1, 2, 2], [1, 1, 4, 2, 2])

    def rank_has(rank):
        def loader():
            ends = [sum(sizes[rank][: i + 1]) for i in range(len(sizes[rank]))]
            batches = [list(range(end - size, end)) for end, size in zip(ends, sizes[rank])]
            return on_rank(DataLoader(Numbers(20), batch_sampler=batches), OWN)

        whole, left, resumed = loader(), loader(), loader()
        full = told(whole)
        take(left, 2)
        resumed.load_state_dict(left.state_dict())
        return full, told(resumed), len(whole), left.state_dict()["samples"]

    (first, rest, length, position), (second, other, same, at) = run(rank_has)
    assert (length, same, position, at) == (4, 4, 6, 6)
    assert [batch for batch, *_ in first] == [[0, 1, 2], [3], [4, 5], [6, 7]]
    assert [batch for batch, *_ in second] == [[0], [1], [2, 3, 4, 5], [6, 7]]
    assert [entry[2:5] for entry in first] == [(4, 1.5, 4), (2, 1.0, 6), (6, 2 / 3, 12), (4, 1.0, 16)]
    assert rest == first[2:] and other == second[2:]
