"""The copy of a run's config that lies beside its checkpoints and starts the same run again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...callbacks.base import Callback
from . import document

if TYPE_CHECKING:
    from ..module import TrainModule
    from ..trainer import Trainer


class SaveConfig(Callback):
    """Writes ``text`` to ``<log_dir>/config.yaml`` when fitting starts; a different one stays as config-1.yaml."""

    def __init__(self, text: str, filename: str = "config.yaml") -> None:
        self.text = text
        self.filename = filename

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Write the file on the main process."""
        if not trainer.is_global_zero:
            return
        path = Path(trainer.log_dir) / self.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if document.read(path.read_text(encoding="utf-8")) == document.read(self.text):
                return
            path.rename(_free(path))
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(self.text, encoding="utf-8")
        os.replace(partial, path)


def _free(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return candidate
