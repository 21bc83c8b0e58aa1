"""The state of models of which each rank holds a part."""

from __future__ import annotations

from .base import Strategy


class ShardedState(Strategy):
    """A strategy whose models and optimizers are in parts, which checkpoints keep as parts."""

    full_state = False
