"""Ranks that share the work on the same samples count as one: for data, metrics, schedules and seeds."""

from __future__ import annotations

import torch
import torchmetrics
from drivetrain import (
    Accelerator,
    ParallelismConfig,
    TorchTensorParallelConfig,
    Trainer,
    TrainModule,
    prepare_data_loader,
    set_seed,
)
from drivetrain.strategies.context_parallel import Sequences
from drivetrain.tests.distributed import run
from torch.utils.data import DataLoader

SQUARE = {"dp_replicate_size": 2, "tp_size": 2}


def test_places_and_worlds():
    def places(rank):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**SQUARE))
        strategy = accelerator.strategy
        assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_replicate", "tp")
        assert accelerator.parallelism_config.total_size == accelerator.num_processes == 4
        sums = strategy.data_world.all_reduce(torch.tensor([float(rank)])).tolist()
        everyone = strategy.data_world.gather_object(rank)
        told = strategy.data_world.broadcast_object(rank, src=1)
        return accelerator.data_parallel_rank, accelerator.tensor_parallel_rank, sums, everyone, told

    assert run(places, 4) == [
        (0, 0, [2.0], [0, 2], 2), (0, 1, [4.0], [1, 3], 3), (1, 0, [2.0], [0, 2], 2), (1, 1, [4.0], [1, 3], 3),
    ]  # fmt: skip


def test_each_sample_once_for_every_group_of_ranks():
    def samples(rank):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**SQUARE))
        loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))
        seen, gathered = [], []
        for batch in loader:
            seen += batch.tolist()
            gathered += accelerator.gather_for_metrics(batch).tolist()
        objects = [accelerator.gather_for_metrics([rank], use_gather_object=True) for _ in range(1)]
        return loader.total_batch_size, seen, gathered, objects

    found = run(samples, 4)
    assert found[0][:3] == found[1][:3] and found[2][:3] == found[3][:3]
    assert [one[0] for one in found] == [4] * 4
    assert all(one[2] == list(range(11)) for one in found)
    assert set(found[0][1]) | set(found[2][1]) == set(range(11)) and found[0][1] != found[2][1]
    assert found[0][3] == [[0, 2]] and found[3][3] == [[1, 3]]


def test_random_order_is_one_for_all_without_a_seed():
    def order(rank):
        torch.manual_seed(rank)  # what no seed comes to: another state in each process
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**SQUARE))
        generator = torch.Generator().manual_seed(100 + rank)
        loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2, shuffle=True, generator=generator))
        return [batch.tolist() for batch in loader], torch.rand(1).item()

    found = run(order, 4)
    assert found[0][0] == found[1][0] and found[2][0] == found[3][0]
    assert sorted(sum(found[0][0] + found[2][0], [])) == list(range(8))
    assert found[0][1] == found[1][1] and found[2][1] == found[3][1]  # those that share layers drop out alike


def test_schedules_and_seeds_count_the_ranks_with_other_samples():
    def steps(rank):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**SQUARE))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        optimizer.step()
        scheduler.step()
        set_seed(3, device_specific=True)
        return scheduler.get_last_lr(), torch.rand(1).item()

    found = run(steps, 4)
    assert [one[0] for one in found] == [[0.25]] * 4
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]


class Counts(TrainModule):
    """Logs sums, and a metric object that sums, over samples."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(1, 2)
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        self.log("seen", float(len(batch)), reduce_fx="sum", on_step=False, on_epoch=True)
        return self.wide(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.total.update(batch.sum())
        self.log("total", self.total)
        self.log("count", float(len(batch)), reduce_fx="sum")
        self.log("mean", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sums_and_metric_objects_count_each_sample_once():
    def fit(rank):
        handler = TorchTensorParallelConfig(plan={"wide": "colwise_gather_output"})
        config = ParallelismConfig(**SQUARE, tp_handler=handler)
        module = Counts()
        trainer = Trainer(accelerator="cpu", strategy=config, max_epochs=1, logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)  # fmt: skip
        data = torch.arange(9.0)[:, None]
        trainer.fit(module, DataLoader(data[:8], batch_size=2), DataLoader(data, batch_size=2))
        return {name: trainer.callback_metrics[name] for name in ("seen", "total", "count", "mean")}

    assert run(fit, 4) == [{"seen": 8.0, "total": 36.0, "count": 9.0, "mean": 4.0}] * 4


def test_a_loader_for_a_given_mesh():
    def shares(rank):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        loader = prepare_data_loader(DataLoader(torch.arange(8), batch_size=2), torch_device_mesh=mesh)
        return [batch.tolist() for batch in loader]

    assert run(shares, 4) == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


def test_ranks_that_share_sequences_see_the_same_samples_and_other_tokens():
    def parts(rank):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2, cp_size=2))
        strategy = accelerator.strategy
        assert isinstance(strategy.sequences, Sequences)
        labels = torch.tensor([[0, 1, -100, -100], [0, 1, 2, 3]])
        batch, share = strategy.divide_batch((torch.arange(8).view(2, 4), labels))
        sizes = strategy.data_world.size, strategy.loss_world.size
        return *sizes, batch[0].tolist(), share, accelerator.context_parallel_rank

    found = run(parts, 4)
    assert found[0] == found[2] == (2, 4, [[0, 1], [4, 5]], 4 * 2 / 6, 0)
    assert found[1] == found[3] == (2, 4, [[2, 3], [6, 7]], 2 * 2 / 6, 1)
