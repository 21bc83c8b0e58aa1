"""Evaluation where every rank needs the same number of forward passes: extra ones, whose results are dropped.

Short ranks get no further batch in an evaluation, so that each sample counts once. Under an engine whose forward needs
all ranks (FSDP, say) such a rank passes a batch once more, and the module is afterwards as if it had not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..strategies.world import World

_NONE = object()
_OWN = {"_parameters", "_buffers", "_modules"}


def in_step(batches: Iterable[Any], world: World, *, equal: bool) -> Iterator[tuple[Any, bool]]:
    """Yield each batch with True; with `equal`, on ranks that have no more, one again with False until all are done.

    A rank that never had a batch gets one of another rank's. Every rank has to iterate (collective with `equal`).
    """
    if not equal or world.size == 1:
        for batch in batches:
            yield batch, True
        return
    last, rest = _NONE, iter(batches)
    while True:
        batch = next(rest, _NONE)
        if not world.agree(batch is not _NONE):
            return
        if last is _NONE:
            last = _shared(batch, world)
        last = last if batch is _NONE else batch
        yield last, batch is not _NONE


@contextmanager
def forgotten(module: nn.Module) -> Iterator[None]:
    """Put back what a block changes in the attributes of a module and its parts: counters, lists, metrics' states.

    Weights and buffers are not looked at; evaluations leave them alone. Inside, `log` and `log_dict` do nothing.
    """
    before = [(vars(part), {name: _copied(value) for name, value in _own(part)}) for part in module.modules()]
    vars(module).update(log=_ignore, log_dict=_ignore)
    try:
        yield
    finally:
        for attributes, values in before:
            for name in attributes.keys() - values.keys() - _OWN:
                del attributes[name]
            for name, value in values.items():
                attributes[name] = _restored(value)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """What `log` is in a pass whose results are dropped."""


def _shared(batch: Any, world: World) -> Any:
    """This rank's first batch; where a rank has none, that of the first rank that has one."""
    having = world.gather_object(batch is not _NONE)
    if all(having):
        return batch
    first = having.index(True)
    given = world.broadcast_object(batch if world.rank == first else None, first)
    return given if batch is _NONE else batch


def _own(part: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(part).items() if name not in _OWN]


def _copied(value: Any) -> tuple[Any, Any]:
    """A value, and its content where it can be changed in place."""
    if isinstance(value, torch.Tensor):
        return value, value.detach().clone()
    if isinstance(value, (list, dict, set)):
        return value, value.copy()
    return value, None


def _restored(before: tuple[Any, Any]) -> Any:
    value, content = before
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(value.is_inference()):
            value.copy_(content)
    elif isinstance(value, list):
        value[:] = content
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    return value
