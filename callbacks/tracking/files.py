"""Replacing a file as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def replace(path: Path, parts: Iterable[str]) -> None:
    """Write a file of text parts so that it is there as a whole, or as it was before, whatever happens."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "w", newline="", encoding="utf-8") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
