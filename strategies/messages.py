"""Messages of several processes: a logger that speaks once, or in order, and a bar that only one process shows."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from . import world as worlds
from .environment import text


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # takes no argument at run time before Python 3.11


class MultiProcessAdapter(_Adapter):
    """A logger that writes on the first process only, unless a call says otherwise.

    `main_process_only=False` writes on every process; `in_order=True` on all, one after the other by rank, for which
    every process has to make the call.
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a message; takes `main_process_only` (True) and `in_order` (False) besides logging's own."""
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # so that the caller's line is shown, not this one
        if not self.isEnabledFor(level):
            return
        world = worlds.current()
        if world.rank == 0 and (main_only or not in_order):
            self._write(level, msg, args, kwargs)
        elif not main_only and not in_order:
            self._write(level, msg, args, kwargs)
        elif not main_only:
            for rank in range(world.size):
                if rank == world.rank:
                    self._write(level, msg, args, kwargs)
                world.barrier("logging in order")

    def _write(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        msg, options = self.process(msg, kwargs)
        self.logger.log(level, msg, *args, **{**options, "stacklevel": options["stacklevel"] + 1})

    @functools.cache  # noqa: B019  # a process has few loggers, and they live as long as it does
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Writes a warning the first time that it is made with these arguments."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Returns the logger of this name (use `__name__`), for messages of several processes.

    `log_level` ("INFO", …; default: the variable ACCELERATE_LOG_LEVEL) sets its level and the root logger's.
    """
    log_level = log_level or text("LOG_LEVEL")
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Returns a bar of the tqdm package, shown by the first process of each machine only, unless told otherwise.

    Raises:
        TypeError: `main_process_only` is given in place of what is to be iterated, as it was long ago.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise TypeError(
            f"Expected what to iterate first. Received: {args[0]}. Pass main_process_only={args[0]} by name."
        )
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = worlds.current().local_rank != 0
    return bar(*args, **kwargs)
