"""Names of checkpoints: templates of counters and metrics, like "{epoch}-{step}-{val_loss:.2f}"."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Mapping

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
_SEPARATORS = re.compile(r"[/\\]")


class Template:
    """A file name with fields ``{name}`` or ``{name:format}``, where a name is that of a counter or metric.

    With ``insert`` each field becomes "name=value" (``equals`` is the sign between). Separators of folders in names
    of metrics become "_". Raises ValueError for text that would make a folder.
    """

    def __init__(self, text: str, *, insert: bool = False, equals: str = "=") -> None:
        literal = _FIELD.sub("", text) if isinstance(text, str) else "{"
        if not text or set("{}/\\" + os.sep) & set(literal) or text.startswith("."):
            raise ValueError(
                "Expected a name without folders, with fields like {epoch} or {val_loss:.2f}. "
                f"Received: filename={text!r}. Put the folder into dirpath."
            )
        self.text, self.insert, self.equals = text, insert, equals

    @property
    def names(self) -> tuple[str, ...]:
        """The counters and metrics that it shows."""
        return tuple(name for name, _ in _FIELD.findall(self.text))

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the name for these values; a value that is not there is "nan"."""

        def field(match: re.Match[str]) -> str:
            value = _formatted(values.get(match[1], math.nan), match[2] or "")
            return f"{match[1]}{self.equals}{value}" if self.insert else value

        return _SEPARATORS.sub("_", _FIELD.sub(field, self.text))


def folder(dirpath: Any) -> Path:
    """Return a folder's absolute path; raises ValueError for what is none on this machine."""
    if not isinstance(dirpath, (str, os.PathLike)) or "://" in str(dirpath):
        raise ValueError(
            f"Expected a folder on this machine. Received: dirpath={dirpath!r}. Have them copied elsewhere "
            "by CheckpointUpload."
        )
    return Path(dirpath).expanduser().absolute()


def _formatted(value: Any, spec: str) -> str:
    if isinstance(value, float) and value.is_integer() and spec.endswith("d"):
        value = int(value)
    try:
        return format(value, spec)
    except (ValueError, TypeError):
        return str(value)  # "nan" has no whole digits
