"""Values that a function of the user's reduces: those of an epoch that was interrupted are not lost."""

from __future__ import annotations

import math

import pytest
import torch

from drivetrain import Callback, Interrupted
from drivetrain.tests import distributed
from drivetrain.tests.faults.test_signals import sending
from drivetrain.tests.faults.toy import STEPS, Falling, loader, trainer


def largest_gap(values: torch.Tensor) -> torch.Tensor:
    """Return something that needs all values."""
    return values.sort().values.diff().max() if len(values) > 1 else values.sum()


class Gaps(Falling):
    """Logs by functions: in all batches, in those before ``until``, and at the end of the epoch."""

    def __init__(self, act=lambda module, index: None, until: int = STEPS) -> None:
        super().__init__(act)
        self.until = until

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = batch.mean().square()
        self.log("gap", value, reduce_fx=largest_gap, on_epoch=True)
        self.log("plain", float(value), reduce_fx=lambda values: values.median(), on_step=False, on_epoch=True)
        self.log("own", value, reduce_fx=largest_gap, on_step=False, on_epoch=True, sync_dist=False)
        if batch_idx < self.until:
            self.log("early", value, reduce_fx=largest_gap, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("at the end", float(self.trainer.global_step), reduce_fx=largest_gap)


class Rows(Callback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list = []

    def on_log(self, trainer, module, metrics, step):
        self.rows.append((step, dict(metrics)))


def rows_of(root, module, ranks=1, **options):
    """Fit and return the rows, up to a signal if one comes."""
    rows = Rows()
    runner = trainer(root, callbacks=[rows], max_epochs=2, log_every_n_steps=3, **options)
    try:
        runner.fit(module, loader(ranks=ranks), resume="last")
    except Interrupted:
        pass
    return rows.rows


@pytest.mark.parametrize("until", [STEPS, 2])
@pytest.mark.parametrize("at", [3, 7, STEPS - 1])
def test_R1_an_interrupted_epoch_keeps_its_values(at, until, tmp_path):
    whole = rows_of(tmp_path / "whole", Gaps(until=until))
    assert [row["gap_epoch"] for _, row in whole if "gap_epoch" in row] == [21.0, 21.0]  # 11² - 10²
    assert whole[-1][1]["plain"] == 25.0 and whole[-1][1]["early"] == (1.0 if until == 2 else 21.0)
    first = rows_of(tmp_path / "parts", Gaps(sending("SIGTERM", at), until=until))
    rest = rows_of(tmp_path / "parts", Gaps(until=until))
    assert first + rest == whole


@pytest.mark.parametrize("lacking", [None, 0, 1])
def test_R1_two_ranks_of_which_one_may_not_log_again(lacking, tmp_path):
    def work(rank):
        until = {0: 2} if lacking == 0 else {1: 2} if lacking == 1 else {}
        whole = rows_of(tmp_path / "whole", Gaps(until=until.get(rank, STEPS)), ranks=2)
        first = rows_of(tmp_path / "parts", Gaps(sending("SIGTERM", 6), until=until.get(rank, STEPS)), ranks=2)
        return whole, first + rows_of(tmp_path / "parts", Gaps(until=until.get(rank, STEPS)), ranks=2)

    for whole, parts in distributed.run(work, 2):
        assert parts == whole and not math.isnan(whole[-1][1]["early"])


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_R6_at_another_world_size(before, after, tmp_path):
    def first(rank):
        rows_of(tmp_path, Gaps(sending("SIGTERM", 2 * before - 1)), ranks=2)

    def rest(rank):
        return rows_of(tmp_path, Gaps(), ranks=2)[-1][1]

    distributed.run(first, before)
    for row in distributed.run(rest, after):
        assert row["gap_epoch"] == 23.0**2 - 22.0**2 and row["plain"] == 121.0
