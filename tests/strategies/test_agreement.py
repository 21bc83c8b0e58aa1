"""Random number generators that the processes share."""

from __future__ import annotations

import pytest
import torch

from drivetrain import synchronize_rng_state, synchronize_rng_states
from drivetrain.strategies.settings import RNGType
from drivetrain.tests.distributed import run


def test_all_draw_what_the_first_draws():
    def rank(rank):
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(10 + rank)
        before = torch.random.get_rng_state()[:8].tolist()
        synchronize_rng_states(["torch", "generator"], generator)
        return before, torch.rand(1).item(), torch.rand(1, generator=generator).item()

    first, second = run(rank, 2)
    assert first[0] != second[0] and first[1:] == second[1:]
    assert first[1] == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert first[2] == torch.rand(1, generator=torch.Generator().manual_seed(10)).item()


def test_one_process_keeps_its_own():
    state = torch.random.get_rng_state()
    synchronize_rng_states(["torch"])
    synchronize_rng_state(None)
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_is_not_there():
    with pytest.raises(ValueError, match="Expected a generator"):
        synchronize_rng_state(RNGType.GENERATOR)
    with pytest.raises(ValueError, match="Expected a device of this machine"):
        synchronize_rng_states(["npu"])
    with pytest.raises(ValueError, match="dice"):
        synchronize_rng_states(["dice"])
