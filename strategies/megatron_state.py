"""Weights and optimizer states of Megatron's models in our checkpoints: each rank writes and reads what it has.

They have the names and shapes of the same model on one process (see megatron_state_parts.py), so that a checkpoint goes
from any arrangement of ranks to any other, to plain torch and back. Weights are the float32 ones that the optimizer
trains, where there are such. What an engine has is described in megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from .checkpoint.pieces import Pieces, within
from .checkpoint.references import Reference, open_state
from .checkpoint.sharded import save_sharded, save_sharded_state
from .contents import is_extra
from .megatron_state_parts import Local, Source, locals_of
from .optimizer_order import IN_ORDER
from .world import World

_LISTED = 5  # names in a message


@dataclass
class Trained:
    """A weight as the optimizer has it: `main`, all of the local one or its elements from `first` on, and its state."""

    local: Local
    main: Tensor
    first: int | None
    inner: Any  # torch's optimizer

    @property
    def state(self) -> dict[str, Any]:
        """Its state, which may be empty."""
        found: dict[str, Any] = self.inner.state.get(self.main, {})
        return found


# Weights


def parts(module: nn.Module, engine: Any, *, master: bool) -> dict[str, Any]:
    """Returns this rank's part of a module's state dict, under the names of the whole: Pieces, and what is beside them.

    With `master` trained weights are the optimizer's own.
    """
    prefix = prefix_in(module, engine)
    own = _locals(engine, prefix)
    found: dict[str, Any] = {local.name: local.pieces(local.tensor) for local in own}
    if master and engine.optimizer is not None:
        elsewhere = torch.empty(0)
        for local in own if _is_shared_out(engine) else ():
            if local.tensor.requires_grad:  # of which other ranks may have all
                found[local.name] = local.pieces(elsewhere, 0)
        for one in trained(engine, own):
            found[one.local.name] = one.local.pieces(one.main, one.first)
    found |= {name: found[local.name] for local in own for name in local.also}
    state = module.state_dict()
    return found | {name: value for name, value in state.items() if not name.startswith(f"{prefix}chunks.")}


def save_weights(writer: Any, state: Mapping[str, Any], *, stem: str) -> None:
    """Writes what `parts` returned; every rank has to call this."""
    extra = {name: value for name, value in state.items() if is_extra(name, value)}
    save_sharded(writer, {name: value for name, value in state.items() if name not in extra}, stem=stem)
    of_all = {name: value for part in writer.world.gather_object(extra) for name, value in part.items()}
    if of_all and writer.world.rank == 0:
        writer.state(f"{stem}-extra", of_all)


def load_weights(module: nn.Module, engine: Any, source: Source, *, world: World, strict: bool = True) -> Any:
    """Loads weights into a module and the optimizer's own; every rank has to call this.

    Raises:
        RuntimeError: keys are missing or unknown under `strict`.
    """
    prefix = prefix_in(module, engine)
    own = _locals(engine, prefix)
    there = set(source.names())
    rest = {name for name in module.state_dict() if not name.startswith(f"{prefix}chunks.")}
    known = [(local, local.known_as(there)) for local in own]
    mine = {name for local, name in known if name is not None for name in (name, *local.also)} | rest
    taken = {name for names in world.gather_object(mine) for name in names}
    missing = [local.name for local, name in known if name is None] + sorted(rest - there)
    result = _IncompatibleKeys(missing, [name for name in there if name not in taken])
    if strict:
        _check(module, result, world)
    of_main = {one.local.name: one for one in trained(engine, own)} if engine.optimizer is not None else {}
    for local, name in known:
        if name is None:
            continue
        local.fill(local.tensor.detach(), source)
        one = of_main.get(local.name)
        if one is not None and not _same_memory(one.main, local.tensor):
            local.fill(one.main.detach(), source, first=one.first)
    values = {name: source.read(name, ((0,) * len(source.shape(name)), source.shape(name))) for name in rest & there}
    module.load_state_dict(values, strict=False)
    return result


def complete(state: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Returns the same names in the same order on every rank (collective): what others have has no values here."""
    outlines: dict[str, Any] = {}
    for part in world.gather_object({name: _outline(value) for name, value in state.items()}):
        outlines = {**part, **outlines}
    return {name: state.get(name, outlines[name]) for name in sorted(outlines, key=order)}


def whole(value: Any, world: World) -> Any:
    """Returns a whole tensor on the CPU for Pieces, on the first rank (collective); others as they are."""
    if not isinstance(value, Pieces):
        return value.detach().cpu() if isinstance(value, Tensor) else value
    found = torch.empty(value.shape, dtype=value.dtype)
    for boxes, views in world.gather_object((value.boxes, [view.detach().cpu().clone() for view in value.views])):
        for box, view in zip(boxes, views) if world.rank == 0 else ():
            found[within(box, (0,) * len(value.shape))].copy_(view)
    return found


