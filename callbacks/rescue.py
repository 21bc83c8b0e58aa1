"""Saving when a run fails: without hiding why, and without waiting for ranks that do not come."""

from __future__ import annotations

import warnings
from typing import Any, Callable


def rescue(trainer: Any, save: Callable[[], Any]) -> None:
    """Call ``save`` after an exception, in a run of one process; what stands in its way is a warning."""
    if trainer.world_size > 1:
        reason = f"one of {trainer.world_size} ranks failed and a checkpoint takes all of them"
    else:
        try:
            save()
            return
        except Exception as error:
            reason = str(error)
    warnings.warn(f"Expected to save a checkpoint after the exception. Received: {reason}.", stacklevel=3)
