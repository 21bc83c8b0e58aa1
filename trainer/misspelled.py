"""Methods that look like hooks but that nothing calls: misspelled, or under a name of Lightning's past."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

_FORMER = {
    "configure_sharded_model": "configure_model",
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
}  # what earlier versions of Lightning called, and what took their place


def warn_about_misspelled(thing: Any, base: type) -> None:
    """Warn about methods whose name is nearly that of a hook or a step of ``base``, with the right name."""
    known = {name for name in dir(base) if not name.startswith("_")}
    for name in dir(type(thing)):
        method = getattr(type(thing), name, None)
        if name.startswith("_") or name in known or not callable(method) or hasattr(method, "__self__"):
            continue
        right = meant(name, known)
        if right is not None:
            warnings.warn(
                f"Expected names of hooks. Received: {type(thing).__name__}.{name}, which nothing calls. "
                f"Rename it to {right} if that is what it should be.",
                stacklevel=2,
            )


def meant(name: str, known: set[str]) -> str | None:
    """Return the hook that ``name`` stands for: its former name, or nearly its name; None for anything else."""
    if _FORMER.get(name) in known:
        return _FORMER[name]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8 if name.startswith("on_") else 0.88)
    return nearest[0] if nearest else None
