"""The state of models of which each rank holds a part: gathered, and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import Strategy
from .checkpoint import sharded
from .checkpoint.gathering import save_gathered
from .checkpoint.tensors import clean_keys
from .contents import fitted, is_extra
from .optimizer import load_named_state, named_state, unwrap_optimizer
from .replaced_parameters import part_like


class ShardedState(Strategy):
    """A strategy whose models and optimizers are in parts, which checkpoints keep as parts.

    With `full_state` the first rank gathers and writes all of it instead.
    """

    full_state = False
    reads_parts = True

    def state_dict(self, model: Any, *, full: bool = True) -> dict[str, Any]:
        """Returns the weights under the names of the user's module: this rank's parts (DTensors) with `full=False`.

        Else whole and on the CPU, on the first rank only, gathered one by one; the others get an empty dict.
        """
        state = self._parts(model)
        return gathered(state, keep=self.world.rank == 0) if full else state

    def weights(self, model: Any) -> dict[str, Any]:
        return self.state_dict(model, full=self.full_state)

    def load_state_dict(self, model: Any, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads weights, whole ones or parts; of a whole one each rank takes its part."""
        module = self.unwrap(model)
        targets = self._parts(model)
        parts = {name: part_like(value, targets[name]) if name in targets else value for name, value in state.items()}
        return module.load_state_dict(fitted(parts, module), strict=strict)

    def save_weights(self, writer: Any, state: dict[str, Any], *, stem: str, **options: Any) -> None:
        if self.full_state:
            super().save_weights(writer, state, stem=stem, **options)
            return
        extra = {key: value for key, value in state.items() if is_extra(key, value)}
        sharded.save_sharded(writer, {key: state[key] for key in state if key not in extra}, stem=stem)
        if extra and writer.world.rank == 0:
            writer.state(f"{stem}-extra", extra)

    def save_model(self, writer: Any, model: Any, **options: Any) -> None:
        """Writes whole weights, gathered one after the other."""
        state = self._parts(model)
        extra = {key: value for key, value in state.items() if is_extra(key, value)}
        save_gathered(writer, {key: state[key] for key in state if key not in extra}, whole, **options)
        if extra and writer.world.rank == 0:
            writer.state("model-extra", extra)

    def load_weights(self, checkpoint: Any, model: Any, *, stem: str, strict: bool = True) -> Any:
        parts = sharded.open_parts(checkpoint, stem=stem)
        targets = self._parts(model)
        state: dict[str, Any] = {
            name: parts.like(name, targets[name]) if isinstance(targets.get(name), Tensor) else parts.read(name)
            for name in self._wanted(parts.names(), targets)
        }
        if checkpoint.has(f"{stem}-extra.json"):
            state |= checkpoint.state(f"{stem}-extra")
        return self.load_state_dict(model, state, strict=strict)

    def _wanted(self, names: list[str], targets: Mapping[str, Any]) -> list[str]:
        """The tensors of a checkpoint that this rank looks at."""
        return names

    def save_optimizer(self, writer: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        state = named_state(optimizer, names)
        if not self.full_state:
            sharded.save_sharded_state(writer, stem, state)
            return
        whole = _whole(state)
        if writer.world.rank == 0:
            writer.state(stem, whole)

    def load_optimizer(self, checkpoint: Any, optimizer: Any, names: Mapping[int, str], *, stem: str) -> None:
        optimizer = unwrap_optimizer(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        targets = {names[id(parameter)]: parameter for parameter in parameters if id(parameter) in names}
        saved = sharded.load_sharded_state(checkpoint, stem, targets)
        load_named_state(optimizer, saved, names, label=stem.replace("-", " "))
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                state.update({key: part_like(value, parameter) for key, value in state.items()})

    def _parts(self, model: Any) -> dict[str, Any]:
        """This rank's parts of the weights, by name; tied ones are one object."""
        module = self.unwrap(model)
        return clean_keys(module.state_dict(keep_vars=True), module)


def gathered(state: Mapping[str, Any], *, keep: bool = True) -> dict[str, Any]:
    """Returns whole tensors on the CPU for those in parts, one after the other; nothing unless `keep`."""
    found: dict[str, Any] = {}
    known: dict[int, Any] = {}
    for name, value in state.items():
        if keep and id(value) not in known:
            known[id(value)] = whole(value)
        elif id(value) not in known:
            known[id(value)] = None
            _take_part(value)
        if keep:
            found[name] = known[id(value)]
    return found


def whole(value: Any) -> Any:
    """Returns a tensor in parts as a whole one on the CPU (collective), a whole one without its graph, else itself."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.full_tensor().cpu()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _take_part(value: Any) -> None:
    if isinstance(value, DTensor):
        with torch.no_grad():
            value.full_tensor()


def _whole(value: Any) -> Any:
    """Nested state with whole tensors; every rank has to call this."""
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_whole, value))
    return whole(value)
