"""Checks of callbacks' arguments: what was expected, what came, what to do."""

from __future__ import annotations

import math
from typing import Any


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Raise ValueError unless ``value`` is None or a whole number of at least ``least``."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(
            f"Expected a whole number ≥ {least}. Received: {name}={value!r}. Leave it out for the default."
        )


def check_number(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is None or a number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value)):
        raise ValueError(f"Expected a number. Received: {name}={value!r}. Write e.g. {name}=0.01.")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        words = ", ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
        raise ValueError(f"Expected one of {words}. Received: {name}={value!r}. Use one of these.")
