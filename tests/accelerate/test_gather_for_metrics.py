"""gather_for_metrics gives each sample once and in order: brute force over lengths, batch sizes and settings."""

from __future__ import annotations

from collections import namedtuple
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.tests.distributed import run

Pair = namedtuple("Pair", "number text")
EVERY, SOME = (range(1, 10), (1, 2, 3, 4)), ((1, 2, 5, 7, 8), (2, 3))  # lengths and batch sizes


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Sized(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return map(torch.tensor, range(self.length))


class Unsized(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return map(torch.tensor, range(self.length))


def tensors(batch):
    return batch


def nested(batch):
    return {"pair": Pair(batch, [batch[:, None].float()]), "flags": (batch > 2,)}


def objects(batch):
    return [f"sample {number}" for number in batch.tolist()]


def mixed(batch):
    return [{"number": number, "tensor": torch.tensor([number])} for number in batch.tolist()]


def plain(gathered, form):
    """The numbers in what was gathered, each part of it compared."""
    if form is tensors:
        return gathered.tolist()
    if form is nested:
        numbers = gathered["pair"].number.tolist()
        assert gathered["pair"].text[0].tolist() == [[float(number)] for number in numbers]
        assert gathered["flags"][0].tolist() == [number > 2 for number in numbers]
        assert type(gathered["pair"]) is Pair
        return numbers
    if form is objects:
        return [int(text.removeprefix("sample ")) for text in gathered]
    assert all(item["tensor"].tolist() == [item["number"]] for item in gathered)
    return [item["number"] for item in gathered]


def kept(length, size, *, ranks, drop_last, split):
    """How many samples `drop_last` leaves: whole global batches."""
    stride = size if split else size * ranks
    return length - length % stride if drop_last else length


def settings(split, dispatch, short):
    return DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch, even_batches=short != "uneven",
                                   split_last_batch=short == "shared")  # fmt: skip


def check_all(accelerator, kind, form, ranks, *, lengths, sizes):
    """Every length, batch size and setting; returns how many runs there were."""
    count = 0
    for length, size, drop_last, split, dispatch, short in product(
        lengths, sizes, (False, True), (False, True), (None, True), ("even", "uneven", "shared")
    ):
        left = kept(length, size, ranks=ranks, drop_last=drop_last, split=split)
        lockstep = short != "uneven" or dispatch or length % (size if split else size * ranks) == 0 or drop_last
        if left == 0 or (split and size % ranks) or not lockstep:
            continue  # nothing to iterate; a batch that cannot be split; ranks with fewer batches than others
        accelerator.dataloader_config = settings(split, dispatch, short)
        loader = accelerator.prepare_data_loader(DataLoader(kind(length), size, drop_last=drop_last))
        seen = [plain(accelerator.gather_for_metrics(form(batch)), form) for batch in loader]
        case = (length, size, drop_last, split, dispatch, short)
        assert sum(seen, []) == list(range(left)), case
        count += 1
    return count


@pytest.mark.parametrize("form, grid", [(tensors, EVERY), (nested, SOME), (objects, SOME), (mixed, SOME)])
@pytest.mark.parametrize("kind", [Numbers, Sized, Unsized])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_sample_once_and_in_order(ranks, kind, form, grid):
    def rank(rank):
        return check_all(Accelerator(cpu=True), kind, form, ranks, lengths=grid[0], sizes=grid[1])

    counts = run(rank, ranks, timeout=240)
    assert counts[0] > (200 if grid is EVERY else 40) and len(set(counts)) == 1


def test_gather_object_of_what_are_tensors():
    def rank(rank):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Numbers(7), 2))
        return [accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True) for batch in loader]

    assert run(rank, 2) == [[[0, 1, 2, 3], [4, 5, 6]]] * 2
