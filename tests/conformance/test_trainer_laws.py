"""The laws on the Trainer: parity, isolation, accumulation, evaluation, on one process and on 2 gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from drivetrain import Accelerator, Callback, EarlyStopping, Trainer, TrainModule
from drivetrain.strategies.settings import DataLoaderConfiguration, GradientAccumulationPlugin
from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.loop.models import Line, Numbers, Slope, Validated, loader, quiet
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Classifier(TrainModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def points(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def plain_loop(epochs: int, data: DataLoader, accumulate: int = 1) -> Classifier:
    module = Classifier()
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        batches = list(data)
        for index, batch in enumerate(batches):
            start = index - index % accumulate
            size = min(accumulate, len(batches) - start)
            loss = module.training_step(batch, index)
            (loss / size).backward()
            if index + 1 == start + size:
                optimizer.step()
                optimizer.zero_grad()
    return module


def same(one, two, tolerance=0.0):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Parity


@pytest.mark.parametrize("accumulate", [1, 4, 3])
def test_parity_trainer_equals_a_plain_torch_loop_bit_for_bit(accumulate):
    expected = plain_loop(4, DataLoader(points(), batch_size=4), accumulate)
    module = Classifier()
    quiet(max_epochs=4, accumulate_grad_batches=accumulate).fit(module, DataLoader(points(), batch_size=4))
    assert module.losses == expected.losses
    same(module, expected)


def test_parity_trainer_equals_the_documented_raw_loop_bit_for_bit():
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, scale_last_window=True), seed=4,
        dataloader_config=DataLoaderConfiguration(split_last_batch=True),
    )  # fmt: skip
    raw = Classifier()
    model, optimizer, data = accelerator.prepare(raw, raw.configure_optimizers(), DataLoader(points(), 4, shuffle=True))
    for epoch in range(2):
        for index, batch in enumerate(data):
            with accelerator.accumulate(model):
                accelerator.backward(model.training_step(batch, index))
                optimizer.step()
                optimizer.zero_grad()
    module = Classifier()
    quiet(max_epochs=2, accumulate_grad_batches=3, seed=4).fit(module, DataLoader(points(), 4, shuffle=True))
    assert module.losses == raw.losses
    same(module, raw)


def test_parity_two_ranks_equal_one_process():
    """The same global batches of 8, the last one short (60 samples): 50 steps and more within 1e-5."""

    def train(rank, size):
        module = Classifier()
        quiet(max_epochs=7, seed=4).fit(module, DataLoader(points(60), 8 // size, shuffle=True))
        return {name: tensor.detach() for name, tensor in module.named_parameters()}

    alone = run(lambda rank: train(rank, 1), 1)[0]
    for weights in run(lambda rank: train(rank, 2), 2):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6)


class Public:
    """An Accelerator of which only public names can be reached."""

    def __init__(self, accelerator):
        object.__setattr__(self, "inner", accelerator)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AssertionError(f"the Trainer reached for Accelerator.{name}")
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        if name.startswith("_"):
            raise AssertionError(f"the Trainer set Accelerator.{name}")
        setattr(self.inner, name, value)


def test_trainer_uses_only_the_public_accelerator(tmp_path):
    module = Classifier()
    module.validation_step = lambda batch, index: module.log("val", module.net(batch[0]).mean())
    trainer = Trainer(accelerator=Public(Accelerator(cpu=True)), max_epochs=2, default_root_dir=tmp_path,
                      accumulate_grad_batches=2, gradient_clip_val=1.0, enable_progress_bar=False)  # fmt: skip
    data = DataLoader(points(), 4)
    trainer.fit(module, data, data)
    trainer.validate(module, data, ckpt_path="best", verbose=False)
    assert trainer.global_step == 16


# Isolation


@pytest.mark.parametrize("extra", ["validation", "sanity", "logging", "progress", "profiler", "checkpoints", "all"])
def test_isolation_nothing_optional_changes_training(tmp_path, extra):
    class Random(Classifier):
        def training_step(self, batch, batch_idx):
            x = torch.nn.functional.dropout(batch[0], 0.3)
            loss = super().training_step((x, batch[1]), batch_idx)
            self.log("loss", loss, on_epoch=True, on_step=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("noise", torch.rand(()).item() + self.net(batch[0]).mean())

    def train(**options):
        module = Random()
        validates = options.pop("validates", False)
        trainer = quiet(max_epochs=3, seed=6, default_root_dir=tmp_path, **options)
        trainer.fit(module, DataLoader(points(), 4, shuffle=True), DataLoader(points(), 4) if validates else None)
        return module

    options = {
        "validation": {"validates": True, "val_check_interval": 3}, "sanity": {"validates": True, "num_sanity_val_steps": 2},
        "logging": {"logger": "csv", "log_every_n_steps": 1}, "progress": {"enable_progress_bar": True},
        "profiler": {"profiler": "simple"}, "checkpoints": {"enable_checkpointing": True},
    }  # fmt: skip
    options["all"] = {key: value for group in options.values() for key, value in group.items()}
    bare = train()
    full = train(**options[extra])
    assert full.losses == bare.losses
    same(full, bare)


def test_isolation_modes_of_submodules_survive_a_validation():
    class Mixed(Validated):
        def __init__(self):
            super().__init__()
            self.frozen = torch.nn.Dropout().eval()

        def validation_step(self, batch, batch_idx):
            assert not self.training and not self.layer.training and not torch.is_grad_enabled()

        def on_train_epoch_end(self):
            assert self.training and self.layer.training and not self.frozen.training

    quiet(max_epochs=1).fit(Mixed(), loader(4), loader(4))


# Gradients


def test_G1_a_short_last_window_is_a_mean_too():
    class Seen(Callback):
        weights = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.weights.append(module.weight.item())

    module = Slope()
    quiet(max_epochs=1, accumulate_grad_batches=4, callbacks=[Seen()]).fit(module, loader(5, 1))
    assert Seen.weights == [0, 0, 0, -1, -2]


class Tokens(TrainModule):
    """Micro-batches of 1 and of 9 valid tokens: the gradient is the mean over all 10 of them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        tokens = torch.arange(1.0) if batch.item() == 0 else torch.arange(1.0, 10.0)
        return {"loss": (self.weight * tokens).mean(), "weight": len(tokens)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_G2_weighted_micro_batches_equal_one_batch_on_one_and_two_ranks():
    def train(rank, accumulate):
        module = Tokens()
        quiet(max_epochs=1, accumulate_grad_batches=accumulate).fit(module, loader(2, 1))
        return module.weight.item()

    assert run(lambda rank: train(rank, 2), 1) == pytest.approx([-4.5])  # mean of 0..9
    assert run(lambda rank: train(rank, 1), 2) == pytest.approx([-4.5, -4.5])


def test_G3_reductions_happen_at_window_edges_only():
    def train(rank):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        counts = []
        module = Classifier()
        trainer = quiet(max_epochs=1, accumulate_grad_batches=4)

        class Count(Callback):
            def on_train_start(self, trainer, module):
                def hook(state, bucket):
                    counts.append(trainer.batch_idx)
                    return allreduce_hook(state, bucket)

                trainer.model.register_comm_hook(None, hook)

        trainer.callbacks.append(Count())
        trainer.fit(module, DataLoader(points(), 4))
        return sorted(set(counts)), {n: p.detach() for n, p in module.named_parameters()}

    expected = Classifier()
    optimizer = expected.configure_optimizers()
    for batch in DataLoader(points(), 32):
        expected.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for edges, weights in run(train, 2):
        assert edges == [3, 7]
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("automatic", [True, False])
def test_G4_clipping_sees_unscaled_gradients(automatic):
    """True gradient 0.5, clipped at 1.0: the step is -0.5 whatever the scale."""

    class Half(Slope):
        def __init__(self):
            super().__init__(lambda index: 0.5)
            self.automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if automatic:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    module = Half()
    clip = {"gradient_clip_val": 1.0} if automatic else {}
    trainer = quiet(max_epochs=1, precision="16-mixed", **clip)
    assert trainer.scaler is not None
    trainer.fit(module, loader(1, 1))
    assert module.weight.item() == -0.5
    assert trainer.global_step == 1


def test_G5_skipped_steps_move_nothing():
    module = Slope(lambda index: float("inf"))

    def configure():
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module.configure_optimizers = configure
    trainer = quiet(max_epochs=1, precision="16-mixed")
    trainer.fit(module, loader(3, 1))
    assert module.weight.item() == 0.0
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert trainer.global_step == 0
    assert trainer.accelerator.skipped_steps == 3


def test_G7_a_scheduler_steps_once_per_step_on_two_ranks():
    def train(rank):
        module = Line()

        def configure():
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        module.configure_optimizers = configure
        trainer = quiet(max_epochs=1)
        trainer.fit(module, loader(8))
        return trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]

    assert run(train, 2) == [(2, 0.25)] * 2


