"""When recorded work is handed to the XLA device: once for each optimizer step, and for each batch of an evaluation.

A prepared loader does so between two batches, when everything that a step left behind (metrics, schedules) is recorded
and gradients are let go of; not between the micro-batches of a window, which are one graph. Without such a loader
`zero_grad` does, after a step; and at the latest the next backward pass.
"""

from __future__ import annotations

from typing import Any

from . import xla_runtime
from .gradients import GradientState
from .optimizer import AcceleratedOptimizer


class Steps:
    """What was recorded since work was handed over the last time."""

    def __init__(self) -> None:
        self.backwards = 0
        self._stepped = False  # an optimizer has

    def hand_over(self) -> None:
        """Hands over what was recorded."""
        self._stepped = False
        xla_runtime.sync()

    def before_backward(self) -> None:
        """Hands over the step before, where nothing has yet: a batch may have several, and a loop no loader."""
        self.backwards += 1
        if self._stepped:
            self.hand_over()

    def after_step(self) -> None:
        """Remembers that an optimizer has stepped."""
        self._stepped = True

    def after_zero_grad(self) -> None:
        """Hands over a step whose gradients were let go of, unless a prepared loader will."""
        if self._stepped and not GradientState().in_dataloader:
            self.hand_over()

    def between_batches(self) -> Between:
        """Returns what a loader calls before each of its batches, and at its end."""
        return Between(self)


class Between:
    """Hands over what was recorded between two batches of one loader, unless they belong to one window."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._seen = steps, steps.backwards

    def __call__(self) -> None:
        steps, state = self._steps, GradientState()
        trained, self._seen = steps.backwards != self._seen, steps.backwards
        if not trained or state.sync_gradients or state.sync_each_batch:
            steps.hand_over()


class XLAOptimizer(AcceleratedOptimizer):
    """The prepared optimizer, which hands its step over when gradients are cleared and no loader does."""

    steps: Any = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self.steps.after_zero_grad()
