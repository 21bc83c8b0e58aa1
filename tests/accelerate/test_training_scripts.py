"""Training scripts as people write them for Accelerate, on 1 and 2 processes; right values come from plain torch loops.

Each script is a function that runs on every rank. Where a global batch is the same on any number of processes its
result has to be that of the plain loop: bit for bit on one process, to 1e-5 on two.
"""

from __future__ import annotations

import contextlib
import math
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LocalSGD,
    ProfileKwargs,
    ProjectConfiguration,
    find_executable_batch_size,
    gather_object,
    set_seed,
)
from drivetrain.callbacks.tracking.base import GeneralTracker
from drivetrain.tests.distributed import run

BOTH = pytest.mark.parametrize("ranks", [1, 2])


def close(found, right, ranks):
    found, right = torch.as_tensor(found), torch.as_tensor(right)
    return torch.equal(found, right) if ranks == 1 else torch.allclose(found, right, rtol=1e-5, atol=1e-6)


def flat(model):
    return torch.cat([value.detach().float().flatten() for value in model.state_dict().values()]).tolist()


# Sentences of different lengths, padded in the collate function; AdamW and a schedule by steps; accuracy


class Sentences(Dataset):
    """Numbers that rise or fall: whether they rise is the label; sentence i has 3 + i % 5 numbers."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.items = []
        for index in range(count):
            label = index % 2
            start = int(torch.randint(6, 10, (1,), generator=generator))
            steps = torch.arange(3 + index % 5)
            self.items.append({"ids": (start + steps * (1 if label else -1)).clamp(1, 15), "label": label})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(items):
    ids = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.tensor([item["label"] for item in items])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids, mask, labels=None):
        hidden, _ = self.mix(self.embed(ids))
        last = hidden[torch.arange(len(ids)), mask.sum(1) - 1]
        logits = self.head(last)
        return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}


def warmup(optimizer, first, total):
    def rate(step):
        return step / first if step < first else max(0.0, (total - step) / (total - first))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def sentences_plain(epochs, batch, accumulate):
    set_seed(42)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(Sentences(32), batch_size=batch, collate_fn=collate)
    schedule = warmup(optimizer, 2, len(loader) * epochs // accumulate)
    rates = []
    for _ in range(epochs):
        for step, data in enumerate(loader):
            (model(**data)["loss"] / accumulate).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append(schedule.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        right = sum(int((model(**data)["logits"].argmax(-1) == data["labels"]).sum())
                    for data in DataLoader(Sentences(21), batch_size=4, collate_fn=collate))  # fmt: skip
    return flat(model), right / 21, rates


@BOTH
def test_classifying_sentences(ranks):
    def script(rank):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        set_seed(42)
        batch_size = 8 // accelerator.num_processes
        train = DataLoader(Sentences(32), batch_size=batch_size, collate_fn=collate)
        evaluation = DataLoader(Sentences(21), batch_size=4, collate_fn=collate)
        model = Classifier().to(accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.02)
        total = 3 * 4 // 2
        schedule = warmup(optimizer, 2 * accelerator.num_processes, total * accelerator.num_processes)
        model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)
        rates = []
        for _ in range(3):
            model.train()
            for batch in train:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    rates.append(schedule.get_last_lr()[0])
        model.eval()
        predictions, references = [], []
        for batch in evaluation:
            with torch.no_grad():
                logits = model(**batch)["logits"]
            found, labels = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            predictions.append(found)
            references.append(labels)
        predictions, references = torch.cat(predictions), torch.cat(references)
        assert len(references) == 21
        accuracy = (predictions == references).float().mean().item()
        return flat(accelerator.unwrap_model(model)), accuracy, rates

    weights, accuracy, rates = sentences_plain(3, 8, 2)
    for found in run(script, ranks):
        assert close(found[0], weights, ranks)
        assert found[1] == pytest.approx(accuracy) and found[2] == pytest.approx(rates)


# Images: a frozen part, normalisation on the device, one cycle of rates by batches


class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 3
        return {"image": torch.randn(3, 6, 6, generator=generator) + label, "label": label}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def frozen():
    set_seed(7)
    model = Network()
    for parameter in model.body.parameters():
        parameter.requires_grad = False
    return model, torch.optim.Adam(model.head.parameters(), lr=0.1 / 25)


def normalized(images, device="cpu"):
    mean, std = torch.tensor([0.5, 0.4, 0.3])[None, :, None, None], torch.tensor([1.0, 1.1, 1.2])[None, :, None, None]
    return (images - mean.to(device)) / std.to(device)


@BOTH
def test_classifying_images(ranks):
    def script(rank):
        accelerator = Accelerator(cpu=True)
        model, optimizer = frozen()
        train = DataLoader(Images(), batch_size=6 // accelerator.num_processes)
        evaluation = DataLoader(Images(), batch_size=5)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(train))
        model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)
        for _ in range(2):
            model.train()
            for batch in train:
                batch = {key: value.to(accelerator.device) for key, value in batch.items()}
                outputs = model(normalized(batch["image"], accelerator.device))
                loss = nn.functional.cross_entropy(outputs, batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        accurate, count = 0, 0
        for batch in evaluation:
            with torch.no_grad():
                outputs = model(normalized(batch["image"], accelerator.device))
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate += (predictions == references).long().sum().item()
            count += predictions.shape[0]
        return flat(accelerator.unwrap_model(model)), count, accurate

    weights, accurate = images_plain(ranks)
    for found, count, right in run(script, ranks):
        assert close(found, weights, ranks) and count == 24 and right == accurate


def images_plain(ranks):
    model, optimizer = frozen()
    loader = DataLoader(Images(), batch_size=6)
    # On two processes the schedule is counted in their batches, of which there are twice as many, and steps twice.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(loader) * ranks)
    for _ in range(2):
        for batch in loader:
            nn.functional.cross_entropy(model(normalized(batch["image"])), batch["label"]).backward()
            optimizer.step()
            for _ in range(ranks):
                schedule.step()
            optimizer.zero_grad()
    outputs = model(normalized(torch.stack([Images()[index]["image"] for index in range(24)]))).argmax(-1)
    return flat(model), int((outputs == torch.arange(24) % 3).sum())


# The complete example: checkpoints by steps or epochs, going on in the middle of an epoch, trackers


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)


def points(count=40):
    x = torch.linspace(-1, 1, count * 2).view(count, 2)
    return TensorDataset(x, x.prod(1, keepdim=True))


class Notes(GeneralTracker):
    """A tracker of one's own, as the documentation shows it."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self, run_name):
        super().__init__()
        self.run_name, self.rows, self.config, self.finished = run_name, [], None, False

    @property
    def tracker(self):
        return self.rows

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **kwargs):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


