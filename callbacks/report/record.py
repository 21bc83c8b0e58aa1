"""Keeps what metrics do not tell of a run (clock, memory, warnings, environment), and writes the page at its end.

    run.json       environment, settings, warnings, and one entry for each time that the run was started
    timeline.csv   step, elapsed seconds, samples, learning rate, memory: a line with each row of metrics
    report.html    the page
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch

from ...strategies.memory import device_memory
from ..base import AFTER_MODULE, Callback
from ..tracking.files import replace

logger = logging.getLogger(__name__)

COLUMNS = ("step", "elapsed", "samples", "lr", "memory_gib")
"""Columns of timeline.csv; `elapsed` are seconds trained, over interruptions, `memory_gib` the most used so far."""
_WARNINGS = 100


class Report(Callback):
    """Write `report.html` into the run's folder when a fit ends: curves, where the time went, settings, checkpoints.

    The page is one file that needs no network; `drivetrain report` makes it again, also for several runs side by side.
    With ``page=False`` only what the page is made of is kept. Costs nothing in a step: it listens to rows of metrics.
    """

    priority = AFTER_MODULE + 1  # after the last checkpoint of a fit

    def __init__(self, *, page: bool = True) -> None:
        self.page = page
        self._folder: Path | None = None
        self._file: TextIO | None = None
        self._content: dict[str, Any] = {}
        self._validating = 0.0
        self._warnings: _Warnings | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self._folder = Path(trainer.log_dir)
        try:
            self._begin(trainer, module)
        except OSError as error:
            self._give_up(error)

    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if self._file is None or not trainer.training:
            return
        rate = next((group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups), "")
        row = (step, round(trainer.progress.seconds(), 4), trainer.progress.samples, float(rate) if rate != "" else "",
               round(_memory(trainer.device), 4))  # fmt: skip
        try:
            self._file.write(",".join(map(str, row)) + "\n")
        except OSError as error:
            self._give_up(error)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._since = time.monotonic()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._validating += time.monotonic() - self._since

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._end(trainer, "finished", page=self.page)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        stopped = isinstance(exception, (KeyboardInterrupt, SystemExit))
        error = f"{type(exception).__name__}: {exception}".rstrip(": ")
        self._end(trainer, "interrupted" if stopped else "failed", page=self.page and not stopped, error=error)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and self._file is not None:  # neither ended nor raised: left by agreement with other ranks
            self._end(trainer, "interrupted", page=False)

    def _begin(self, trainer: Any, module: Any) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        before = _read(self._folder / "run.json")
        self._validating = 0.0
        self._content = {
            "run_id": trainer.run_id,
            "strategy": trainer.strategy.name,
            "precision": trainer.precision.name,
            "world_size": trainer.world_size,
            "device": str(trainer.device.type),
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "environment": _environment(trainer.device),
            "starts": before.get("starts", []),
            "warnings": before.get("warnings", []),
        }
        self._content["starts"].append({
            "time": _now(), "host": platform.node(), "command": sys.argv, "from_step": trainer.global_step,
            "status": "running",
        })  # fmt: skip
        kept = _rows_until(self._folder / "timeline.csv", trainer.global_step)
        replace(self._folder / "timeline.csv", kept)
        self._file = open(self._folder / "timeline.csv", "a", encoding="utf-8", newline="", buffering=1)
        self._warnings = _Warnings(self._content["warnings"])
        logging.getLogger("drivetrain").addHandler(self._warnings)
        self._write()

    def _end(self, trainer: Any, status: str, *, page: bool, error: str | None = None) -> None:
        if self._file is None or self._folder is None:
            return
        self._close()
        self._content["starts"][-1] |= {
            "status": status, "ended": _now(), "to_step": trainer.global_step, "error": error,
            "stop_reason": None if trainer.stop_reason is None else str(trainer.stop_reason),
            "seconds": round(trainer.progress.seconds(), 3), "validation_seconds": round(self._validating, 3),
        }  # fmt: skip
        try:
            self._write()
        except OSError as problem:
            logger.warning("What the report needs could not be written: %s.", problem)
            return
        if page:
            self._make_page(trainer)

    def _make_page(self, trainer: Any) -> None:
        """A page that cannot be made costs the page, never the run."""
        from .page import write  # here, as a run that needs no page needs none of it

        assert self._folder is not None
        try:
            for tracker in trainer.trackers:
                flush = getattr(tracker, "flush", None)
                if flush is not None:
                    flush()
            write([self._folder], self._folder / "report.html")
        except Exception as problem:
            logger.warning("The report could not be made: %s: %s.", type(problem).__name__, problem)

    def _write(self) -> None:
        assert self._folder is not None
        replace(self._folder / "run.json", [json.dumps(self._content, indent=1), "\n"])

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        if self._warnings is not None:
            logging.getLogger("drivetrain").removeHandler(self._warnings)
            self._warnings = None

    def _give_up(self, error: OSError) -> None:
        self._close()
        logger.warning("What the report needs could not be written: %s. The run goes on without.", error)


class _Warnings(logging.Handler):
    """Collects drivetrain's warnings, each text once with how often it came."""

    def __init__(self, collected: list[dict[str, Any]]) -> None:
        super().__init__(logging.WARNING)
        self.collected = collected

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        for entry in self.collected:
            if entry["message"] == text:
                entry["count"] += 1
                return
        if len(self.collected) < _WARNINGS:
            self.collected.append({"time": _now(), "level": record.levelname, "message": text, "count": 1})


def _environment(device: torch.device) -> dict[str, str]:
    from ... import __version__

    facts = {"drivetrain": __version__, "torch": torch.__version__, "python": platform.python_version(),
             "platform": platform.platform()}  # fmt: skip
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


def _memory(device: torch.device) -> float:
    """The most that this process has used so far, in GiB: of the accelerator's memory, else resident memory."""
    peak = device_memory(device).get("peak_allocated")
    if peak is not None:
        return peak / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _rows_until(path: Path, step: int) -> list[str]:
    """The lines of a timeline that a run that goes on from `step` will not write again."""
    header = ",".join(COLUMNS) + "\n"
    if not path.is_file():
        return [header]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]
    return [header, *(line for line in lines if line.endswith("\n") and int(line.split(",", 1)[0]) <= step)]


def _read(path: Path) -> dict[str, Any]:
    """What run.json holds; nothing where it is not there, or no longer what it was."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = isinstance(content, dict) and all(isinstance(content.get(k, []), list) for k in ("starts", "warnings"))
    return content if known else {}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
