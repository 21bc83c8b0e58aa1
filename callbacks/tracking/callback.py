"""The callback that hands a run's values to trackers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import Callback
from .base import on_main
from .feed import QueuedTracker
from .files import replace
from .trackers import finish_trackers, start_trackers
from .values import plain


class Tracking(Callback):
    """Tracks a run's values, hyperparameters and fate in the folder `trainer.log_dir`.

    `log_with` is a tracker's name, a GeneralTracker object or a list of these, or "all" (see `filter_trackers`).
    `project_name` is for trackers that know projects. `config` is stored beside the hyperparameters of module and
    data module. `init_kwargs` are further arguments by tracker name. `timeout` is how many seconds to wait for trackers
    at the end. `trackers` are the running ones; `status.json` in the folder tells how the run ended.
    """

    priority = -50  # trackers are there when other callbacks' start hooks run

    def __init__(
        self,
        log_with: Any = ("tensorboard", "csv"),
        project_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = 15.0,
    ) -> None:
        self.log_with = log_with
        self.project_name = project_name
        self.config = config
        self.init_kwargs = init_kwargs
        self.timeout = timeout
        self.trackers: list[QueuedTracker] = []
        self._running = False
        self._error: str | None = None
        self._folder: Path | None = None  # where the status is written

    @property
    def state_key(self) -> str:
        """Name that tells several Tracking callbacks of a run apart."""
        listed = self.log_with if isinstance(self.log_with, (list, tuple)) else [self.log_with]
        return f"Tracking[{','.join(str(getattr(item, 'name', item)) for item in listed)}]"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the trackers; what they hold of steps after the restored one comes again and is dropped."""
        self._start(trainer, module, resume_step=trainer.global_step or None)  # a run that begins drops nothing

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Start the trackers unless they run."""
        if not trainer.sanity_checking:
            self._start(trainer, module)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Start the trackers."""
        self._start(trainer, module)

    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        """Hand a row to each tracker, with the number of the epoch."""
        for tracker in self.trackers if self._running else ():
            tracker.log({"epoch": trainer.current_epoch, **metrics}, step=step)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Write out every row up to the checkpoint's step: a run that goes on from it will not log them again."""
        for tracker in self.trackers if self._running else ():
            tracker.flush()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Mark the run as failed or interrupted; others may still log until `teardown`."""
        if not self._running:
            return
        self._error = f"{type(exception).__name__}: {exception}".rstrip(": ")
        for tracker in self.trackers:
            tracker.fail(self._error)
            tracker.flush()
        word = "interrupted" if isinstance(exception, (KeyboardInterrupt, SystemExit)) else "failed"
        self._write_status({"status": word, "step": trainer.global_step, "error": self._error})

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Finish."""
        if not self._running:
            return
        self._running = False
        finish_trackers(self.trackers)
        if self._error is None:
            reason = plain(getattr(trainer, "stop_reason", None))
            self._write_status({"status": "finished", "step": trainer.global_step, "stop_reason": reason})

    def _start(self, trainer: Any, module: Any, *, resume_step: int | None = None) -> None:
        if self._running:
            return
        self._folder = Path(trainer.log_dir) if on_main() else None
        self.trackers = start_trackers(
            self.log_with, self.project_name or "drivetrain", self._configuration(trainer, module),
            init_kwargs=self.init_kwargs, resume_step=resume_step, timeout=self.timeout, run_dir=trainer.log_dir,
        )
        self._running, self._error = True, None
        self._write_status({"status": "running", "step": trainer.global_step})

    def _configuration(self, trainer: Any, module: Any) -> dict[str, Any]:
        """Return all hyperparameters; where the data module has others of the same name, they go below "datamodule"."""
        config = {**_hparams(module), **(self.config or {})}
        data = _hparams(getattr(trainer, "datamodule", None))
        differing = {name: value for name, value in data.items() if plain(config.get(name, value)) != plain(value)}
        config = {**data, **config}
        return {**config, "datamodule": differing} if differing else config

    def _write_status(self, content: dict[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace(self._folder / "status.json", [json.dumps(content, indent=1), "\n"])
        except OSError as error:
            warnings.warn(f"The status of the run could not be written: {error}. The run goes on.", stacklevel=2)


def _hparams(owner: Any) -> dict[str, Any]:
    return dict(owner.hparams) if getattr(owner, "logs_hparams", False) else {}
