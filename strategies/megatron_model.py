"""MegatronModel: a model of megatron-core as a user's module holds it; each rank has one or more chunks of it.

    class Module(TrainModule):
        def configure_model(self):                    # Megatron's ranks are known by now
            self.model = MegatronModel({"num_layers": 4, "hidden_size": 64, …})
        def training_step(self, batch, index):
            return self.model.loss(batch)             # {"loss": mean over tokens, "weight": number of tokens}
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

In a training step the engine calls the user's step for each micro-batch and chunk; a call of the model ends the step on
ranks that do not have the last chunk. In evaluation every rank gets what the last chunk gave.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

_ALONE = (
    "Expected a model of Megatron in a run by Megatron. Received: no such run. Use Trainer(strategy='megatron') and "
    "make the model in configure_model, or make Accelerator(megatron_lm_plugin=…) before it."
)
_builder: Callable[[MegatronModel], Any] | None = None


class MegatronModel(nn.Module):
    """A model of megatron-core, whose chunks are made when the ranks are known.

    Args:
        config: what megatron_models.architecture takes (fields, a Hugging Face config, a folder), or an object with
            the methods `config(**engine)`, `build(config, pre_process=, post_process=, vp_stage=)` and `batch(data)`.
        options: further arguments of `architecture`.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        own = all(hasattr(config, name) for name in ("config", "build", "batch")) and not options
        models = import_module(".megatron_models", __package__)
        self.architecture = config if own else models.architecture(config, **options)
        self.config: Any = None  # Megatron's TransformerConfig, once chunks are there
        self.chunks = nn.ModuleList()
        self.run: Callable[[Any], Any] = _unprepared  # what an engine does with a micro-batch
        self.part: Callable[[Any], Any] = _whole  # this rank's part of its sequences
        if _builder is not None:
            self.build()

    def build(self) -> None:
        """Makes this rank's chunks, unless they are there.

        Raises:
            RuntimeError: no engine of Megatron is set up.
        """
        if len(self.chunks):
            return
        if _builder is None:
            raise RuntimeError(_ALONE)
        self.config, chunks = _builder(self)
        self.chunks.extend(chunks)

    def forward(self, data: Any) -> Any:
        """Returns the output for a batch: the losses of its tokens where it has labels, else logits."""
        return self.run(data)

    def batch(self, data: Any) -> Any:
        """Returns a batch as the model takes it: of each sequence the part that this rank has."""
        return self.part(self.architecture.batch(data))

    def loss(self, data: Any) -> dict[str, torch.Tensor]:
        """Returns the mean loss of a batch over its tokens, and their number as its weight."""
        total, count = self.batch(data).loss(self(data))
        return {"loss": total / count.clamp(min=1), "weight": count}


def find(module: nn.Module) -> MegatronModel | None:
    """Returns the model of Megatron in a module.

    Raises:
        ValueError: there are several.
    """
    found = [part for part in module.modules() if isinstance(part, MegatronModel)]
    if len(found) > 1:
        raise ValueError(f"Expected one MegatronModel in a module. Received: {len(found)}. Train each by a module.")
    return found[0] if found else None


def set_builder(builder: Callable[[MegatronModel], Any] | None) -> None:
    """Tells how chunks are made: by the engine of Megatron that is set up."""
    global _builder
    _builder = builder


def _whole(batch: Any) -> Any:
    return batch


def _unprepared(data: Any) -> Any:
    raise RuntimeError("Expected a prepared MegatronModel. Received: one that is not. Pass it to accelerator.prepare.")
