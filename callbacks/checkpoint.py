"""When to save a checkpoint and under which name; what goes in its place is decided in retention.py."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .base import AFTER_MODULE, Callback
from .checks import check_choice, check_whole
from .durations import Deadline, DurationLike, seconds
from .filenames import Template, folder
from .monitored import Monitored, epoch_over, validates
from .rescue import rescue
from .retention import Kept, discard, point, worst, written_by

_DEFAULT_NAME = "checkpoint-{step:06d}"
_COUNTERS = ("epoch", "step")


class ModelCheckpoint(Callback):
    """Save checkpoints (folders) into ``dirpath`` and keep the best, the newest or all of them.

    ``monitor`` and ``mode`` name a logged metric and whether its "min" or "max" is best. ``save_top_k`` is how many
    are kept: the best ones, without ``monitor`` the newest; -1 all, 0 none. ``save_last`` (True or "link": the same
    here) also keeps the newest, to which the link ``last`` points.

    A save is due every ``every_n_train_steps`` optimizer steps, every ``train_time_interval`` (seconds, "2h", a
    timedelta) and every ``every_n_epochs`` epochs (1, where none of the three is given): at the end of an epoch and
    after each validation within it; only at its end with ``save_on_train_epoch_end=True``, only after validations
    with False. A save waits for its metric: for the validation that follows at the same step, or, if there is nothing
    new since the last save, for the next value.

    ``filename`` is a template, "{epoch}-{step}-{val_loss:.2f}", that becomes "epoch=2-step=300-val_loss=0.12"
    (``auto_insert_metric_name=False`` leaves the names out). A name that is taken gets "-v1", "-v2", … unless
    ``enable_version_counter=False``, which replaces what lies there. ``save_on_exception`` saves when the fit raises;
    on several ranks those save that come within seconds, where each holds the whole state.

    With ``asynchronous`` (None: where the state takes 64 MiB or more) training waits only until the state is copied,
    and the copy is written beside it; a save that fails raises at the end of a later step.

    A checkpoint is removed only when the one that comes in its place is on the disk, and only if this callback wrote
    it. Raises TypeError or ValueError for bad arguments, and ValueError naming the logged metrics where ``monitor``
    is none of them.
    """

    priority = AFTER_MODULE + 100  # what other callbacks do at the same event belongs into the checkpoint
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: DurationLike | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        asynchronous: bool | None = None,
    ) -> None:
        check_whole("save_top_k", save_top_k, least=-1)
        check_whole("every_n_train_steps", every_n_train_steps, least=0)
        check_whole("every_n_epochs", every_n_epochs, least=0)
        check_choice("save_last", save_last, (None, False, True, "link"))
        self._monitored = None if monitor is None else Monitored(monitor, mode, owner=type(self).__name__)
        self._rank = self._monitored.rank if self._monitored is not None else None
        self.dirpath = self._given = None if dirpath is None else folder(dirpath)
        self.auto_insert_metric_name = auto_insert_metric_name
        self._template = self._made(filename)
        self._uses = tuple(n for n in {monitor, *self._template.names} if n is not None and n not in _COUNTERS)
        self.monitor, self.mode, self.filename, self.verbose = monitor, mode, filename, verbose
        self.enable_version_counter, self.asynchronous = enable_version_counter, asynchronous
        self.save_top_k, self.save_last, self.save_weights_only = save_top_k, bool(save_last), save_weights_only
        self.save_on_exception, self.save_on_train_epoch_end = save_on_exception, save_on_train_epoch_end
        self._every_steps = every_n_train_steps or 0
        interval = train_time_interval
        self._interval = None if interval is None else seconds(interval, name="train_time_interval")
        unset = every_n_train_steps is None and train_time_interval is None
        self._every_epochs = int(unset) if every_n_epochs is None else every_n_epochs
        self._begin()

    def _begin(self) -> None:
        self._deadline = Deadline()
        self._kept = self._planned = Kept()
        self._step = self._saved_step = self._passed = 0  # optimizer steps: seen last, saved last; intervals passed
        self._urgent_step = 0  # saved last out of turn
        self._newest = ""  # where the last save went
        self._saved_at = 0.0  # seconds trained when the last interval of time was over
        self._waiting = False  # a save is due and waits for its metric
        self._fitting = self._validated = False
        self._found: set[str] = set()  # names in the folder when an interrupted run goes on
        if self._monitored is not None:
            self._monitored.used = -1

    # What was saved

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, without ``monitor`` the newest; "" before the first."""
        return self._kept.best or ""

    @property
    def best_model_score(self) -> float | None:
        """The monitored value of the best checkpoint."""
        return self._kept.best_score

    @property
    def best_k_models(self) -> dict[str, float]:
        """The monitored checkpoints that are kept: path → value."""
        return dict(self._kept.scores) if self.monitor else {}

    @property
    def kth_best_model_path(self) -> str:
        """The first of the kept checkpoints to go, "" while there are fewer than ``save_top_k``."""
        return worst(self._kept.scores, self._rank) if len(self._kept.scores) == self.save_top_k > 0 else ""

    @property
    def kth_value(self) -> float | None:
        """The monitored value of ``kth_best_model_path``."""
        return self.best_k_models.get(self.kth_best_model_path)

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint, with ``save_last``."""
        return self._kept.last or ""

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a checkpoint for counters and metrics (name → number)."""
        template = self._made(filename) if filename else self._template
        name = template.render(metrics) + ("" if ver is None else f"-v{ver}")
        return str(self.dirpath / name) if self.dirpath else name

    # Events

    @property
    def state_key(self) -> str:
        when = f"{self._every_steps},{self._every_epochs},{self._interval}"
        return f"{type(self).__qualname__}({self.monitor},{self.mode},{when},{self.filename},{self.save_weights_only})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "kept": asdict(self._planned),
            "dirpath": str(self.dirpath or ""),
            "used": self._monitored.used if self._monitored else -1,
            "saved_step": self._saved_step,
            "urgent_step": self._urgent_step,
            "saved_at": self._saved_at,
            "waiting": self._waiting,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_step, self._saved_at = state_dict["saved_step"], state_dict["saved_at"]
        self._waiting, self._urgent_step = state_dict["waiting"], state_dict["urgent_step"]
        if self._monitored:
            self._monitored.used = state_dict["used"]
        self._kept = self._planned = Kept(**state_dict["kept"]).found(state_dict["dirpath"], str(self.dirpath or ""))

    @property
    def last_steps(self) -> set[int]:
        """The steps of the newest whole checkpoints."""
        return set() if self.save_weights_only else {self._saved_step, self._urgent_step}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self.dirpath = self._given or folder(trainer.log_dir) / "checkpoints"
        last = self.dirpath / self.CHECKPOINT_NAME_LAST
        if self.save_last and last.exists() and not last.is_symlink():
            raise ValueError(
                f"Expected a link or nothing at {last}. Received: a file or folder. "
                "Move it away, or set save_last=False."
            )

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._begin()  # a second fit is another run; one that goes on gets its state after this

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._fitting, self._validated = True, False
        self._step = trainer.global_step
        self._passed = self._step // self._every_steps if self._every_steps else 0
        if trainer.is_global_zero:
            discard(self._kept.doomed)  # a crash may have come just before this
        self._kept = self._planned = self._kept.settled()
        resumed = trainer.session.checkpoint is not None and self.dirpath is not None and self.dirpath.is_dir()
        self._found = set(os.listdir(self.dirpath)) if resumed else set()
        if self.save_on_train_epoch_end is False and self._every_epochs and not validates(trainer):
            warnings.warn(
                "Expected validations to save after. Received: save_on_train_epoch_end=False, nothing to validate on. "
                "No checkpoint is saved at the end of an epoch; leave save_on_train_epoch_end out.",
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._step:
            return  # inside an accumulation window
        self._step = step
        if self._due(trainer, step):
            self._save_or_wait(trainer, more=trainer.validation_due or epoch_over(trainer))
        elif self._waiting and self._monitored and self._monitored.fresh(trainer) and not trainer.validation_due:
            self._save_or_wait(trainer, more=False)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not self._fitting:
            return
        self._validated = True
        over, when = epoch_over(trainer), self.save_on_train_epoch_end
        if self._waiting or (self._epoch_counts(trainer) and (not over if when is None else not when)):
            self._save_or_wait(trainer, more=over)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._waiting or (self._epoch_counts(trainer) and self.save_on_train_epoch_end is not False):
            self._refuse_unknown(trainer)
            self._save_or_wait(trainer, more=False)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.save_last and trainer.global_step != self._saved_step:
            self._save(trainer, math.nan, ranked=self.monitor is None)
        self._fitting = False

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self._planned is not self._kept:  # the save that was being written has failed
            self._planned, self._saved_step = self._kept, -1
        if self.save_on_exception and self._fitting:
            rescue(trainer, exception, lambda: self.save_now(trainer, agreed=False), saved=self.last_steps)
        self._fitting = False

    def save_now(self, trainer: Any, *, agreed: bool = True) -> str:
        """Save out of turn unless this step is saved, and return where; the next save in turn comes in its place.

        Collective, unless not ``agreed``.
        """
        trainer.accelerator.wait_for_saves()  # its coming may change what is kept
        if trainer.global_step not in (self._saved_step, self._urgent_step):
            self._newest = self._free(trainer, _counters(trainer), agreed=agreed)
            self._write(trainer, replace(self._kept, last=self._newest, new=self._newest, doomed={}), urgent=True)
        return self._newest or str(trainer.session.checkpoint or "")

    # Decisions

    def _due(self, trainer: Any, step: int) -> bool:
        due = False
        if self._every_steps and step // self._every_steps != self._passed:
            self._passed, due = step // self._every_steps, True
        if self._interval is not None:
            clock, world = trainer.progress.seconds, trainer.accelerator.world
            if self._deadline.passed(self._saved_at + self._interval, now=clock, world=world):
                self._saved_at, due = clock(), True
        return due

    def _epoch_counts(self, trainer: Any) -> bool:
        return self._every_epochs > 0 and (trainer.current_epoch + 1) % self._every_epochs == 0

    def _save_or_wait(self, trainer: Any, *, more: bool) -> None:
        """Save, or wait for the metric: if ``more`` comes at this step, or nothing has come since the last save."""
        step, monitored = trainer.global_step, self._monitored
        if more and any(trainer.metric_steps.get(name) != step for name in self._uses):
            self._waiting = True
            return
        if trainer.training and any(trainer.metric_steps.get(name) != step for name in self._uses):
            trainer.reduce_metrics()  # a value of this step may be there already, only its row is not due yet
        self._waiting = monitored is not None and not monitored.fresh(trainer)
        if step == self._saved_step:
            return
        if not self._waiting:
            self._save(trainer, math.nan if monitored is None else monitored.take(trainer))
            return
        self._say_waiting(trainer)
        if self.save_last or self.save_top_k == -1:
            self._save(trainer, math.nan, ranked=self.save_top_k == -1)

    def _say_waiting(self, trainer: Any) -> None:
        monitored = self._monitored
        assert monitored is not None
        if monitored.missing(trainer):
            monitored.warn_once(f"{monitored.absent(trainer)} The save waits until then.")
        else:
            monitored.warn_once(
                f"Expected {monitored.name!r} to be logged between two saves. Received: no new value. "
                "The save waits for the next one; save less often, or leave monitor out."
            )

    def _refuse_unknown(self, trainer: Any) -> None:
        """At the end of an epoch everything has been logged that will be: then a missing metric is an error."""
        monitored = self._monitored
        if monitored is not None and monitored.missing(trainer) and (self._validated or not validates(trainer)):
            raise ValueError(monitored.absent(trainer))

    # Saving

    def _save(self, trainer: Any, score: float, *, ranked: bool = True) -> None:
        trainer.accelerator.wait_for_saves()  # its coming may change what is kept, and which names are free
        limit = self.save_top_k if ranked else 0
        planned = self._kept.admit(score, limit=limit, rank=self._rank, last=self.save_last)
        if planned is not None:
            metrics = _counters(trainer) | ({self.monitor: score} if self.monitor else {})
            path = self.format_checkpoint_name(metrics)
            self._write(trainer, planned.named(path if path in planned.doomed else self._free(trainer, metrics)))

    def _write(self, trainer: Any, planned: Kept, *, urgent: bool = False) -> None:
        """Have a checkpoint written; what it replaces goes when it is on the disk."""
        before = self._saved_step, self._urgent_step
        now = trainer.global_step
        self._saved_step, self._urgent_step = (before[0], now) if urgent else (now, before[1])
        self._planned, self._newest = planned, planned.new  # as the checkpoint itself remembers it

        def then() -> None:
            self._kept = self._planned = planned.settled()
            if trainer.is_global_zero:
                if self.save_last:
                    point(Path(planned.new).with_name(self.CHECKPOINT_NAME_LAST), Path(planned.new))
                discard(planned.doomed)
            if self.verbose:
                score = planned.scores.get(planned.new, math.nan)
                trainer.print(f"Saved {planned.new}" + (f" ({self.monitor}={score:.6g})" if self.monitor else ""))

        options = {"weights_only": self.save_weights_only, "asynchronous": self.asynchronous}
        try:
            trainer.save_checkpoint(planned.new, then=then, **options)
        except BaseException:
            self._planned = self._kept
            self._saved_step, self._urgent_step = (before[0], -1) if urgent else (-1, before[1])
            raise

    def _free(self, trainer: Any, metrics: dict[str, Any], *, agreed: bool = True) -> str:
        """Return a path that is free on rank 0's disk (others need not see it); not ``agreed``, on this rank's."""
        path, version = self.format_checkpoint_name(metrics), self.STARTING_VERSION
        while self.enable_version_counter and os.path.lexists(path) and not self._again(trainer, path):
            path, version = self.format_checkpoint_name(metrics, ver=version), version + 1
        return trainer.accelerator.world.broadcast_object(path) if agreed else path

    def _again(self, trainer: Any, path: str) -> bool:
        """Tell whether the run was at this step before it was interrupted, and left ``path`` then."""
        left = os.path.basename(path) in self._found
        return left and written_by(path, trainer.run_id, trainer.global_step)

    def _made(self, filename: str | None) -> Template:
        insert = filename is not None and self.auto_insert_metric_name
        return Template(filename or _DEFAULT_NAME, insert=insert, equals=self.CHECKPOINT_EQUALS_CHAR)


class OnExceptionCheckpoint(Callback):
    """Save the checkpoint ``dirpath``/``filename`` when a fit raises; on several ranks, see ``save_on_exception``."""

    priority = AFTER_MODULE + 100

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        self.dirpath, self.filename = folder(dirpath), filename
        self._template = Template(filename, insert=True)

    @property
    def checkpoint_path(self) -> str:
        """Where the checkpoint goes, before ``filename``'s fields are filled in."""
        return str(self.dirpath / self.filename)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if trainer.session.stage == "fit":
            path = self.dirpath / self._template.render(_counters(trainer))
            rescue(trainer, exception, lambda: trainer.save_checkpoint(path))


def _counters(trainer: Any) -> dict[str, Any]:
    return {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
