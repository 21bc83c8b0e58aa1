"""A launch that asks for activations that are computed again from what waits on the CPU."""

from __future__ import annotations

import pytest
import torch
from drivetrain import FullyShardedDataParallelPlugin
from drivetrain.strategies import sharding


def test_a_launch_gives_it_together_with_checkpointing(monkeypatch):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    with pytest.raises(ValueError, match="activation_checkpointing=False"):
        FullyShardedDataParallelPlugin(fsdp_version=2)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing_offload
    monkeypatch.delenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing_offload is False


def test_a_units_inputs_go_to_the_cpu_and_nothing_else_is_kept(monkeypatch):
    """Counted where torch packs what a backward needs; on the CPU itself there is nothing to be seen of the place."""
    kept = []

    class Counting(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory):
            super().__init__(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counting)
    unit = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    x = torch.ones(2, 4, requires_grad=True)
    expected = torch.autograd.grad(unit(x).sum(), x)[0]
    sharding.wrap_forwards(unit, [unit], recompute=True, offload=True, compile=None)
    found = unit(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], expected)
