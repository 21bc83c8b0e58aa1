"""Megatron's indexed data sets: written by its own builder, read in its order, shared among ranks, resumed in place."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("megatron.core")

from drivetrain import (  # noqa: E402
    Accelerator,
    MegatronDataModule,
    MegatronGPT,
    MegatronLMDummyDataLoader,
    MegatronLMPlugin,
    MegatronStrategy,
    Trainer,
)
from drivetrain.strategies import megatron_data  # noqa: E402
from drivetrain.strategies.gradients import GradientState  # noqa: E402
from drivetrain.strategies.state import PartialState  # noqa: E402
from drivetrain.tests.distributed import run  # noqa: E402
from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # seconds on a machine of its own, minutes on a loaded one
SEQUENCE, EOD = 8, 31
MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32, "sequence_length": SEQUENCE,
         "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
ALL = {"splits_string": "100,0,0", "seq_length": SEQUENCE}


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()
    megatron_data.core("datasets.gpt_dataset")
    megatron_data.core("datasets.blended_megatron_dataset_builder")


def write(prefix, documents=12, first=0):
    """Documents of one to a dozen tokens, each ended by EOD; returns them."""
    import numpy

    builder = megatron_data.core("datasets.indexed_dataset").IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    generator = torch.Generator().manual_seed(first)
    found = []
    for number in range(documents):
        length = 1 + number % 12
        tokens = torch.cat([torch.randint(0, EOD, (length,), generator=generator), torch.tensor([EOD])])
        builder.add_document(tokens, [len(tokens)])
        found.append(tokens.tolist())
    builder.finalize(f"{prefix}.idx")
    return found


def texts(data):
    """The tokens of each sample and the one after them."""
    return [[*one["tokens"].tolist(), int(one["labels"][-1])] for one in (data[number] for number in range(len(data)))]


def test_samples_are_pieces_of_the_documents_in_the_order_of_the_seed(tmp_path):
    documents, prefix = write(tmp_path / "a"), str(tmp_path / "a")
    one, again, other = (
        MegatronLMDummyDataLoader(data_path=prefix, seed=seed, **ALL).datasets(MegatronLMPlugin())[0]
        for seed in (1, 1, 2)
    )
    stream = [token for number in one.document_index for token in documents[number]]
    cut = [stream[start : start + SEQUENCE + 1] for start in range(0, len(stream) - SEQUENCE, SEQUENCE)]
    assert sorted(texts(one)) == sorted(cut) and texts(one) != cut
    assert texts(one) == texts(again) and texts(one) != texts(other)


def seen(loader):
    return [text for batch in loader for text in torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1).tolist()]


@pytest.mark.parametrize("options, replicas", [({"tp_degree": 2}, 1), ({}, 2), ({"num_micro_batches": 2}, 2)])
def test_prepare_gives_each_replica_its_share_of_three_splits(options, replicas, tmp_path):
    write(tmp_path / "a", 60)
    given = {"data_path": str(tmp_path / "a"), "splits_string": "70,20,10", "seq_length": SEQUENCE,
             "micro_batch_size": 3}  # fmt: skip
    wanted = [texts(data) for data in MegatronLMDummyDataLoader(**given).datasets(MegatronLMPlugin())]

    def work(rank):
        with OnCPU():
            accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**options), cpu=True)
            data = MegatronLMDummyDataLoader(**given)
            loaders = accelerator.prepare(data, data, data)
            return [(loader.batch_size, seen(loader)) for loader in loaders]

    found = run(work, 2, group=False)
    for split, whole in enumerate(wanted):
        sizes, shares = zip(*(rank[split] for rank in found))
        assert sizes[0] == 3 * options.get("num_micro_batches", 1)
        if replicas == 1:
            assert shares[0] == shares[1]
            assert shares[0] == whole[: len(shares[0])] and len(whole) - len(shares[0]) < (3 if split == 0 else 1)
        else:
            size = sizes[0]
            together = [text for start in range(0, len(shares[0]), size) for share in shares
                        for text in share[start : start + size]]  # fmt: skip
            count = len(whole) - len(whole) % (2 * size) if split == 0 else len(whole)
            assert together[:count] == whole[:count]


class Recording(MegatronGPT):
    """Keeps what it was trained on, and its losses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen, self.losses = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch["tokens"].tolist())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def fit(prefix, steps, *, resume=None, save=None, options=None):
    GradientState._reset_state()
    PartialState._reset_state()
    with OnCPU():
        strategy = MegatronStrategy(train_iters=6, eval_iters=1, **(options or {}))
        trainer = Trainer(strategy=strategy, max_steps=steps, **runs.QUIET)
        module = Recording(MODEL, lr=1e-2)
        data = MegatronDataModule(data_path=str(prefix), splits_string="90,10,0", seq_length=8, micro_batch_size=2)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        return module.seen, module.losses, float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("options", [{"tp_degree": 2}, {}], ids=["tensor parallel", "replicas"])
