"""The way the other tests here run: a process of its own with as many XLA devices as asked for."""

from __future__ import annotations

import pytest
import torch
from drivetrain.tests.distributed import RankFailed
from drivetrain.tests.xla.running import run


@pytest.mark.parametrize("devices", [1, 4])
def test_a_function_finds_its_devices(devices):
    def count(start):
        import torch_xla
        import torch_xla.runtime as xr

        if devices > 1:
            xr.use_spmd()
        total = torch.arange(start, start + 3, device=torch_xla.device()).sum()
        return xr.global_runtime_device_count(), xr.is_spmd(), total.item()

    assert run(count, 2, devices=devices) == (devices, devices > 1, 9)


def test_what_is_raised_comes_back_with_what_was_printed():
    def fail():
        print("said before")
        raise ValueError("of the test")

    with pytest.raises(RankFailed, match="(?s)ValueError: of the test.*said before"):
        run(fail)