def complete(folder, *, checkpointing_steps=None, resume_from=None, stop_after=None):
    """The script; returns weights, what was logged, and the checkpoints' names."""
    notes = Notes("complete")
    accelerator = Accelerator(cpu=True, log_with=notes, project_dir=os.fspath(folder))
    accelerator.init_trackers("complete", config={"lr": 0.05})
    set_seed(3)
    train = DataLoader(points(), shuffle=True, batch_size=8 // accelerator.num_processes)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4 * accelerator.num_processes, 0.7)
    model, optimizer, train, schedule = accelerator.prepare(model, optimizer, train, schedule)
    overall, first, resume_step = 0, 0, None
    if resume_from is not None:
        accelerator.load_state(resume_from)
        kind, _, number = os.path.basename(resume_from).partition("_")
        if kind == "epoch":
            first = int(number) + 1
        else:
            overall = int(number)
            first, resume_step = divmod(overall, len(train))
        overall = first * len(train) if kind == "epoch" else overall
    for epoch in range(first, 3):
        train.set_epoch(epoch)
        total, active = 0.0, train
        if epoch == first and resume_step is not None:
            active = accelerator.skip_first_batches(train, resume_step)
        for x, y in active:
            loss = nn.functional.mse_loss(model(x), y)
            total += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            overall += 1
            if isinstance(checkpointing_steps, int) and overall % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(folder, f"step_{overall}"))
            if overall == stop_after:
                return flat(accelerator.unwrap_model(model)), notes.rows, sorted(os.listdir(folder))
        accelerator.log({"train_loss": total.item() / len(train), "epoch": epoch}, step=epoch)
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
    accelerator.end_training()
    if accelerator.is_main_process:
        assert notes.finished and notes.config == {"lr": 0.05}
    return flat(accelerator.unwrap_model(model)), notes.rows, sorted(os.listdir(folder))


