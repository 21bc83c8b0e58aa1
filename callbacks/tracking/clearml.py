"""ClearML: its name is known, and an error says what to do instead."""

from __future__ import annotations

from typing import Any

from .base import NO_CLEARML, GeneralTracker


class ClearMLTracker(GeneralTracker):
    """Stands for Accelerate's tracker of this name. Raises NotImplementedError when it is made."""

    name = "clearml"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        raise NotImplementedError(NO_CLEARML)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Part of Accelerate's interface."""

    def log_table(
        self, table_name: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Part of Accelerate's interface."""
