"""A part of a model cut into stages, of which each rank of a pipeline keeps its own.

A part that is an nn.Sequential is cut between its children: at the names given, or so that all stages have as many.
Any other part has a method `pipeline_stage(stage, stages)`, or the user gives a function `(part, stage, stages)`, that
returns the stage as a module: of the part's own layers, or a copy without the others, with the part's names for its
parameters. What no stage of this rank holds leaves the part, so that its memory is freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from .parallel_options import PipelineConfig

Cut = Callable[[Any, int, int], nn.Module]
_CUT = "_drivetrain_stages"


def find_part(model: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Returns the name of the part that is cut, and the part.

    Raises:
        ValueError: there is none of that name, or without a name not exactly one that could be meant.
    """
    if name is not None:
        found = dict(model.named_modules()).get(name)
        if found is None:
            shown = ", ".join(child for child, _ in model.named_children())
            raise ValueError(
                f"Expected the name of a part of {type(model).__name__}. Received: module={name!r}. Its parts: {shown}."
            )
        return name, found
    if isinstance(model, nn.Sequential):
        return "", model
    parts = [(child, part) for child, part in model.named_children() if any(True for _ in part.parameters())]
    if len(parts) != 1 or any(True for _ in model.parameters(recurse=False)):
        raise ValueError(
            f"Expected {type(model).__name__} to have one part with parameters, to be cut into stages. Received: "
            f"{[child for child, _ in parts]}. Name it: PipelineConfig(module=...)."
        )
    return parts[0]


def cut_of(part: nn.Module, config: PipelineConfig, stages: int) -> Cut:
    """Returns the function that makes the stages of a part.

    Raises:
        ValueError: the part cannot be cut in that way; the message says what is wrong.
    """
    if callable(config.split):
        return config.split
    own = getattr(part, "pipeline_stage", None)
    if config.split is None and callable(own):
        return lambda part, stage, count: own(stage, count)
    if not isinstance(part, nn.Sequential):
        raise ValueError(
            f"Expected an nn.Sequential, or a part with a method pipeline_stage(stage, stages), to be cut into stages. "
            f"Received: {type(part).__name__}. Write the method, or pass PipelineConfig(split=function)."
        )
    groups = _groups(list(part._modules), config.split, stages)
    return lambda part, stage, count: nn.Sequential(OrderedDict((name, part._modules[name]) for name in groups[stage]))


def kept(part: nn.Module, config: PipelineConfig, ranks: list[int], rank: int) -> dict[int, nn.Module]:
    """Cuts a part, and leaves in it the stages of one rank, which are returned by their numbers.

    A part that was cut before, by an earlier run, stays as it is.

    Raises:
        ValueError: it cannot be cut so, or was cut otherwise.
    """
    before = known(part)
    if before is not None:
        if before[0] != (ranks, rank):
            raise ValueError(
                f"Expected a part that was cut alike before. Received: stages on the ranks {before[0][0]}, and now "
                f"{ranks}. Make the module anew, and load a checkpoint."
            )
        return before[1]
    cut = cut_of(part, config, len(ranks))
    check_apart(part, cut, len(ranks))
    own = {stage: cut(part, stage, len(ranks)) for stage, place in enumerate(ranks) if place == rank}
    keep(part, own)
    vars(part)[_CUT] = ((ranks, rank), own)
    return own


def known(part: nn.Module) -> Any:
    """Returns how a part was cut before, and its stages here; None if it was not."""
    return vars(part).get(_CUT)


def keep(part: nn.Module, kept: dict[int, nn.Module]) -> None:
    """Leaves in a part only the parameters and buffers of these stages; the others' names disappear from it.

    Raises:
        ValueError: a stage has a parameter under a name that the part does not have.
    """
    held: dict[str, Any] = {}
    for stage, module in kept.items():
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        unknown = sorted(set(own) - _names(part))
        if unknown:
            raise ValueError(
                f"Expected a stage whose parameters have the names that they have in the part. Received: stage {stage} "
                f"with {unknown[:5]}. Keep the part's names."
            )
        held |= own
    for path, module in list(part.named_modules()):
        prefix = f"{path}." if path else ""
        for name in list(module._parameters):
            module._parameters[name] = held.get(prefix + name)
        for name in list(module._buffers):
            module._buffers[name] = held.get(prefix + name)


def check_apart(part: nn.Module, make: Cut, stages: int) -> None:
    """Raises ValueError where two stages share a parameter, or some parameter of the part is in none."""
    owners: dict[str, int] = {}
    for stage in range(stages):
        for name, _ in make(part, stage, stages).named_parameters():
            if name in owners:
                raise ValueError(
                    f"Expected each parameter in one stage. Received: {name} in the stages {owners[name]} and {stage}. "
                    "Weights that layers share have to be in one stage."
                )
            owners[name] = stage
    shared: dict[int, str] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        first = shared.setdefault(id(parameter), name)
        if name in owners and first in owners and owners[name] != owners[first]:
            raise ValueError(
                f"Expected layers that share a weight in one stage. Received: {first} in stage {owners[first]} and "
                f"{name} in stage {owners[name]}. Cut elsewhere, or do not share it."
            )
    missing = [name for name, _ in part.named_parameters() if name not in owners]
    if missing:
        raise ValueError(
            f"Expected every parameter in some stage. Received: {', '.join(missing[:5])} in none. Return them with one."
        )


def _groups(names: list[str], split: Any, stages: int) -> list[list[str]]:
    if split is None:
        if len(names) < stages:
            raise ValueError(
                f"Expected at least one layer for each stage. Received: {len(names)} layers for {stages} stages. "
                "Use fewer ranks or stages_per_rank."
            )
        starts = [len(names) * stage // stages for stage in range(stages)]
    else:
        unknown = [name for name in split if name not in names]
        starts = [0, *[names.index(name) for name in split if name in names]]
        if unknown or len(starts) != stages or starts != sorted(set(starts)):
            raise ValueError(
                f"Expected split to name {stages - 1} layers in their order, at which stages begin. Received: "
                f"split={list(split)} for the layers {names}, {stages} stages. Correct the names."
            )
    return [names[start:stop] for start, stop in zip(starts, [*starts[1:], len(names)])]


def _names(part: nn.Module) -> set[str]:
    found = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
    return {name for name, _ in found}
