"""Signals: noted when they come, acted on at a step's edge by all ranks together: save, ask for a requeue, end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..strategies.environment import interactive, text
from .base import AFTER_MODULE, Callback
from .checkpoint import ModelCheckpoint
from .siblings import PeerFailed, Siblings, siblings

logger = logging.getLogger(__name__)

_SIGNALS = tuple(name for name in ("SIGUSR1", "SIGTERM", "SIGINT") if hasattr(signal, name))  # not all on Windows
_SOON = 2.0  # seconds in which a launcher repeats the Ctrl-C that its ranks had from the terminal already


class Interrupted(SystemExit):
    """A signal has stopped a run: ``signal`` is its name, ``checkpoint`` the folder saved or "", ``code`` an exit code.

    Being a SystemExit it ends the program, quietly and by that code, unless somebody catches it.
    """

    def __init__(self, code: int, *, signal: str = "", checkpoint: str = "") -> None:
        super().__init__(code)
        self.signal, self.checkpoint = signal, checkpoint


class Preemption(Callback):
    """End a run in good order when a signal asks for it; part of every run unless the Trainer is ``barebones``.

    A signal that any rank gets is noted, and at the next step's edge all ranks save (``save=False``: do not) into the
    folder of the run's ``ModelCheckpoint``, or into ``<log_dir>/checkpoints``, and end by ``Interrupted``. A validation
    is left between two batches; the run that goes on begins it anew. ``validate``, ``test`` and ``predict`` end there,
    with nothing to save. The exit
    code is 128 + the signal's number (143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1), or what ``exit_codes`` says:
    ``{"SIGUSR1": 0}``. After SIGUSR1 a SLURM job is requeued, once, by rank 0 (``requeue``: True after any signal,
    False never). A second SIGINT ends the run at once. ``signals=()`` leaves all signals alone.

    A signal that the program handles or ignores itself is left to it, handlers that were there before the run are
    put back after it, and outside of the main thread nothing is installed. SIGTERM that a launcher sends because
    another rank has ended raises ``PeerFailed`` instead. Raises ValueError for a name that is no signal's.
    """

    priority = AFTER_MODULE + 1000  # at the end of a run after everybody who writes something

    def __init__(
        self,
        signals: Sequence[str] = _SIGNALS,
        *,
        save: bool = True,
        requeue: bool | None = None,
        exit_codes: Mapping[str, int] | None = None,
    ) -> None:
        for name in (*signals, *(exit_codes or {})):
            if not name.startswith("SIG") or not hasattr(signal, name):
                raise ValueError(f'Expected names of signals. Received: {name!r}. Use e.g. "SIGTERM".')
        self.signals, self.save, self.requeue = tuple(signals), save, requeue
        self.exit_codes = {name: 128 + getattr(signal, name) for name in self.signals} | dict(exit_codes or {})
        self._previous: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._noted: dict[str, float] = {}  # when a signal came to this rank first
        self._siblings: Siblings | None = None
        self._trainer: Any = None
        self._ended = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if not self.signals:
            return
        self._begin()
        self._trainer, self._process = trainer, os.getpid()
        self._siblings = siblings(trainer)
        if threading.current_thread() is threading.main_thread():
            for name in self.signals:
                self._install(name)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self._ended and self._siblings is not None:
            self._siblings.wait()  # the first that ends is taken for a failure, and the others are told to hurry
        if self._siblings is not None:
            self._siblings.forget()
        for name, handler in self._previous.items():
            signal.signal(getattr(signal, name), handler)
        self._previous.clear()
        self._trainer = self._siblings = None

    def on_stop(self, trainer: Any, module: Any) -> None:
        """End here, unless training is over anyway: then what belongs to its end comes first."""
        if self.signals:
            over = trainer.schedule.finished(trainer.progress, wish=trainer.should_stop)
            name, over = self._agreed(trainer, over and not trainer.session.abandoned)
            if name and not over:
                self._end(trainer, name)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.signals:
            name, _ = self._agreed(trainer, True)
            if name:
                self._end(trainer, name)

    # In evaluations

    def _listen(self, trainer: Any, *rest: Any) -> None:
        """Tell the others of a signal, and hear of theirs: no collective, as numbers of batches may differ."""
        if self._siblings is None or self._siblings.none:
            return
        if self._noted:
            self._siblings.say(next(iter(self._noted)))
        elif self._siblings.heard():
            trainer.interrupted = True

    def _after(self, trainer: Any, module: Any) -> None:
        """A signal in the very last batch lets an evaluation come to its end."""
        if trainer.session.stage != "fit":
            self.on_train_end(trainer, module)

    _hear: Any = _listen
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _hear
    _close: Any = _after
    on_validation_end = on_test_end = on_predict_end = _close

    # What a signal does

    def _install(self, name: str) -> None:
        number = getattr(signal, name)
        previous = signal.getsignal(number)
        if previous in (signal.SIG_DFL, signal.default_int_handler) or getattr(previous, "steps_aside", False):
            self._previous[name] = previous
            signal.signal(number, self._note)
        elif previous is not signal.SIG_IGN:
            logger.warning("%s is handled by the program itself; a fit does not save when it comes.", name)

    def _note(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._process:
            self._in_child(number)
        elif name in self._noted:
            self._repeated(name)
        elif name == "SIGTERM" and self._siblings is not None and (failure := self._siblings.failure()):
            if not self._trainer.session.failed:
                raise PeerFailed(f"Expected all ranks to go on. Received: {failure}. This rank ends with it.")
        else:
            self._noted[name] = time.monotonic()
            self._trainer.interrupted = True

    def _in_child(self, number: int) -> None:
        """A worker that was forked meanwhile: what is sent to all processes is not meant for it, but its end is."""
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _repeated(self, name: str) -> None:
        alone = self._siblings is None or self._siblings.none
        if name == "SIGINT" and (alone or time.monotonic() - self._noted[name] > _SOON):
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one does not even ask Python
            raise KeyboardInterrupt

    # At a step's edge

    def _agreed(self, trainer: Any, over: bool) -> tuple[str, bool]:
        """Return the signal that some rank has got ("" for none), and whether training is over on some rank."""
        votes = torch.tensor([*(int(name in self._noted) for name in self.signals), int(over)])
        *came, over_somewhere = trainer.accelerator.world.all_reduce(votes, "max").tolist()
        return next((name for name, vote in zip(self.signals, came) if vote), ""), bool(over_somewhere)

    def _end(self, trainer: Any, name: str) -> None:
        trainer.interrupted, trainer.stop_reason = True, name
        self._noted.setdefault(name, time.monotonic())
        training = trainer.session.loop is not None
        checkpoint = self._saved(trainer) if self.save and training else ""
        trainer.accelerator.wait_for_saves()  # one that is written in the background
        self._ended = True
        code = self.exit_codes[name]
        where = f", saved in {checkpoint}" if checkpoint else ""
        place = f"training stops at step {trainer.global_step}" if training else f"{trainer.session.stage} stops here"
        trainer.print(f"{name}: {place}{where}. Exit code {code}.")
        if self.requeue or (self.requeue is None and name == "SIGUSR1"):
            self._requeue(trainer)
        if name == "SIGINT" and interactive():
            raise KeyboardInterrupt(f"{place}{where}")
        raise Interrupted(code, signal=name, checkpoint=checkpoint)

    def _saved(self, trainer: Any) -> str:
        for callback in trainer.session.callbacks:
            if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only:
                return callback.save_now(trainer)
        path = trainer.log_dir / "checkpoints" / f"interrupted-{trainer.global_step:06d}"
        trainer.save_checkpoint(path)
        return str(path)

    def _requeue(self, trainer: Any) -> None:
        job = text("SLURM_JOB_ID")
        if job is None or text("SLURM_JOB_NAME") in ("bash", "interactive") or not trainer.is_global_zero:
            return
        try:
            subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            logger.warning("Expected SLURM to requeue job %s. Received: %s. Start it again by hand.", job, said)
        else:
            trainer.print(f"SLURM job {job} is requeued.")
