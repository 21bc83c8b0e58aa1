"""What a training checkpoint holds, and in which file.

    model.safetensors, model_1.safetensors, …   weights of the prepared models, under the user's own names
    model.shards.json, model.shard-00000.…      instead of these, where each process writes what it holds (sharded.py);
                                                so for optimizers
    model-extra.json (+ .safetensors), …        what their modules keep beside tensors (`get_extra_state`), if any do
    optimizer-0.json (+ .safetensors), …        optimizer state by parameter names: loads on any number of processes
    training.json (+ .safetensors)              schedulers, the loss scaler, loaders, registered objects
    rank-00000.json (+ .safetensors), …         of each process: random states, registered objects that are `per_rank`

The first process writes everything that all share. How files become durable is the checkpoint folder's business.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from . import random
from .checkpoint import sharded
from .checkpoint.tensor_file import data_size
from .checkpoint.tensors import clean_keys, load_weights, save_weights
from .optimizer import unwrap_optimizer
from .precision import Precision
from .scheduler import unwrap_scheduler
from .sharded_gradients import local
from .world import World

if TYPE_CHECKING:
    from .base import Strategy

logger = logging.getLogger(__name__)
_WEIGHTS = re.compile(r"model(_\d+)?(-\d{5}-of-\d{5}|-extra)?\.(safetensors(\.index\.json)?|json)")
_SHARED = re.compile(rf"{_WEIGHTS.pattern}|(optimizer-\d+|training)\.(safetensors|json)")
_LARGE = re.compile(r"(model(_\d+)?(-\d{5}-of-\d{5})?|optimizer-\d+)\.safetensors")


class Contents:
    """Everything that was prepared or registered, in that order, and how it goes into a checkpoint and back."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []
        self.objects: list[Any] = []

    def clear(self) -> None:
        """Lets go of everything."""
        for held in (self.models, self.optimizers, self.schedulers, self.loaders, self.objects):
            held.clear()

    def size(self) -> int:
        """Returns how many bytes weights and optimizer states take on this process."""
        tensors = [tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())]
        for optimizer in self.optimizers:
            for state in unwrap_optimizer(optimizer).state.values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return data_size(local(tensor) for tensor in tensors if not is_lazy(tensor))

    def save(
        self,
        writer: Any,
        strategy: Strategy,
        *,
        precision: Precision,
        weights: list[dict[str, Any]],
        max_shard_size: int | str | None = None,
        extra: dict[str, Any] | None = None,
        weights_only: bool = False,
        loaders: bool = True,
    ) -> None:
        """Writes this process's files; `weights` are those of the models, `extra` is kept in training.json.

        With `loaders=False` somebody else keeps the places of the loaders.
        """
        options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        for index, state in enumerate(weights):
            strategy.save_weights(writer, state, stem=weights_name(index), **options)
        if weights_only:
            return
        names = parameter_names(strategy.unwrap(model) for model in self.models)
        for index, optimizer in enumerate(self.optimizers):
            strategy.save_optimizer(writer, optimizer, names, stem=f"optimizer-{index}")
        if writer.world.rank == 0:  # of those that save together; they keep their own ranks in the run
            writer.state("training", self._shared_state(precision, extra or {}, loaders=loaders))
        writer.state(rank_name(strategy.world.rank), self._own_state(strategy.world))

    def load(
        self,
        checkpoint: Any,
        strategy: Strategy,
        *,
        precision: Precision,
        models: list[Any],
        strict: bool = True,
        weights_only: bool = False,
        positions: bool = False,
    ) -> dict[str, Any]:
        """Restores the given models and, unless `weights_only`, everything else; returns what `save` got as `extra`.

        `positions` puts loaders back to their place within the epoch; else only their epoch is restored. Who wants no
        half of a damaged checkpoint lets it fetch what `read_by` names before.

        Raises:
            ValueError: other objects were saved than are here; the message says which.
        """
        saved = {} if weights_only else checkpoint.state("training")
        if not weights_only:
            self._check_counts(checkpoint, saved)
        for index, model in enumerate(models):
            strategy.load_weights(checkpoint, model, stem=weights_name(index), strict=strict)
        if weights_only:
            return {}
        names = parameter_names(strategy.unwrap(model) for model in self.models)
        for index, optimizer in enumerate(self.optimizers):
            strategy.load_optimizer(checkpoint, optimizer, names, stem=f"optimizer-{index}")
        self._load_shared(saved, precision, positions)
        self._load_own(checkpoint, strategy.world)
        return saved["extra"]

    def _shared_state(self, precision: Precision, extra: dict[str, Any], *, loaders: bool) -> dict[str, Any]:
        return {
            "optimizers": len(self.optimizers),
            "schedulers": [unwrap_scheduler(scheduler).state_dict() for scheduler in self.schedulers],
            "precision": precision.state_dict(),
            "loaders": [loader.state_dict() for loader in self.loaders] if loaders else None,
            "objects": [obj.state_dict() for obj in self._registered(per_rank=False)],
            "extra": extra,
        }

    def _load_shared(self, saved: dict[str, Any], precision: Precision, positions: bool) -> None:
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            unwrap_scheduler(scheduler).load_state_dict(state)
        precision.load_state_dict(saved["precision"])
        loaders = self.loaders if saved["loaders"] is not None else []
        for loader, state in zip(loaders, saved["loaders"] or [], strict=True):
            loader.load_state_dict(state if positions else _epoch_only(state))
        for obj, state in zip(self._registered(per_rank=False), saved["objects"], strict=True):
            obj.load_state_dict(state)

    def _own_state(self, world: World) -> dict[str, Any]:
        return {
            "random": random.capture(world.device),
            "objects": [obj.state_dict() for obj in self._registered(per_rank=True)],
        }

    def _load_own(self, checkpoint: Any, world: World) -> None:
        """Random states last: building anything above may have drawn from them."""
        name = rank_name(world.rank)
        if not checkpoint.has(f"{name}.json"):
            logger.warning(
                "The checkpoint %s has no state of rank %d: other processes have saved it. This rank keeps its own "
                "random state and its own per-rank objects.", checkpoint.directory, world.rank,
            )  # fmt: skip
            return
        own = checkpoint.state(name)
        for obj, state in zip(self._registered(per_rank=True), own["objects"], strict=True):
            obj.load_state_dict(state)
        random.restore(own["random"], world.device)

    def _registered(self, *, per_rank: bool) -> list[Any]:
        return [obj for obj in self.objects if bool(getattr(obj, "per_rank", False)) == per_rank]

    def _check_counts(self, checkpoint: Any, saved: dict[str, Any]) -> None:
        here = {
            "optimizers": len(self.optimizers),
            "schedulers": len(self.schedulers),
            "loaders": len(self.loaders),
            "objects": len(self._registered(per_rank=False)),
        }
        if saved["loaders"] is None:
            del here["loaders"]
        there = {key: saved[key] if isinstance(saved[key], int) else len(saved[key]) for key in here}
        if here != there:
            raise ValueError(
                f"Expected what was prepared and registered when {checkpoint.directory} was saved: {there}. Received: "
                f"{here}. Prepare and register the same objects in the same order before loading, or load with "
                "weights_only=True."
            )


