"""Weights and optimizer states of DeepSpeed's engines, whole and by the model's own names, and back.

They are read by the engine's accessors (`safe_get_full_…`) and written by `safe_set_…`, so that a checkpoint is the
same files as every other strategy's, and no pickle is read. Everything here is collective: all ranks take part, and
only those with `keep` hold what was gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from . import deepspeed_tensor as tensor
from .deepspeed_optimizer import EngineOptimizer

_LISTED = 5  # names in a message


def partitioned(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned the weights of a module."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


# Weights


def weights(module: torch.nn.Module, *, engine: Any = None, master: bool = False, keep: bool = True) -> dict[str, Any]:
    """Returns a module's state dict; of trained weights the engine's float32 ones with `master`."""
    whole: dict[int, torch.Tensor] = {}
    state = module.state_dict(keep_vars=True)
    for parameter in dict.fromkeys(value for value in state.values() if isinstance(value, torch.nn.Parameter)):
        full = tensor.whole(parameter, _whole(parameter, engine, master))
        if keep:
            whole[id(parameter)] = full.detach().cpu() if hasattr(parameter, "ds_id") else full.detach()
    if not keep:
        return {}
    plain = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    return {key: whole.get(id(state[key]), value) for key, value in plain.items()}


def _whole(parameter: torch.nn.Parameter, engine: Any, master: bool) -> torch.Tensor:
    if master and engine is not None and parameter.requires_grad:
        found = _master(parameter, engine)
        if found is not None:
            return found
    if not hasattr(parameter, "ds_id"):
        return parameter
    with import_module("deepspeed").zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _master(parameter: torch.nn.Parameter, engine: Any) -> torch.Tensor | None:
    """The float32 weights that the engine trains, where the parameter itself is not one."""
    if parameter.dtype == torch.float32 and not hasattr(parameter, "ds_id"):
        return None
    copies = _copies(engine)
    if id(parameter) in copies:
        return copies[id(parameter)]
    if hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping"):
        found: torch.Tensor | None = import_module("deepspeed.utils").safe_get_full_fp32_param(parameter)
        return found
    return None


def _copies(engine: Any) -> dict[int, torch.Tensor]:
    """The float32 copies of 16-bit weights without ZeRO, by the id of the weights."""
    optimizer = engine.optimizer
    halves, wholes = getattr(optimizer, "fp16_groups", None), getattr(optimizer, "fp32_groups", None)
    if engine.zero_optimization_stage() or not halves or not wholes:
        return {}
    return {id(half): whole for ours, theirs in zip(halves, wholes) for half, whole in zip(ours, theirs)}


def load_weights(
    module: torch.nn.Module, state: Mapping[str, Any], *, engine: Any = None, strict: bool = True
) -> _IncompatibleKeys:
    """Loads whole weights, of which every rank has all, into a module and the engine's float32 copies.

    Raises:
        RuntimeError: keys are missing or unknown under `strict`, or a shape differs.
    """
    own = module.state_dict(keep_vars=True)
    state = {key: tensor.part(own[key], value) if key in own else value for key, value in state.items()}
    if partitioned(module):
        result = _load_partitioned(module, state, strict)
    else:
        result = module.load_state_dict(state, strict=strict)
    if engine is not None and engine.optimizer is not None:
        pairs = {id(own[key]): (own[key], value) for key, value in state.items() if key in own}
        for parameter, value in pairs.values():
            _set_master(parameter, value, engine)
    return result


def _load_partitioned(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> _IncompatibleKeys:
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    result = _IncompatibleKeys([key for key in own if key not in state], [key for key in state if key not in own])
    problems = [f"{part} {keys[:_LISTED]}" for part, keys in zip(("missing", "unexpected"), result) if keys and strict]
    gather = import_module("deepspeed").zero.GatheredParameters
    for key, parameter in own.items():
        if key not in state or not hasattr(parameter, "ds_id"):
            continue
        if not problems and tuple(parameter.ds_shape) == tuple(state[key].shape):
            with gather([parameter], modifier_rank=0):
                parameter.data.copy_(state[key])
        elif not problems:
            problems.append(f"{key} of shape {tuple(state[key].shape)} for {tuple(parameter.ds_shape)}")
    if problems:
        raise RuntimeError(f"Expected the weights of {type(module).__name__}. Received: {'; '.join(problems)}.")
    rest = {key: state[key] for key, value in own.items() if key in state and not isinstance(value, torch.nn.Parameter)}
    module.load_state_dict(rest, strict=False)
    return result


def _set_master(parameter: Any, value: torch.Tensor, engine: Any) -> None:
    if not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad:
        return
    copies = _copies(engine)
    if id(parameter) in copies:
        copies[id(parameter)].data.copy_(value)
    else:
        _set(parameter, value, None)


# Optimizer states


class Gathered:
    """An optimizer's state as `torch.optim.Optimizer.state_dict` shows it, gathered while it is in use."""

    def __init__(self, optimizers: Iterable[EngineOptimizer], *, keep: bool, states: bool = True) -> None:
        self._optimizers, self._keep, self._states = list(optimizers), keep, states

    def __enter__(self) -> None:
        for optimizer in self._optimizers:
            optimizer.shown = state_dict(optimizer, keep=self._keep, states=self._states)

    def __exit__(self, *details: Any) -> None:
        for optimizer in self._optimizers:
            optimizer.shown = None


