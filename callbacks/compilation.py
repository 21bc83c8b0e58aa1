"""How often XLA compiles: once for each new graph, which no step after the first few should need."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch

from ..strategies.nested import leaves_of
from .base import Callback
from .checks import check_whole
from .device_stats import over_ranks

logger = logging.getLogger(__name__)

_ADVICE = (
    "Every new shape is a new graph: pad batches to few lengths, set drop_last=True for a short last batch, and let no "
    "number that changes from step to step come to a tensor by Python (`x * float(step)`)."
)


class CompilationMonitor(Callback):
    """Count what XLA compiles in training, and warn of steps that compile when they should not.

    The first ``warmup`` batches of a fit may compile: an optimizer makes its states in its first step, which gives its
    second another graph. Whatever a later one compiles is a graph that differs, as a rule by a shape: the first such
    batch is named in a warning with the shapes of its tensors. Evaluations and checkpoints have graphs of their own,
    which do not count. Each row of training gets

    - "xla/compilations": graphs that batches of this fit have compiled so far, the most of all ranks;
    - "xla/late_compilations": those of them after the warm-up;
    - "xla/fallbacks": operators so far that XLA does not have, each of which waits for the device.

    The counters are torch_xla's own and are read without the device. On other devices nothing is counted, and a
    warning says so. Raises ValueError for a warm-up that is no number of batches.
    """

    def __init__(self, warmup: int = 4) -> None:
        check_whole("warmup", warmup, least=0)
        self.warmup = warmup
        self.compilations = self.late = self._batches = self._row = self._before = 0
        self._warned = self._logged = self._validating = False
        self._shapes = self._usual = ""
        self._metrics: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._metrics = import_module("torch_xla.debug.metrics") if trainer.device.type == "xla" else None
        if self._metrics is None:
            logger.warning("CompilationMonitor counts what XLA compiles; this run is on %s.", trainer.device.type)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._reset()
        self._row = self._row_number(trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._count(trainer)  # the batch before was handed over since
        self._batches += 1
        if self._metrics is not None and not self._warned:
            self._usual, self._shapes = self._shapes, shapes(batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = self._row_number(trainer)
        if self._metrics is not None and row > self._row:
            self._row = row
            trainer.log_dict(over_ranks(self._values(), trainer))

    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if not self._logged and not self._validating:  # to bring values together is a graph that comes once
            self._logged, self._before = True, self._compiled()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._count(trainer)
        self._validating = True

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._validating, self._before = False, self._compiled()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._count(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._count(trainer)

    def _row_number(self, trainer: Any) -> int:
        every: int = trainer.log_every_n_steps
        return trainer.global_step // every if every else 0

    def _reset(self) -> None:
        self.compilations = self.late = self._batches = self._row = 0
        self._warned = self._logged = self._validating = False
        self._shapes = self._usual = ""
        self._before = self._compiled()

    def _compiled(self) -> int:
        return 0 if self._metrics is None else int(self._metrics.counter_value("UncachedCompile") or 0)

    def _values(self) -> dict[str, float]:
        fallbacks = [name for name in self._metrics.counter_names() if name.startswith("aten::")]
        count = sum(self._metrics.counter_value(name) for name in fallbacks)
        return {"xla/compilations": float(self.compilations), "xla/late_compilations": float(self.late),
                "xla/fallbacks": float(count)}  # fmt: skip

    def _count(self, trainer: Any) -> None:
        """Take what was compiled since the last look for the work of the batch before."""
        now = self._compiled()
        new, self._before = now - self._before, now
        self.compilations += new
        if not new or self._batches <= self.warmup:
            return
        self.late += new
        if not self._warned:
            self._warned = True
            logger.warning(
                "XLA compiled %d more graph(s) for batch %d of this fit (step %d), after %d batches to warm up. Shapes "
                "of that batch: %s; of the one before: %s. %s",
                new, self._batches, trainer.global_step, self.warmup, self._shapes, self._usual, _ADVICE,
            )  # fmt: skip


def shapes(batch: Any) -> str:
    """Return the shapes of a batch's tensors, in order; nothing is read from the device."""
    found = [str(list(leaf.shape)) for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    return ", ".join(found) or "no tensors"
