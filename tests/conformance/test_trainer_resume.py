"""A run that stops and goes on equals one that never stopped (cases R1 to R10)."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from drivetrain import Callback, ModelCheckpoint, Trainer
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import Line, Numbers, Slope, Validated, loader, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Stop(Callback):
    """Saves after batch ``batch`` of epoch ``epoch`` and ends the run."""

    def __init__(self, path, epoch: int, batch: int) -> None:
        self.path, self.epoch, self.batch = path, epoch, batch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("shuffle", [True, False])
def test_R1_R2_seen_after_resume_equals_the_uninterrupted_run(tmp_path, shuffle):
    def train(module, **options):
        quiet(max_epochs=3, seed=1, **options.pop("trainer", {})).fit(module, loader(12, shuffle=shuffle), **options)
        return module

    whole = train(Line())
    first = train(Line(), trainer={"callbacks": [Stop(tmp_path / "c", 1, 2)]})
    second = train(Line(), ckpt_path=tmp_path / "c")
    assert len(whole.seen) == 18
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.layer.weight, whole.layer.weight) and torch.equal(second.layer.bias, whole.layer.bias)
    if not shuffle:
        assert second.seen[:3] == [[6, 7], [8, 9], [10, 11]]


def test_R3_a_save_inside_a_window_waits_for_its_edge(tmp_path):
    class Ask(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 5:
                assert trainer.save_checkpoint(tmp_path / "c") is False
                assert not (tmp_path / "c").exists()

    slope = lambda index: float(index + 1)  # noqa: E731
    module = Slope(slope)
    quiet(max_epochs=1, accumulate_grad_batches=4, callbacks=[Ask()]).fit(module, loader(12, 1))
    assert module.weight.item() == -19.5
    resumed = Slope(slope)
    quiet(max_epochs=1, accumulate_grad_batches=4).fit(resumed, loader(12, 1), ckpt_path=tmp_path / "c")
    assert resumed.weight.item() == -19.5


class Noisy(Dataset):
    """Item i is i plus noise of all three generators."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index + random.random() + np.random.rand() + torch.rand(()).item()])


class Kept(Line):
    def training_step(self, batch, batch_idx):
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).square().mean() * torch.nn.functional.dropout(torch.ones(1), 0.5).mean()


@pytest.mark.parametrize("workers", [0, 2])
def test_R5_augmentation_and_dropout_go_on_where_they_were(tmp_path, workers):
    def train(**options):
        module = Kept(lr=1e-4)
        data = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
        quiet(max_epochs=2, seed=3, **options.pop("trainer", {})).fit(module, data, **options)
        return module

    whole = train()
    first = train(trainer={"callbacks": [Stop(tmp_path / "c", 0, 3)]})
    second = train(ckpt_path=tmp_path / "c")
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.layer.weight, whole.layer.weight)
    assert len({value for batch in whole.seen for value in batch}) == 24


