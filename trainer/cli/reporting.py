"""What the commands report: drivetrain's log on standard error."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Show what drivetrain reports; a program that configures logging itself keeps its own way."""
    logger = logging.getLogger(__package__.split(".")[0])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
