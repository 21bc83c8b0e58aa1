"""Writes down digests of a run: samples, random states, the output of every module, weights, optimizer states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_64

from ..callbacks.base import Callback
from ..strategies import random

if TYPE_CHECKING:
    from .module import TrainModule
    from .trainer import Trainer

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 20


class Seen(BaseException):
    """A witness has seen enough: ends the run, past everything that catches errors."""


class Witness:
    """Sees a fit until a step; ``parts`` are its callbacks, one before and one after all others.

    At the step ``until`` it saves ``checkpoint`` (if one is wanted) and ends the run by ``Seen``.
    """

    def __init__(self, path: Path, *, until: int, checkpoint: Path | None) -> None:
        self.until, self.checkpoint = until, checkpoint
        self._file = path.open("w", encoding="utf-8")
        self._seen: dict[str, str] = {}
        self._batch: dict[str, Any] = {}
        self._asked = False

    def parts(self) -> list[Callback]:
        """Return the callbacks to add to a trainer."""
        first, last = Callback(), Callback()
        first.priority, last.priority = -(10**9), 10**9
        first.on_train_start = lambda trainer, module: self._listen(trainer, module)  # type: ignore[method-assign]
        first.on_train_batch_start = self._begin  # type: ignore[method-assign]
        last.on_train_batch_end = self._end  # type: ignore[method-assign]
        return [first, last]

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _listen(self, trainer: Trainer, module: TrainModule) -> None:
        for name, part in module.named_modules():
            if part is not module:
                part.register_forward_hook(self._hook(trainer, name, part))

    def _hook(self, trainer: Trainer, name: str, part: nn.Module) -> Any:
        title = f"the output of {name} ({type(part).__name__})"

        def note(part: nn.Module, inputs: Any, output: Any) -> None:
            if trainer.stage == "train" and not torch.compiler.is_compiling():
                self._note(f"what {name} ({type(part).__name__}) was given", inputs)
                self._note(title, output)

        return note

    def _begin(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        progress = trainer.progress
        self._seen = {}
        self._batch = {
            "epoch": progress.epoch,
            "batch": batch_idx,
            "step before": progress.step,
            "attributes": dict(attributes(module)),
        }
        self._note("the samples of the batch", batch)
        for source, state in random.capture(trainer.device).items():
            self._note(f"the random state of {source}", state)

    def _end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(f"what training_step of {type(module).__name__} returned", outputs)
        if trainer.progress.step != self._batch["step before"]:
            self._note_state(trainer, module)
        line = {**self._batch, "step": trainer.progress.step, "seen": self._seen}
        self._file.write(json.dumps(line) + "\n")
        if trainer.progress.step >= self.until:
            self._finish(trainer)

    def _note_state(self, trainer: Trainer, module: TrainModule) -> None:
        for name, tensor in module.state_dict().items():
            self._note(f"the weight {name}", tensor)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for index, optimizer in enumerate(trainer.optimizers):
            for title, state in states_of(optimizer, index, names):
                self._note(title, state)
        for index, config in enumerate(trainer.lr_scheduler_configs):
            self._note(f"the state of scheduler {index}", config.scheduler.state_dict())

    def _finish(self, trainer: Trainer) -> None:
        self._file.flush()
        if self.checkpoint is None:
            raise Seen
        if not self._asked:
            self._asked = True
            trainer.save_checkpoint(self.checkpoint, then=_enough)

    def _note(self, name: str, value: Any) -> None:
        """Keep a digest under a name; a second value of that name (a module called twice) joins it."""
        title, number = name, 1
        while title in self._seen:
            number += 1
            title = f"{name}, call {number}"
        self._seen[title] = digest(value)


def states_of(optimizer: Any, index: int, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield (title, value) of what an optimizer holds; ``names`` are those of parameters by their ids."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for parameter, state in inner.state.items():
        yield f"the state of optimizer {index} for {names.get(id(parameter), 'a tensor')}", state
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    yield f"the settings of optimizer {index}", groups


def digest(value: Any) -> str:
    """Return a hash of nested values, 16 hexadecimal digits; equal bits give equal digests."""
    content = xxh3_64()
    for part in _bytes(value, 0):
        content.update(part)
    return content.hexdigest()


def attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, value or digest) of the plain attributes of all submodules that are in no state_dict."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_") or name == "training" or not _is_plain(value, 0):
                continue
            text = repr(value)
            shown = text if isinstance(value, _PLAIN) and len(text) < 60 else f"{type(value).__name__} {digest(value)}"
            yield f"{path}.{name}" if path else f"{type(module).__name__}.{name}", shown


def _bytes(value: Any, depth: int) -> Iterator[bytes | memoryview]:
    yield f"{type(value).__name__}:".encode()
    if depth > _DEPTH:
        return
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield f"{value.dtype}{list(value.shape)}".encode()
        yield memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _bytes(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _bytes(item, depth + 1)
    elif isinstance(value, _PLAIN):
        yield repr(value).encode()


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, (Tensor, np.ndarray, *_PLAIN)):
        return True
    if depth > 3:
        return False
    if isinstance(value, dict):
        return all(_is_plain(item, depth + 1) for item in value.values())
    return isinstance(value, (list, tuple)) and all(_is_plain(item, depth + 1) for item in value)


def _enough() -> None:
    raise Seen