# Ranks


class Uneven(IterableDataset):
    def __init__(self, rank):
        self.length = 8 if rank == 0 else 12

    def __iter__(self):
        yield from (torch.tensor([float(i)]) for i in range(self.length))


@pytest.mark.parametrize("shared", [True, False])
def test_D1_uneven_streams_end_together(shared):
    def train(rank):
        module = Line()
        trainer = quiet(max_epochs=2, use_distributed_sampler=shared)
        trainer.fit(module, DataLoader(Uneven(rank), batch_size=2))
        return trainer.global_step

    assert run(train, 2) == ([4, 4] if shared else [8, 8])


def test_D3_the_union_is_in_order():
    def train(rank):
        module = Line()
        quiet(max_epochs=1).fit(module, loader(8))
        return module.seen

    assert run(train, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


class Evaluated(Validated):
    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.seen = []

    def test_step(self, batch, batch_idx):
        self.seen += batch.flatten().int().tolist()
        self.metric.update(batch)
        self.log("metric", self.metric)
        self.log("mean", batch.mean())
        self.log("most", batch.max(), reduce_fx="max")
        self.log("total", batch.sum(), reduce_fx="sum")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_D4_each_sample_once_and_the_same_metrics_at_any_world_size(ranks, batch_size):
    def evaluate(rank):
        module = Evaluated()
        return quiet().test(module, loader(5, batch_size), verbose=False), module.seen

    results = run(evaluate, ranks)
    assert sorted(item for _, seen in results for item in seen) == [0, 1, 2, 3, 4]
    for rows, _ in results:
        assert rows == [{"metric": 2.0, "mean": 2.0, "most": 4.0, "total": 10.0}]


def test_D5_logged_values_agree_on_all_ranks():
    def train(rank):
        class Ranked(Validated):
            def validation_step(self, batch, batch_idx):
                self.log("rank", float(rank))

        stopping = EarlyStopping("rank", patience=1)
        trainer = quiet(max_epochs=5, callbacks=[stopping])
        trainer.fit(Ranked(), loader(8), loader(8))
        return trainer.callback_metrics["rank"], trainer.current_epoch

    assert run(train, 2) == [(0.5, 2)] * 2


def test_D6_a_name_that_only_one_rank_logs_is_an_error_with_its_name():
    def train(rank):
        class Lonely(Line):
            def training_step(self, batch, batch_idx):
                if rank == 0:
                    self.log("lonely", 1.0)
                return super().training_step(batch, batch_idx)

        quiet(max_epochs=1, log_every_n_steps=1).fit(Lonely(), loader(8))

    with pytest.raises(RankFailed, match=r"lonely.*rank 0|rank 0.*lonely"):
        run(train, 2, timeout=120)


def test_should_stop_on_one_rank_stops_all():
    def train(rank):
        class Wish(Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if rank == 1 and batch_idx == 1:
                    trainer.should_stop = True

        trainer = quiet(max_epochs=3, callbacks=[Wish()])
        trainer.fit(Line(), loader(16))
        return trainer.global_step

    assert run(train, 2) == [2, 2]


# Logging


def test_L1_the_loss_reaches_the_log_once_an_epoch():
    class Rows(Callback):
        def __init__(self):
            self.rows = []

        def on_log(self, trainer, module, metrics, step):
            self.rows.append((step, sorted(metrics)))

    rows = Rows()
    quiet(max_epochs=3, log_every_n_steps=50, callbacks=[rows]).fit(Line(), loader(8))
    assert rows.rows == [(4, ["loss"]), (8, ["loss"]), (12, ["loss"])]


def test_L2_the_batch_size_is_counted_not_guessed():
    class TimeFirst(TrainModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            self.log("mean", batch.mean(), on_step=False, on_epoch=True)
            return self.weight * 1.0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(Numbers(3), batch_size=2, collate_fn=lambda items: torch.stack(items, dim=1).expand(7, -1))
    trainer = quiet(max_epochs=1)
    trainer.fit(TimeFirst(), data)
    assert trainer.callback_metrics["mean"] == 1.0  # (0.5 * 2 + 2 * 1) / 3
    with pytest.raises(ValueError, match=r"mean.*batch_size"):
        quiet(max_epochs=1).fit(TimeFirst(), DataLoader([torch.ones(2, 7)], batch_size=None))


def test_a_logged_tensor_may_change_in_place_afterwards():
    class InPlace(Line):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(())

        def training_step(self, batch, batch_idx):
            self.total += 1
            self.log("total", self.total, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1)
    trainer.fit(InPlace(), loader(8))
    assert trainer.callback_metrics["total"] == 2.5  # mean of 1, 2, 3, 4


def test_long_epochs_are_folded_without_loss():
    class Long(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("index", float(batch_idx), on_step=False, on_epoch=True)
            self.log("lowest", torch.tensor(5.0 - batch_idx), on_step=False, on_epoch=True, reduce_fx="min")
            return loss

    trainer = quiet(max_epochs=1)
    trainer.fit(Long(), loader(1400))
    assert trainer.callback_metrics["index"] == 349.5
    assert trainer.callback_metrics["lowest"] == -694.0


# Checkpoints


def test_C6_compiled_and_tied_modules_keep_their_names(tmp_path):
    class Tied(Line):
        def __init__(self):
            super().__init__()
            self.first = torch.compile(torch.nn.Linear(3, 3), backend="eager")
            self.second = torch.nn.Linear(3, 3)
            self.second.weight = self.first._orig_mod.weight

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.second(self.first(torch.ones(1, 3))).mean()

    module = Tied()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(tmp_path / "c")
    from safetensors.torch import load_file

    names = load_file(tmp_path / "c" / "model.safetensors")
    assert not [name for name in names if "_orig_mod" in name or "module." in name]
    fresh = Tied()
    quiet(max_epochs=1).fit(fresh, loader(4), ckpt_path=tmp_path / "c")
    same(fresh, module)


def test_C7_an_unsavable_hyperparameter_is_refused_by_name_before_training():
    class Holding(Line):
        def __init__(self, loss):
            super().__init__()
            self.save_hyperparameters()

    module = Holding(torch.nn.MSELoss())
    with pytest.raises(TypeError, match=r"hparams.*loss"):
        quiet(max_epochs=1).fit(module, loader(4))
    assert module.seen == []


def test_load_from_checkpoint_builds_the_module(tmp_path):
    class Sized(Line):
        def __init__(self, width=1, name="a"):
            super().__init__()
            self.save_hyperparameters()
            self.wide = torch.nn.Linear(width, width)

    trainer = quiet(max_epochs=1)
    module = Sized(width=3)
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(tmp_path / "c")
    loaded = Sized.load_from_checkpoint(tmp_path / "c", name="b")
    assert loaded.hparams == {"width": 3, "name": "b"}
    same(loaded, module)
