"""The laws, for a hand-written loop with the Accelerator: one process and DDP on two ranks against plain torch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import run, torchrun

RANKS = pytest.mark.parametrize("ranks", [1, 2], ids=["single", "ddp"])


@pytest.fixture(autouse=True)
def _fresh():
    GradientState._reset_state()
    PartialState._reset_state()
    yield
    GradientState._reset_state()
    PartialState._reset_state()


def everywhere(function, ranks):
    """Runs on one process without a process group, or on ranks with one; returns the results in rank order."""
    return run(function, ranks=ranks, group=ranks > 1)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data(count=400):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


def vector(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def torch_loop(batches, *, lr=0.05, precision=None):
    """A plain loop over lists of micro-batches, whose gradients are averaged over all items of the list."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for micro_batches in batches:
        total = sum(len(y) for _, y in micro_batches)
        for x, y in micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                output = model(x)
            loss = F.cross_entropy(output.float(), y)
            (loss if len(y) == total else loss * (len(y) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return vector(model)


def chunks(size, count=400):
    x, y = data(count).tensors
    return list(zip(x.split(size), y.split(size)))


def our_loop(accelerator, batch_size, *, count=400, weighted=False, lr=0.05):
    model = mlp()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=lr), DataLoader(data(count), batch_size=batch_size)
    )
    updates = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss, weight=len(y) if weighted else None)
            optimizer.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
    return vector(model), updates


# Parity


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_parity_with_plain_torch_is_bit_exact_on_one_process(precision):
    ours, updates = our_loop(Accelerator(cpu=True, mixed_precision=precision), 8)
    assert updates == 50
    assert torch.equal(ours, torch_loop([[chunk] for chunk in chunks(8)], precision=precision))


def test_parity_with_plain_torch_is_bit_exact_with_accumulation():
    ours, updates = our_loop(Accelerator(cpu=True, gradient_accumulation_steps=2), 4)
    pairs = chunks(4)
    assert updates == 50
    assert torch.equal(ours, torch_loop([pairs[i : i + 2] for i in range(0, 100, 2)]))


def test_parity_of_two_ranks_after_fifty_steps():
    expected = torch_loop([[chunk] for chunk in chunks(8)])
    for ours, updates in run(lambda rank: our_loop(Accelerator(), 4)):
        assert updates == 50
        assert torch.linalg.norm(ours - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_parity_of_ddp_on_one_process_is_bit_exact():
    ((ours, _),) = run(lambda rank: our_loop(Accelerator(strategy="ddp", cpu=True), 8), ranks=1, group=False)
    assert torch.equal(ours, torch_loop([[chunk] for chunk in chunks(8)]))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true", "64-true"])
def test_precisions_keep_two_ranks_together(precision):
    def work(rank):
        dtype = torch.float64 if precision == "64-true" else None
        weights, updates = our_loop(Accelerator(mixed_precision=precision), 4)
        assert dtype is None or weights.dtype is dtype
        return weights, updates

    (first, updates), (second, _) = run(work)
    assert torch.equal(first, second) and updates == 50
    assert torch.isfinite(first).all() and not torch.allclose(first.float(), vector(mlp()), atol=0.05)


# Accumulation


@RANKS
def test_accumulated_micro_batches_are_one_large_batch(ranks):
    """8 items a rank and update, in 4 micro-batches of 2."""
    expected = torch_loop([[chunk] for chunk in chunks(8 * ranks)])

    def work(rank):
        return our_loop(Accelerator(cpu=True, gradient_accumulation_steps=4), 2)

    for ours, updates in everywhere(work, ranks):
        assert updates == 50 // ranks
        assert torch.linalg.norm(ours - expected) <= 1e-5 * torch.linalg.norm(expected)


@RANKS
def test_G1_short_last_window_is_one_batch_of_what_it_holds(ranks):
    """Windows of 4 micro-batches; the last window holds 2."""
    count = ranks * 2 * (4 * 4 + 2)
    expected = torch_loop([[chunk] for chunk in chunks(8 * ranks, count)])

    def work(rank):
        plugin = GradientAccumulationPlugin(num_steps=4, scale_last_window=True)
        return our_loop(Accelerator(cpu=True, gradient_accumulation_plugin=plugin), 2, count=count)

    for ours, updates in everywhere(work, ranks):
        assert updates == 5
        assert torch.linalg.norm(ours - expected) <= 1e-5 * torch.linalg.norm(expected)


@RANKS
def test_short_last_window_of_an_unsized_loader(ranks):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(chunks(2, count=ranks * 12))

    def work(rank):
        plugin = GradientAccumulationPlugin(num_steps=4, scale_last_window=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model = mlp()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Stream(), batch_size=None)
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return vector(model)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for chunk in chunks(8 * ranks, count=ranks * 12):
        F.cross_entropy(model(chunk[0]), chunk[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours in everywhere(work, ranks):
        assert torch.allclose(ours, vector(model), rtol=1e-5, atol=1e-7)


@RANKS
def test_G2_gradient_is_that_of_one_batch_of_all_tokens(ranks):
    """Micro-batches of 1 and of 9 items, after one another on one rank, or one on each of two ranks."""
    x, y = (tensor[:10] for tensor in data().tensors)
    parts = [(x[:1], y[:1]), (x[1:], y[1:])]

    def work(rank):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 // ranks)
        model = accelerator.prepare(mlp())
        for part_x, part_y in parts if ranks == 1 else [parts[rank]]:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(part_x), part_y), weight=torch.tensor(len(part_y)))
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    model = mlp()
    F.cross_entropy(model(x), y).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for ours in everywhere(work, ranks):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-7)


