"""What the arguments of an Accelerator and its methods have to be, each by its name: errors say what came instead."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from ..strategies.base import is_scheduler
from ..strategies.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`holds` tells whether a value is of the right kind, `fits` whether one of that kind makes sense."""

    what: str
    advice: str
    holds: Callable[[Any], bool]
    fits: Callable[[Any], bool] = lambda value: True


def check(**arguments: Any) -> None:
    """Raises TypeError or ValueError for the first argument that is not what its name asks for (see the table)."""
    for name, value in arguments.items():
        rule = _RULES[name]
        right = rule.holds(value)
        if not right or not rule.fits(value):
            shown = repr(value) if len(repr(value)) < 200 else f"a {type(value).__name__}"
            kind = ValueError if right else TypeError
            raise kind(f"Expected {rule.what}. Received: {name}={shown}. {rule.advice}.")


def check_optional(**arguments: Any) -> None:
    """The same for those that are not None."""
    check(**{name: value for name, value in arguments.items() if value is not None})


def parameter_list(parameters: Any) -> list[torch.Tensor]:
    """Returns one parameter, or any iterable of them, as a list.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    iterable = isinstance(parameters, Iterable) and not isinstance(parameters, str)
    found: list[Any] = list(parameters) if iterable else [None]
    if found and not isinstance(found[0], torch.Tensor):
        raise TypeError(
            f"Expected parameters as a tensor or an iterable of tensors. Received: parameters={parameters!r}. "
            "Pass model.parameters()."
        )
    return found


def _kind(*kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_loader(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, torch.Tensor, torch.nn.Module))


def _words(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in values)


_MODULE = Rule("a torch.nn.Module", "Pass the model, or what prepare() made of it", _kind(torch.nn.Module))
_FUNCTION = Rule("a function", "Pass something that can be called", callable)
_PATH = Rule("a path", "Pass a str or a pathlib.Path", _kind(str, os.PathLike))
_SWITCH = Rule("True or False", "Pass one of both", _kind(bool))
_WORDS = Rule("a dict with names as keys", "Pass a dict such as {'loss': 0.5}", _kind(Mapping), _words)
_RULES: dict[str, Rule] = {
    "model": _MODULE,
    "optimizer": Rule("a torch optimizer", "Pass one of torch.optim, or your own subclass of Optimizer",
                      _kind(torch.optim.Optimizer)),
    "scheduler": Rule("a learning-rate scheduler", "Pass one of torch.optim.lr_scheduler", is_scheduler),
    "dataloader": Rule("a DataLoader", "Pass the loader, or what prepare() made of it", _is_loader),
    "num_batches": Rule("a whole number of at least 0", "Pass the number of batches to leave out", _is_whole,
                        lambda value: value >= 0),
    "max_norm": Rule("a number of at least 0", "Pass the largest norm to allow, float('inf') for none", _is_number,
                     lambda value: value >= 0),
    "clip_value": Rule("a number of at least 0", "Pass the largest absolute value to allow", _is_number,
                       lambda value: value >= 0),
    "norm_type": Rule("a number above 0, or 'inf'", "Pass 2 for the usual norm",
                      lambda value: _is_number(value) or value == "inf", lambda value: value == "inf" or value > 0),
    "dim": Rule("the number of a dimension", "Pass a whole number", _is_whole),
    "scale": Rule("a number", "Pass a factor such as 0.5", _is_number),
    "inputs": Rule("a list, tuple, tensor or dict", "Make a list of it", lambda value: hasattr(value, "__len__")),
    "device": Rule("a device", "Pass a str such as 'cuda:1', or a torch.device", _kind(str, int, torch.device)),
    "learning_rate": Rule("a number", "Pass the learning rate", _is_number),
    "hook": _FUNCTION,
    "function": _FUNCTION,
    "then": _FUNCTION,
    "output_dir": _PATH,
    "input_dir": _PATH,
    "save_directory": _PATH,
    "project_dir": _PATH,
    "f": Rule("a path or an open file", "Pass a str or a pathlib.Path",
              lambda value: isinstance(value, (str, os.PathLike)) or hasattr(value, "write")),
    "joinables": Rule("a list of prepared models", "Pass [model]", _kind(list, tuple)),
    "values": _WORDS,
    "config": _WORDS,
    "init_kwargs": _WORDS,
    "log_kwargs": _WORDS,
    "metadata": _WORDS,
    "load_kwargs": _WORDS,
    "project_name": Rule("a name", "Pass a str", _kind(str)),
    "name": Rule("a name", "Pass a str", _kind(str, Enum)),
    "method": Rule("the name of a method", "Pass a str such as 'training_step'", _kind(str)),
    "process_index": Rule("the rank of a process", "Pass a whole number from 0 on", _is_whole,
                          lambda value: value >= 0),
    "local_process_index": Rule("the rank of a process on its machine", "Pass a whole number from 0 on", _is_whole,
                                lambda value: value >= 0),
    "autocast_handler": Rule("AutocastKwargs", "Pass AutocastKwargs(...), or nothing", _kind(AutocastKwargs)),
    "profile_handler": Rule("ProfileKwargs", "Pass ProfileKwargs(...), or nothing", _kind(ProfileKwargs)),
    "device_placement": _SWITCH,
    "step_scheduler_with_optimizer": _SWITCH,
    "split_batches": _SWITCH,
    "cpu": _SWITCH,
    "even_batches": _SWITCH,
    "dataloader_config": Rule("a DataLoaderConfiguration", "Pass DataLoaderConfiguration(...)",
                              _kind(DataLoaderConfiguration)),
    "project_config": Rule("a ProjectConfiguration", "Pass ProjectConfiguration(...)", _kind(ProjectConfiguration)),
    "gradient_accumulation_plugin": Rule("a GradientAccumulationPlugin",
                                         "Pass GradientAccumulationPlugin(num_steps=...)",
                                         _kind(GradientAccumulationPlugin)),
    "dynamo_plugin": Rule("a TorchDynamoPlugin", "Pass TorchDynamoPlugin(backend=...)", _kind(TorchDynamoPlugin)),
    "rng_types": Rule("a list of generators", "Pass a list such as ['torch', 'cuda']", _kind(list, tuple)),
    "kwargs_handlers": Rule("a list of option objects", "Pass a list such as [AutocastKwargs()]", _kind(list, tuple)),
}  # fmt: skip
