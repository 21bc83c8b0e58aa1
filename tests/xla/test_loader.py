"""Loaders that feed XLA devices ahead: what they hand out, when it travels, and what they tell of themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain.tests.distributed import RankFailed
from drivetrain.tests.xla.running import run

ROWS = 22  # in batches of 4: five full ones and one of 2


class Noisy(Dataset):
    """Rows with noise from each of the generators that augmentations use."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index + torch.rand(3), np.random.rand(), {"label": random.random(), "index": index}


class Stream(IterableDataset):
    """A stream with a state of its own."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < ROWS:
            self.place += 1
            yield torch.tensor([self.place + random.random(), np.random.rand()])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def fed(data, between=lambda: None, rows=None, ahead=2, **options):
    """Return a loader of this data that feeds the XLA device."""
    import torch_xla

    from drivetrain.strategies import xla_loader
    from drivetrain.strategies.world import World

    loader = DataLoader(data, batch_size=4, **options)
    device = torch_xla.device()
    return xla_loader.prepare(loader, world=World(device), device=device, between=between, rows=rows, ahead=ahead, seed=5)


def plain(data, **options):
    """Return the same loader for the CPU."""
    from drivetrain.strategies.data.preparing import prepare_loader
    from drivetrain.strategies.world import World

    return prepare_loader(DataLoader(data, batch_size=4, **options), world=World(), seed=5)


def seen(loader, epochs=2):
    """Return all that a loop sees of a loader: batches, what the loader says with each, and the next random numbers."""
    from drivetrain.strategies.nested import send_to_device

    told = []
    for _ in range(epochs):
        for batch in loader:
            state = loader.state_dict()
            drawn = (np.random.rand(), random.random(), torch.rand(1).item())
            told.append((send_to_device(batch, "cpu"), state, loader.end_of_dataloader, loader.remainder,
                         loader.samples, loader.batches, drawn))  # fmt: skip
    return told


def assert_same(found, right):
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tensors", "noisy", "stream"])
def test_batches_positions_and_random_states_are_those_of_a_loader_that_reads_nothing_ahead(kind, workers):
    def compare():
        data = {"tensors": TensorDataset(torch.arange(ROWS)), "noisy": Noisy(), "stream": Stream()}[kind]
        options = {"num_workers": workers, "shuffle": kind != "stream"}
        runs = []
        for make in (plain, fed):
            torch.manual_seed(0), np.random.seed(0), random.seed(0)
            runs.append(seen(make(data, **options)))
        return runs

    right, found = run(compare)
    copies = 2 if kind == "stream" and workers else 1  # each worker reads the whole stream
    assert len(right) == 12 * copies and right[6 * copies - 1][2] and not right[0][2]
    assert_same(found, right)


def test_a_loop_that_was_left_goes_on_behind_the_batch_it_had():
    def go_on():
        right = [batch for batch, *_ in seen(plain(Stream()), epochs=1)]
        loader = fed(Stream(), ahead=3)
        for number, batch in enumerate(loader):
            if number == 2:
                state = loader.state_dict()
                break
        again = fed(Stream(), ahead=3)
        again.load_state_dict(state)
        return right, [batch.cpu() for batch in again], state["samples"], again.done

    right, rest, samples, done = run(go_on)
    assert samples == 12
    assert_same(rest, right[3:])


def test_no_more_is_read_than_asked_for():
    def count():
        class Counting(Dataset):
            read: list = []

            def __len__(self):
                return 40

            def __getitem__(self, index):
                self.read.append(index)
                return index

        loader = fed(Counting())
        loader.limit = 3
        batches = [batch.tolist() for batch in loader]
        ahead = []
        for _ in fed(Counting()):
            ahead.append(len(Counting.read) - 12)
            if len(ahead) == 2:
                break
        return batches, Counting.read[:12], ahead

    batches, read, ahead = run(count)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and read == list(range(12))
    assert ahead == [12, 16]  # two batches beyond the one in hand


def test_an_error_of_reading_comes_when_its_batch_is_due():
    def fail():
        class Broken(Dataset):
            def __len__(self):
                return 40

            def __getitem__(self, index):
                if index == 13:
                    raise ValueError("sample 13")
                return index

        loader, had = fed(Broken()), []
        with pytest.raises(ValueError, match="sample 13"):
            for batch in loader:
                had.append(batch.tolist())
        return had[-1], loader.state_dict()["samples"]

    assert run(fail) == ([8, 9, 10, 11], 12)


def test_each_tensor_travels_once_before_its_step_and_by_another_thread():
    def count():
        import threading

        import torch_xla.debug.metrics as metrics

        def transfers():
            data = metrics.metric_data("TransferToDeviceTime")
            return data[0] if data else 0

        loader = fed(TensorDataset(torch.randn(ROWS, 3), torch.randn(ROWS)), ahead=1)
        send, threads = loader.feed.send, set()

        def watched(batch):
            threads.add(threading.current_thread() is threading.main_thread())
            return send(batch)

        loader.feed.send = watched
        before = transfers()
        batches = list(loader)
        after = transfers()
        total = sum((x.sum(1) * y).sum() for x, y in batches).item()
        right = sum((x.sum(1) * y).sum() for x, y in plain(loader.dataset)).item()
        return after - before, transfers() - after, threads, total - right

    ahead, later, threads, difference = run(count)
    assert ahead in (6, 12)  # one transfer a batch, or one for each of its two tensors
    assert later <= 1  # a constant of the sum; no batch travels again
    assert threads == {False} and abs(difference) < 1e-4


def test_a_module_that_moves_batches_itself_gets_them_from_the_cpu():
    def move():
        loader, kinds = fed(TensorDataset(torch.arange(ROWS))), []
        loader.transfer = lambda batch: (kinds.append(batch[0].device.type), batch)[1]
        return [batch[0].device.type for batch in loader], kinds

    devices, kinds = run(move)
    assert devices == kinds == ["cpu"] * 6


def test_between_is_called_around_every_batch_and_where_a_loop_is_left():
    def call():
        order = []
        loader = fed(TensorDataset(torch.arange(12)), between=lambda: order.append("between"))
        for batch in loader:
            order.append(len(batch[0]))
        whole, order[:] = list(order), []
        for batch in loader:
            order.append(len(batch[0]))
            break
        return whole, order

    whole, left = run(call)
    assert whole == ["between", 4, "between", 4, "between", 4, "between"]
    assert left == ["between", 4, "between"]


def test_what_is_nested_and_what_moves_itself():
    def nest():
        from torch.nn.utils.rnn import PackedSequence, pack_sequence

        class Own:
            def __init__(self, where="cpu"):
                self.where = where

            def to(self, device):
                return Own(str(device))

        shared = torch.arange(3)
        batch = {"a": [shared, (shared, 5)], "packed": pack_sequence([torch.ones(2), torch.ones(1)]), "own": Own(),
                 "graph": torch.ones(2, requires_grad=True), "text": "as it is"}  # fmt: skip
        loader = fed([0] * 4, collate_fn=lambda rows: batch)
        found = next(iter(loader))
        assert found["a"][0] is found["a"][1][0] and found["a"][1][1] == 5 and found["text"] == "as it is"
        assert type(found["packed"]) is PackedSequence and found["packed"].batch_sizes.device.type == "cpu"
        assert found["graph"].requires_grad
        return found["a"][0].device.type, found["packed"].data.device.type, found["own"].where, found["graph"].device.type

    assert run(nest) == ("xla", "xla", "xla:0", "xla")


def test_a_source_may_use_its_memory_again():
    def reuse():
        memory = torch.empty(4, 64, 64)

        def collate(rows):
            return memory.copy_(torch.tensor(rows).view(4, 1, 1).expand_as(memory))

        return [batch.mean((1, 2)).tolist() for batch in fed(list(range(16)), collate_fn=collate)]

    assert run(reuse) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_rows_are_divided_over_the_data_dimensions_of_a_mesh():
    def divide():
        import torch_xla
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
        x = torch.arange(ROWS * 3.0).view(ROWS, 3)
        specs, sums = [], []
        for dimensions in (("data",), ("data", "model"), ()):
            loader = fed(TensorDataset(x, x[:, 0]), rows=(mesh, dimensions))
            batches = list(loader)
            specs.append([torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in batches[0]])
            sums.append([(a.sum(1) * b).sum().item() for a, b in batches])
        scalar = fed(list(range(8)), collate_fn=lambda rows: torch.tensor(7.0), rows=(mesh, ("data",)))
        return specs, sums, [(a.sum(1) * a[:, 0]).sum().item() for a in x.split(4)], next(iter(scalar)).item()

    specs, sums, right, scalar = run(divide, devices=4)
    assert specs[0] == ["{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", "{devices=[2,2]0,1,2,3 last_tile_dim_replicate}"]
    assert specs[1] == ["{devices=[4,1]0,1,2,3}", "{devices=[4]0,1,2,3}"]
    assert specs[2] == ["", ""] or all("replicated" in spec for spec in specs[2])
    assert sums == [right, right, right] and scalar == 7.0  # the last batch has 2 rows for 4 devices


def test_an_error_of_the_transfer_names_its_batch():
    def fail():
        class Bad:
            def to(self, device):
                raise RuntimeError("of the transfer")

        list(fed(list(range(16)), collate_fn=lambda rows: Bad() if 8 in rows else torch.tensor(rows)))

    with pytest.raises(RankFailed, match="RuntimeError: of the transfer"):
        run(fail)
