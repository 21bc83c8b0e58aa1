"""Fetching: augmentation that is the same for any number of workers, and batches as torch's own loader makes them."""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from drivetrain.strategies.data.fetch import Rows, collate, make_fetch
from drivetrain.strategies.data.untouched import _readable, watch
from drivetrain.strategies.random import seed_all
from drivetrain.tests.strategies.data.sets import Noisy, Numbers, epoch, plain, prepared, take
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}]


def noisy(**options) -> DataLoader:
    return DataLoader(Noisy(16), batch_size=2, shuffle=True, **options)


@pytest.mark.parametrize("options", WORKERS[1:])
def test_R5_workers_change_nothing(options):
    here, there = prepared(noisy()), prepared(noisy(**options))
    for _ in range(3):
        assert epoch(here) == epoch(there)


@pytest.mark.parametrize("options", WORKERS)
def test_R5_augmentation_after_resuming_is_the_same(options):
    whole = prepared(noisy(**options))
    epoch(whole)
    full, after = epoch(whole), epoch(whole)
    left = prepared(noisy(**options))
    left.set_epoch(1)
    assert take(left, 3) == full[:3]
    resumed = prepared(noisy(**options))
    resumed.load_state_dict(left.state_dict())
    assert epoch(resumed) == full[3:]
    assert epoch(resumed) == after


def test_augmentation_is_the_same_for_the_same_batches_on_more_ranks():
    alone = epoch(prepared(noisy()))
    ranks = [epoch(prepared(noisy(), rank=rank, size=2)) for rank in range(2)]
    assert [batch for step in zip(*ranks) for batch in step] == alone


def test_augmentation_differs_between_batches_epochs_and_seeds():
    loader = prepared(noisy())
    draws = [batch[1:] for _ in range(2) for batch in epoch(loader)] + [b[1:] for b in epoch(prepared(noisy(), seed=1))]
    for source in range(3):
        values = [value for batch in draws for value in batch[source]]
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("draw", ["nothing", "always", "once in a while"])
def test_main_process_draws_the_same_with_any_number_of_workers(draw):
    """What a training step draws between two batches depends neither on workers nor on what the data set draws."""

    class Data(Numbers):
        def __getitem__(self, index):
            if draw == "always" or (draw == "once in a while" and index % 5 == 0):
                return index + np.random.rand() + random.random() + torch.rand(()).item()
            return float(index)

    found = []
    for options in WORKERS:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        loader = prepared(DataLoader(Data(12), batch_size=3, **options))
        draws = []
        for _ in range(2):
            for batch in loader:
                draws.append((plain(batch), torch.rand(()).item(), np.random.rand(), random.random()))
        found.append(draws)
    assert found[0] == found[1] == found[2]
    steps = [draw[1:] for draw in found[0]]
    assert all(len(set(column)) == len(steps) for column in zip(*steps))


def test_draws_of_data_and_of_training_are_not_the_same_numbers():
    loader = prepared(DataLoader(Noisy(4), batch_size=1))
    for _, _, of_numpy, of_random in loader:
        assert np.random.rand() != of_numpy.item() and random.random() != of_random.item()


def test_collate_is_seeded_too():
    def jitter(samples):
        return [sample + random.random() for sample in samples]

    batches = [epoch(prepared(DataLoader(list(range(6)), batch_size=2, collate_fn=jitter, **o))) for o in WORKERS[:2]]
    assert batches[0] == batches[1]


class TwoTensors(Dataset):
    def __init__(self, kind):
        self.x, self.y, self.kind = torch.randn(9, 3), torch.arange(9), kind

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return self.kind(self.x[i], self.y[i])


Pair = namedtuple("Pair", "x y")
KINDS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "namedtuple": Pair,
    "nested": lambda x, y: {"x": (x, [y]), "name": "a"},
    "mixed": lambda x, y: (x, y.item(), y.numpy()),
    "one": lambda x, y: x,
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_torch(kind):
    data = TwoTensors(KINDS[kind])
    for ours, theirs in zip(prepared(DataLoader(data, 4)), DataLoader(data, 4), strict=True):
        same(ours, theirs)


def tensor_sets():
    data = TensorDataset(torch.randn(9, 3), torch.arange(9))
    return {
        "tensors": data,
        "subset": Subset(data, [7, 0, 3, -1, 2]),
        "subset of subset": Subset(Subset(data, [7, 0, 3, 1, 2]), [4, 1, 2]),
        "numpy subset": Subset(data, np.array([7, 0, 3])),
        "concatenated": ConcatDataset([data, data]),
        "strided": TensorDataset(torch.randn(3, 9).t(), torch.randn(18)[::2]),
        "scalars": TensorDataset(torch.arange(9)),
        "list": [(torch.ones(2) * i, i) for i in range(9)],
        "range": range(9),
        "array": np.arange(9.0),
        "tensor": torch.randn(9, 2),
    }


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", list(tensor_sets()))
def test_tensor_data_as_torch_gives_it(kind, shuffle):
    torch.manual_seed(0)
    data = tensor_sets()[kind]
    loader = prepared(DataLoader(data, 4, shuffle=shuffle))
    indices = [i for batch in prepared(DataLoader(list(range(len(data))), 4, shuffle=shuffle)) for i in batch.tolist()]
    for ours, theirs in zip(loader, DataLoader(data, 4, sampler=indices), strict=True):
        same(ours, theirs)
    with_workers = prepared(DataLoader(data, 4, shuffle=shuffle, num_workers=1))
    for ours, theirs in zip(with_workers, DataLoader(data, 4, sampler=indices), strict=True):
        same(ours, theirs)


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs) and ours.is_contiguous()
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


