"""What a run keeps in memory (case L5)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drivetrain import Callback
from drivetrain.tests.distributed import run
from drivetrain.tests.loop.models import Line, loader, quiet

MIB = 1 << 20


def resident() -> int:
    """Bytes of its own that this process holds in memory; of files, as libraries are, the kernel lets go at any time."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Large(Line):
    """Predicts 1 MiB for each batch."""

    def predict_step(self, batch, batch_idx):
        return torch.full((MIB // 4,), float(batch_idx))


class Write(Callback):
    """Writes each prediction to a file; notes what the process holds after 20 and after all 200."""

    def __init__(self, path):
        self.path, self.held = path, {}

    def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        with open(self.path, "ab") as file:
            file.write(outputs.numpy().tobytes())
        if batch_idx in (19, 199):
            self.held[batch_idx] = resident()


@pytest.mark.parametrize(("keep", "least", "most"), [(False, -100 * MIB, 20 * MIB), (True, 160 * MIB, 260 * MIB)])
def test_L5_predictions_that_a_callback_writes_are_not_kept(tmp_path, keep, least, most):
    """180 predictions of 1 MiB later the process holds no more; that kept ones would show is the second case."""

    def predict(rank):
        write = Write(tmp_path / "predictions")
        quiet(callbacks=[write]).predict(Large(), loader(200, 1), return_predictions=keep)
        return write.held[199] - write.held[19]

    (growth,) = run(predict, 1)
    assert least <= growth <= most
    assert (tmp_path / "predictions").stat().st_size == 200 * MIB
