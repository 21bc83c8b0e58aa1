"""Optimizer states by number, as torch and other libraries keep them: they go to the parameters in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IN_ORDER = "in_order"
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")  # like their parameter


def in_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's own `state_dict()`, marked as one whose parameters are told by their order alone."""
    return {**state, IN_ORDER: True}


def named_in_order(
    saved: Mapping[str, Any], groups: list[dict[str, Any]], names: list[list[str]], label: str
) -> dict[str, Any]:
    """Returns what `in_order` marked as `named_state` gives it, under the names that parameters in these places have.

    `groups` are those of the optimizer, `names` the names of their parameters.

    Raises:
        ValueError: the groups have other numbers of parameters, or a state has not the shape of its parameter.
    """
    numbers = [group["params"] for group in saved["param_groups"]]
    here, there = ([len(group) for group in groups] for groups in (names, numbers))
    if here != there:
        raise ValueError(
            f"Expected groups of {here} parameters for {label}. Received: {there} in the checkpoint, which tells them "
            "by their order. Build the optimizer as it was when the checkpoint was saved."
        )
    known: dict[Any, str] = {}
    for group, own, group_names in zip(numbers, groups, names, strict=True):
        for number, parameter, name in zip(group, own["params"], group_names, strict=True):
            _check_shapes(saved["state"].get(number, {}), parameter, f"{name} in {label}")
            known[number] = name
    state = {known.get(number, number): value for number, value in saved["state"].items()}
    renamed = [{**group, "params": own} for group, own in zip(saved["param_groups"], names, strict=True)]
    return {**{key: value for key, value in saved.items() if key != IN_ORDER}, "state": state, "param_groups": renamed}


def _check_shapes(state: Mapping[str, Any], parameter: Any, what: str) -> None:
    for key in _SHAPED:
        value = state.get(key)
        if value is not None and value.shape != parameter.shape:
            raise ValueError(
                f"Expected {key} of {what} to have the shape {list(parameter.shape)}. Received: {list(value.shape)} in "
                "the checkpoint, which tells parameters by their order. Give them to the optimizer in that order."
            )
