"""Rank 0 reads for all ranks: what each gets, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Accelerator, DataLoaderConfiguration, DataLoaderDispatcher
from drivetrain.tests.distributed import RankFailed, run


class OnlyOnFirst(Dataset):
    """Numbers that only one rank can read."""

    def __init__(self, length, rank):
        self.length, self.rank = length, rank

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert self.rank == 0
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __init__(self, length, rank):
        self.length, self.rank = length, rank

    def __iter__(self):
        assert self.rank == 0
        return (torch.tensor([float(index)]) for index in range(self.length))


class Padded(Dataset):
    """Rows of length 1, 2, 3, …"""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((index + 1,), float(index))


def pad(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1.0)


def read(length, batch_size, *, kind=OnlyOnFirst, collate_fn=None, options=None, **settings):
    """Batches of two ranks as numbers, and what gather_for_metrics makes of them."""

    def rank(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **settings))
        data = kind(length) if kind is Padded else kind(length, rank)
        loader = accelerator.prepare(DataLoader(data, batch_size, collate_fn=collate_fn, **(options or {})))
        assert isinstance(loader, DataLoaderDispatcher)
        batches, seen, ends = [], [], []
        for batch in loader:
            batches.append(batch.tolist())
            seen += accelerator.gather_for_metrics(batch[:, 0].contiguous()).tolist()
            ends.append(loader.end_of_dataloader)
        return batches, seen, ends, loader.remainder

    return run(rank, 2)


def flat(batches):
    return [[row[0] for row in batch] for batch in batches]


def test_each_rank_gets_its_own_batch():
    first, second = read(8, 2)
    assert flat(first[0]) == [[0, 1], [4, 5]] and flat(second[0]) == [[2, 3], [6, 7]]
    assert first[1] == second[1] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert first[2] == second[2] == [False, True] and first[3] == -1


@pytest.mark.parametrize("kind", [OnlyOnFirst, Stream])
def test_a_short_end_is_shared_out_and_filled_from_the_first_batch(kind):
    first, second = read(7, 2, kind=kind)  # after 0 1 | 2 3 are left 4 5 6: filled up by 0
    assert flat(first[0]) == [[0, 1], [4, 5]] and flat(second[0]) == [[2, 3], [6, 0]]
    assert first[1] == second[1] == [0, 1, 2, 3, 4, 5, 6]
    assert first[3] == second[3] == 3


def test_a_short_end_is_split_where_that_is_asked_for():
    first, second = read(5, 2, split_last_batch=True)  # one sample is left: the other rank repeats it, uncounted
    assert flat(first[0]) == [[0, 1], [4]] and flat(second[0]) == [[2, 3], [4]]
    assert first[1] == [0, 1, 2, 3, 4]


def test_drop_last_drops_global_batches_that_are_short():
    first, second = read(7, 2, options={"drop_last": True})
    assert flat(first[0]) == [[0, 1]] and flat(second[0]) == [[2, 3]]
    assert first[2] == second[2] == [True]


def test_split_batches_reads_global_batches():
    first, second = read(6, 4, split_batches=True)
    assert flat(first[0]) == [[0, 1], [4]] and flat(second[0]) == [[2, 3], [5]]
    assert first[1] == [0, 1, 2, 3, 4, 5]


def test_batches_of_unequal_shape_go_as_they_are():
    first, second = read(7, 2, kind=Padded, collate_fn=pad)
    assert first[0] == [[[0, -1], [1, 1]], [[4, 4, 4, 4, 4, -1], [5] * 6]]
    assert second[0] == [[[2, 2, 2, -1], [3, 3, 3, 3]], [[6] * 7]]
    assert first[1] == second[1] == [0, 1, 2, 3, 4, 5, 6]


def test_objects_that_cannot_be_cut_are_repeated_uncounted():
    def rank(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader = accelerator.prepare(DataLoader(list("abcde"), 2, collate_fn=list))
        batches, seen = [], []
        for batch in loader:
            batches.append(batch)
            seen += accelerator.gather_for_metrics(batch)
        return batches, seen

    first, second = run(rank, 2)
    assert first == ([["a", "b"], ["e"]], ["a", "b", "c", "d", "e"])
    assert second == ([["c", "d"], ["e"]], ["a", "b", "c", "d", "e"])


def test_lengths_and_skipping():
    def rank(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader = accelerator.prepare(DataLoader(OnlyOnFirst(11, rank), 2))
        later = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)]
        return len(loader), later, loader.state_dict()["epoch"]

    first, second = run(rank, 2)
    assert first[0] == second[0] == 3
    assert flat(first[1]) == [[4, 5], [8, 9]] and flat(second[1]) == [[6, 7], [10, 4]]
    assert first[2] == 1


def test_a_function_of_the_users_cuts():
    def every_second(batch, part, process_index, num_processes):
        return batch[process_index::num_processes]

    def rank(rank):
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(OnlyOnFirst(8, rank), 2)
        loader = accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=every_second)
        return [batch.flatten().tolist() for batch in loader]

    assert run(rank, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_an_error_of_the_reading_rank_ends_all():
    def rank(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader = accelerator.prepare(DataLoader(OnlyOnFirst(8, 1), 2))
        try:
            list(loader)
        except RuntimeError as error:
            return str(error)
        except AssertionError:
            return "its own"

    first, second = run(rank, 2)
    assert first == "its own" and "Expected batches from rank 0" in second


def test_one_process_reads_for_itself():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(OnlyOnFirst(5, 0), 2))
    assert [batch.flatten().tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_a_share_of_the_users_own_is_refused():
    def rank(rank):
        settings = DataLoaderConfiguration(dispatch_batches=True, shard=False)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        next(iter(accelerator.prepare(DataLoader(OnlyOnFirst(8, 0), 2))))

    with pytest.raises(RankFailed, match="not divided yet"):
        run(rank, 2)


@pytest.mark.parametrize("kind", [OnlyOnFirst, Stream])
@pytest.mark.parametrize("workers", [0, 1])
def test_goes_on_where_it_was(kind, workers, tmp_path):
    def rank(rank):
        settings = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        loader = accelerator.prepare(DataLoader(kind(12, rank), 2, num_workers=workers))
        for number, _ in enumerate(loader):
            if number == 0:
                accelerator.save_state(tmp_path / "saved")
        accelerator.load_state(tmp_path / "saved")
        return [batch.flatten().tolist() for batch in loader]

    assert run(rank, 2) == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]