def test_R5_workers_change_nothing():
    seen = []
    for workers in (0, 2):
        module = Kept()
        data = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
        quiet(max_epochs=2, seed=3).fit(module, data)
        seen.append((module.seen, module.layer.weight.item()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_R6_another_world_size_sees_exactly_the_rest(tmp_path, before, after):
    """16 items, 4 in each global batch, 8 of them before the stop."""

    def train(rank, *, size, stop):
        module = Line()
        callbacks = [Stop(tmp_path / "c", 0, 1)] if stop else []
        trainer = quiet(max_epochs=1, seed=5, callbacks=callbacks)
        trainer.fit(module, loader(16, 4 // size, shuffle=True), ckpt_path=None if stop else tmp_path / "c")
        return [item for batch in module.seen for item in batch], trainer.global_step

    first = run(lambda rank: train(rank, size=before, stop=True), before)
    second = run(lambda rank: train(rank, size=after, stop=False), after)
    seen = [item for items, _ in first for item in items], [item for items, _ in second for item in items]
    assert len(seen[0]) == len(seen[1]) == 8
    assert sorted(seen[0] + seen[1]) == list(range(16))
    assert [steps for _, steps in second] == [4] * after


def test_R8_resuming_fetches_nothing_that_is_skipped(tmp_path):
    class Counted(Numbers):
        fetched = 0

        def __getitem__(self, index):
            Counted.fetched += 1
            return super().__getitem__(index)

    data = DataLoader(Counted(100_010), batch_size=1)
    trainer = quiet(max_epochs=1, callbacks=[Stop(tmp_path / "c", 0, 2)])
    trainer.fit(Line(), data)
    import json

    from drivetrain.strategies.checkpoint.format import Checkpoint, Writer

    saved = Checkpoint.open(tmp_path / "c")
    tree = saved.json("training.json")
    assert json.dumps(tree).count('"samples": 3') >= 1
    with Writer(tmp_path / "far") as writer:  # the same checkpoint, 100,000 batches on
        text = json.dumps(tree).replace('"samples": 3', '"samples": 100000').replace('"batch": 3', '"batch": 100000')
        for name in saved.files:
            if name == "training.json":
                writer.json(name, json.loads(text))
            elif name.endswith(".json"):
                writer.json(name, saved.json(name))
            else:
                writer.tensors(name, saved.tensors(name))
        writer.commit({"step": 3, "world_size": 1, "run_id": saved.manifest["run_id"]})
    Counted.fetched = 0
    module = Line()
    quiet(max_epochs=1).fit(module, data, ckpt_path=tmp_path / "far")
    assert module.seen == [[100_000 + i] for i in range(10)]
    assert Counted.fetched == 10


class Stream(IterableDataset):
    started = 0

    def __iter__(self):
        Stream.started += 1
        for index in range(10):
            yield torch.tensor([float(index)])


class Resumable(Stream):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield torch.tensor([float(self.position - 1)])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("kind", [Stream, Resumable])
def test_R8_iterables_go_on_where_they_were(tmp_path, kind, caplog):
    whole, first, second = Line(), Line(), Line()
    quiet(max_epochs=2).fit(whole, DataLoader(kind(), batch_size=2))
    quiet(max_epochs=2, callbacks=[Stop(tmp_path / "c", 0, 2)]).fit(first, DataLoader(kind(), batch_size=2))
    with caplog.at_level(logging.INFO):
        quiet(max_epochs=2).fit(second, DataLoader(kind(), batch_size=2), ckpt_path=tmp_path / "c")
    assert first.seen + second.seen == whole.seen
    told = any("samples of Stream again" in record.message for record in caplog.records)
    assert told == (kind is Stream)


def test_R10_reading_properties_before_restoring_changes_nothing(tmp_path):
    class Reading(Line):
        def configure_optimizers(self):
            self.total = self.trainer.estimated_stepping_batches
            for name in ("num_training_batches", "num_val_batches", "log_dir", "callback_metrics", "train_dataloader"):
                getattr(self.trainer, name)
            return super().configure_optimizers()

    def train(module, **options):
        quiet(max_epochs=3, seed=1, **options.pop("trainer", {})).fit(module, loader(12, shuffle=True), **options)
        return module

    whole = train(Line())
    first = train(Reading(), trainer={"callbacks": [Stop(tmp_path / "c", 1, 2)]})
    second = train(Reading(), ckpt_path=tmp_path / "c")
    assert first.total == second.total == 18
    assert first.seen + second.seen == whole.seen


@pytest.mark.parametrize("when", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_interruption_at_every_kind_of_save(tmp_path, when, accumulate):
    """Weights, metrics, schedulers and events after a resume equal those of a run that went through."""

    class Full(Validated):
        def __init__(self):
            super().__init__(lr=0.05)
            self.events = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", self.layer(batch / 10).mean())

        def on_train_epoch_start(self):
            self.events.append(("start", self.current_epoch))

        def on_validation_end(self):
            self.events.append(("validated", self.trainer.batch_idx, self.trainer.callback_metrics["val"]))

        def on_train_epoch_end(self):
            self.events.append(("end", self.current_epoch))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
            schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [*schedules, {"scheduler": plateau, "monitor": "val"}]

    class Save(Callback):
        priority = 100

        def __init__(self, at):
            self.at, self.count = at, 0

        def hook(self, trainer, module, *rest):
            self.count += 1
            if self.count == self.at:
                trainer.save_checkpoint(tmp_path / "c")
                trainer.should_stop = True

    setattr(Save, when, Save.hook)

    def train(callbacks=(), ckpt=None):
        module = Full()
        trainer = quiet(max_epochs=3, seed=2, callbacks=list(callbacks), val_check_interval=0.5,
                        accumulate_grad_batches=accumulate)  # fmt: skip
        trainer.fit(module, loader(16, shuffle=True), loader(4), ckpt_path=ckpt)
        return module, trainer

    whole, complete = train()
    for at in {"on_train_batch_end": (1, 4, 8, 9, 17), "on_validation_end": (1, 2, 3), "on_train_epoch_end": (1, 2)}[when]:
        first, _ = train([Save(at)])
        second, resumed = train(ckpt=tmp_path / "c")
        assert first.seen + second.seen == whole.seen, at
        assert torch.equal(second.layer.weight, whole.layer.weight), at
        assert resumed.callback_metrics == complete.callback_metrics, at
        assert second.events == whole.events[len(whole.events) - len(second.events) :], at
        rates = [c.scheduler.state_dict() for c in resumed.lr_scheduler_configs]
        assert rates == [c.scheduler.state_dict() for c in complete.lr_scheduler_configs], at


def test_last_finds_the_newest_checkpoint_and_begins_anew_without_one(tmp_path):
    def trainer(**options):
        return Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_progress_bar=False, seed=1,
                       callbacks=[ModelCheckpoint(every_n_train_steps=2)], **options)  # fmt: skip

    whole, first, second = Line(), Line(), Line()
    quiet(max_epochs=2, seed=1).fit(whole, loader(12, shuffle=True))
    trainer(max_epochs=1, limit_train_batches=3).fit(first, loader(12, shuffle=True), resume="last")
    assert first.seen == whole.seen[:3]
    run = trainer(max_epochs=2)
    run.fit(second, loader(12, shuffle=True), resume="last")
    assert second.seen == whole.seen[2:]
    assert torch.equal(second.layer.weight, whole.layer.weight)
    assert run.run_id == "run-0001"


def test_validation_loaders_may_come_and_go_between_runs(tmp_path):
    first, second = Validated(), Validated()
    quiet(max_epochs=2, callbacks=[Stop(tmp_path / "c", 0, 2)]).fit(first, loader(12))
    trainer = quiet(max_epochs=1)
    trainer.fit(second, loader(12), [loader(4), loader(2)], ckpt_path=tmp_path / "c")
    assert first.seen + second.seen == [[i, i + 1] for i in range(0, 12, 2)]
    assert trainer.callback_metrics["mean/dataloader_idx_0"] == 1.5