@BOTH
@pytest.mark.parametrize("every, stop_after, last", [(3, 8, "step_6"), (3, 10, "step_9"), ("epoch", 12, "epoch_1")])
def test_going_on_from_a_checkpoint_is_as_if_nothing_had_happened(ranks, every, stop_after, last, tmp_path):
    whole = run(lambda rank: complete(tmp_path / "a", checkpointing_steps=every), ranks)
    run(lambda rank: complete(tmp_path / "b", checkpointing_steps=every, stop_after=stop_after), ranks)
    resumed = run(lambda rank: complete(tmp_path / "b", resume_from=os.fspath(tmp_path / "b" / last)), ranks)
    for one, other in zip(whole, resumed, strict=True):
        assert one[0] == other[0]  # weights, dropout and order of samples included: bit for bit
    assert [step for step, _ in whole[0][1]] == [0, 1, 2]
    assert whole[0][1][-1] == resumed[0][1][-1] and (ranks == 1 or whole[1][1] == [])
    assert len(whole[0][2]) == (5 if every == 3 else 3)


def test_checkpoints_with_numbers_hooks_and_objects_of_ones_own(tmp_path):
    class Count:
        def __init__(self):
            self.value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def script(rank, part):
        config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, project_dir=os.fspath(tmp_path), project_config=config)
        count, seen = Count(), []
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        accelerator.register_for_checkpointing(count)
        handle = accelerator.register_save_state_pre_hook(lambda models, weights, place: seen.append(len(models)))
        if part == "load":
            accelerator.load_state()
            return count.value, accelerator.unwrap_model(model).weight.item(), accelerator.save_iteration
        for number in range(5):
            count.value = number
            nn.init.constant_(accelerator.unwrap_model(model).weight, float(number))
            accelerator.save_state()
            if number == 2:
                handle.remove()
        accelerator.wait_for_everyone()  # the first process removes old ones
        return sorted(os.listdir(tmp_path / "checkpoints")), len(seen)

    assert run(script, 2, "save") == [(["checkpoint_3", "checkpoint_4"], 3)] * 2
    assert run(script, 2, "load") == [(4, 4.0, 5)] * 2


# Accumulation over batches of different token counts


class Tokens(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.arange(2 + index % 4, dtype=torch.float32) + index


def padded(items):
    return nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1.0)


def token_loss(model, batch):
    kept = batch >= 0
    return (model(batch[kept].unsqueeze(1) / 10) - 1).square().sum(), int(kept.sum())


@BOTH
def test_accumulating_batches_of_different_token_counts(ranks):
    """By hand, as the documentation does: the losses are sums, divided by the window's tokens on all processes."""
    def script(rank):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        set_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Tokens(), batch_size=2 // accelerator.num_processes, collate_fn=padded)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        iterator, steps = iter(loader), 3
        for _ in range(math.ceil(len(loader) / steps)):
            batches = [batch for batch in (next(iterator, None) for _ in range(steps)) if batch is not None]
            items = torch.tensor(sum(int((batch >= 0).sum()) for batch in batches))
            items = accelerator.gather(items).sum().item()
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                apart = contextlib.nullcontext() if last or ranks == 1 else model.no_sync()
                with apart:
                    loss, _ = token_loss(model, batch)
                    loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / items
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return flat(accelerator.unwrap_model(model))

    for found in run(script, ranks):
        assert close(found, by_tokens(), 2)


@BOTH
def test_accumulating_by_weights(ranks):
    """The same by drivetrain's own argument."""
    def script(rank):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        set_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Tokens(), batch_size=2 // accelerator.num_processes, collate_fn=padded)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss, count = token_loss(model, batch)
                accelerator.backward(loss / count, weight=count)
                optimizer.step()
                optimizer.zero_grad()
        return flat(accelerator.unwrap_model(model))

    for found in run(script, ranks):
        assert close(found, by_tokens(), 2)


