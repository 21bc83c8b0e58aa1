"""Which rank takes which samples: by brute force over lengths, batch sizes, world sizes and settings."""

from __future__ import annotations

from itertools import product

import pytest
from drivetrain.strategies.data.samplers import NOTHING, Layout, Listed, Order, divided, shares

LENGTHS, BATCHES, WORLDS = range(1, 14), (1, 2, 3, 5), (1, 2, 3, 4)
SHORT = ("split", "pad", "fill")


def layouts(batch_size: int, world_size: int, **options) -> list[Layout]:
    if world_size == 1:
        options["short"] = "fill"
    return [Layout(batch_size, world_size, rank, **options) for rank in range(world_size)]


def steps(length: int, batch_size: int, world_size: int, *, start: int = 0, **options) -> list[list]:
    """The shares of all ranks, step by step (a rank that got none is left out)."""
    order = Listed([100 + i for i in range(length)])
    per_rank = [list(shares(order, layout, start)) for layout in layouts(batch_size, world_size, **options)]
    longest = max(map(len, per_rank))
    return [[rank[step] for rank in per_rank if step < len(rank)] for step in range(longest)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("short", SHORT)
def test_every_sample_once_and_in_order(short, drop_last):
    for n, b, w in product(LENGTHS, BATCHES, WORLDS):
        seen = []
        for step in steps(n, b, w, short=short, drop_last=drop_last, lockstep=False):
            seen += [sample for share in step for sample in share.content]
        kept = n // (b * w) * b * w if drop_last else n
        padded = -(-n // (b * w)) * b * w if short == "pad" and w > 1 and not drop_last else kept
        assert seen == [100 + i % n for i in range(padded)], (n, b, w)


@pytest.mark.parametrize("short", SHORT)
def test_what_shares_say_of_themselves(short):
    for n, b, w in product(LENGTHS, BATCHES, WORLDS):
        consumed = 0
        for step in steps(n, b, w, short=short, lockstep=False):
            total = sum(len(share.content) for share in step)
            real = min(b * w, n - consumed)
            for share in step:
                assert share.samples == len(share.content)
                assert share.total == total
                assert share.weight == pytest.approx(share.samples * w / total)
                assert share.stop == consumed + real
                assert share.remainder == (real if real < b * w else -1)
            assert sum(share.weight for share in step) == pytest.approx(w)
            if short != "pad":
                assert step[0].offset == consumed
                assert [a.offset + a.samples for a in step[:-1]] == [later.offset for later in step[1:]]
            consumed += real
        assert consumed == n


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("short", SHORT)
def test_number_of_steps_and_the_last_one(short, drop_last, lockstep):
    for n, b, w in product(LENGTHS, BATCHES, WORLDS):
        for layout in layouts(b, w, short=short, drop_last=drop_last, lockstep=lockstep):
            found = list(shares(Order(n), layout))
            assert len(found) == layout.steps(n), (n, layout)
            assert [share.last for share in found] == [False] * (len(found) - 1) + [True] * bool(found)


def test_ranks_in_lockstep_get_equally_many_batches():
    for n, b, w in product(LENGTHS, BATCHES, WORLDS):
        for short in ("split", "pad"):
            assert len({layout.steps(n) for layout in layouts(b, w, short=short)}) == 1


def test_rank_without_samples_repeats_one_that_does_not_count():
    # 9 samples, 2 a rank, 4 ranks: the second global batch holds sample 8 alone
    step = steps(9, 2, 4, short="split")[1]
    assert [share.content for share in step] == [[108], [108], [108], [108]]
    assert [share.samples for share in step] == [1, 0, 0, 0]
    assert [share.weight for share in step] == [4.0, 0.0, 0.0, 0.0]
    assert {share.total for share in step} == {1}


def test_short_batch_is_split_by_divmod():
    # 13 samples, 4 a rank, 2 ranks: 5 are left, 3 and 2
    step = steps(13, 4, 2, short="split")[1]
    assert [share.content for share in step] == [[108, 109, 110], [111, 112]]
    assert [share.weight for share in step] == [pytest.approx(6 / 5), pytest.approx(4 / 5)]


def test_padding_repeats_the_start_of_the_epoch():
    # as Accelerate's BatchSamplerShard: 5 samples, 2 a rank, 2 ranks
    assert [[share.content for share in step] for step in steps(5, 2, 2, short="pad")] == [
        [[100, 101], [102, 103]],
        [[104, 100], [101, 102]],
    ]
    # 1 sample, 2 a rank, 2 ranks: over and over
    assert [[share.content for share in step] for step in steps(1, 2, 2, short="pad")] == [[[100, 100], [100, 100]]]


def test_filling_leaves_late_ranks_without():
    assert [[share.content for share in step] for step in steps(5, 2, 2, short="fill")] == [
        [[100, 101], [102, 103]],
        [[104]],
    ]


def test_R6_every_position_goes_on_at_every_world_size():
    """What ranks of any number read from any position on is the rest of the order."""
    for n, b, w in product(LENGTHS, BATCHES, WORLDS):
        for start in range(n + 1):
            rest = steps(n, b, w, start=start, short="split", lockstep=False) if start < n else []
            assert [s for step in rest for share in step for s in share.content] == [100 + i for i in range(start, n)]


@pytest.mark.parametrize("short", SHORT)
def test_chunks_that_come_one_by_one_are_divided_alike(short):
    """The lazy way (a user's sampler, a stream) gives what the direct way gives."""
    for n, b, w in product(LENGTHS, BATCHES, WORLDS):
        for layout in layouts(b, w, short=short):
            items = list(range(n))
            chunks = iter([items[at : at + layout.stride] for at in range(0, n, layout.stride)])
            lazily = list(divided(chunks, layout))
            assert lazily == list(shares(Order(n), layout)), (n, layout)
            assert all(share.content is not NOTHING for share in lazily)
