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
from .graph import log_graph
from .provenance import gathered, record
from .trackers import finish_trackers, start_trackers
from .uploads import Uploads
from .values import plain


class Tracking(Callback):
    """Tracks a run's values, hyperparameters and fate in the folder `trainer.log_dir`.

    `log_with` is a tracker's name, a GeneralTracker object or a list of these, or "all" (see `filter_trackers`).
    `project_name` is for trackers that know projects. `config` is stored beside the hyperparameters of module and
    data module. `init_kwargs` are further arguments by tracker name. `timeout` is how many seconds to wait for trackers
    at the end, uploads included.

    `log_checkpoints`: trackers that take files get the best and the last checkpoint at the end (True), or each as it is
    saved ("all"). `log_graph`: those that take it get the model's graph, drawn from the module's `example_input_array`.
    `provenance`: command line, git commit and changes, and packages are recorded, in `provenance.json` and by trackers.

    `trackers` are the running ones; the ids of their runs are in each checkpoint, by which a run goes on in them.
    `status.json` in the folder tells how the run ended: "finished", "failed", "preempted" (by a signal; "interrupted"
    by Ctrl-C), "running".
    """

    priority = -50  # trackers are there when other callbacks' start hooks run

    def __init__(
        self,
        log_with: Any = ("tensorboard", "csv"),
        project_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = 15.0,
        log_checkpoints: bool | str = False,
        log_graph: bool = False,
        provenance: bool = True,
    ) -> None:
        self.log_with = log_with
        self.project_name = project_name
        self.config = config
        self.init_kwargs = init_kwargs
        self.timeout = timeout
        self.log_checkpoints, self.log_graph, self.provenance = log_checkpoints, log_graph, provenance
        self._uploads = Uploads(log_checkpoints)
        self._ids: dict[str, str] = {}  # of the trackers' runs, by tracker
        self._known: Path | None = None  # the folder of the run that was tracked last
        self.trackers: list[QueuedTracker] = []
        self._running = False
        self._error: str | None = None
        self._folder: Path | None = None  # where the status is written

    @property
    def state_key(self) -> str:
        """Name that tells several Tracking callbacks of a run apart."""
        listed = self.log_with if isinstance(self.log_with, (list, tuple)) else [self.log_with]
        return f"Tracking[{','.join(str(getattr(item, 'name', item)) for item in listed)}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of the trackers' runs."""
        return {"ids": self._run_ids()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in these runs."""
        self._ids = dict(state_dict.get("ids", {}))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Begin a run of its own, unless a checkpoint is restored after this."""
        self._ids, self._known, self._uploads = {}, None, Uploads(self.log_checkpoints)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the trackers; what they hold of steps after the restored one comes again and is dropped."""
        self._start(trainer, module, resume_step=trainer.global_step or None)  # a run that begins drops nothing
        if self.log_graph and self._running:
            log_graph(self.trackers, module)

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
        if self.log_checkpoints and self.trackers and self._running:
            self._uploads.saved(trainer, self.trackers)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Write out every row up to the checkpoint's step: a run that goes on from it will not log them again."""
        for tracker in self.trackers if self._running else ():
            tracker.flush()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Mark the run as failed or interrupted; others may still log until `teardown`."""
        if not self._running:
            return
        word, self._error = _fate(exception)
        for tracker in self.trackers:
            tracker.fail(self._error) if word == "failed" else tracker.preempt(self._error)
            tracker.flush()
        self._write_status({"status": word, "step": trainer.global_step, "error": self._error})

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Finish."""
        if not self._running:
            return
        self._running = False
        if stage == "fit" and self.log_checkpoints and self.trackers:
            self._uploads.end(trainer, self.trackers)
        self._ids = self._run_ids()
        finish_trackers(self.trackers)
        self._uploads.clear(self.trackers)
        if self._error is None:
            reason = plain(getattr(trainer, "stop_reason", None))
            self._write_status({"status": "finished", "step": trainer.global_step, "stop_reason": reason})

    def _start(self, trainer: Any, module: Any, *, resume_step: int | None = None) -> None:
        if self._running:
            return
        folder = Path(trainer.log_dir)
        self._folder = folder if on_main() else None
        goes_on = resume_step is not None or folder == self._known
        self.trackers = start_trackers(
            self.log_with, self.project_name or "drivetrain", self._configuration(trainer, module),
            init_kwargs=self.init_kwargs, resume_step=resume_step, timeout=self.timeout, run_dir=folder,
            run_ids=self._ids if goes_on else {}, goes_on=goes_on, title=getattr(trainer, "run_id", None),
        )
        if self.provenance and folder != self._known:
            self._record(folder)
        self._known = folder
        self._running, self._error = True, None
        self._write_status({"status": "running", "step": trainer.global_step})

    def _configuration(self, trainer: Any, module: Any) -> dict[str, Any]:
        """Return all hyperparameters; where the data module has others of the same name, they go below "datamodule"."""
        config = {**_hparams(module), **(self.config or {})}
        data = _hparams(getattr(trainer, "datamodule", None))
        differing = {name: value for name, value in data.items() if plain(config.get(name, value)) != plain(value)}
        config = {**data, **config}
        return {**config, "datamodule": differing} if differing else config

    def _run_ids(self) -> dict[str, str]:
        found = {tracker.name: tracker.wrapped.run_id for tracker in self.trackers}
        return {**self._ids, **{name: run_id for name, run_id in found.items() if isinstance(run_id, str)}}

    def _record(self, folder: Path) -> None:
        if not self.trackers:
            return
        try:
            values, files = record(folder) if on_main() else (gathered()[0], [])
        except OSError as error:
            warnings.warn(f"What the run was made from could not be recorded: {error}. The run goes on.", stacklevel=2)
            return
        for tracker in self.trackers:
            tracker.store_provenance(values, files)

    def _write_status(self, content: dict[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace(self._folder / "status.json", [json.dumps(content, indent=1), "\n"])
        except OSError as error:
            warnings.warn(f"The status of the run could not be written: {error}. The run goes on.", stacklevel=2)


def _fate(exception: BaseException) -> tuple[str, str]:
    """Return how a run ended that raised, and what is said of it."""
    signal = getattr(exception, "signal", "")
    if signal and signal != "SIGINT":
        return "preempted", f"stopped by {signal}"
    stopped = isinstance(exception, (KeyboardInterrupt, SystemExit))
    return "interrupted" if stopped else "failed", f"{type(exception).__name__}: {exception}".rstrip(": ")


def _hparams(owner: Any) -> dict[str, Any]:
    return dict(owner.hparams) if getattr(owner, "logs_hparams", False) else {}
