"""One batch on its way through Megatron's schedule: its micro-batches, and what the user's step finds out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .nested import find_batch_size, recursively_apply
from .pipelined import Recorder


class Stage(BaseException):
    """Ends the user's step where a rank does not have the last chunk; holds what its chunk gave."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class MicroBatches:
    """A batch in parts along dimension 0; each iterator goes over all of them.

    Args:
        batch: nested data of tensors.
        wanted: how many parts at best; a divisor of the number of samples is taken.
        fits: whether a schedule can work with so many; if not, the first part comes again and does not count.
    """

    def __init__(self, batch: Any, wanted: int, fits: Callable[[int], bool]) -> None:
        self.batch, self.size = batch, find_batch_size(batch)
        if not self.size:
            raise ValueError("Expected a batch with samples. Received: an empty one. Leave it out.")
        divisors = [number for number in range(min(wanted, self.size), 0, -1) if self.size % number == 0]
        self.real = next(filter(fits, divisors), divisors[0])
        self.count = next(number for number in range(self.real, self.real + 2 * self.size + 1024) if fits(number))
        self.samples = self.size // self.real

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        for index in range(self.count):
            yield self.part(index if index < self.real else 0), index < self.real

    def part(self, index: int) -> Any:
        """Returns a part: the rows of all tensors that have one for each sample."""
        if self.real == 1:
            return self.batch
        first, last = index * self.samples, (index + 1) * self.samples

        def rows(tensor: Tensor) -> Tensor:
            return tensor[first:last] if tensor.ndim and len(tensor) == self.size else tensor

        return recursively_apply(rows, self.batch)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What the shapes of hidden states follow from."""
        found: list[Any] = [self.samples]
        recursively_apply(lambda tensor: found.append(tuple(tensor.shape[1:])), self.batch)
        return tuple(found)


class Job:
    """The user's step on the micro-batches of one batch, and the losses that it gives where the last chunk is.

    With weights the gradient is the mean over all items; until the sum of the weights is known they count by the first
    micro-batch's, and `factor` brings that to its true scale.
    """

    def __init__(
        self, step: Callable[..., Any], rest: tuple[Any, ...], recorder: Recorder | None, share: float = 1.0
    ) -> None:
        self.step, self.rest, self.recorder = step, rest, recorder
        self.share = share  # of a loss on a part of each sequence, as Megatron multiplies by the number of parts
        self.losses: list[Tensor] = []
        self.weights: list[Any] = []
        self.count = 0  # of micro-batches that Megatron divides by

    def __call__(self, batch: Any, *, real: bool) -> Tensor:
        """Returns the loss of a micro-batch as it is differentiated; raises Stage where there is none."""
        if self.recorder is None:
            outputs = self.step(batch, *self.rest)
        else:
            with self.recorder.recording() if real else self.recorder.silent():
                outputs = self.step(batch, *self.rest)
        loss, weight = _loss_and_weight(outputs)
        self.count += 1
        if not real:
            return loss * 0.0
        self.losses.append(loss.detach().clone())
        self.weights.append(weight)
        if (weight is None) != (self.weights[0] is None):
            raise ValueError("Expected a weight with every loss of a batch or with none. Received: both. Give each.")
        return loss * self.share * (1.0 if weight is None else weight / _reference(self.weights[0]))

    def result(self) -> dict[str, Any]:
        """The loss of the whole batch, its weight, and what gradients are to be multiplied by (None for nothing)."""
        if len(self.losses) == 1:
            return {"loss": self.losses[0], "weight": self.weights[0], "factor": self._factor(1)}
        if self.weights[0] is None:
            loss, total = torch.stack(self.losses).mean(), None
            return {"loss": loss, "weight": None, "factor": self._factor(len(self.losses))}
        weights = torch.stack([torch.as_tensor(one, dtype=torch.float32) for one in self.weights])
        total = weights.sum()
        losses = torch.stack(self.losses)
        loss = (losses * weights.to(losses.device)).sum() / total.clamp(min=torch.finfo(torch.float32).tiny)
        return {"loss": loss, "weight": total, "factor": self._factor(total / _reference(self.weights[0]))}

    def _factor(self, parts: Any) -> Any:
        """Megatron divides by the number of micro-batches, where the sum of the parts is meant."""
        if not isinstance(parts, Tensor):
            return None if parts == self.count else self.count / parts
        return torch.where(parts > 0, self.count / parts, 0.0)


def _reference(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight, 1)
    return weight if weight > 0 else 1


def _loss_and_weight(outputs: Any) -> tuple[Tensor, Any]:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            "Expected a step that returns a loss of one number, or a dict with 'loss', under Megatron. Received: "
            f"{type(outputs).__name__}. Return it for every batch."
        )
    return loss, outputs.get("weight") if isinstance(outputs, Mapping) else None


def as_numbers(found: dict[str, Any]) -> dict[str, Any]:
    """Returns a result for other ranks: numbers in the place of tensors."""
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in found.items()}
