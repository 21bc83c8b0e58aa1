"""What the machine is doing: memory and load of the processor and of the accelerator."""

from __future__ import annotations

from typing import Any

import torch

from ..strategies.memory import device_memory
from .base import Callback


class DeviceStatsMonitor(Callback):
    """Log, with each row of training, what this run takes of its machines.

    - "cpu/percent" (mean over the ranks' machines), "cpu/memory_percent", and of the processes themselves
      "cpu/process_gib" (resident memory, the largest of all ranks) and "cpu/process_percent" (100: one core);
    - with an accelerator "device/allocated_gib", "device/reserved_gib", "device/peak_allocated_gib" (the largest of
      all ranks) and, on CUDA with its management library, "device/utilization_percent".

    ``cpu_stats=False`` leaves the processor out, None means so where there is an accelerator. ``filter_keys`` keeps
    only these names. Values are taken once a row, and one exchange between the ranks brings them together. Raises
    ImportError, which names the extra, where psutil is missing.
    """

    def __init__(self, cpu_stats: bool | None = None, filter_keys: set[str] | None = None) -> None:
        self.cpu_stats, self.filter_keys = cpu_stats, None if filter_keys is None else set(filter_keys)
        self._process: Any = None
        self._row = 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit" or self.cpu_stats is False or (self.cpu_stats is None and trainer.device.type != "cpu"):
            return
        try:
            import psutil
        except ImportError:
            raise ImportError(
                "Expected psutil for DeviceStatsMonitor. Received: it is not installed. Run "
                "`pip install 'drivetrain[stats]'`, or pass cpu_stats=False."
            ) from None
        self._process = psutil.Process()
        psutil.cpu_percent(), self._process.cpu_percent()  # the first call only begins to count

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._row = self._row_number(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = self._row_number(trainer)
        if row > self._row:
            self._row = row
            values = self._processor() | self._accelerator(trainer.device)
            kept = self.filter_keys
            trainer.log_dict(over_ranks({k: v for k, v in values.items() if kept is None or k in kept}, trainer))

    def _row_number(self, trainer: Any) -> int:
        every: int = trainer.log_every_n_steps
        return trainer.global_step // every if every else 0

    def _processor(self) -> dict[str, float]:
        if self._process is None:
            return {}
        import psutil

        return {
            "cpu/percent": psutil.cpu_percent(),
            "cpu/memory_percent": psutil.virtual_memory().percent,
            "cpu/process_gib": self._process.memory_info().rss / 2**30,
            "cpu/process_percent": self._process.cpu_percent(),
        }

    def _accelerator(self, device: torch.device) -> dict[str, float]:
        values = {f"device/{name}_gib": number / 2**30 for name, number in device_memory(device).items()}
        if device.type == "cuda":
            try:
                values["device/utilization_percent"] = float(torch.cuda.utilization(device))
            except (ImportError, RuntimeError):  # without nvidia-ml-py, or where the driver does not tell
                pass
        return values


def over_ranks(values: dict[str, float], trainer: Any) -> dict[str, float]:
    """Return each value over all ranks: the largest of what ends in "_gib", the mean of the others."""
    world = trainer.accelerator.world
    numbers = list(values.values())
    highest = world.all_reduce(torch.tensor(numbers, dtype=torch.float64), "max").tolist()
    mean = world.all_reduce(torch.tensor(numbers, dtype=torch.float64), "mean").tolist()
    return {name: h if name.endswith("_gib") else m for name, h, m in zip(values, highest, mean)}
