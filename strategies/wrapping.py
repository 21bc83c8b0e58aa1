"""Which modules of a model are sharded as units: by their class, by their size, by hand, or where the model tells it.

A unit's parameters are gathered together just before it computes and let go after it, so the units decide how much of
a model is whole at a time. What is in no unit belongs to the root.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Policy = Callable[..., bool]


def units(model: nn.Module, policy: Any = None, *, ignored: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Returns the modules to shard apart, those inside of others first; never the model itself.

    `policy` is None (the repeated layers that the model names in `_no_split_modules`, or else that it keeps in lists),
    False (none), a collection of modules or of classes, a function of a module, or one of torch's policies: a function
    of (module, recurse, nonwrapped_numel). A module that shares parameters with others outside of it is left out.
    """
    if policy is False:
        return []
    if policy is None:
        policy = repeated_classes(model)
    chosen = _chosen(model, policy)
    skipped = {id(part) for one in ignored for part in one.modules()}
    owners = _owners(model)
    kept = []
    for module in chosen:
        if module is model or id(module) in skipped or next(module.parameters(), None) is None:
            continue
        if _shares(module, owners):
            logger.info("%s is sharded with the root: it shares parameters with other modules.", type(module).__name__)
            continue
        kept.append(module)
    return kept


def by_class(names: Iterable[str], model: nn.Module) -> set[type[nn.Module]]:
    """Returns the classes of these names among a model's modules.

    Raises:
        ValueError: the model has none of that name; the message lists those that it has.
    """
    known: dict[str, type[nn.Module]] = {}
    for module in model.modules():
        for kind in type(module).__mro__[:-1]:  # a sharded module has a class of its own above the user's
            known.setdefault(kind.__name__, kind)
    names = [name for name in names if name]
    missing = [name for name in names if name not in known]
    if missing:
        have = sorted({type(module).__name__ for module in model.modules() if not isinstance(module, _CONTAINERS)})
        raise ValueError(
            f"Expected transformer_cls_names_to_wrap to name classes of the model. Received: {missing}; it has "
            f"{', '.join(have)}. Name one of these."
        )
    return {known[name] for name in names}


def repeated_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Returns the classes of the layers that a model is made of: as it names them, or those that lists hold twice."""
    named = named_layers(model)
    if named:
        return {type(module) for module in model.modules() if type(module).__name__ in named}
    counts: dict[type[nn.Module], int] = {}
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    for layer in (layer for one in lists for layer in one):
        if next(layer.children(), None) is not None:  # a block, not a single Linear
            counts[type(layer)] = counts.get(type(layer), 0) + 1
    return {kind for kind, count in counts.items() if count > 1 and not issubclass(kind, _CONTAINERS)}


def named_layers(model: nn.Module) -> list[str]:
    """Returns the class names in `_no_split_modules` (Hugging Face's) of a model and the models inside it."""
    names: dict[str, None] = {}
    for module in model.modules():
        names.update(dict.fromkeys(getattr(module, "_no_split_modules", None) or ()))
    return list(names)


def _chosen(model: nn.Module, policy: Any) -> list[nn.Module]:
    if isinstance(policy, (list, tuple, set, frozenset)):
        classes = tuple(one for one in policy if isinstance(one, type))
        modules = {id(one) for one in policy if isinstance(one, nn.Module)}
        policy = functools.partial(_among, classes, modules)
    if not callable(policy):
        raise TypeError(
            f"Expected auto_wrap_policy as a function, modules or classes. Received: {policy!r}. Pass one of these."
        )
    if _takes_one(policy):
        return [module for module in _inner_first(model) if policy(module)]
    found: list[nn.Module] = []
    _wrap(model, policy, found, set())
    return found


def _among(classes: tuple[type, ...], modules: set[int], module: nn.Module) -> bool:
    return isinstance(module, classes) or id(module) in modules


def _takes_one(policy: Policy) -> bool:
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return True
    return "nonwrapped_numel" not in parameters and "recurse" not in parameters


def _wrap(module: nn.Module, policy: Policy, found: list[nn.Module], seen: set[int]) -> int:
    """As torch's FSDP wraps by such a policy: returns how many elements are in units now."""
    if id(module) in seen:
        return 0
    seen.add(id(module))
    total = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    inside = sum(_wrap(child, policy, found, seen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=total - inside):
        found.append(module)
        return total
    return inside


def _inner_first(model: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(list(model.modules())) if not isinstance(module, _CONTAINERS)]


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """For each parameter (by identity) the modules that have it as their own."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _shares(module: nn.Module, owners: dict[int, set[int]]) -> bool:
    inside = {id(part) for part in module.modules()}
    return any(not owners[id(parameter)] <= inside for parameter in module.parameters())