def state_dict(optimizer: EngineOptimizer, *, keep: bool = True, states: bool = True) -> dict[str, Any]:
    """Returns the whole state with parameters by number; without `states` the groups alone."""
    found: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for place, group in enumerate(optimizer.param_groups):
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        options = {key: value for key, value in group.items() if key not in ("params", "step")}
        groups.append({**options, "params": numbers})
        for index, parameter in zip(numbers, group["params"]) if states else ():
            own = _state_of(optimizer, parameter, place, keep)
            if own:
                found[index] = own
    return {"state": found, "param_groups": groups}


def _state_of(optimizer: EngineOptimizer, parameter: Any, index: int, keep: bool) -> dict[str, Any]:
    engine, group = optimizer.engine, optimizer.param_groups[index]
    flat = _flat(engine, parameter, index)
    if flat is None:
        return {}
    state = engine.basic_optimizer.state.get(flat, {})
    whole = _same_size(state, flat)
    read = import_module("deepspeed.utils").safe_get_full_optimizer_state
    found = {}
    for key in state:
        if key not in whole:
            found[key] = state[key]
            continue
        direct = flat is parameter or id(parameter) in _copies(engine)
        found[key] = tensor.whole(parameter, state[key] if direct else read(parameter, key))
    if found and "step" in group:  # DeepSpeed's fused Adam counts for the whole group
        found["step"] = group["step"]
    if isinstance(found.get("step"), int):
        found["step"] = torch.tensor(float(found["step"]))  # as torch's optimizers keep it
    return {key: _kept(value) for key, value in found.items()} if keep else {}


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def load_state_dict(optimizer: EngineOptimizer, saved: Mapping[str, Any]) -> None:
    """Loads a whole state, of which every rank has all."""
    number = 0
    for place, (group, options) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        for key, value in options.items():
            if key != "params" and key in group:
                group[key] = value
        for parameter in group["params"]:
            _load_state(optimizer, parameter, place, saved["state"].get(number, {}))
            number += 1
    vars(optimizer.basic)["_opt_called"] = bool(saved["state"])  # else a scheduler complains of the order