@RANKS
def test_G2_weighted_windows_with_a_short_last_batch_and_window(ranks):
    """7 micro-batches a rank in windows of 3, the last micro-batch short: every update is over its items."""
    count = 7 * 4 * ranks - 2
    micro_batches = [chunk for chunk in chunks(4 * ranks, count)]
    expected = torch_loop([micro_batches[i : i + 3] for i in range(0, 7, 3)])

    def work(rank):
        config = DataLoaderConfiguration(split_last_batch=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=config)
        return our_loop(accelerator, 4, count=count, weighted=True)

    for ours, updates in everywhere(work, ranks):
        assert updates == 3
        assert torch.linalg.norm(ours - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_short_last_global_batch_shared_by_two_ranks_is_weighted_by_the_loader():
    """11 items in global batches of 4: the last one is 2 and 1."""
    expected = torch_loop([[chunk] for chunk in chunks(4, 11)])

    def work(rank):
        return our_loop(Accelerator(dataloader_config=DataLoaderConfiguration(split_last_batch=True)), 2, count=11)

    for ours, updates in run(work):
        assert updates == 3
        assert torch.linalg.norm(ours - expected) <= 1e-5 * torch.linalg.norm(expected)


def counting(model):
    """Registers a hook that averages as DDP does, and counts the buckets."""
    counts = []

    def hook(state, bucket):
        counts.append(bucket.index())
        tensor = bucket.buffer().div_(torch.distributed.get_world_size())
        return torch.distributed.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    return counts


def test_G3_two_windows_are_two_reductions():
    x, y = (tensor[:32] for tensor in data().tensors)

    def work(rank):
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model = accelerator.prepare(mlp())
        counts, gradients = counting(model), []
        for index in range(8):
            part = slice((index * 2 + rank) * 2, (index * 2 + rank) * 2 + 2)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x[part]), y[part]))
                if accelerator.sync_gradients:
                    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                    model.zero_grad()
        return counts, gradients

    for counts, gradients in run(work):
        assert len(counts) == 2
        for window, gradient in enumerate(gradients):
            model = mlp()
            part = slice(window * 16, window * 16 + 16)
            F.cross_entropy(model(x[part]), y[part]).backward()
            expected = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_G3_reduction_in_every_micro_batch_where_that_is_asked_for():
    def work(rank):
        plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        counts = counting(model)
        for index in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor([[float(rank + index)]])).sum())
        return len(counts), model.module.weight.grad.item()

    assert run(work) == [(4, 2.0)] * 2


def test_no_sync_by_hand():
    def work(rank):
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        counts = counting(model)
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.tensor([[1.0 + rank]])).sum())
        accelerator.backward(model(torch.tensor([[1.0 + rank]])).sum())
        return len(counts), model.module.weight.grad.item()

    assert run(work) == [(1, 3.0)] * 2


# Overflow


