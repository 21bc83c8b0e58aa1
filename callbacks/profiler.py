"""Where the time of a fit goes: by the parts of the loop, by torch's operators, or by Python's functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Callable

from .base import Callback
from .checks import check_choice, check_whole
from .filenames import folder
from .sections import LAST, Sections

_KINDS = {"simple": "simple", "torch": "torch", "pytorch": "torch", "cprofile": "cprofile", "advanced": "cprofile",
          "xla": "xla"}  # fmt: skip
_SCHEDULE = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
_FOR_MEMORY = ("record_shapes", "profile_memory", "with_stack")  # what a timeline of memory is made of
_LEAST = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "row_limit": 1}


class Profiler(Callback):
    """Measure a fit and write the result into ``dirpath`` (by default the run's folder); tables are printed too.

    - "simple": the seconds that went into waiting for data, ``training_step``, backward, optimizer, logging,
      validation, checkpoints and each callback. It reads a clock between them: with a GPU, work that is still under
      way counts where it is waited for. Adds a few microseconds to a step.
    - "torch" ("pytorch"): operators, by ``torch.profiler``. It leaves out ``wait`` batches, warms up for ``warmup``,
      records ``active`` and does so ``repeat`` times (0: to the end); each time it writes a trace for
      chrome://tracing and a table of ``row_limit`` rows by ``sort_by``, on every rank. ``record_shapes``,
      ``profile_memory``, ``with_stack``, ``with_flops`` and ``activities`` are torch's. Traces are named such that
      TensorBoard's profiler plugin finds them. ``memory_timeline`` adds the memory by category over time, as JSON.
    - "xla": a trace of the XLA runtime, for TensorBoard, over batches ``wait`` to ``wait + active`` (extra ``xla``).
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
        memory_timeline: bool | None = None,
        row_limit: int | None = None,
        sort_by: str | None = None,
    ) -> None:
        check_choice("kind", kind, tuple(_KINDS))
        schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        switches = {
            "activities": activities, "record_shapes": record_shapes, "profile_memory": profile_memory,
            "with_stack": with_stack, "with_flops": with_flops,
        }  # fmt: skip
        switches |= dict.fromkeys(_FOR_MEMORY, True) if memory_timeline else {}
        rest = {"sort_by": sort_by, "row_limit": row_limit, "memory_timeline": memory_timeline}
        everything = {**schedule, **switches, **rest}
        given = {name for name, value in everything.items() if value is not None}
        self.kind = _KINDS[kind]
        known = {"simple": set(), "cprofile": {"row_limit"}, "torch": given, "xla": {"wait", "active"}}
        unknown = given - known[self.kind]
        if unknown:
            raise ValueError(
                f"Expected options of Profiler({kind!r}). Received: {', '.join(sorted(unknown))}. "
                'Leave them out, or use Profiler("torch").'
            )
        for name, least in _LEAST.items():
            check_whole(name, everything[name], least=least)
        self.dirpath, self.filename = None if dirpath is None else folder(dirpath), filename or f"profile-{self.kind}"
        self.tool: Any = None
        self._make: Callable[[], Any]
        if self.kind == "simple":
            self._make = partial(Sections)
        elif self.kind == "cprofile":
            from .function_profile import Functions  # here, as the other kinds need no profiler of Python's

            self._make = partial(Functions, row_limit or 30)
        elif self.kind == "xla":
            from .xla_profile import Traces

            self._make = partial(Traces, 3 if wait is None else wait, active or 3)
        else:
            from .operator_profile import Operators

            options: dict[str, Any] = {name: value for name, value in switches.items() if value is not None}
            options["schedule_option"] = _SCHEDULE | {n: v for n, v in schedule.items() if v is not None}
            self._make = partial(Operators, options, row_limit or 20, sort_by, memory_timeline=bool(memory_timeline))

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
