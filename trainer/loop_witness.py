"""What a training loop of one's own shows of itself, so that ``prove_loop`` can interrupt and compare it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..strategies import random
from .witness import Seen, attributes, digest, states_of


class LoopWitness:
    """Sees a loop until a step; the loop calls ``resume`` once, and ``step`` after each optimizer step."""

    def __init__(self, root: Path, name: str, *, until: int, save: bool, resume: bool) -> None:
        self._root, self._name, self._until, self._save, self._resume = root, name, until, save, resume
        self._steps = 0
        self._file: Any = None

    def resume(self, accelerator: Any) -> dict[str, Any] | None:
        """Load the checkpoint where the part goes on from one, and return its place; None for the beginning."""
        self._file = (self._root / f"{self._name}-{accelerator.process_index}.seen").open("w", encoding="utf-8")
        if not self._resume:
            return None
        saved = accelerator.load_state(self._root / "checkpoint")["proof"]
        self._steps = saved["steps"]
        return saved["place"]

    def step(
        self, accelerator: Any, batch: Any = None, loss: Any = None, *, place: dict[str, Any] | None = None
    ) -> None:
        """Take down a step that was made; ``place`` (plain values) is what ``resume`` returns where the loop goes on.

        Raises RuntimeError before ``resume`` was called. In the end it leaves the loop by an exception of its own.
        """
        if self._file is None:
            raise RuntimeError("Expected proof.resume(accelerator) before the first step. Received: none. Call it.")
        seen, contents = {"the samples of the batch": batch, "the loss": loss}, accelerator._contents
        models = [accelerator.unwrap_model(model) for model in contents.models]
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        for source, state in random.capture(accelerator.device).items():
            seen[f"the random state of {source}"] = state
        for model in models:
            seen |= {f"the weight {name}": tensor for name, tensor in model.state_dict().items()}
        for index, optimizer in enumerate(contents.optimizers):
            seen |= dict(states_of(optimizer, index, names))
        for index, scheduler in enumerate(contents.schedulers):
            seen[f"the state of scheduler {index}"] = scheduler.state_dict()
        line = {
            "epoch": None, "batch": None, "step before": self._steps, "step": self._steps + 1,
            "attributes": {key: value for model in models for key, value in attributes(model)},
            "seen": {name: digest(value) for name, value in seen.items()},
        }  # fmt: skip
        self._file.write(json.dumps(line) + "\n")
        self._steps += 1
        if self._steps >= self._until:
            self._finish(accelerator, place or {})

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()

    def _finish(self, accelerator: Any, place: dict[str, Any]) -> None:
        if self._save:
            state = {"steps": self._steps, "place": place}
            accelerator.save_state(self._root / "checkpoint", metadata={"proof": state})
        raise Seen
