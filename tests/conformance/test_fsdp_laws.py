"""The laws under FSDP and HSDP: parity with one process, interruption, and runs that a rank leaves or spoils."""

from __future__ import annotations

import pytest
import torch
from drivetrain.strategies.fsdp import FSDPStrategy
from drivetrain.strategies.fsdp1 import FSDP1Strategy
from drivetrain.tests.conformance.cells import Record, Transformer, cell, trained
from drivetrain.tests.distributed import RankFailed, run

TOLERANCE = {None: 1e-5, "bf16": 2e-2}
CELLS = [
    pytest.param("fsdp", 2, None, 1, id="fsdp"),
    pytest.param("fsdp", 2, None, 4, id="fsdp-accumulate"),
    pytest.param("fsdp", 2, "bf16", 1, id="fsdp-bf16"),
    pytest.param("fsdp", 2, "bf16", 4, id="fsdp-bf16-accumulate"),
    pytest.param("fsdp1", 2, None, 1, id="fsdp1"),
    pytest.param("fsdp1", 2, "bf16", 4, id="fsdp1-bf16-accumulate"),
    pytest.param("hsdp", 4, None, 1, id="hsdp"),
    pytest.param("hsdp", 4, "bf16", 1, id="hsdp-bf16"),
]
_references: dict[tuple, Record] = {}


def reference(precision, accumulate) -> Record:
    """One process, plain torch underneath; computed once for each way to compute."""
    key = precision, accumulate
    if key not in _references:
        (_references[key],) = run(lambda rank: trained(precision=precision, accumulate=accumulate), 1, group=False)
    return _references[key]


def short_reference() -> Record:
    """One process, 6 steps."""
    if () not in _references:
        (_references[()],) = run(lambda rank: trained(steps=6), 1, group=False)
    return _references[()]


@pytest.mark.parametrize(("strategy", "ranks", "precision", "accumulate"), CELLS)
def test_parity_with_one_process_after_fifty_steps(strategy, ranks, precision, accumulate):
    found = cell(
        strategy, ranks, reference=reference(precision, accumulate), precision=precision, accumulate=accumulate
    )
    assert all(value <= TOLERANCE[precision] for value in found.values()), found


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"auto_wrap_policy": "NO_WRAP"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500},
        {"transformer_cls_names_to_wrap": ["Block"], "forward_prefetch": True},
        {"sync_module_states": False},
        {"ignored_modules": r"layers\.0\.norm1"},
    ],
    ids=lambda options: "-".join(options),
)
def test_parity_whatever_is_sharded_and_when(options):
    found = cell(lambda: FSDPStrategy(**options), 2, reference=short_reference(), steps=6)
    assert all(value <= 1e-5 for value in found.values()), found


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"}, 2),
        ({"sharding_strategy": "NO_SHARD"}, 2),
        ({"sharding_strategy": "HYBRID_SHARD"}, 4),
        ({"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"}, 2),
        ({"ignored_modules": r"layers\.0\.norm1"}, 2),
    ],
    ids=["grad-op", "no-shard", "hybrid", "recompute", "ignored"],
)
def test_parity_of_version_1_whatever_is_sharded_and_when(options, ranks):
    found = cell(lambda: FSDP1Strategy(**options), ranks, reference=short_reference(), steps=6)
    assert all(value <= 1e-5 for value in found.values()), found


class Skipping(Transformer):
    """Leaves a block out on one rank."""

    def __init__(self, bad: int, block: int) -> None:
        super().__init__()
        self.bad, self.block = bad, block

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for index, layer in enumerate(self.layers):
            x = x if index == self.block and torch.distributed.get_rank() == self.bad else layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("strategy", "bad", "block", "said"), [
    ("fsdp", 1, 0, "layers.0 on rank 0, layers.1 on rank 1"),
    ("fsdp", 0, 1, "the end on rank 0, layers.1 on rank 1"),
])  # fmt: skip
def test_a_unit_that_one_rank_does_not_call_is_named(strategy, bad, block, said):
    """Its weights would else be gathered with those of another unit, or for ever."""
    with pytest.raises(RankFailed, match=f"Expected all ranks to call the same unit.*Received: {said}") as failure:
        run(lambda rank: trained(strategy, steps=2, model=lambda: Skipping(bad, block)), 2, patience=20)
    assert "Then rank 1 raised RuntimeError: Expected all ranks" in str(failure.value) or failure.value.rank == 1
