"""Recording the arguments of ``__init__``, so that a checkpoint can build its module again."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any, Mapping, Sequence


class AttributeDict(dict):
    """A dict whose entries are attributes too: ``hparams.lr`` is ``hparams["lr"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"Expected one of {sorted(self)}. Received: hparams.{name}. Save it first.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Hyperparameters:
    """Gives a class ``save_hyperparameters`` and ``hparams``."""

    @property
    def hparams(self) -> AttributeDict:
        """The arguments that ``save_hyperparameters`` recorded; saved in every checkpoint."""
        return self.__dict__.setdefault("_hparams", AttributeDict())

    @property
    def logs_hparams(self) -> bool:
        """Whether trackers get the hyperparameters."""
        return self.__dict__.get("_logs_hparams", True)

    def save_hyperparameters(
        self, *args: Any, ignore: str | Sequence[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Record the arguments of ``__init__`` (or those named, or a given dict) as ``hparams``.

        Call it in ``__init__``. ``ignore`` leaves names out; ``logger=False`` keeps them from the trackers. Raises
        ValueError for a name that is no argument.
        """
        if len(args) == 1 and isinstance(args[0], Mapping):
            found = dict(args[0])
        else:
            found = init_arguments(self, frame or inspect.currentframe().f_back)  # type: ignore[union-attr]
            unknown = [name for name in args if name not in found]
            if unknown:
                raise ValueError(
                    f"Expected names of arguments of __init__: {sorted(found)}. Received: {unknown}. Use these names."
                )
            found = {name: found[name] for name in args} if args else found
        left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
        self.__dict__["_logs_hparams"] = logger
        self.hparams.update({name: value for name, value in found.items() if name not in left_out})


def init_arguments(thing: Any, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of the running ``__init__`` calls of ``thing``, those of a subclass winning."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        values = inspect.getargvalues(frame)
        if not values.args or values.locals.get(values.args[0]) is not thing:
            break
        mine = {name: values.locals[name] for name in values.args[1:] if name in values.locals}
        extra = values.locals.get(values.keywords, {}) if values.keywords else {}
        found.update({name: value for name, value in {**mine, **extra}.items() if name != "__class__"})
        frame = frame.f_back
    return found