def by_tokens():
    """Each window of three global batches as one batch of tokens."""
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(DataLoader(Tokens(), batch_size=2, collate_fn=padded))
    for window in (batches[:3], batches[3:]):
        losses = [token_loss(model, batch) for batch in window]
        (sum(loss for loss, _ in losses) / sum(count for _, count in losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


# Gradients inside and outside of windows, as a replica and a plain model see them


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_in_step_where_they_should_be(split, each):
    def script(rank):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split),
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each),
        )  # fmt: skip
        set_seed(42)
        plain = nn.Linear(1, 1)
        replica = nn.Linear(1, 1)
        replica.load_state_dict(plain.state_dict())
        x = torch.arange(40.0).view(40, 1) / 40
        loader = DataLoader(TensorDataset(x, 2 * x + 3), batch_size=8)
        ddp, loader = accelerator.prepare(replica, loader)
        seen = []
        for number, (inputs, targets) in enumerate(loader):
            everything, wanted = accelerator.gather((inputs, targets))
            (nn.functional.mse_loss(plain(everything), wanted) / 2).backward()
            with accelerator.accumulate(ddp):
                accelerator.backward(nn.functional.mse_loss(ddp(inputs), targets))
            due = (number + 1) % 2 == 0 or number == len(loader) - 1
            assert accelerator.sync_gradients is due
            together = torch.allclose(plain.weight.grad, accelerator.unwrap_model(ddp).weight.grad)
            seen.append((due, together))
            if due:
                plain.zero_grad()
                ddp.zero_grad()
        return seen

    for seen in run(script, 2):
        assert all(together is (due or each) for due, together in seen)


# Several models in one script


@BOTH
def test_two_models_accumulate_together(ranks):
    def script(rank):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        set_seed(1)
        first, second = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]
        loader = DataLoader(points(16), batch_size=4 // accelerator.num_processes)
        first, second, loader, *optimizers = accelerator.prepare(first, second, loader, *optimizers)
        for x, y in loader:
            with accelerator.accumulate(first, second):
                accelerator.backward(nn.functional.mse_loss(second(torch.tanh(first(x))), y))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(accelerator.unwrap_model(first)) + flat(accelerator.unwrap_model(second))

    set_seed(1)
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for number, (x, y) in enumerate(DataLoader(points(16), batch_size=4)):
        (nn.functional.mse_loss(second(torch.tanh(first(x))), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in run(script, ranks):
        assert close(found, flat(first) + flat(second), ranks)


# Stopping early, by a flag of one process


@BOTH
def test_stopping_early_by_a_trigger(ranks):
    def script(rank):
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(points(32), batch_size=2))
        for step, _ in enumerate(loader):
            if step == 3 and accelerator.is_last_process:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        return step, accelerator.check_trigger()

    assert run(script, ranks) == [(3, False)] * ranks


# Processes that train apart


def test_local_sgd_averages_what_the_processes_have_learned():
    def script(rank):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(TensorDataset(torch.arange(8.0).view(8, 1)), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen = []
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
                seen.append(accelerator.unwrap_model(model).weight.item())
        return seen

    # Rank 0 sees 0, 2, 4, 6 and rank 1 sees 1, 3, 5, 7; the mean of both after two steps each.
    assert run(script, 2) == [[0.0, -3.0, -7.0, -14.0], [-1.0, -3.0, -8.0, -14.0]]


# Batches that do not come out even


@pytest.mark.parametrize("even", [None, False])
def test_joining_processes_of_which_one_has_more_batches(even):
    def script(rank):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even is not False))
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        sizes = []
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for (x,) in loader:
                sizes.append(len(x))
                loss = model(x).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return sizes, accelerator.unwrap_model(model).weight.item(), loader.even_batches

    (first, weight, setting), (second, other, _) = run(script, 2)
    assert (first, second) == ([2, 2], [2]) and setting is (even is None)
    assert weight == other == -1.5  # the second step is the mean of a gradient of 1 and of none


# What reduces gradients


@pytest.mark.parametrize("hook, tolerance", [("no", 0), ("fp16", 2e-3), ("bf16", 2e-2), ("power_sgd", 1e-6),
                                             ("batched_power_sgd", 1.0)])  # fmt: skip
def test_ddp_communication_hooks(hook, tolerance):
    def script(rank):
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 1000} if "power" in hook else {}
        handler = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        set_seed(2)
        model = Regression().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(16), batch_size=2))
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return flat(accelerator.unwrap_model(model))

    set_seed(2)
    model = Regression().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(points(16), batch_size=4):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = run(script, 2)
    assert first == second and torch.allclose(torch.tensor(first), torch.tensor(flat(model)), atol=tolerance + 1e-6)


