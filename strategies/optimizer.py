"""The prepared optimizer: it steps at the end of an accumulation window, and its state is kept by parameter names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .gradients import GradientState
from .optimizer_order import IN_ORDER, named_in_order
from .precision import Precision

Step = Callable[[torch.optim.Optimizer, Any], "tuple[bool, Any]"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing inside an accumulation window.

    `optimizer` is the user's; attributes that are not found here are taken from it. `step` is what steps it and tells
    whether that was skipped (default: the precision's step).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        step: Step | None = None,
    ) -> None:
        # The base class is not initialised: parameters, groups and state are the wrapped optimizer's alone.
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = GradientState()
        self.step_was_skipped = False
        self._step = step or Precision().step
        if device_placement:
            place_state(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps at the end of a window and returns what the optimizer returns; inside a window does nothing."""
        if self.gradient_state.sync_gradients:
            self.step_was_skipped, result = self._step(self.optimizer, closure)
            return result
        return None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients at the end of a window; inside a window does nothing."""
        if self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def state(self) -> Any:
        """The optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters with their options."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that a group has unless it says otherwise."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state, parameters by index."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switches an optimizer that has modes (schedule-free ones) to training; others have none."""
        self._switch("train")

    def eval(self) -> None:
        """Switches an optimizer that has modes (schedule-free ones) to evaluation; others have none."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __copy__(self) -> AcceleratedOptimizer:
        new = type(self).__new__(type(self))
        new.__dict__ = dict(vars(self))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedOptimizer:
        new = memo[id(self)] = type(self).__new__(type(self))
        kept = ("_step", "scaler", "gradient_state")  # of the run, not of this optimizer
        for name, value in vars(self).items():
            new.__dict__[name] = value if name in kept else copy.deepcopy(value, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process: not how the run here steps it."""
        return {name: value for name, value in vars(self).items() if name not in ("_step", "gradient_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._step, self.gradient_state = Precision().step, GradientState()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the user's optimizer inside a prepared one."""
    inner: torch.optim.Optimizer = optimizer
    while isinstance(inner, AcceleratedOptimizer):
        inner = inner.optimizer
    return inner


def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Moves state that exists already to its parameters' devices; step counters stay where they are."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict):
            moved = {k: v.to(parameter.device) for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"}
            state.update(moved)


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Returns an optimizer's state with parameters by name instead of by index.

    Such a state loads into an optimizer that holds its parameters in another order, on any number of processes.
    Parameters that no model has are named by their place: "group_0.parameter_3".
    """
    optimizer = unwrap_optimizer(optimizer)
    saved = optimizer.state_dict()
    by_group = _names_by_group(optimizer, names)
    by_index: dict[Any, str] = {}
    groups = []
    for group, group_names in zip(saved["param_groups"], by_group, strict=True):
        by_index.update(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": group_names})
    state = {by_index.get(key, key): value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def load_named_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], names: Mapping[int, str], *, label: str = "optimizer"
) -> None:
    """Loads what `named_state` returned, each tensor in the dtype that it was saved in.

    Raises:
        ValueError: the groups differ in number, or their parameters in name; the message names them.
    """
    optimizer = unwrap_optimizer(optimizer)
    by_group = _names_by_group(optimizer, names)
    if saved.get(IN_ORDER):
        saved = named_in_order(saved, optimizer.param_groups, by_group, label)
    _compare_groups(by_group, [group["params"] for group in saved["param_groups"]], label)
    current = optimizer.state_dict()
    index: dict[str, Any] = {}
    groups = []
    for group, group_names, saved_group in zip(
        current["param_groups"], by_group, saved["param_groups"], strict=True
    ):
        index.update(zip(group_names, group["params"], strict=True))
        groups.append({**saved_group, "params": group["params"]})
    state = {index.get(key, key): value for key, value in saved["state"].items()}
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
    vars(optimizer)["_opt_called"] = bool(state)  # else a scheduler complains that it steps before the optimizer
    for parameter, name in zip(_parameters(optimizer), sum(by_group, []), strict=True):
        if name in saved["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(saved["state"][name], optimizer.state[parameter])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_by_group(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    return [
        [names.get(id(parameter), f"group_{g}.parameter_{p}") for p, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def _compare_groups(current: list[list[str]], saved: list[list[str]], label: str) -> None:
    if len(current) != len(saved):
        raise ValueError(
            f"Expected {len(current)} parameter groups for {label}. Received: {len(saved)} in the checkpoint. "
            "Build the optimizer as it was when the checkpoint was saved."
        )
    for number, (here, there) in enumerate(zip(current, saved, strict=True)):
        missing, unexpected = sorted(set(here) - set(there)), sorted(set(there) - set(here))
        if missing or unexpected:
            raise ValueError(
                f"Expected the same parameters in group {number} of {label} as in the checkpoint. Received: "
                f"missing there {missing[:5]}, unknown here {unexpected[:5]}. Build the model and the optimizer as "
                "they were, or load with weights_only=True."
            )


def _exact(saved: Any, loaded: Any) -> Any:
    """`saved` where `loaded` lost something: torch casts state to the parameter's dtype, which may hold fewer digits,
    and spoils text inside of lists. Tensors stay where loading put them.
    """
    if isinstance(saved, torch.Tensor):
        if not isinstance(loaded, torch.Tensor):
            return saved
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping):
        known = loaded if isinstance(loaded, Mapping) else {}
        return {**known, **{key: _exact(value, known.get(key)) for key, value in saved.items()}}
    if isinstance(saved, (list, tuple)):
        others = loaded if isinstance(loaded, (list, tuple)) and len(loaded) == len(saved) else [None] * len(saved)
        return type(saved)(_exact(value, other) for value, other in zip(saved, others))
    return saved