def test_a_resumed_run_goes_on_at_the_same_sample(options, tmp_path):
    write(tmp_path / "a", 40)

    def work(rank):
        whole = fit(tmp_path / "a", 6, options=options)
        first = fit(tmp_path / "a", 3, save=str(tmp_path / "checkpoint"), options=options)
        rest = fit(tmp_path / "a", 6, resume=str(tmp_path / "checkpoint"), options=options)
        return whole, first, rest

    for whole, first, rest in run(work, 2, group=False):
        assert len(whole[0]) == 6 and whole[0] == first[0] + rest[0]
        assert whole[1] == first[1] + rest[1]
        assert len({str(batch) for batch in whole[0]}) == 6


def test_several_files_are_blended_by_their_weights(tmp_path):
    write(tmp_path / "a", 40), write(tmp_path / "b", 40, first=1)

    def work(rank):
        with OnCPU():
            plugin = MegatronLMPlugin(train_samples=40)
            accelerator = Accelerator(megatron_lm_plugin=plugin, cpu=True)
            paths = [0.75, str(tmp_path / "a"), 0.25, str(tmp_path / "b")]
            loader = accelerator.prepare(MegatronLMDummyDataLoader(data_path=paths, **ALL))
            data = loader.dataset
            return len(data), [int(data[number]["dataset_id"]) for number in range(len(data))]

    (count, sources), _ = run(work, 2, group=False)
    assert count == 40 and sources.count(0) == 30


def test_ends_of_documents_count_as_told(tmp_path):
    write(tmp_path / "a")
    plugin = MegatronLMPlugin(eod_mask_loss=True, seq_length=SEQUENCE)
    data = MegatronLMDummyDataLoader(data_path=str(tmp_path / "a"), split="100,0,0", eod=EOD).datasets(plugin)[0]
    hidden = 0
    for number in range(len(data)):
        assert data[number]["loss_mask"].tolist() == [float(token != EOD) for token in data[number]["tokens"].tolist()]
        hidden += int((data[number]["loss_mask"] == 0).sum())
    assert hidden > 0
    with pytest.raises(ValueError, match="Expected eod, the token between documents, with eod_mask_loss"):
        MegatronLMDummyDataLoader(data_path=str(tmp_path / "a")).datasets(plugin)
    with pytest.raises(ValueError, match="Received: seq_length=16 of the data and 8 of MegatronLMPlugin"):
        MegatronLMDummyDataLoader(data_path=str(tmp_path / "a"), seq_length=16, eod=EOD).datasets(plugin)


def test_data_sets_of_ones_own_know_how_many_samples_are_wanted():
    asked = []

    def provide(sizes):
        asked.append(sizes)
        return torch.utils.data.TensorDataset(torch.arange(sizes[0])), None, None

    plugin = MegatronLMPlugin(
        train_iters=10, eval_interval=4, eval_iters=3, num_micro_batches=2,
        custom_megatron_datasets_provider_function=provide,
    )
    loaders = MegatronLMDummyDataLoader(micro_batch_size=5).loaders(plugin, replicas=2)
    assert asked == [[10 * 20, 3 * 3 * 20, 3 * 20]]  # 20 samples a step, three evaluations
    assert loaders[0].batch_size == 10 and len(loaders[0].dataset) == 200 and loaders[1:] == [None, None]


@pytest.mark.parametrize("options, message", [
    ({"seq_lenght": 8}, "Received: seq_lenght=8. Did you mean 'seq_length'"),
    ({"data_impl": "lazy"}, "Received: data_impl='lazy'"),
])  # fmt: skip
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MegatronLMDummyDataLoader(data_path="a", **options)


def test_options_of_older_megatrons_that_say_what_is_so_are_taken():
    taken = MegatronLMDummyDataLoader(data_path="a", data_impl="mmap", skip_warmup=True)
    assert taken.dataset_args == {"data_path": "a"}


@pytest.mark.parametrize("options, message", [
    ({"seq_length": 8}, "Expected data_path"),
    ({"data_path": "a"}, "Expected seq_length"),
    ({"data_path": "a", "train_data_path": "b", "seq_length": 8}, "or paths of single splits. Received: both"),
])  # fmt: skip
def test_missing_and_contradicting_paths_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MegatronLMDummyDataLoader(**options).datasets(MegatronLMPlugin())


def test_a_package_without_its_compiled_part_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(ImportError, match="compiled data helpers.*compile_helpers"):
        megatron_data.helpers()


def test_stand_ins_and_the_flag_go_together():
    plugin = MegatronLMPlugin(megatron_dataset_flag=True)
    with pytest.raises(ValueError, match="Expected a MegatronLMDummyDataLoader with megatron_dataset_flag=True"):
        megatron_data.replaced([torch.utils.data.DataLoader([1, 2])], plugin, 1)

    def provide(sizes):
        return [1], [2], [3]

    plugin = MegatronLMPlugin(custom_megatron_datasets_provider_function=provide)
    data = MegatronLMDummyDataLoader()
    assert [list(one.dataset) for one in megatron_data.replaced([data] * 3, plugin, 1)] == [[1], [2], [3]]
    with pytest.raises(ValueError, match="three times at most"):
        megatron_data.replaced([data] * 4, plugin, 1)


def test_other_strategies_have_no_such_data(tmp_path):
    trainer = Trainer(**runs.QUIET)
    with pytest.raises(ValueError, match="Expected strategy='megatron' for MegatronDataModule. Received: 'single'"):
        trainer.fit(MegatronGPT(MODEL), datamodule=MegatronDataModule(data_path=str(tmp_path), seq_length=8))
