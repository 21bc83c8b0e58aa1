"""Advice when memory is exhausted: where and on what batch, how much the run holds, and what to change."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from ..strategies.memory import should_reduce_batch_size
from .base import AFTER_MODULE, Callback
from .checks import check_whole

logger = logging.getLogger(__name__)

_DEPTH = 4  # of nested batches that are described
_LOOPS = ("epoch", "run_loader")  # the functions of the trainer that go over batches
_WORDS = {"sanity_check": "the sanity check", "validate": "validation", "test": "test", "predict": "prediction"}


class OutOfMemory(Callback):
    """Add to an error that came from exhausted memory what it was about: step, shapes, and what to change.

    Part of every run, unless the Trainer is ``barebones``; costs nothing before. The advice is a note of the exception
    (below its traceback; before Python 3.11 a part of its message). With ``snapshot`` and CUDA, allocations are noted
    during the run (the last ``entries`` of them, which costs some time in each), and when memory is exhausted, their
    history is written to ``<log_dir>/memory-rank-0.pickle``, or into the folder that ``snapshot`` names; look at it on
    https://pytorch.org/memory_viz. Raises ValueError for ``entries`` below 1.
    """

    priority = AFTER_MODULE + 50

    def __init__(self, snapshot: bool | str | Path = False, *, entries: int = 100_000) -> None:
        check_whole("entries", entries, least=1)
        self.snapshot, self.entries = snapshot, entries
        self._records = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.snapshot and trainer.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=self.entries)
            self._records = True
        elif self.snapshot:
            logger.warning("Memory is recorded on CUDA only, not on %s; the advice comes all the same.", trainer.device)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self._records:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records = False

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if not exhausted(exception):
            return
        text = advice(trainer, exception)
        if self._records:
            text += f"\nThe history of memory lies in {self._dumped(trainer)}; see https://pytorch.org/memory_viz."
        _add(exception, text)

    def _dumped(self, trainer: Any) -> Path:
        folder = Path(self.snapshot if isinstance(self.snapshot, (str, Path)) else trainer.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"memory-rank-{trainer.global_rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        return path


def exhausted(error: BaseException) -> bool:
    """Tell whether an error says that there was not enough memory, of a device or of the machine."""
    return isinstance(error, MemoryError) or isinstance(error, Exception) and should_reduce_batch_size(error)


def advice(trainer: Any, error: BaseException) -> str:
    """Return where memory was exhausted, what filled it, and what can be done."""
    stage, index, batch = _place(error)
    evaluates = stage in _WORDS
    where = f"in {_WORDS[stage]}, after step" if evaluates else "in step"
    counted = "" if index is None else f", batch {index}"
    lines = [
        f"Out of memory on {trainer.device} (rank {trainer.global_rank}) {where} {trainer.global_step}, epoch "
        f"{trainer.current_epoch}{counted}."
    ]
    if batch is not None:
        lines.append(f"The batch: {described(batch)}.")
    lines += [held(trainer), "What helps:"]
    lines += [f"- {one}" for one in (_for_evaluation(trainer, stage) if evaluates else _for_training(trainer))]
    return "\n".join(lines)


def described(batch: Any, depth: int = 0) -> str:
    """Return dtypes and shapes of a nested batch: ``{x: float32[64, 3, 32, 32], y: int64[64]}``."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype)[6:]}{list(batch.shape)}"
    if isinstance(batch, Mapping) and depth < _DEPTH:
        return "{" + ", ".join(f"{key}: {described(value, depth + 1)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (list, tuple)) and depth < _DEPTH:
        shown = [described(value, depth + 1) for value in batch[:8]] + ["…"] * (len(batch) > 8)
        return "(" + ", ".join(shown) + ")"
    return type(batch).__name__


def held(trainer: Any) -> str:
    """Return how much weights, gradients and optimizer states take on this process."""
    weights = list(trainer.module.parameters()) + list(trainer.module.buffers())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    optimizers = (getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers)
    states = [v for o in optimizers for state in o.state.values() for v in state.values() if isinstance(v, Tensor)]
    parts = {"weights": weights, "gradients": gradients, "optimizer states": states}
    sizes = ", ".join(f"{name} {_size(tensors)}" for name, tensors in parts.items())
    text = f"Held by this process: {sizes}"
    if trainer.device.type == "cuda":
        used, reserved = torch.cuda.memory_allocated(trainer.device), torch.cuda.memory_reserved(trainer.device)
        total = torch.cuda.get_device_properties(trainer.device).total_memory
        text += f"; allocated {_bytes(used)}, reserved {_bytes(reserved)} of {_bytes(total)}"
    return text + "."


def _for_training(trainer: Any) -> list[str]:
    advices, loader = [], trainer.train_dataloader
    size, windows = getattr(loader, "batch_size", None), trainer.accelerator.gradient_accumulation_steps
    if size is not None and size > 1:
        smaller = f"batch_size={size // 2} and accumulate_grad_batches={2 * windows}"
        advices.append(f"Smaller batches with the same steps: {smaller} in the place of {size} and {windows}.")
    else:
        advices.append("Smaller or shorter samples: a batch holds one already, or its size is not known.")
    if trainer.precision.dtype in (torch.float32, torch.float64):
        advices.append('Lower precision: precision="bf16-mixed" halves most activations.')
    if trainer.strategy.replicates or trainer.world_size == 1:
        number = f"the {trainer.world_size} processes" if trainer.world_size > 1 else "several processes (devices=...)"
        advices.append(f'Sharding: strategy="fsdp" divides weights, gradients and optimizer states among {number}.')
    advices.append("Recomputing: torch.utils.checkpoint.checkpoint around the model's blocks keeps no activations.")
    if trainer.device.type == "cuda":
        advices.append("Where much more is reserved than allocated: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
    return advices


def _for_evaluation(trainer: Any, stage: str) -> list[str]:
    advices = [f"Smaller batches in the loader of {_WORDS[stage]}: its results do not depend on them."]
    if stage == "predict" and trainer.return_predictions:
        advices.append("Predictions that are not kept: return_predictions=False, and a callback that writes them.")
    advices.append("Outputs of steps that are not kept: log values in validation_step rather than collect its tensors.")
    return advices


def _place(error: BaseException) -> tuple[str, int | None, Any]:
    """Return the stage, the index and the batch that the trainer was at; they are found in its frames."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name in _LOOPS and "batch" in (found := frame.f_locals):
            return found.get("stage", "train"), found.get("index"), found["batch"]
    return "train", None, None


def _add(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = (f"{error}\n{text}", *error.args[1:])


def _size(tensors: Iterable[Tensor]) -> str:
    return _bytes(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.3g} GiB"
