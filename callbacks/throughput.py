"""How fast a run goes: steps, samples, tokens and operations a second, and the share of the time spent on data."""

from __future__ import annotations

import logging
import time
from typing import Any, Callable

import torch

from .base import Callback
from .checks import check_number
from .sections import LAST

logger = logging.getLogger(__name__)

# Floating-point operations a second of dense matrix products, by the beginning of a device's name; from the makers'
# data sheets: (float32 or TF32 where the device has it, 16-bit).
_PEAKS = (
    ("NVIDIA B200", 1.1e15, 2.25e15), ("NVIDIA H200", 4.94e14, 9.89e14), ("NVIDIA H100 PCIe", 3.78e14, 7.56e14),
    ("NVIDIA H100 NVL", 4.17e14, 8.35e14), ("NVIDIA H100", 4.94e14, 9.89e14), ("NVIDIA A100", 1.56e14, 3.12e14),
    ("NVIDIA L40S", 1.83e14, 3.62e14), ("NVIDIA L4", 6.0e13, 1.21e14), ("NVIDIA A10", 6.25e13, 1.25e14),
    ("NVIDIA GeForce RTX 4090", 8.26e13, 1.652e14), ("Tesla V100", 1.57e13, 1.25e14), ("Tesla T4", 8.1e12, 6.5e13),
)  # fmt: skip


class ThroughputMonitor(Callback):
    """Log, with each row of training, how fast the batches since the last row went, over all ranks.

    - "throughput/steps_per_sec", "…/samples_per_sec": optimizer steps and samples, from the counters of the run;
    - "…/items_per_sec": with ``length_fn(batch)``, what it counts in a batch of one rank, for example tokens;
    - "…/data_wait": the share of the time, 0 to 1, in which the loop waited for a batch;
    - "…/flops_per_sec": a device, and "…/mfu": its share of what the device can do (model FLOPs utilization, defined in
      "PaLM", Chowdhery et al. 2022, appendix B), with ``flops_per_batch``: the operations of one batch of one rank,
      forward and backward, as a number, a function of the batch, or "measure" to count them once in the first batch.
      ``available_flops`` is what the device can do; left out, it is looked up by the device's name.

    Validations do not count. ``batch_size_fn(batch)`` counts samples where the loader cannot. Nothing is read from the
    device, and ranks exchange three numbers a row. Raises ValueError or TypeError for arguments of another kind.
    """

    priority = 1 - LAST  # hears a batch begin before everybody else, but for the profiler

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        flops_per_batch: float | str | Callable[[Any], float] | None = None,
        available_flops: float | None = None,
    ) -> None:
        for name, function in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"Expected a function of the batch. Received: {name}={function!r}. Pass e.g. len.")
        if isinstance(flops_per_batch, str) and flops_per_batch != "measure":
            raise ValueError(
                f'Expected flops_per_batch to be a number, a function or "measure". Received: {flops_per_batch!r}.'
            )
        if not isinstance(flops_per_batch, str) and not callable(flops_per_batch):
            check_number("flops_per_batch", flops_per_batch)
        check_number("available_flops", available_flops)
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.flops_per_batch, self.available_flops = flops_per_batch, available_flops
        self._counter: Any = None
        self._mark = 0.0  # since when the loop waits for a batch, or works on one

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            end = Callback()  # hears events after everybody else: what comes then is waiting for data
            end.priority = LAST
            end.on_train_batch_end = self._worked_till_now  # type: ignore[method-assign]
            end.on_validation_end = self._wait  # type: ignore[method-assign]
            trainer.session.callbacks.append(end)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._peak = self._available(trainer)
        self._begin(trainer)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._wait()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self._waited += now - self._mark
        self._mark = now
        if self.flops_per_batch == "measure":
            self._count(module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._counter is not None:
            self._counted()
        self._batches += 1
        if self.length_fn is not None:
            self._items += self.length_fn(batch)
        if self.batch_size_fn is not None:
            self._samples += self.batch_size_fn(batch)
        if callable(self.flops_per_batch):
            self._flops += self.flops_per_batch(batch)
        elif self.flops_per_batch not in (None, "measure"):
            self._flops += self.flops_per_batch
        every = trainer.log_every_n_steps
        row_follows = every and trainer.global_step // every > self._row
        if row_follows or (batch_idx + 1 >= trainer.num_training_batches and trainer.global_step > self._step):
            self._worked_till_now()
            trainer.log_dict(self._row_of(trainer))
            self._begin(trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:  # its batch never ended
            counter.__exit__(None, None, None)

    def _wait(self, *_: Any) -> None:
        self._mark = time.perf_counter()

    def _worked_till_now(self, *_: Any) -> None:
        now = time.perf_counter()
        self._worked += now - self._mark
        self._mark = now

    def _begin(self, trainer: Any) -> None:
        self._step, self._row = trainer.global_step, trainer.global_step // (trainer.log_every_n_steps or 1)
        self._counted_before = trainer.progress.samples
        self._batches, self._items, self._samples, self._flops = 0, 0, 0, 0.0
        self._worked = self._waited = 0.0
        self._mark = time.perf_counter()

    def _row_of(self, trainer: Any) -> dict[str, float]:
        accelerator = trainer.accelerator
        clock = torch.tensor([self._worked + self._waited, self._waited, self._flops], dtype=torch.float64)
        seconds, waited, flops = accelerator.world.all_reduce(clock, "mean").tolist()
        seconds = max(seconds, 1e-9)
        own = torch.tensor([self._items, self._samples], dtype=torch.float64)
        items, samples = accelerator.strategy.data_world.all_reduce(own, "sum").tolist()
        if self.batch_size_fn is None:
            samples = trainer.progress.samples - self._counted_before
        row = {
            "steps_per_sec": (trainer.global_step - self._step) / seconds,
            "samples_per_sec": samples / seconds,
            "data_wait": waited / seconds,
        }
        if self.length_fn is not None:
            row["items_per_sec"] = items / seconds
        if flops:
            row["flops_per_sec"] = flops / seconds
            if self._peak:
                row["mfu"] = flops / seconds / self._peak
        return {f"throughput/{name}": value for name, value in row.items()}

    def _count(self, module: Any) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # slow to import

        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()

    def _counted(self) -> None:
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        self.flops_per_batch = float(counter.get_total_flops())

    def _available(self, trainer: Any) -> float | None:
        if self.available_flops is not None or self.flops_per_batch is None:
            return self.available_flops
        device = trainer.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        for known, full, half in _PEAKS:
            if name.startswith(known):
                return half if "16" in str(trainer.precision.name) else full
        logger.warning(
            "ThroughputMonitor does not know how many operations a second %s can do: no mfu is logged. Pass "
            "available_flops=….", name,
        )  # fmt: skip
        return None
