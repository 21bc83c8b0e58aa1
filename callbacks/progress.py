"""Show how far a run is: bars on a terminal and in notebooks, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from time import monotonic
from typing import Any, TextIO

from .base import AFTER_MODULE, Callback
from .checks import check_choice, check_number, check_whole
from .displays import Bars, Display, Lines, Pulse, clock, in_notebook, shown
from .durations import Duration
from .rich_display import RichBars, require_rich

_TITLES = {"validate": "Validation", "sanity_check": "Sanity check", "test": "Testing", "predict": "Prediction"}
_REDRAW = 0.1  # seconds between two redraws of a bar
_FIRST_LINE = 3.0  # seconds until the first line; then three times as long, up to the set interval
_FREE_LINES = 20  # so many epochs always end with a line; later ones only if a second has passed


class Progress(Callback):
    """Show progress on the main process; on a terminal as bars, redrawn at most ten times a second, elsewhere as lines.

    ``refresh_rate`` batches lie at least between two redraws (0: show nothing), ``process_position`` rows stay free
    above the bars, ``leave`` keeps the bar of every epoch. ``per`` "fit" counts the optimizer steps of the whole fit
    instead of the batches of an epoch. Lines come after 3 and 12 s and then every ``line_seconds``, and at the ends
    of epochs; when no batch ends for that long, a line says so. Shown are the metrics that were logged with
    ``prog_bar=True``, as last reduced: showing reads no tensor. ``stream`` is where to write, by default stderr.
    ``style`` "rich" draws the bars of a terminal by rich (extra ``rich``). Raises ValueError for bad arguments,
    ImportError where rich is asked for and missing.
    """

    priority = AFTER_MODULE

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        *,
        leave: bool = False,
        per: str = "epoch",
        line_seconds: float = 30.0,
        stream: TextIO | None = None,
        style: str = "tqdm",
    ) -> None:
        check_choice("style", style, ("tqdm", "rich"))
        if style == "rich":
            require_rich()
        check_whole("refresh_rate", refresh_rate, least=0)
        check_whole("process_position", process_position, least=0)
        check_choice("per", per, ("epoch", "fit"))
        check_number("line_seconds", line_seconds)
        if not line_seconds > 0:
            raise ValueError(f"Expected seconds above zero. Received: line_seconds={line_seconds!r}. Use e.g. 30.")
        self.refresh_rate, self.process_position, self.leave, self.per = refresh_rate, process_position, leave, per
        self.line_seconds, self.stream, self.style = line_seconds, stream, style
        self._enabled = refresh_rate > 0
        self._display = Display()
        self._due = math.inf  # when to draw next; each batch costs a look at the clock
        self._pause = _REDRAW
        self._drawn = self._done = self._lines = 0
        self._total_steps = math.inf
        self._since = (0.0, 0)  # clock and optimizer steps when training began in this process
        self._training = False
        self._pulse: Pulse | None = None

    def enable(self) -> None:
        """Show progress, from the next run on."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing, from the next run on."""
        self._enabled = False

    def write(self, *values: Any, **options: Any) -> None:
        """Print as ``print`` does, without breaking a bar."""
        self._display.write(*values, **options)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if not (self._enabled and trainer.is_global_zero):
            return
        stream = self.stream or sys.stderr
        if stream.isatty() or in_notebook():
            rich = self.style == "rich"
            self._display = RichBars(stream, self.leave) if rich else Bars(stream, self.process_position, self.leave)
            self._pause = _REDRAW
        else:
            self._display, self._pause = Lines(stream), min(_FIRST_LINE, self.line_seconds)
        self._lines = 0
        self._due = monotonic() + self._pause
        self._pulse = Pulse(self._display, self.line_seconds)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._end()

    # Training

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._training, self._since = True, (monotonic(), trainer.global_step)
        if self.per == "fit":
            self._open_training(trainer, "Training")
        elif trainer.batch_idx:  # goes on within an epoch, whose start is not announced again
            self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.per == "epoch":
            last = _last_epoch(trainer)
            self._open_training(trainer, f"Epoch {trainer.current_epoch + 1}" + (f"/{last}" if last else ""))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if monotonic() >= self._due:
            self._draw_training(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._due == math.inf:
            return
        last = trainer.should_stop or trainer.current_epoch + 1 == _last_epoch(trainer)
        if last or self._lines < _FREE_LINES or self._display.silent_for() >= 1.0:
            self._lines += 1
            self._draw_training(trainer, final=True)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._training = False
        self._display.close("train")

    # Evaluation

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if self._training and not isinstance(self._display, Lines):
            self._draw_training(trainer, final=True)  # so that the time of the validation slows no batches
        self._open_evaluation(trainer)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._done += 1
        if monotonic() >= self._due:
            self._draw_evaluation(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._close_evaluation(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    # Drawing

    def _open_training(self, trainer: Any, title: str) -> None:
        self._total_steps = trainer.estimated_stepping_batches
        whole = self.per == "fit"
        total = self._total_steps if whole else trainer.num_training_batches
        done = trainer.global_step if whole else trainer.batch_idx
        self._drawn = done
        self._display.open("train", title, None if math.isinf(total) else int(total), done)

    def _draw_training(self, trainer: Any, *, final: bool = False) -> None:
        done = trainer.global_step if self.per == "fit" else trainer.batch_idx
        if not final and done - self._drawn < self.refresh_rate:
            return
        self._drawn = done
        notes = self._left(trainer) if self.per == "epoch" or self._display.needs_time_left else []
        if isinstance(self._display, Lines):
            notes.insert(0, f"step {trainer.global_step}")
        self._display.draw("train", done, notes + shown(trainer.progress_bar_metrics))
        self._wait(slower=not final)

    def _open_evaluation(self, trainer: Any) -> None:
        self._done = self._drawn = 0
        stage = trainer.stage
        names = {"validate": "num_val_batches", "sanity_check": "num_sanity_val_batches"}
        counts = getattr(trainer, names.get(stage, f"num_{stage}_batches"))
        total = sum(counts) if isinstance(counts, (list, tuple)) else counts
        self._display.open("evaluate", _TITLES[stage], None if math.isinf(total) else int(total), 0)

    def _draw_evaluation(self, trainer: Any) -> None:
        if self._done - self._drawn >= self.refresh_rate:
            self._drawn = self._done
            self._display.draw("evaluate", self._done, [])
            self._wait(slower=True)

    def _close_evaluation(self, trainer: Any) -> None:
        alone = trainer.stage != "sanity_check" and not self._training
        if alone and self._due < math.inf:
            self._display.draw("evaluate", self._done, shown(trainer.progress_bar_metrics))
        self._display.close("evaluate", keep=alone)

    def _left(self, trainer: Any) -> list[str]:
        """Return the time that the fit will still take, from its optimizer steps in this process."""
        began, first = self._since
        done = trainer.global_step - first
        if math.isinf(self._total_steps) or done <= 0:
            return []
        left = (monotonic() - began) * max(0, self._total_steps - trainer.global_step) / done
        return [f"{clock(left)} left"]

    def _wait(self, *, slower: bool) -> None:
        self._due = monotonic() + self._pause
        if slower and isinstance(self._display, Lines):
            self._pause = min(self.line_seconds, 3 * self._pause)

    def _end(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        self._display.close("evaluate")
        self._display.close("train")
        self._display, self._due, self._pulse, self._training = Display(), math.inf, None, False


TQDMProgressBar = Progress


def _last_epoch(trainer: Any) -> int | None:
    """Return how many epochs the run has at most, None where nothing limits them."""
    given = trainer.max_epochs
    if given is None or given == -1:
        return None
    limit = Duration.parse(given, name="max_epochs", unit="ep")
    return int(limit.value) if limit.unit == "ep" else None