@RANKS
def test_G4_clipping_sees_the_true_gradient(ranks):
    def work(rank):
        accelerator = Accelerator(
            cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
        )
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward((model(torch.ones(1, 1)) * 0.5).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        return norm, vector(model).item()

    assert everywhere(work, ranks) == [(0.5, -0.5)] * ranks


def test_G5_overflow_on_one_rank_is_skipped_by_both():
    def work(rank):
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        history = []
        for slope in (float("inf") if rank else 1.0, 0.5):
            accelerator.backward((model(torch.ones(1, 1)) * slope).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append((accelerator.optimizer_step_was_skipped, vector(model).item(), schedule.get_last_lr()[0]))
        return history, accelerator.skipped_steps, accelerator.scaler.get_scale()

    assert run(work) == [([(True, 0.0, 1.0), (False, -0.5, 0.25)], 1, 512.0)] * 2


def test_G7_scheduler_steps_by_accelerates_way_and_by_ours():
    def work(rank):
        counted = []
        for options in ({}, {"step_scheduler_with_optimizer": False}, {"split_batches": True}):
            accelerator = Accelerator(**options)
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
            for _ in range(2):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                schedule.step()
            counted.append(schedule.scheduler.last_epoch)
        return counted

    assert run(work) == [[4, 2, 2]] * 2


# Checkpoints


def test_C4_saving_and_loading_at_once_works_every_time(tmp_path):
    def work(rank):
        accelerator = Accelerator()
        model = nn.Linear(1000, 1000)
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        accelerator.backward(model(torch.ones(1, 1000)).sum())
        optimizer.step()
        expected = vector(model).clone()
        for _ in range(3):
            accelerator.save_state(tmp_path / "here")
            with torch.no_grad():
                model.module.weight.zero_()
            accelerator.load_state(tmp_path / "here")
            assert torch.equal(vector(model), expected)
        return True

    assert run(work) == [True, True]


def stateful(accelerator):
    model = mlp()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def step(accelerator, model, optimizer, batch):
    accelerator.backward(F.cross_entropy(model(batch[0]), batch[1]))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (2, 2)])
def test_C6_state_loads_at_any_number_of_ranks(tmp_path, saving, loading):
    batches = chunks(4)

    def save(rank):
        accelerator = Accelerator(cpu=True)
        model, optimizer = stateful(accelerator)
        for batch in batches[:3]:
            step(accelerator, model, optimizer, batch)
        accelerator.save_state(tmp_path / "here")
        step(accelerator, model, optimizer, batches[3])
        return sorted(accelerator.get_state_dict(model)), vector(model)

    def load(rank):
        accelerator = Accelerator(cpu=True)
        model, optimizer = stateful(accelerator)
        manifest = accelerator.load_state(tmp_path / "here")
        step(accelerator, model, optimizer, batches[3])
        return manifest["world_size"], vector(model)

    names, expected = everywhere(save, saving)[0]
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for world_size, ours in everywhere(load, loading):
        assert world_size == saving and torch.allclose(ours, expected, rtol=1e-6, atol=1e-7)


def test_each_rank_gets_its_own_random_state_and_objects_back(tmp_path):
    class Own:
        per_rank, value = True, None

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def work(rank):
        accelerator, own = Accelerator(), Own()
        accelerator.register_for_checkpointing(own)
        torch.manual_seed(rank)
        own.value = f"rank {rank}"
        accelerator.save_state(tmp_path / "here")
        drawn = torch.rand(2)
        own.value = None
        torch.manual_seed(5)
        accelerator.load_state(tmp_path / "here")
        return own.value, torch.equal(torch.rand(2), drawn), drawn.tolist()

    (first, same0, drawn0), (second, same1, drawn1) = run(work)
    assert (first, second) == ("rank 0", "rank 1") and same0 and same1 and drawn0 != drawn1


def test_damage_is_an_error_on_every_rank(tmp_path):
    def save(rank):
        accelerator = Accelerator()
        stateful(accelerator)
        accelerator.save_state(tmp_path / "here")

    def load(rank):
        accelerator = Accelerator()
        stateful(accelerator)
        try:
            accelerator.load_state(tmp_path / "here")
        except Exception as error:
            return type(error).__name__, "model.safetensors" in str(error)

    run(save)
    file = tmp_path / "here" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run(load) == [("CheckpointError", True)] * 2


