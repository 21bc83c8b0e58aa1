"""Megatron's indexed data sets as loaders: each replica its share, in Megatron's order, from any sample on."""

from __future__ import annotations

from types import SimpleNamespace

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
                                     eod=END, vocab_size=32, **more)  # fmt: skip


def loaded(rank, prefix, options):
    with OnCPU():
        plugin = MegatronLMPlugin(megatron_dataset_flag=True, train_iters=3, eval_iters=1, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        loaders = accelerator.prepare(*[dummy(prefix)] * 3)
        return [[batch["tokens"].tolist() for batch in loader] for loader in loaders]


def test_replicas_share_batches_of_micro_batches(prefix):
    with OnCPU():
        training, validation, test = dummy(prefix).datasets([24, 8, 8])
    wanted = [training[index]["tokens"].tolist() for index in range(24)]
    assert len({tuple(row) for row in wanted}) == 24 and max(map(max, wanted)) == END
    one, other = run(loaded, 2, prefix, {"num_micro_batches": 2}, group=False)
    assert [len(batches) for batches in one] == [3, 1, 1] and [len(batch) for batch in one[0]] == [4, 4, 4]
    assert [row for both in zip(one[0], other[0]) for batch in both for row in batch] == wanted
    held = [validation[index]["tokens"].tolist() for index in range(8)]
    assert one[1][0] + other[1][0] == held


def test_ranks_of_one_replica_see_the_same_from_any_sample_on(prefix):
    options = {"tp_degree": 2}
    one, other = run(loaded, 2, prefix, options, group=False)
    assert one == other and len(one[0]) == 3
    later, _ = run(loaded, 2, prefix, {**options, "consumed_samples": [2, 0, 0]}, group=False)
    assert later[0] == one[0][1:] and later[1:] == one[1:]


def test_data_sets_of_the_scripts_own(prefix):
    def provider(samples):
        assert samples == [6, 2, 2]
        return [[{"tokens": torch.tensor([number])} for number in range(count)] for count in samples]

    own = {"custom_megatron_datasets_provider_function": provider}
    (found,) = run(loaded, 1, prefix, own, group=False)
    assert found == [[[[0], [1]], [[2], [3]], [[4], [5]]], [[[0], [1]]], [[[0], [1]]]]


def test_ends_of_documents_need_not_count(prefix):
    with OnCPU():
        (counted, *_), (masked, *_) = (
            dummy(prefix).datasets([8, 1, 1], plugin=SimpleNamespace(eod_mask_loss=flag, seq_length=None,
                                   custom_megatron_datasets_provider_function=None)) for flag in (False, True))  # fmt: skip
    ends = [int((masked[index]["tokens"] == END).sum()) for index in range(8)]
    lost = [int(counted[index]["loss_mask"].sum() - masked[index]["loss_mask"].sum()) for index in range(8)]
    assert ends == lost and sum(ends) > 0


def test_what_nobody_says(prefix):
    with pytest.raises(ValueError, match=r"Received: no data_path, seq_length, tokenizer \(or eod\)"):
        MegatronLMDummyDataLoader().datasets([1, 1, 1])
    with pytest.raises(ValueError, match="no train_iters or train_samples"):
        dummy(prefix).loaders(MegatronLMPlugin(), 1)

    def without(rank):
        with OnCPU(), pytest.raises(ValueError, match="Expected a MegatronLMDummyDataLoader"):
            plugin = MegatronLMPlugin(megatron_dataset_flag=True)
            Accelerator(cpu=True, megatron_lm_plugin=plugin).prepare(torch.nn.Linear(1, 1))

    run(without, 1, group=False)
