"""The Trainer on ranks of Megatron: the same numbers as a plain loop of torch over the whole model."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.tests.distributed import run

pytest.importorskip("megatron.core")

from drivetrain import MegatronStrategy, Trainer  # noqa: E402
from drivetrain.tests.strategies import megatron_gpt as tiny  # noqa: E402
from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # seconds on a machine of its own, minutes on a loaded one
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
VIRTUAL = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 4}
TWO = {
    "tensor parallel": {"tp_degree": 2},
    "sequence parallel": {"tp_degree": 2, "sequence_parallelism": True},
    "stages": {"pp_degree": 2},
    "stages, micro-batches": {"pp_degree": 2, "num_micro_batches": 4},
    "virtual stages": VIRTUAL,
    "replicas": {},
    "replicas, shared optimizer": {"use_distributed_optimizer": True, "num_micro_batches": 2},
    "attention again": {"tp_degree": 2, "recompute_activations": True},
    "layers again": {"tp_degree": 2, **FULL, "recompute_method": "uniform"},
    "a layer again": {"pp_degree": 2, **FULL, "recompute_method": "block"},
    "unequal stages": {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1},
}
FOUR = {
    "tensor parallel and stages": {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2},
    "sequence parallel, replicas": {"tp_degree": 2, "sequence_parallelism": True, "use_distributed_optimizer": True},
    "virtual stages, replicas": VIRTUAL,
}


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


@cache
def expected(**options):
    return run(lambda rank: runs.plain(rank, **options), 1)[0]


def fit(ranks, *args, **kwargs):
    found = run(lambda rank: runs.fit(*args, **kwargs), ranks, group=False, timeout=240)
    assert all(one == found[0] for one in found), "all ranks tell the same"
    return found[0]


def check(found, wanted, tolerance=1e-5):
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.validation == pytest.approx(wanted.validation, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)


def test_one_rank_equals_the_plain_loop_which_learns():
    check(fit(1, {}), expected())
    assert min(expected().norms) > 0.05  # all of them are clipped
    untrained = expected(window=4).losses[2]
    assert expected().losses[2] != pytest.approx(untrained, rel=1e-3)


@pytest.mark.parametrize("options", TWO.values(), ids=TWO)
def test_two_ranks_equal_the_plain_loop(options):
    check(fit(2, options), expected())


@pytest.mark.parametrize("options", FOUR.values(), ids=FOUR)
def test_four_ranks_equal_the_plain_loop(options):
    check(fit(4, options), expected())


@pytest.mark.parametrize("options", [{"tp_degree": 2}, VIRTUAL, {"use_distributed_optimizer": True}], ids=str)
def test_windows_of_several_batches_are_one_large_batch(options):
    """The last window is short, and batches count by their tokens."""
    check(fit(2, options, accumulate_grad_batches=4), expected(window=4))


def test_batches_that_count_the_same_whatever_their_tokens():
    check(fit(2, {"pp_degree": 2}, module={"mean": True}, accumulate_grad_batches=3), expected(window=3, mean=True))


def test_frozen_weights_stay_as_they_are():
    check(fit(2, {"tp_degree": 2}, module={"frozen": True}), expected(frozen=True))


@pytest.mark.parametrize(
    ("word", "options"),
    [("bf16-mixed", {"tp_degree": 2}), ("bf16-mixed", {"use_distributed_optimizer": True}), ("16-mixed", VIRTUAL)],
    ids=str,
)
def test_sixteen_bits_are_near(word, options):
    found, wanted = fit(2, options, precision=word), expected()
    assert found.losses == pytest.approx(wanted.losses, rel=2e-3)
    assert found.validation == pytest.approx(wanted.validation, rel=2e-3)
    assert found.losses != wanted.losses


def test_interleaved_stages_do_not_batch_their_messages():
    """With two stages batched messages are taken for each other, and gradients are wrong in silence."""

    def work(rank):
        with OnCPU():
            trainer = Trainer(strategy=MegatronStrategy(**VIRTUAL), max_epochs=1, **runs.QUIET)
            module = runs.Module()
            trainer.fit(module, DataLoader(tiny.tokens(8), batch_size=8))
            config = module.model.config
            return config.overlap_p2p_comm, config.batch_p2p_comm, len(module.model.chunks)

    assert run(work, 2, group=False) == [(True, False, 2)] * 2


def test_predictions_of_stages_are_those_of_the_whole_model():
    def work(rank, options):
        with OnCPU():
            trainer = Trainer(strategy=MegatronStrategy(**options), **runs.QUIET)
            return torch.cat(trainer.predict(runs.Module(), DataLoader(tiny.tokens(7, 3), batch_size=3)))

    (whole,) = run(work, 1, {}, group=False)
    assert whole.shape == (7, tiny.SEQUENCE)
    for options in ({"pp_degree": 2}, VIRTUAL):
        for found in run(work, 2, options, group=False):
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
