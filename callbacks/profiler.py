"""Where the time of a fit goes: by the parts of the loop, by torch's operators, or by Python's functions."""

from __future__ import annotations

import cProfile
import io
import pstats
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ..strategies.settings import ProfileKwargs
from .base import Callback
from .checks import check_choice, check_whole
from .filenames import folder
from .sections import LAST, Sections

_KINDS = {"simple": "simple", "torch": "torch", "pytorch": "torch", "cprofile": "cprofile", "advanced": "cprofile"}


class Profiler(Callback):
    """Measure a fit and write the result into ``dirpath`` (by default the run's folder); tables are printed too.

    - "simple": the seconds that went into waiting for data, ``training_step``, backward, optimizer, logging,
      validation, checkpoints and each callback. It reads a clock between them: with a GPU, work that is still under
      way counts where it is waited for. Adds a few microseconds to a step.
    - "torch" ("pytorch"): operators, by ``torch.profiler``. It leaves out ``wait`` batches, warms up for ``warmup``,
      records ``active`` and does so ``repeat`` times (0: to the end); each time it writes a trace for
      chrome://tracing and a table of ``row_limit`` rows by ``sort_by``, on every rank. ``record_shapes``,
      ``profile_memory``, ``with_stack``, ``with_flops`` and ``activities`` are torch's.
    - "cprofile" ("advanced"): Python functions, by cumulated time, ``row_limit`` of them.

    Raises ValueError for another kind, and for an option that the kind has not.
    """

    priority = -LAST  # before everybody else

    def __init__(
        self,
        kind: str = "simple",
        dirpath: str | Path | None = None,
        *,
        filename: str | None = None,
        wait: int | None = None,
        warmup: int | None = None,
        active: int | None = None,
        repeat: int | None = None,
        activities: list[str] | None = None,
        record_shapes: bool | None = None,
        profile_memory: bool | None = None,
        with_stack: bool | None = None,
        with_flops: bool | None = None,
        row_limit: int | None = None,
        sort_by: str | None = None,
    ) -> None:
        check_choice("kind", kind, tuple(_KINDS))
        schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        switches = {
            "activities": activities, "record_shapes": record_shapes, "profile_memory": profile_memory,
            "with_stack": with_stack, "with_flops": with_flops,
        }  # fmt: skip
        everything = {**schedule, **switches, "sort_by": sort_by, "row_limit": row_limit}
        given = {name for name, value in everything.items() if value is not None}
        self.kind = _KINDS[kind]
        unknown = given - {"simple": set(), "cprofile": {"row_limit"}, "torch": given}[self.kind]
        if unknown:
            raise ValueError(
                f"Expected options of Profiler({kind!r}). Received: {', '.join(sorted(unknown))}. "
                'Leave them out, or use Profiler("torch").'
            )
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0), ("row_limit", 1)):
            check_whole(name, everything[name], least=least)
        self.dirpath, self.filename = None if dirpath is None else folder(dirpath), filename or f"profile-{self.kind}"
        self.tool: Sections | Operators | Functions | None = None
        self._make: Callable[[], Sections | Operators | Functions]
        if self.kind == "simple":
            self._make = partial(Sections)
        elif self.kind == "cprofile":
            self._make = partial(Functions, row_limit or 30)
        else:
            defaults = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
            options: dict[str, Any] = {name: value for name, value in switches.items() if value is not None}
            options["schedule_option"] = {n: defaults[n] if v is None else v for n, v in schedule.items()}
            self._make = partial(Operators, options, row_limit or 20, sort_by)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self.tool = self._make()  # here: what it holds cannot go to spawned processes
            for event, function in self.tool.hooks.items():  # each kind listens only to what it needs
                setattr(self, event, function)
            name = self.filename + (f"-rank{trainer.global_rank}" if trainer.global_rank else "")
            self.tool.open(trainer, module, (self.dirpath or folder(trainer.log_dir)) / name)
            self.tool.end.on_train_end = lambda trainer, module: self._finish(trainer)  # type: ignore[method-assign]
            trainer.session.callbacks.append(self.tool.end)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._finish(trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self.tool is not None:
            self.tool.close()

    def _finish(self, trainer: Any) -> None:
        report = self.tool.stop() if self.tool is not None else ""
        if report:
            trainer.print(report)


class Operators:
    """torch.profiler over some batches, on every rank."""

    def __init__(self, options: dict[str, Any], row_limit: int, sort_by: str | None) -> None:
        self.options, self.row_limit, self.sort_by = options, row_limit, sort_by
        self.schedule: dict[str, int] = options["schedule_option"]
        self.hooks = {"on_train_start": lambda *_: self._start()}
        self.end = Callback()  # hears events after everybody else
        self.end.priority = LAST
        self.end.on_train_batch_end = lambda *_: self.profile.step()  # type: ignore[method-assign]
        self.running = False

    def open(self, trainer: Any, module: Any, path: Path) -> None:
        """Make ready for a fit whose results go to ``path`` and an ending."""
        device = trainer.device.type
        self.order = self.sort_by or f"self_{device if device in ('cuda', 'xpu') else 'cpu'}_time_total"
        self.path, self.written = path, 0
        self.profile = ProfileKwargs(**self.options, on_trace_ready=self._write).build()

    def stop(self) -> str:
        """Return what was written where; "" where nothing ran."""
        if not self.running:
            return ""
        self.running = False
        self.profile.stop()
        if self.written:
            return f"Profiled operators: {self.path}-*.json (for chrome://tracing) and {self.path}-*.txt"
        ahead = self.schedule["wait"] + self.schedule["warmup"]
        warnings.warn(
            f"Expected more than {ahead} batches to profile. Received: {self.profile.step_num}. "
            "Train for longer, or lower wait and warmup.",
            stacklevel=2,
        )
        return ""

    def close(self) -> None:
        """Let go of the fit."""

    def _start(self) -> None:
        self.running = True
        self.profile.start()

    def _write(self, profile: Any) -> None:
        ahead = self.schedule["wait"] + self.schedule["warmup"]
        if profile.step_num % (ahead + self.schedule["active"]) == ahead:
            return  # the run ended before the first batch to record
        self.written += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(f"{self.path}-{self.written}.json")
        text = profile.key_averages().table(sort_by=self.order, row_limit=self.row_limit)
        Path(f"{self.path}-{self.written}.txt").write_text(text)


class Functions:
    """Python's own profiler over the whole fit."""

    def __init__(self, row_limit: int) -> None:
        self.row_limit = row_limit
        self.hooks = {"on_train_start": lambda *_: self._start()}
        self.end = Callback()
        self.end.priority = LAST
        self.running = False

    def open(self, trainer: Any, module: Any, path: Path) -> None:
        """Make ready for a fit whose results go to ``path`` and an ending."""
        self.path, self.profile = Path(f"{path}.txt"), cProfile.Profile()

    def stop(self) -> str:
        """Return the table, which is also written; "" where nothing ran."""
        if not self.running:
            return ""
        self.running = False
        self.profile.disable()
        text = io.StringIO()
        pstats.Stats(self.profile, stream=text).sort_stats("cumulative").print_stats(self.row_limit)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text.getvalue())
        self.profile.dump_stats(self.path.with_suffix(".prof"))
        return f"{text.getvalue().rstrip()}\n{self.path}, and {self.path.with_suffix('.prof')} for pstats or snakeviz"

    def close(self) -> None:
        """Let go of the fit."""

    def _start(self) -> None:
        try:
            self.profile.enable()
        except ValueError as error:  # Python 3.12 has room for one
            raise ValueError(
                f"Expected no other profiler of Python to run. Received: {error}. "
                'Stop it, or use Profiler("simple").'
            ) from error
        self.running = True
