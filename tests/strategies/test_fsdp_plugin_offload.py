"""A launch key of FSDP that is not followed is refused."""

from __future__ import annotations

import pytest

from drivetrain import FullyShardedDataParallelPlugin


def test_offloading_activations_is_refused(monkeypatch):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    with pytest.raises(NotImplementedError, match="activation_checkpointing alone"):
        FullyShardedDataParallelPlugin(fsdp_version=2)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false")
    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing is False