def gathered(state: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Returns what `parts` returned with whole tensors, on the first rank only (collective)."""
    found = {name: whole(value, world) for name, value in complete(state, world).items()}
    return found if world.rank == 0 else {}


# Optimizer states


def save_optimizer(writer: Any, engine: Any, prefix: str, *, stem: str, without: bool = False) -> None:
    """Writes the state of the engine's optimizer, or the groups `without` it; every rank has to call this."""
    tree = optimizer_parts(engine, prefix)
    save_sharded_state(writer, stem, {**tree, "state": {}} if without else tree)


def optimizer_parts(engine: Any, prefix: str) -> dict[str, Any]:
    """Returns this rank's part of the optimizer's state, by names of the whole model, which begin with `prefix`."""
    own = _locals(engine, prefix)
    state: dict[str, Any] = {}
    for one in trained(engine, own):
        found = {key: _state_part(one, key, value) for key, value in one.state.items() if value is not None}
        steps = [group["step"] for group in one.inner.param_groups if "step" in group]
        if found and steps:  # of fused kernels, which count for a whole group
            found["step"] = torch.tensor(float(steps[0]))
        if found:
            state[one.local.name] = found
    return {"state": state, "param_groups": _groups(engine, own)}


def load_optimizer(checkpoint: Any, engine: Any, prefix: str, *, stem: str, world: World) -> None:
    """Reads what this rank holds of a state that any strategy has saved; every rank has to call this.

    Raises:
        ValueError: the optimizer has other groups of parameters.
    """
    _load(open_state(checkpoint, stem), engine, prefix, stem.replace("-", " "), world)


def whole_optimizer(engine: Any, world: World) -> dict[str, Any]:
    """Returns the optimizer's state by names of the whole model, on the first rank only (collective)."""
    tree = optimizer_parts(engine, "")
    parts_of = {(name, key): value for name, state in tree["state"].items() for key, value in state.items()}
    pieces = {f"{name}.{key}": value for (name, key), value in parts_of.items() if isinstance(value, Pieces)}
    rest = {names: value for names, value in parts_of.items() if not isinstance(value, Pieces)}
    tensors = gathered(pieces, world)
    told = world.gather_object((rest, [group["params"] for group in tree["param_groups"]]))
    if world.rank:
        return {}
    state: dict[str, Any] = {}
    for (name, key), value in [one for part, _ in told for one in part.items()]:
        state.setdefault(name, {}).setdefault(key, value)
    for name, value in tensors.items():
        owner, _, key = name.rpartition(".")
        state.setdefault(owner, {})[key] = value
    names = [list(dict.fromkeys(name for _, groups in told for name in groups[place]))
             for place in range(len(tree["param_groups"]))]  # fmt: skip
    groups = [{**group, "params": own} for group, own in zip(tree["param_groups"], names)]
    return {"state": state, "param_groups": groups}


def load_whole_optimizer(engine: Any, saved: Mapping[str, Any], world: World) -> None:
    """Loads what `whole_optimizer` returned, of which every rank has all (collective).

    Raises:
        ValueError: the optimizer has other groups of parameters.
    """
    state = {name: {key: Held(value) if isinstance(value, Tensor) else value for key, value in one.items()}
             for name, one in saved["state"].items()}  # fmt: skip
    _load({**saved, "state": state}, engine, "", "the optimizer", world)


def _load(saved: Mapping[str, Any], engine: Any, prefix: str, label: str, world: World) -> None:
    if saved.get(IN_ORDER):
        raise ValueError(
            f"Expected parameters by name in {label} for Megatron, whose ranks have them in orders of their own. "
            "Received: a state that tells them by their order alone. Load it under strategy='single' and save it "
            "there, or load with weights_only=True."
        )
    own = _locals(engine, prefix)
    _load_groups(engine, own, saved["param_groups"], label, world)
    for one in trained(engine, own):
        name = one.local.known_as(saved["state"])
        if name is None or not saved["state"][name]:
            one.inner.state.pop(one.main, None)
        else:
            one.inner.state[one.main] = _state_of(one, saved["state"][name])
    vars(engine.given)["_opt_called"] = bool(saved["state"])  # else a scheduler complains of the order


def trained(engine: Any, own: list[Local]) -> Iterator[Trained]:
    """What the optimizer of an engine trains on this rank."""
    by_id = {id(local.tensor): local for local in own}
    for one in _optimizers(engine):
        inner = one.optimizer
        if inner is None:
            continue
        places = getattr(one, "model_param_group_index_map", None)
        if places is not None:  # the distributed optimizer: some of a weight's elements, in a row
            for parameter, (group, place) in places.items():
                first = one._get_model_param_range_map(parameter)["param"].start
                yield Trained(by_id[id(parameter)], inner.param_groups[group]["params"][place], first, inner)
            continue
        held = {id(main) for group in inner.param_groups for main in group["params"]}
        for local in own:
            main = getattr(local.tensor, "main_param", None)
            main = local.tensor if main is None else main
            if id(main) in held:
                yield Trained(local, main, None, inner)


def _optimizers(engine: Any) -> list[Any]:
    """Megatron's optimizers: one for dense weights, and perhaps one for experts."""
    return list(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]))


