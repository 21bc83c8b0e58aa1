"""Gradient accumulation: which micro-batch ends a window, and by what each loss of a window is scaled.

The gradient that a window leaves is the mean of its micro-batches' gradients over `num_steps` of them, or, with
`scale_last_window`, over those that it held. With weights it is the mean over all items of all micro-batches and
ranks: sum(w * g) / sum(w). Every factor is applied before a backward pass, so that gradients are right as soon as the
window's last backward returned, and none is ever scaled twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from .gradients import GradientState
from .sharded_gradients import scale

if TYPE_CHECKING:
    from .base import Strategy
    from .world import World

logger = logging.getLogger(__name__)

Parameters = Callable[[], Iterable[torch.nn.Parameter]]


class Accumulation:
    """The context of one micro-batch; one object serves every micro-batch of the same models."""

    def __init__(self, window: Window, strategy: Strategy, models: tuple[Any, ...], parameters: Parameters) -> None:
        self.models = models
        self._window = window
        self._strategy = strategy
        self._parameters = parameters
        self._held: list[Any] = []

    def __enter__(self) -> None:
        if not self._window.advance(self._parameters) and not self._window.state.sync_each_batch:
            for model in self.models:
                context = self._strategy.no_sync(model)
                context.__enter__()
                self._held.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            self._held.pop().__exit__(kind, error, trace)
        if self._window.state.sync_gradients:
            self._window.close()


class Window:
    """Counts the micro-batches of a window and scales their losses."""

    def __init__(self, state: GradientState, world: World, parameters: Parameters) -> None:
        self.state = state
        self.world = world
        self.count = 0
        self.parameters = parameters
        self._default_parameters = parameters
        self._limit = self._divisor = 1
        self._unweighted = False
        self._weights = _Weights()
        self._told = False

    def advance(self, parameters: Parameters | None = None) -> bool:
        """Begins the next micro-batch and returns whether it is the last of its window.

        `parameters` gives those whose gradients the window holds, for the rare case that they must be rescaled.
        """
        state = self.state
        loader = state.active_dataloader
        if self.count == 0:
            self._unweighted = False
            self._limit = self._divisor = state.num_steps
            if self._limit > 1 and state.scale_last_window and loader is not None and loader.batches is not None:
                self._divisor = min(self._limit, loader.batches + 1)
        self.parameters = parameters or self._default_parameters
        self.count += 1
        ended = loader is not None and state.sync_with_dataloader and loader.end_of_dataloader
        state.sync_gradients = last = ended or self.count >= self._limit
        if last and self.count != self._divisor and not self._weights.used:
            self._end_early()
        return last

    def close(self) -> None:
        """Ends the window after its last micro-batch; gradients that nobody used are not counted on."""
        self.count = 0
        if self._weights.used:
            self._weights = _Weights()

    def scale(self, loss: torch.Tensor, weight: Any = None) -> torch.Tensor:
        """Returns the loss to differentiate for this micro-batch; `weight` is the number of items it is a mean over.

        Raises:
            ValueError: weights are given for some losses of a window only, or differ within a micro-batch.
        """
        if weight is not None:
            return loss * self._share(weight)
        if self._weights.used:
            raise ValueError(_message(*_MIXED))
        self._unweighted = True
        loader = self.state.active_dataloader
        if loader is not None and loader.weight != 1.0:
            loss = loss * loader.weight
        divisor = self._divisor if self.count else self.state.num_steps
        return loss if divisor == 1 else loss / divisor

    def _end_early(self) -> None:
        if self.state.scale_last_window:
            rescale(self.parameters(), self._divisor / self.count)
            self._divisor = self.count
        elif not self._told:
            self._told = True
            logger.warning(
                "The last window of this epoch holds %d of %d micro-batches, and its gradient is their sum divided by "
                "%d. GradientAccumulationPlugin(scale_last_window=True) divides by the number that it holds.",
                *(self.count, self._divisor, self._divisor),
            )

    def _share(self, weight: Any) -> Any:
        if not self.count:  # outside of `accumulate` every backward is a window of its own
            weights = _Weights()
            weights.add(weight, 1, self.state.num_steps)
        else:
            _require(not self._unweighted, *_MIXED)
            weights = self._weights
            if not weights.add(weight, self.count, self._limit):
                return weights.share
        if not self.state.sync_gradients:
            return weights.partial()
        return weights.final(self.world, self.parameters)


class _Weights:
    """The weights of one window.

    Before the last micro-batch gradients are kept relative to the window's first weight, so that all losses are of one
    magnitude (which 16-bit gradients need); the last one brings them to their final scale.
    """

    def __init__(self) -> None:
        self.used = False
        self.share: Any = None
        self._micro_batch = 0
        self._weight: Any = None
        self._total: Any = 0
        self._reference: Any = None

    def add(self, weight: Any, micro_batch: int, limit: int) -> bool:
        """Counts a micro-batch's weight; returns False for a further loss of the same micro-batch."""
        if micro_batch == self._micro_batch:
            same = weight is self._weight or bool(weight == self._weight)
            _require(same, "one weight per micro-batch", f"weight={weight} after {self._weight}", "Combine the losses")
            return False
        _require(_is_count(weight), "weight as one number of items, 0 or more", f"weight={weight!r}", "Pass a number")
        self.used = True
        self._micro_batch, self._weight = micro_batch, weight
        self._total = self._total + weight
        if self._reference is None:
            self._reference = _positive(weight) * limit
        return True

    def partial(self) -> Any:
        """Returns the factor of a loss that more micro-batches follow."""
        self.share = self._weight / self._reference
        return self.share

    def final(self, world: World, parameters: Parameters) -> Any:
        """Returns the factor of the last loss, once the gradients before it are scaled to fit it."""
        factor = _reciprocal(_sum_over_ranks(self._total, world)) * world.size
        if self._micro_batch > 1:
            rescale(parameters(), self._reference * factor)
        self.share = self._weight * factor
        return self.share


_MIXED = (
    "a weight for every loss of an accumulation window or for none",
    "backward() with and without weight= in one window",
    "Give each loss its number of items",
)


def rescale(parameters: Iterable[Any], factor: float | torch.Tensor) -> None:
    """Multiplies the gradients of these parameters in place by one factor."""
    scale(parameters, factor)


def _sum_over_ranks(total: Any, world: World) -> Any:
    if world.size == 1:
        return total
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    return world.all_reduce(torch.as_tensor(total, dtype=dtype, device=world.device).clone())


def _positive(weight: Any) -> Any:
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().double() if weight.device.type != "mps" else weight.detach().float()
        return torch.where(weight > 0, weight, 1)
    return weight if weight > 0 else 1


def _reciprocal(total: Any) -> Any:
    """1 / total, and 0 for no items at all: their gradient is zero."""
    if isinstance(total, torch.Tensor):
        return torch.where(total > 0, 1 / total, 0)
    return 1 / total if total > 0 else 0.0


def _is_count(weight: Any) -> bool:
    if isinstance(weight, torch.Tensor):
        return weight.numel() == 1 and weight.dim() == 0 and not weight.is_complex()
    return isinstance(weight, (int, float)) and weight >= 0


def _message(expected: str, received: str, advice: str) -> str:
    return f"Expected {expected}. Received: {received}. {advice}."


def _require(condition: bool, expected: str, received: str, advice: str) -> None:
    if not condition:
        raise ValueError(_message(expected, received, advice))