def _load_state(optimizer: EngineOptimizer, parameter: Any, index: int, saved: Mapping[str, Any]) -> None:
    engine, group = optimizer.engine, optimizer.param_groups[index]
    flat = _flat(engine, parameter, index)
    if flat is None:
        return
    states = engine.basic_optimizer.state
    if not saved:
        states.pop(flat, None)
        return
    if getattr(engine.optimizer, "swap_optimizer", False) and flat.numel() == 0:
        raise NotImplementedError(
            "Expected optimizer states in memory to load a checkpoint into. Received: states that DeepSpeed has "
            "swapped out to NVMe. Go on with offload_optimizer_device='cpu', or by accelerator.strategy.load_native."
        )
    saved = {key: tensor.part(parameter, value) for key, value in saved.items()}
    state = _room(engine, flat, saved, parameter)
    for key, value in saved.items():
        if key == "step" and ("step" in group or type(engine.basic_optimizer).__name__ == "FusedAdam"):
            group["step"] = int(value)  # which counts for the whole group
        elif key == "step":
            state["step"] = int(value) if _counts(engine) else torch.as_tensor(value).clone()
        elif isinstance(value, torch.Tensor) and value.numel() == _numel(parameter):
            _write_state(engine, parameter, flat, key, value)
        else:
            state[key] = value


def _room(engine: Any, flat: Any, saved: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """The state of a flat parameter with tensors to load into, linked to the model's parameters where ZeRO does so."""
    state: dict[str, Any] = engine.basic_optimizer.state[flat]
    for key, value in saved.items():
        shaped = isinstance(value, torch.Tensor) and value.numel() == _numel(parameter)
        if key not in state and shaped and key != "step":
            state[key] = torch.zeros_like(flat, dtype=value.dtype)
            if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
                engine.optimizer._hp_optimizer_states_linked = False
    return state


def _write_state(engine: Any, parameter: Any, flat: Any, key: str, value: torch.Tensor) -> None:
    if flat is parameter or id(parameter) in _copies(engine):
        engine.basic_optimizer.state[flat][key].copy_(value)
        return
    if not getattr(engine.optimizer, "_hp_optimizer_states_linked", True):
        # Linking looks at every group: those that are still empty are linked again when they are filled.
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    _set(parameter, value, key)


def _set(parameter: Any, value: torch.Tensor, key: str | None) -> None:
    """Writes one whole tensor into the parts that this rank holds of it."""
    accessors = import_module("deepspeed.utils")
    value = value.float() if key is None else value
    if hasattr(parameter, "_z3_optimizer"):
        part = _part(parameter, value)
        if key is None:
            accessors.safe_set_local_fp32_param(parameter, part)
        else:
            accessors.safe_set_local_optimizer_state(parameter, part, key)
    elif getattr(parameter, "_hp_mapping", None) is not None:
        target = value.to(parameter.device)
        if key is None:
            accessors.safe_set_full_fp32_param(parameter, target)
        else:
            accessors.safe_set_full_optimizer_state(parameter, target, key)


def _part(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's share of a whole tensor, zeros behind its end."""
    size = parameter.ds_tensor.numel()
    rank = parameter._z3_optimizer._get_param_partition_rank(parameter)
    flat = value.reshape(-1)[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _flat(engine: Any, parameter: Any, index: int) -> Any:
    """The tensor by which the basic optimizer knows a parameter of a group, often a flat one; None if it is frozen."""
    optimizer = engine.optimizer
    if not parameter.requires_grad:
        return None
    if hasattr(parameter, "_z3_optimizer"):
        return optimizer.fp32_partitioned_groups_flat[optimizer.grad_position[optimizer.get_param_id(parameter)][0]]
    copies = _copies(engine)
    if id(parameter) in copies:
        return copies[id(parameter)]
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)[index]
    return parameter


def _same_size(state: Mapping[str, Any], flat: Any) -> set[str]:
    return {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == flat.shape
            and key != "step"}  # fmt: skip


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _counts(engine: Any) -> bool:
    """Whether the basic optimizer keeps its number of steps as an int, as DeepSpeed's own for the CPU do."""
    return type(engine.basic_optimizer).__module__.startswith("deepspeed.")