# A batch size that fits


def test_a_batch_size_that_fits_into_memory():
    tried = []

    def train(accelerator):
        @find_executable_batch_size(starting_batch_size=64)
        def inner(batch_size):
            accelerator.free_memory()
            tried.append(batch_size)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(40), batch_size=batch_size))
            if batch_size > 50:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            for x, y in loader:
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            return batch_size, len(accelerator._models)

        return inner()

    assert run(lambda rank: (train(Accelerator(cpu=True)), tried), 1) == [((45, 1), [64, 57, 51, 45])]


# Distributed inference


def test_inference_on_parts_of_the_prompts():
    def script(rank):
        accelerator = Accelerator(cpu=True)
        with accelerator.split_between_processes(["a", "b", "c", "d", "e"]) as prompts:
            answers = [prompt.upper() for prompt in prompts]
        gathered = gather_object(answers)
        with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as numbers:
            doubled = torch.tensor([2 * number for number in numbers])
        return gathered, accelerator.gather(doubled)[:3].tolist()

    assert run(script, 2) == [(["A", "B", "C", "D", "E"], [2, 4, 6])] * 2


# Large, odd evaluations


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@BOTH
@pytest.mark.parametrize("kind", ["map", "stream", "dispatch"])
def test_metrics_over_an_odd_number_of_many_samples(ranks, kind):
    def script(rank):
        config = DataLoaderConfiguration(dispatch_batches=kind == "dispatch")
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = list(range(1237)) if kind == "map" else Stream(1237)
        loader = accelerator.prepare(DataLoader(data, batch_size=32))
        found = [accelerator.gather_for_metrics(batch) for batch in loader]
        words = [accelerator.gather_for_metrics([f"{number}" for number in batch.tolist()]) for batch in loader]
        return torch.cat(found).tolist(), sum(words, [])

    right = list(range(1237))
    for numbers, words in run(script, ranks):
        assert numbers == right and words == [f"{number}" for number in right]


# Where the time goes


@BOTH
def test_profiling_by_a_schedule(ranks, tmp_path):
    def script(rank):
        ready = []
        handler = ProfileKwargs(
            activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2, "skip_first": 1},
            on_trace_ready=lambda profiler: ready.append(profiler.step_num), record_shapes=True,
            output_trace_dir=os.fspath(tmp_path),
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        model = accelerator.prepare(nn.Linear(4, 4))
        with accelerator.profile() as profiler:
            for _ in range(8):
                model(torch.ones(2, 4))
                profiler.step()
        accelerator.wait_for_everyone()
        return ready

    assert run(script, ranks) == [[4, 7]] * ranks
    assert sorted(os.listdir(tmp_path)) == [f"profile_{rank}.json" for rank in range(ranks)]


# Folds


@BOTH
def test_cross_validation_gathers_predictions_of_every_fold(ranks):
    def script(rank):
        accelerator = Accelerator(cpu=True)
        x, y = points(20).tensors
        total = torch.zeros(20, 1)
        for fold in range(2):
            set_seed(fold)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            chosen = [index for index in range(20) if index % 2 != fold]
            train = DataLoader(TensorDataset(x[chosen], y[chosen]), batch_size=2 // accelerator.num_processes)
            test = DataLoader(TensorDataset(x, y), batch_size=3)
            model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
            for inputs, targets in train:
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                total += torch.cat([accelerator.gather_for_metrics(model(inputs)) for inputs, _ in test])
            model, optimizer, train, test = accelerator.free_memory(model, optimizer, train, test)
            assert model is None and not accelerator._models
        return (total / 2).flatten().tolist()

    x, y = points(20).tensors
    total = torch.zeros(20, 1)
    for fold in range(2):
        set_seed(fold)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = [index for index in range(20) if index % 2 != fold]
        for inputs, targets in DataLoader(TensorDataset(x[chosen], y[chosen]), batch_size=2):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        total += model(x).detach()
    for found in run(script, ranks):
        assert torch.allclose(torch.tensor(found), (total / 2).flatten(), atol=1e-6)