def _is_shared_out(engine: Any) -> bool:
    """Whether ranks with other data share the optimizer's weights and states."""
    return any(hasattr(one, "model_param_group_index_map") for one in _optimizers(engine))


def _state_part(one: Trained, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or key == "step" or value.numel() != one.main.numel():
        return torch.tensor(float(value)) if key == "step" else value
    return one.local.pieces(value, one.first)


def _state_of(one: Trained, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state to go on with, in the memory of the one that is there where it fits."""
    found: dict[str, Any] = {}
    for key, value in saved.items():
        local = isinstance(value, (Reference, Held)) and key != "step" and len(value.shape) == len(one.local.shape)
        if local and value.shape[1:] == one.local.shape[1:]:
            before = one.state.get(key)
            target = torch.zeros_like(one.main) if before is None else before
            one.local.fill(target, _Alone(one.local.name, value), first=one.first)
            found[key] = target
        else:
            found[key] = _value(value)
    if not type(one.inner).__module__.startswith("torch.") and "step" in found:
        step = int(found.pop("step"))
        for group in one.inner.param_groups:
            group["step"] = step
    return found


@dataclass(frozen=True)
class Held:
    """A whole tensor in memory, in the place of a Reference."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    def read(self, box: Any = None) -> Tensor:
        """A box of it."""
        return self.tensor.clone() if box is None else self.tensor[within(box, (0,) * self.tensor.ndim)]


class _Alone:
    """One tensor of a state, as a Source."""

    def __init__(self, name: str, reference: Reference | Held) -> None:
        self._name, self._reference = name, reference

    def names(self) -> list[str]:
        """Its name."""
        return [self._name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._reference.shape

    def read(self, name: str, box: Any) -> Tensor:
        """A box of it."""
        return self._reference.read(box)


def _value(value: Any) -> Any:
    return value.read() if isinstance(value, (Reference, Held)) else value


# Groups of parameters: those of the script's optimizer, whose options Megatron's follow


def _groups(engine: Any, own: list[Local]) -> list[dict[str, Any]]:
    names = {id(local.tensor): local.name for local in own}
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]}
        for group in engine.given.param_groups
    ]


def _load_groups(engine: Any, own: list[Local], saved: list[dict[str, Any]], label: str, world: World) -> None:
    groups = engine.given.param_groups
    own_names = [group["params"] for group in _groups(engine, own)]
    of_all = world.gather_object(own_names)
    here = [{name for names in of_all for name in names[place]} for place in range(len(groups))]
    aliases = {name: local.known_as({name for group in saved for name in group["params"]})
               for local in own for name in [local.name]}  # fmt: skip
    there = [set(group["params"]) for group in saved]
    wrong = [place for place, (names, mine) in enumerate(zip(there, own_names))
             if not {aliases[name] for name in mine} <= names or len(names) != len(here[place])]  # fmt: skip
    if world.agree(len(here) != len(there) or bool(wrong)):
        raise ValueError(
            f"Expected the groups of parameters of {label}: {[len(names) for names in here]} parameters. Received: "
            f"{[len(names) for names in there]} in the checkpoint. Build the model and the optimizer as they were, or "
            "load with weights_only=True."
        )
    for group, options in zip(groups, saved):
        group.update({key: _value(value) for key, value in options.items() if key != "params"})


# Small parts


def prefix_in(module: nn.Module, engine: Any) -> str:
    """Returns what the names of Megatron's model begin with in a module."""
    name = next(name for name, part in module.named_modules() if part is engine.model)
    return f"{name}." if name else ""


def prefix_of(names: Mapping[int, str], engine: Any) -> str:
    """Returns what they begin with, by the names of parameters by id."""
    own = engine.model.named_parameters()
    name, parameter = next((name, parameter) for name, parameter in own if id(parameter) in names)
    return names[id(parameter)].removesuffix(name)


def _locals(engine: Any, prefix: str) -> list[Local]:
    vocabulary = getattr(engine.model.architecture, "vocab_size", None)
    return locals_of(engine.model.chunks, prefix, vocabulary=vocabulary)


def _check(module: nn.Module, result: Any, world: World) -> None:
    problems = [f"{part} {keys[:_LISTED]}" for part, keys in zip(("missing", "unexpected"), result) if keys]
    told = [text for text in world.gather_object("; ".join(problems)) if text]
    if told:
        raise RuntimeError(f"Expected the weights of {type(module).__name__}. Received: {told[0]}.")


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _outline(value: Any) -> Any:
    return Pieces(value.shape, value.dtype) if isinstance(value, Pieces) else None


def order(name: str) -> list[Any]:
    """Sorts names by their parts, numbers by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