def _epoch_only(state: dict[str, Any]) -> dict[str, Any]:
    return {"samples": 0, **{key: state[key] for key in ("epoch", "seed", "length") if key in state}}


def save_module(writer: Any, state: Mapping[str, Any], *, name: str = "model", **options: Any) -> None:
    """Writes a module's state dict: its weights, and beside them the states of its modules that are no tensors."""
    extra = {key: value for key, value in state.items() if is_extra(key, value)}
    save_weights(writer, {key: value for key, value in state.items() if key not in extra}, name=name, **options)
    if extra:
        writer.state(f"{name}-extra", extra)


def load_module(checkpoint: Any, *, name: str = "model") -> dict[str, Any]:
    """Returns the state dict that `save_module` wrote."""
    state: dict[str, Any]
    if sharded.is_sharded(checkpoint, name):
        parts = sharded.open_parts(checkpoint, stem=name)
        state = {key: parts.read(key) for key in parts.tensors}
        state |= {alias: state[first] for alias, first in parts.aliases.items()}
    else:
        state = load_weights(checkpoint, name=name)
    return state | checkpoint.state(f"{name}-extra") if checkpoint.has(f"{name}-extra.json") else state


def load_state(checkpoint: Any, stem: str) -> Any:
    """Returns nested state with whole tensors, which was written whole or in parts."""
    if sharded.is_sharded(checkpoint, stem):
        return sharded.load_sharded_state(checkpoint, stem, {})
    return checkpoint.state(stem)


def is_extra(key: str, value: Any) -> bool:
    """Whether an entry of a state dict is what a module keeps beside tensors."""
    return key.rpartition(".")[2] == "_extra_state" and not isinstance(value, torch.Tensor)


def weights_name(index: int) -> str:
    """Returns the stem of the file with the weights of a model by its number."""
    return "model" if index == 0 else f"model_{index}"


def read_by(rank: int, files: Iterable[str], *, weights_only: bool = False, parts: bool = False) -> list[str]:
    """Returns which files of a checkpoint a process reads whole; with `parts` none of weights and optimizers."""
    files = [name for name in files if not (parts and _LARGE.fullmatch(name))]
    if weights_only:
        return [name for name in files if _WEIGHTS.fullmatch(name)]
    own = {f"{rank_name(rank)}.{ending}" for ending in ("json", "safetensors")}
    return [name for name in files if name in own or _SHARED.fullmatch(name)]


def rank_name(rank: int) -> str:
    """Returns the stem of the file with what is one process's own."""
    return f"rank-{rank:05d}"


def fitted(state: Mapping[str, torch.Tensor], module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns weights under the keys that a module has, which a compiler or a wrapper inside it may have prefixed."""
    keys = clean_keys({key: key for key in module.state_dict()}, module)
    return {keys.get(key, key): value for key, value in state.items()}


def parameter_names(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Returns the name of every parameter of these models by its id.

    The first model's parameters have their own names; those of model number i (from 1) begin with "model_i.".
    """
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"model_{index}." if index else ""
        for name, parameter in clean_keys(dict(model.named_parameters()), model).items():
            names.setdefault(id(parameter), prefix + name)
    return names
