"""Megatron's indexed data sets as loaders: each replica its share, in Megatron's order, from any sample on."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Accelerator, MegatronLMDummyDataLoader, MegatronLMPlugin
from drivetrain.tests.distributed import run

pytest.importorskip("megatron.core")

from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(300)
LENGTH, END = 6, 30


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """100 documents of 5 to 9 tokens, written as Megatron's tools write them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    path = str(tmp_path_factory.mktemp("data") / "documents")
    builder, generator = IndexedDatasetBuilder(f"{path}.bin"), torch.Generator().manual_seed(0)
    for number in range(100):
        tokens = torch.randint(0, END, (5 + number % 5,), generator=generator)
        builder.add_document(torch.cat([tokens, torch.tensor([END])]), [len(tokens) + 1])
    builder.finalize(f"{path}.idx")
    return path


def dummy(prefix, **more):
    return MegatronLMDummyDataLoader(data_path=[prefix], splits_string="80,10,10", seq_length=LENGTH, micro_batch_size=2,
                                     eod=END, **more)  # fmt: skip


def loaded(rank, prefix, options):
    with OnCPU():
        plugin = MegatronLMPlugin(megatron_dataset_flag=True, train_iters=3, eval_iters=1, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        loaders = accelerator.prepare(*[dummy(prefix)] * 3)
        return [[batch["tokens"].tolist() for batch in loader] for loader in loaders]


def test_replicas_share_batches_of_micro_batches(prefix):
    plugin = MegatronLMPlugin(train_iters=3, eval_iters=1, num_micro_batches=2)
    with OnCPU():
        training, validation, _ = dummy(prefix).datasets(plugin, 2)
    wanted = [training[index]["tokens"].tolist() for index in range(24)]
    assert len({tuple(row) for row in wanted}) == 24 and max(map(max, wanted)) == END
    one, other = run(loaded, 2, prefix, {"num_micro_batches": 2}, group=False)
    assert [len(batch) for batch in one[0][:3]] == [4, 4, 4]
    assert [row for both in zip(one[0][:3], other[0][:3]) for batch in both for row in batch] == wanted
    assert one[1][0] + other[1][0] == [validation[index]["tokens"].tolist() for index in range(8)]


def test_ranks_of_one_replica_see_the_same(prefix):
    one, other = run(loaded, 2, prefix, {"tp_degree": 2}, group=False)
    assert one == other and len(one[0]) >= 3


def test_data_sets_of_the_scripts_own(prefix):
    def provider(samples):
        assert samples == [6, 2, 2]
        return [[{"tokens": torch.tensor([number])} for number in range(count)] for count in samples]

    own = {"custom_megatron_datasets_provider_function": provider}
    (found,) = run(loaded, 1, prefix, own, group=False)
    assert found == [[[[0], [1]], [[2], [3]], [[4], [5]]], [[[0], [1]]], [[[0], [1]]]]