def test_save_model_by_two_ranks(tmp_path):
    from safetensors.torch import load_file

    def work(rank):
        accelerator = Accelerator()
        accelerator.save_model(accelerator.prepare(mlp()), tmp_path / "model")

    run(work)
    assert sorted(load_file(tmp_path / "model" / "model.safetensors")) == ["0.bias", "0.weight", "2.bias", "2.weight"]


# Evaluation


@pytest.mark.parametrize("split", [False, True], ids=["padded", "split"])
@pytest.mark.parametrize("count", [5, 8, 9, 11, 12])
def test_gather_for_metrics_has_each_sample_once_and_in_order(count, split):
    def work(rank):
        config = DataLoaderConfiguration(split_last_batch=split)
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=2))
        seen, named = [], []
        for (batch,) in loader:
            seen += accelerator.gather_for_metrics({"ids": batch})["ids"].tolist()
            named += accelerator.gather_for_metrics([f"item {i}" for i in batch.tolist()], use_gather_object=True)
        return seen, named

    for seen, named in run(work):
        assert seen == list(range(count)) and named == [f"item {i}" for i in range(count)]


def test_D3_order_is_the_users_own():
    def work(rank):
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=False))
        return [batch.tolist() for (batch,) in loader]

    assert run(work) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_shuffled_order_agrees_between_ranks_without_a_seed():
    def work(rank):
        torch.manual_seed(rank)
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True))
        return [item for (batch,) in loader for item in batch.tolist()]

    first, second = run(work)
    assert sorted(first + second) == list(range(8))


# Between processes


def test_collectives_and_flags():
    def work(rank):
        accelerator = Accelerator()
        gathered = accelerator.gather(torch.tensor([rank])).tolist()
        summed = accelerator.reduce(torch.tensor([1.0 + rank])).item()
        mean = accelerator.reduce(torch.tensor([1.0 + rank]), "mean").item()
        padded = accelerator.pad_across_processes(torch.ones(1 + rank), pad_index=7).tolist()
        before = accelerator.check_trigger()
        if rank == 1:
            accelerator.set_trigger()
        after = accelerator.check_trigger(), accelerator.check_trigger()
        with accelerator.split_between_processes([1, 2, 3]) as mine:
            return gathered, summed, mean, padded, before, after, mine

    first, second = run(work)
    assert first == ([0, 1], 3.0, 1.5, [1.0, 7.0], False, (True, False), [1, 2])
    assert second == ([0, 1], 3.0, 1.5, [1.0, 1.0], False, (True, False), [3])


def test_places():
    def work(rank):
        accelerator = Accelerator()
        state = (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index)
        flags = (accelerator.is_main_process, accelerator.is_last_process, accelerator.use_distributed)
        return state, flags, accelerator.distributed_type.value, accelerator.strategy.name

    assert run(work) == [
        ((2, 0, 0), (True, False, True), "MULTI_CPU", "ddp"),
        ((2, 1, 1), (False, True, True), "MULTI_CPU", "ddp"),
    ]


def test_uneven_inputs_are_joined():
    def work(rank):
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        with accelerator.join_uneven_inputs([model]):
            for _ in range(2 + 3 * rank):
                model.zero_grad()
                accelerator.backward(model(torch.ones(1, 1)).sum())
        return True

    assert run(work, timeout=120) == [True, True]


def test_everything_is_let_go_of_before_the_group_is():
    def work(rank):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer = stateful(accelerator)
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, chunks(4)[0])
        dead = weakref.ref(model), weakref.ref(model.module)
        model, optimizer = accelerator.free_memory(model, optimizer)
        gc.collect()
        freed = [ref() is None for ref in dead]
        kept, _ = stateful(accelerator)
        accelerator.end_training()
        return freed, kept is not None, torch.distributed.is_initialized()

    results = run(work, group=False)
    assert [freed for freed, *_ in results] == [[True, True]] * 2
    assert all(kept and not initialized for _, kept, initialized in results)


def test_a_script_under_torchrun_finds_its_place(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from drivetrain import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))\n"
        "accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())\n"
        "seen = (accelerator.num_processes, model.module.weight.grad.item())\n"
        "open(f'{sys.argv[1]}/rank-{accelerator.process_index}', 'w').write(str(seen))\n"
        "accelerator.end_training()\n"
    )
    done = torchrun(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["(2, 1.5)"] * 2