def test_batches_may_be_changed_without_changing_the_data():
    x = torch.arange(6.0)
    for (batch,) in prepared(DataLoader(TensorDataset(x), 2)):
        batch.mul_(0)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_whole_batches_of_tensors_are_read_at_once():
    data = TensorDataset(torch.arange(4))
    assert isinstance(make_fetch(data, default_collate), Rows)
    assert isinstance(make_fetch(Subset(data, [1, 2]), default_collate), Rows)
    assert not isinstance(make_fetch(data, lambda samples: samples), Rows)

    class Own(TensorDataset):
        def __getitem__(self, index):
            return -index

    assert not isinstance(make_fetch(Own(torch.arange(4)), default_collate), Rows)
    assert epoch(prepared(DataLoader(Own(torch.arange(4)), 2))) == [[0, -1], [-2, -3]]


def test_getitems_is_used_where_it_is_offered():
    class Many(Numbers):
        def __getitems__(self, indices):
            return [-index for index in indices]

    for options in WORKERS[:2]:
        assert epoch(prepared(DataLoader(Many(4), 2, **options))) == [[0, -1], [-2, -3]]


def test_unequal_tuples_are_the_error_that_torch_raises():
    samples = [(torch.ones(1), torch.ones(1)), (torch.ones(1),)]
    with pytest.raises(RuntimeError, match="equal size"):
        collate(samples)


def test_worker_sees_the_users_data_set():
    def begin(worker):
        info = get_worker_info()
        info.dataset.offset = 100 * (worker + 1)
        assert info.num_workers == 2 and info.id == worker

    class Data(Numbers):
        offset = 0

        def __getitem__(self, index):
            assert get_worker_info().dataset is self
            return index + self.offset

    loader = prepared(DataLoader(Data(8), 2, num_workers=2, worker_init_fn=begin))
    assert epoch(loader) == [[100, 101], [202, 203], [104, 105], [206, 207]]


def test_spawned_workers():
    loader = prepared(DataLoader(Noisy(4), 2, num_workers=1, multiprocessing_context="spawn"))
    assert epoch(loader) == epoch(prepared(DataLoader(Noisy(4), 2)))


def test_persistent_workers_live_on():
    import os

    class Data(Numbers):
        def __getitem__(self, index):
            return os.getpid()

    loader = prepared(DataLoader(Data(8), 2, num_workers=2, persistent_workers=True))
    assert epoch(loader) == epoch(loader)
    take(loader, 1)  # left early
    first = epoch(loader)
    assert first == epoch(loader)
    fresh = prepared(DataLoader(Data(8), 2, num_workers=2))
    assert epoch(fresh) != epoch(fresh)


def test_data_set_is_told_the_epoch():
    class Data(Numbers):
        epoch = None

        def set_epoch(self, number):
            self.epoch = number

        def __getitem__(self, index):
            return self.epoch

    for options in WORKERS:
        loader = prepared(DataLoader(Data(4), 2, **options))
        assert [epoch(loader) for _ in range(3)] == [[[n, n], [n, n]] for n in range(3)]


@pytest.mark.parametrize("options", WORKERS)
def test_error_of_the_data_set_comes_through(options):
    class Data(Numbers):
        broken = True

        def __getitem__(self, index):
            if index == 3:
                raise KeyError("sample three is broken")
            return index

    loader = prepared(DataLoader(Data(8), 2, **options))
    before = torch.get_rng_state()
    found = []
    with pytest.raises(KeyError, match="sample three is broken"):
        for batch in loader:
            found.append(plain(batch))
    assert found == [[0, 1]]
    assert torch.equal(torch.get_rng_state(), before)
    assert loader.state_dict()["samples"] == 2  # a checkpoint written now resumes at the batch that failed
    with pytest.raises(KeyError):
        epoch(loader)  # and the loader can be iterated again


def test_stop_iteration_in_a_data_set_does_not_end_the_epoch_quietly():
    class Data(Numbers):
        def __getitem__(self, index):
            raise StopIteration

    for options in WORKERS[:2]:
        with pytest.raises(RuntimeError):
            epoch(prepared(DataLoader(Data(4), 2, **options)))


def test_default_device_and_inference_mode_do_not_matter():
    expected = epoch(prepared(DataLoader(Numbers(8), 2, shuffle=True)))
    with torch.device("meta"):
        loader = prepared(DataLoader(Numbers(8), 2, shuffle=True, collate_fn=list))
        assert epoch(loader) == expected
    with torch.inference_mode():
        assert epoch(prepared(noisy())) == epoch(prepared(noisy()))


def test_no_value_of_a_tensor_is_read_while_batches_are_made():
    """Reading one waits for the device; the order of an epoch is read once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    loader = prepared(DataLoader(TensorDataset(torch.randn(64, 2)), 4, shuffle=True))
    with Reads():
        epoch_of_tensors = list(loader)
    assert len(epoch_of_tensors) == 16 and not [name for name in seen if "_local_scalar_dense" in name]


def test_draws_are_noticed():
    assert _readable()  # on the Pythons that the tests run on; elsewhere everything counts as drawn
    untouched = watch()
    for seed in (0, 5, 2**40 + 7, 2**64 - 1):
        seed_all(seed)
        assert untouched(seed)
        torch.rand(1)
        assert untouched(seed)
        random.random()
        assert not untouched(seed)
        seed_all(seed)
        np.random.rand()
        assert not untouched(seed)
        seed_all(seed)
        for _ in range(312):
            random.random()  # 624 words: the place in the table is where it was
        assert not untouched(seed)
        seed_all(seed)
        np.random.bytes(624 * 4)
        assert not untouched(seed)
        seed_all(seed)
        random.gauss(0, 1)
        assert not untouched(seed)


def test_generator_of_another_kind_counts_as_drawn_from():
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        assert not watch()(0)
    finally:
        np.random.set_bit_generator(bits)
