"""Gradients as means over the ranks of a world, reduced after the backward pass that ends an accumulation window.

For engines that hold parts of a model beside its replicas. Only what a backward pass has touched since the last
reduction is sent, in few large messages; a parameter that took part on some ranks only counts as zero on the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .sharded_gradients import gradients_of, local
from .world import World

_BUCKET = 25 << 20  # bytes in one message, as DistributedDataParallel has it


class GradientMean:
    """Reduces the gradients of the models that it is told of."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._models: list[_Touched] = []

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Takes in the parameters of a model; those that need gradients, now or later, are reduced."""
        held = list(parameters)
        if self.world.size > 1 and held and not any(touched.holds(held) for touched in self._models):
            self._models.append(_Touched(held))

    def clear(self) -> None:
        """Forgets all models."""
        for touched in self._models:
            touched.release()
        self._models.clear()

    def reduce(self) -> None:
        """Replaces gradients that are not reduced yet by their means over all ranks (collective)."""
        self._models = [touched for touched in self._models if touched.alive()]
        parameters = [parameter for touched in self._models for parameter in self._agreed(touched)]
        gradients = [local(gradient) for gradient in gradients_of(parameters)]
        for bucket in _buckets([gradient for gradient in gradients if gradient.numel()]):
            self._mean(bucket)

    def _agreed(self, touched: _Touched) -> list[Tensor]:
        """The parameters that some rank has touched; they get a gradient on every rank."""
        parameters, places = touched.take()
        found = [parameters[place] for place in self._of_any_rank(places, len(parameters))]
        for parameter in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    def _of_any_rank(self, places: set[int], count: int) -> list[int]:
        flags = torch.zeros(count, dtype=torch.uint8)
        flags[list(places)] = 1
        return [place for place, flag in enumerate(self.world.all_reduce(flags, "max").tolist()) if flag]

    def _mean(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]) if len(bucket) > 1 else bucket[0]
        self.world.all_reduce(flat, "mean")
        start = 0
        for gradient in bucket if flat is not bucket[0] else ():
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


class _Touched:
    """Which parameters of one model have new gradients."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._places: set[int] = set()
        self._hooks: list[Any] = []
        self._frozen: list[int] = []
        self._follow(enumerate(parameters))

    def _follow(self, parameters: Iterable[tuple[int, Any]]) -> None:
        self._frozen = []
        for place, parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._noter(place)))
            else:
                self._frozen.append(place)

    def _noter(self, place: int) -> Any:
        places = self._places
        return lambda parameter: places.add(place)

    def holds(self, parameters: list[Tensor]) -> bool:
        """Whether it is about just these."""
        mine = [reference() for reference in self._parameters]
        return len(mine) == len(parameters) and all(one is other for one, other in zip(mine, parameters))

    def alive(self) -> bool:
        return all(reference() is not None for reference in self._parameters)

    def take(self) -> tuple[list[Any], set[int]]:
        parameters: list[Any] = [reference() for reference in self._parameters]
        frozen = [(place, parameters[place]) for place in self._frozen]
        self._places.update(place for place, parameter in frozen if parameter.grad is not None)  # thawed since
        if any(parameter.requires_grad for _, parameter in frozen):
            self._follow(frozen)
        places = set(self._places)
        self._places.clear()
        return parameters, places

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Gradients of one device and dtype, in messages of a bounded size; in the same order on every rank."""
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for gradient in alike:
            bucket.append(gradient)
            if sum(one.nbytes for one in bucket) >= _BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
