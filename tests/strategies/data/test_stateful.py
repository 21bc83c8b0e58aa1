"""torchdata's StatefulDataLoader: prepared like torch's own, its position exact."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.tests.distributed import run


class Counting(IterableDataset):
    """A stream that can say where it stands."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 12:
            self.place += 1
            yield torch.tensor(self.place - 1)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def read(make, folder, ranks, at):
    """The samples of an epoch of which `at` batches are read before a checkpoint, and the rest after loading it."""

    def rank(rank):
        settings = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=settings, seed=3)
        loader = accelerator.prepare(make())
        before = []
        for batch in loader:
            before.append(accelerator.gather(batch).tolist())
            if len(before) == at:
                accelerator.save_state(folder)
        again = Accelerator(cpu=True, dataloader_config=settings, seed=3)
        again.free_memory()
        loader = again.prepare(make())
        again.load_state(folder)
        after = [again.gather(batch).tolist() for batch in loader]
        return before, after

    return run(rank, ranks)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_goes_on_exactly(ranks, workers, tmp_path):
    before, after = read(lambda: StatefulDataLoader(range(12), 2, shuffle=True, num_workers=workers),
                         tmp_path / "saved", ranks, 2)  # fmt: skip
    assert sorted(sum(before, [])) == list(range(12)) and before[2:] == after
    assert sum(before, []) != list(range(12))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_goes_on_exactly(ranks, tmp_path):
    before, after = read(lambda: StatefulDataLoader(Counting(), 2), tmp_path / "saved", ranks, 2)
    assert sum(before, []) == list(range(12)) and before[2:] == after
