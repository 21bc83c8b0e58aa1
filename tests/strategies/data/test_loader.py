"""The prepared loader: epochs, leaving early, nesting, resuming, what it tells of each batch, bad input."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from drivetrain.strategies.data.loader import prepare_data_loader, skip_first_batches
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.settings import DataLoaderConfiguration
from drivetrain.strategies.world import World
from drivetrain.tests.strategies.data.sets import SPLIT, Numbers, Seat, Stream, epoch, numbers, plain, prepared, take
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


def test_is_a_data_loader_and_shows_the_users():
    user = DataLoader(Numbers(10), batch_size=4, pin_memory=False, drop_last=True)
    loader = prepared(user)
    assert isinstance(loader, DataLoader)
    assert loader.base is user and loader.dataset is user.dataset and loader.sampler is user.sampler
    assert loader.batch_sampler is user.batch_sampler and loader.collate_fn is user.collate_fn
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.pin_memory) == (4, 0, True, False)
    assert loader.generator is None and loader.multiprocessing_context is None
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (2, 4, 10)
    assert prepare_data_loader(loader, world=World()) is loader
    with pytest.raises(AttributeError, match="nothing_like_it"):
        loader.nothing_like_it


def test_what_it_tells_of_each_batch():
    loader = numbers(10, 4)
    told = []
    for batch in loader:
        told.append((plain(batch), loader.samples, loader.global_samples, loader.weight, loader.position,
                     loader.batches, loader.end_of_dataloader, loader.remainder, loader.epoch))  # fmt: skip
    assert told == [
        ([0, 1, 2, 3], 4, 4, 1.0, 4, 2, False, -1, 0),
        ([4, 5, 6, 7], 4, 4, 1.0, 8, 1, False, -1, 0),
        ([8, 9], 2, 2, 1.0, 10, 0, True, 2, 0),
    ]
    assert loader.epoch == 1


def test_what_two_ranks_are_told():
    told = []
    for rank in range(2):
        loader = numbers(11, 4, rank=rank, size=2)
        assert len(loader) == 2 and loader.total_batch_size == 8
        told.append([(plain(b), loader.samples, loader.global_samples, loader.weight, loader.position, loader.batches,
                      loader.end_of_dataloader, loader.remainder) for b in loader])  # fmt: skip
    assert told[0] == [([0, 1, 2, 3], 4, 8, 1.0, 8, 1, False, -1), ([8, 9], 2, 3, 4 / 3, 11, 0, True, 3)]
    assert told[1] == [([4, 5, 6, 7], 4, 8, 1.0, 8, 1, False, -1), ([10], 1, 3, 2 / 3, 11, 0, True, 3)]


def test_D3_the_union_of_two_ranks_in_order():
    found = [[sample for batch in numbers(8, 2, rank=rank, size=2) for sample in batch.tolist()] for rank in range(2)]
    assert found == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_R1_R2_resumed_in_the_middle_of_an_epoch(shuffle):
    """12 items, batch 2, 3 epochs; stopped in epoch 1 after batch 3."""
    whole = numbers(12, shuffle=shuffle)
    epochs = [epoch(whole) for _ in range(3)]
    stopped = numbers(12, shuffle=shuffle)
    epoch(stopped)
    for batch in stopped:
        if stopped.position == 6:
            state = json.loads(json.dumps(stopped.state_dict()))
            break
    assert state["epoch"] == 1 and state["samples"] == 6 and state["seed"] == 0
    assert stopped.state_dict() == state  # leaving the loop early loses nothing
    resumed = numbers(12, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and resumed.position == 6 and resumed.epoch == 1
    assert [epoch(resumed), epoch(resumed)] == [epochs[1][3:], epochs[2]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_R1_by_hand_with_skip_first_batches(shuffle):
    whole = numbers(12, shuffle=shuffle)
    epochs = [epoch(whole) for _ in range(3)]
    resumed = numbers(12, shuffle=shuffle)
    resumed.set_epoch(1)
    rest = skip_first_batches(resumed, 3)
    assert len(rest) == 3
    assert epoch(rest) == epochs[1][3:]
    assert resumed.dataset.fetched == 6
    assert resumed.epoch == rest.epoch == 2
    assert epoch(resumed) == epochs[2]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 1), (3, 2)])
def test_R6_goes_on_at_another_world_size(before, after):
    """16 items, batch 2 a rank: what was not seen is seen once."""
    for steps in range(1, 16 // (2 * before)):
        seen = []
        for rank in range(before):
            loader = numbers(16, rank=rank, size=before, shuffle=True)
            seen += [sample for batch in take(loader, steps) for sample in batch]
        rest = []
        for rank in range(after):
            resumed = numbers(16, rank=rank, size=after, shuffle=True, lockstep=False)
            resumed.load_state_dict(loader.state_dict())
            rest += [sample for batch in resumed for sample in batch.tolist()]
        assert len(seen) == 2 * before * steps and sorted(seen + rest) == list(range(16))


def test_R8_nothing_is_fetched_that_is_skipped():
    loader = numbers(1_000_000, 4, shuffle=True)
    loader.load_state_dict({"epoch": 0, "samples": 400_000, "seed": 0, "length": 1_000_000})
    take(loader, 2)
    assert loader.dataset.fetched == 8
    loader = numbers(1_000_000, 4)
    assert take(skip_first_batches(loader, 100_000), 1) == [[400_000, 400_001, 400_002, 400_003]]
    assert loader.dataset.fetched == 4


def test_R8_torchs_own_loader_skips_without_fetching():
    for options in ({"shuffle": True}, {"batch_size": None}, {"num_workers": 1, "shuffle": True}):
        options = {"batch_size": 2, "generator": torch.Generator(), **options}
        data = Numbers(12)
        options["generator"].manual_seed(3)
        full = epoch(DataLoader(data, **options))
        data.fetched = 0
        options["generator"].manual_seed(3)
        view = skip_first_batches(DataLoader(data, **options), 2)
        assert epoch(view) == full[2:] and len(view) == len(full) - 2
        assert data.fetched == (0 if "num_workers" in options else 10 if options["batch_size"] is None else 8)
    assert epoch(skip_first_batches(DataLoader(Stream(6), 2), 1)) == [[2, 3], [4, 5]]
    assert epoch(skip_first_batches([1, 2, 3], 2)) == [3]


def test_skips_add_up_and_may_reach_beyond_the_end():
    loader = numbers(12)
    assert epoch(skip_first_batches(skip_first_batches(loader, 2), 3)) == [[10, 11]]
    assert epoch(skip_first_batches(loader, 6)) == [] and len(skip_first_batches(loader, 7)) == 0
    assert loader.epoch == 2
    view = skip_first_batches(loader, 4)
    next(iter(view))
    assert view.position == 10 and view.samples == 2 and view.batches == 1


def test_position_counts_what_was_skipped():
    loader = numbers(12, size=2)
    take(skip_first_batches(loader, 1), 1)
    assert loader.state_dict()["samples"] == 8
    resumed = numbers(12)
    resumed.load_state_dict(loader.state_dict())
    assert epoch(resumed) == [[8, 9], [10, 11]]


def test_next_epoch_after_one_that_was_left_early():
    whole = numbers(12, shuffle=True)
    epochs = [epoch(whole) for _ in range(3)]
    loader = numbers(12, shuffle=True)
    assert take(loader, 2) == epochs[0][:2]
    assert loader.epoch == 0
    assert take(loader, 6) == epochs[1]  # left at the last batch, before the iteration knew that it ended
    assert epoch(loader) == epochs[2]
    assert loader.epoch == 3


def test_set_epoch():
    whole = numbers(12, shuffle=True)
    epochs = [epoch(whole) for _ in range(4)]
    loader = numbers(12, shuffle=True)
    loader.set_epoch(2)
    assert take(loader, 1) == epochs[2][:1]
    loader.set_epoch(3)  # as loops do it before each epoch, whether the one before was left early or not
    assert epoch(loader) == epochs[3]
    loader.set_epoch(0)
    assert take(loader, 2) == epochs[0][:2]
    loader.set_epoch(0)
    assert epoch(loader) == epochs[0]
    loader.epoch = 2
    assert epoch(loader) == epochs[2]


def test_set_epoch_keeps_a_position_of_the_same_epoch_only():
    for number, expected in ((1, 4), (2, 6)):
        loader = numbers(12)
        loader.load_state_dict({"epoch": 1, "samples": 4, "seed": 0, "length": 12})
        loader.set_epoch(number)
        assert len(epoch(loader)) == expected


def test_set_epoch_inside_the_loop_changes_nothing():
    loader = numbers(12)
    found = []
    for batch in loader:
        loader.set_epoch(0)
        found.append(loader.state_dict()["samples"])
    assert found == [2, 4, 6, 8, 10, 12] and loader.epoch == 1


def test_state_at_the_last_batch_and_after_it():
    loader = numbers(6)
    states = []
    for _ in loader:
        states.append(loader.state_dict())
    assert (states[-1]["epoch"], states[-1]["samples"]) == (0, 6)
    resumed = numbers(6)
    resumed.load_state_dict(states[-1])
    assert epoch(resumed) == [] and resumed.epoch == 1  # that epoch had no more
    assert len(epoch(resumed)) == 3
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (1, 0)


def test_an_exception_in_the_loop_keeps_the_position():
    loader = numbers(12)

    def train():
        for _ in loader:
            if loader.position == 4:
                raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError):
        train()
    assert loader.state_dict()["samples"] == 4


def test_iterator_that_was_not_started_uses_no_epoch():
    loader = numbers(6)
    iter(loader), iter(loader)
    assert epoch(loader) and loader.epoch == 1


def test_nested_loaders_do_not_disturb_each_other():
    GradientState._reset_state()
    state = GradientState()
    outer = prepared(DataLoader(Numbers(6), 2), gradient_state=state)
    inner = prepared(DataLoader(Numbers(8), 4), gradient_state=state)
    found = []
    for batch in outer:
        assert state.active_dataloader is outer
        for other in inner:
            assert state.active_dataloader is inner
            found.append((plain(batch), plain(other), state.end_of_dataloader))
        assert state.active_dataloader is outer and state.end_of_dataloader == (outer.position == 6)
    assert state.active_dataloader is None and not state.in_dataloader
    assert len(found) == 6 and [f[1] for f in found[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (outer.epoch, inner.epoch) == (1, 3)
    for _ in outer:
        break
    assert not state.in_dataloader
    GradientState._reset_state()


def test_gradient_state_is_left_after_an_error():
    entered = []
    state = SimpleNamespace(enter=entered.append, leave=entered.remove)

    class Broken(Numbers):
        def __getitem__(self, index):
            raise OSError("disk")

    loader = prepared(DataLoader(Broken(4), 2), gradient_state=state)
    with pytest.raises(OSError):
        epoch(loader)
    assert entered == []


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_one_loader_inside_itself(options):
    loader = prepared(DataLoader(Numbers(4), 2, **options))
    found = []
    for batch in loader:
        found.append((plain(batch), epoch(loader)))
    assert found == [([0, 1], [[0, 1], [2, 3]]), ([2, 3], [[0, 1], [2, 3]])]
    assert epoch(loader) == [[0, 1], [2, 3]]


def test_limit_ends_an_epoch():
    loader = numbers(12, shuffle=True)
    loader.limit = 2
    assert len(loader) == 2
    ends = []
    for _ in loader:
        ends.append((loader.end_of_dataloader, loader.batches))
    assert ends == [(False, 1), (True, 0)] and loader.epoch == 1
    loader.limit = 0
    assert epoch(loader) == []
    loader.limit = None
    assert len(epoch(loader)) == 6


def test_limit_counts_what_was_done_before():
    left = numbers(16, size=2)
    take(left, 2)
    for size, rest in ((2, 1), (1, 0)):  # 8 samples: 2 batches on two ranks, 4 on one
        resumed = numbers(16, size=size)
        resumed.limit = 3
        resumed.load_state_dict(left.state_dict())
        assert len(epoch(resumed)) == rest and resumed.epoch == 1


def test_another_seed_is_that_of_the_checkpoint(caplog):
    left = numbers(12, seed=5, shuffle=True)
    rest = epoch(numbers(12, seed=5, shuffle=True))[2:]
    take(left, 2)
    resumed = numbers(12, seed=7, shuffle=True)
    resumed.load_state_dict(left.state_dict())
    assert "seed 5" in caplog.text
    assert epoch(resumed) == rest


def test_data_of_another_length_is_told(caplog):
    left = numbers(12)
    take(left, 2)
    numbers(14).load_state_dict(left.state_dict())
    assert "epoch of 12 samples; now it has 14" in caplog.text


def test_data_seed_replaces_the_seed():
    config = DataLoaderConfiguration(data_seed=9)
    assert epoch(numbers(12, config=config, seed=1, shuffle=True)) == epoch(numbers(12, seed=9, shuffle=True))


def test_even_batches_can_be_switched():
    loader = numbers(5, rank=1, size=2, config=None)
    assert loader.even_batches is True
    assert epoch(loader) == [[2, 3], [1, 2]]
    loader.even_batches = False
    assert epoch(loader) == [[2, 3]] and len(loader) == 1


def test_lockstep_is_asked_at_every_iteration():
    loader = numbers(5, 2, rank=1, size=2)
    assert epoch(loader) == [[2, 3], [4]] and loader.samples == 0 and loader.weight == 0.0
    loader.lockstep = False
    assert epoch(loader) == [[2, 3]] and len(loader) == 1
    assert loader.end_of_dataloader


def test_evaluation_with_more_ranks_than_samples():
    found = [epoch(numbers(2, 2, rank=rank, size=4, lockstep=False)) for rank in range(4)]
    assert found == [[[0]], [[1]], [], []]


def test_one_sample():
    assert epoch(numbers(1)) == [[0]]
    found = []
    for rank in range(3):
        loader = numbers(1, rank=rank, size=3)
        found.append([(plain(batch), loader.samples, loader.weight, loader.end_of_dataloader) for batch in loader])
    assert found == [[([0], 1, 3.0, True)], [([0], 0, 0.0, True)], [([0], 0, 0.0, True)]]


def test_batch_size_none_gives_items_as_they_are():
    data = [torch.ones(3), torch.zeros(5)]
    loader = prepared(DataLoader(data, batch_size=None))
    assert [len(batch) for batch in loader] == [3, 5]
    assert loader.samples is None and loader.global_samples is None  # nobody counted them
    assert loader.weight == 1.0 and loader.position == 2 and loader.end_of_dataloader and len(loader) == 2
    assert loader.total_batch_size is None


def test_any_iterable_of_batches_is_a_loader():
    found = [epoch(prepared([[1], [2], [3]], rank=rank, size=2, config=SPLIT, lockstep=False)) for rank in range(2)]
    assert found == [[[1], [3]], [[2]]]

    class Own:
        dataset = "something"

        def __iter__(self):
            return iter([torch.tensor([1, 2]), torch.tensor([3])])

    loader = prepared(Own())
    assert loader.dataset == "something" and isinstance(loader.base, Own)
    assert epoch(loader) == epoch(loader) == [[1, 2], [3]]

    class Doubled(DataLoader):
        def __iter__(self):
            return (batch * 2 for batch in super().__iter__())

    shuffled = prepared(Doubled(Numbers(6), 2, shuffle=True))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = epoch(shuffled)
    assert torch.equal(before, torch.get_rng_state())
    shuffled.set_epoch(0)
    assert epoch(shuffled) == first and sorted(sum(first, [])) == [0, 2, 4, 6, 8, 10]


# Moving batches


def test_moves_batches_to_a_device():
    data = [{"x": torch.ones(2), "rest": [torch.zeros(1), "name"]}] * 4
    loader = prepared(DataLoader(data, 2), device="meta")
    (one, two) = loader
    assert one["x"].device.type == one["rest"][0].device.type == two["x"].device.type == "meta"
    assert one["rest"][1] == ("name", "name") and one["x"].shape == (2, 2)
    stays = prepared(DataLoader(data, 2), device="meta", put_on_device=False)
    assert next(iter(stays))["x"].device.type == "cpu"
    assert prepared(DataLoader(data, 2), device="cpu").move is None  # nothing to do, nothing done


def test_transfer_replaces_the_move():
    loader = prepared(DataLoader(Numbers(4), 2), device="meta")
    loader.transfer = lambda batch: batch + 100
    assert epoch(loader) == [[100, 101], [102, 103]]


# Bad input


@pytest.mark.parametrize(
    "wrong", [None, 3, "path", {"a": 1}, TensorDataset(torch.ones(3)), Stream(3), torch.ones(3), (i for i in range(3))]
)
def test_what_is_no_loader(wrong):
    with pytest.raises(TypeError, match="Expected a DataLoader"):
        prepare_data_loader(wrong, world=World())


def test_empty_loaders_are_refused_before_training():
    for loader in (
        DataLoader([], batch_size=2),
        DataLoader(Numbers(3), batch_size=4, drop_last=True),
        DataLoader(Numbers(4), batch_sampler=[]),
        DataLoader(Stream(3), batch_size=4, drop_last=True),
        [],
    ):
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, Stream):
            loader.dataset.__class__ = type("Sized", (Stream,), {"__len__": lambda self: self.length})
        with pytest.raises(ValueError, match="Expected a loader with at least one batch"):
            prepare_data_loader(loader, world=World())
    with pytest.raises(ValueError, match=r"at least one batch of 4 on 2 rank.*Received: 7 in Numbers, drop_last=True"):
        prepare_data_loader(DataLoader(Numbers(7), 4, drop_last=True), world=Seat(1, 2))


def test_loader_that_turns_out_empty():
    class Empty(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="Expected at least one batch. Received: none from Empty in epoch 0"):
        epoch(prepared(DataLoader(Empty(), 2)))
    once = prepared(DataLoader(Numbers(4), 2, sampler=(i for i in range(4))))
    assert len(epoch(once)) == 2
    with pytest.raises(ValueError, match="can be iterated more than once"):
        epoch(once)


def test_settings_that_exclude_each_other():
    with pytest.raises(ValueError, match="Take a multiple of 3"):
        numbers(12, 4, size=3, config=DataLoaderConfiguration(split_batches=True))


def test_in_order_false_is_told(caplog):
    epoch(prepared(DataLoader(Numbers(4), 2, in_order=False)))
    assert "in_order=False" in caplog.text


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ([1], TypeError),
        ({}, ValueError),
        ({"epoch": 0}, ValueError),
        ({"epoch": 0, "samples": -1, "seed": 0}, ValueError),
        ({"epoch": "0", "samples": 1, "seed": 0}, ValueError),
        ({"epoch": 0, "samples": 1, "seed": 0, "more": 1}, ValueError),
    ],
)
def test_state_of_something_else(state, error):
    with pytest.raises(error, match="Expected"):
        numbers(4).load_state_dict(state)


@pytest.mark.parametrize("count", [-1, 1.5, "2", True])
def test_skip_of_no_number(count):
    with pytest.raises(ValueError, match="Expected a number of batches"):
        skip_first_batches(numbers(4), count)
    with pytest.raises(TypeError, match="Expected a DataLoader"):
        skip_first_batches(3, 1)


def test_sampler_for_other_ranks_is_refused():
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(Numbers(8), num_replicas=4, rank=1)
    with pytest.raises(ValueError, match="Received: rank 1 of 4"):
        prepared(DataLoader(Numbers(8), 2, sampler=sampler))


def test_data_set_without_a_length_needs_a_sampler_only():
    class Unsized(Dataset):
        def __getitem__(self, index):
            return index

    loader = prepared(DataLoader(Unsized(), 2, sampler=[4, 5, 6]))
    assert epoch(loader) == [[4, 5], [6]]


class Counting(Dataset):
    """Item i is the number i; counts what is fetched."""

    def __init__(self, length):
        self.length, self.fetched = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched += 1
        return torch.tensor(index)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_skipping_a_hundred_thousand_batches_fetches_nothing(shuffle, is_prepared):
    data = Counting(200_010)
    loader = DataLoader(data, batch_size=2, shuffle=shuffle)
    loader = prepare_data_loader(loader, world=World()) if is_prepared else loader
    rest = list(skip_first_batches(loader, 100_000))
    assert len(rest) == 5 and data.fetched == 10
    if not shuffle:
        assert torch.cat(rest).tolist() == list(range(200_000, 200_010))
