"""The page of the parity matrix is whole, and tells what was measured within the bounds of the law."""

from __future__ import annotations

import json

import pytest

from drivetrain.strategies.choice import registry
from drivetrain.tests.conformance import parallel_cells
from drivetrain.tests.conformance.matrix import ALL, DOCS, RANKS, WAYS, bound, page, ways_between

RESULTS = json.loads((DOCS / "parity.json").read_text())


def test_the_page_is_made_of_the_results():
    assert (DOCS / "parity.md").read_text() == page(RESULTS)


def test_every_strategy_is_there_in_every_way():
    assert set(parallel_cells.CELLS) <= set(ALL)
    assert {name: set(found) for name, found in RESULTS["parity"].items()} == {name: set(WAYS) for name in RANKS}
    assert set(RESULTS["transfer"]) == set(ways_between())


@pytest.mark.parametrize("way", WAYS)
def test_differences_are_within_the_law(way):
    results = RESULTS["parity"].items()
    beyond = {name: found[way] for name, found in results if max(found[way].values()) > bound(name, way)}
    assert not beyond


def test_checkpoints_go_everywhere():
    assert max(RESULTS["transfer"].values()) <= 1e-5


def test_words_for_sharing_a_model_are_all_in_the_matrix():
    """Other words of the registry are other ways to start the same, or stand for a cell of another name."""
    same = {"tensor_parallel": "tp", "context_parallel": "cp", "ulysses": "sp", "pipeline": "pp-1F1B", "pp": "pp-1F1B",
            "expert_parallel": "ep", "fsdp2": "fsdp", "deepspeed": "deepspeed_stage_2",
            "deepspeed_stage_2_offload": "deepspeed_stage_2", "deepspeed_stage_3_offload": "deepspeed_stage_3"}  # fmt: skip
    elsewhere = {"xla", "tpu", "xla_spmd", "xla_fsdp"}  # in an environment of its own: tests/xla
    for word in set(registry()) - elsewhere:
        assert same.get(word, "ddp" if word.startswith("ddp") else word) in RANKS, word
