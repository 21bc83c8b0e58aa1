"""The parser behind the commands: jsonargparse with drivetrain's keys, and the objects that a config describes."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Optional, Union

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_loader, set_parsing_settings
from jsonargparse.typing import register_type
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks.durations import Duration
from . import document
from .classes import check_callables, denied_modules, import_class, is_named, preload
from .explain import explain
from .help import KEYS
from .sources import ConstructionError, Layer, UsageError

_MODE = "drivetrain"


class RunParser(ArgumentParser):
    """Reads the keys of a run; `add_argument`, `add_class_arguments` and `link_arguments` are those of jsonargparse."""

    def __init__(self, **options: Any) -> None:
        import yaml

        set_loader(_MODE, document.read, exceptions=(yaml.YAMLError,))
        # A class is built only where its kind is declared, and what runs commands cannot be named (docs/security.md).
        set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=denied_modules())
        register_type(Duration, _duration_text, _duration)
        super().__init__(
            **{"exit_on_error": False, "allow_abbrev": False, "parser_mode": _MODE, "print_config": None, **options}
        )

    def add_files(self) -> None:
        """Add the config files; only to a whole run's parser, as a class may have an argument of that name itself."""
        self.add_argument("-c", "--config", action="config", help=KEYS["config"])

    def add_seed(self, default: bool | int | None) -> None:
        """Add seed_everything, the seed of the whole run."""
        kind = Union[int, bool, None]
        self.add_argument("--seed_everything", type=kind, default=default, help=KEYS["seed_everything"])

    def add_checkpoint_keys(self) -> None:
        """Add what a run starts from."""
        for key in ("ckpt_path", "resume"):
            self.add_argument(f"--{key}", type=Optional[str], default=None, help=KEYS[key])

    def add_class(self, key: str, base: type, *, by_path: bool, required: bool) -> None:
        """Add a class under ``key``: its arguments, or (``by_path``) class_path and init_args of a subclass."""
        if by_path:
            self.add_subclass_arguments(base, key, required=required, fail_untyped=False)
        else:
            self.add_class_arguments(base, key, fail_untyped=False)

    def add_optimizer_keys(self) -> None:
        """Add optimizer, lr_scheduler and lr_scheduler_config; neither class is built by the parser."""
        options: dict[str, Any] = {"required": False, "instantiate": False, "fail_untyped": False}
        self.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, **options)
        self.add_subclass_arguments(LRScheduler, "lr_scheduler", skip={"optimizer"}, **options)
        settings = {
            "interval": (Literal["epoch", "step"], "epoch", "unit of frequency"),
            "frequency": (int, 1, "step the scheduler every so many units"),
            "monitor": (Optional[str], None, "metric that a plateau scheduler reads"),
            "strict": (bool, True, "a missing metric is an error"),
            "name": (Optional[str], None, "name in the logs"),
        }
        for name, (kind, default, text) in settings.items():
            self.add_argument(f"--lr_scheduler_config.{name}", type=kind, default=default, help=text)

    def keys(self) -> set[str]:
        """Return the dotted keys that the parser knows."""
        return {action.dest for action in self._actions if action.dest != "help" and not action.dest.endswith(".help")}

    def read(self, layers: Sequence[Layer]) -> Namespace:
        """Return the resolved settings; raises UsageError with one clear message."""
        preload(layers)
        try:
            return self.parse_args([token for layer in layers for token in layer.argument])
        except ArgumentError as error:
            raise UsageError(explain(str(error), layers)) from None

    def resolved(self, config: Namespace) -> dict[str, Any]:
        """Return the settings as plain values, every default included, as they go into a file."""
        tree = document.read(self.dump(config, skip_unset=False, skip_validation=True))
        return {key: value for key, value in tree.items() if key != "config"}


def construct(parser: RunParser, config: Namespace) -> Namespace:
    """Build the objects that ``config`` names; an exception of a constructor becomes a ConstructionError."""
    check_callables(config)
    failures: list[tuple[type, Exception]] = []

    refused: list[UsageError] = []

    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            _check_built(cls, kwargs)
        except UsageError as error:  # what calls this makes another one of it
            refused.append(error)
            raise
        try:
            return cls(*args, **kwargs)
        except Exception as error:
            failures.append((cls, error))
            raise

    try:
        return parser.instantiate(config, instantiators=[(build, object, True)])
    except Exception as error:
        if refused:
            raise refused[0] from None
        if failures:  # the innermost; what wraps it only repeats its text
            raise ConstructionError(_failed_constructor(*failures[0])) from failures[0][1]
        raise UsageError(explain(str(error), ())) from None


def build_named(value: Any, kinds: tuple[type, ...], key: str) -> Any:
    """Return ``value`` with the classes that it names built, alone or in a list, where they are of these kinds.

    For arguments whose type says no kind. drivetrain's own classes count too: the options of an engine have no base.
    """
    if isinstance(value, (list, tuple)):
        return [build_named(item, kinds, key) for item in value]
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        value = Namespace(value)  # the parser left it as it is: its arguments do not fit, which is said below
    if not is_named(value):
        return value
    path = value["class_path"]
    cls, own = import_class(path, key), __name__.partition(".")[0]
    if not isinstance(cls, type) or not (issubclass(cls, kinds) or cls.__module__.partition(".")[0] == own):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise UsageError(f"Expected {key} to be a subclass of {names}. Received: {path}. Name one.")
    parser = RunParser()
    arguments = value.get("init_args") or {}
    arguments = arguments.as_dict() if isinstance(arguments, Namespace) else arguments
    named = {"class_path": path, "init_args": arguments}
    if is_dataclass(cls):  # which the parser takes by its arguments alone
        parser.add_class_arguments(cls, "named", fail_untyped=False)
        named = arguments
    else:
        parser.add_subclass_arguments(cls, "named", fail_untyped=False)
    try:
        config = parser.parse_object({"named": named})
    except ArgumentError as error:
        raise UsageError(explain(str(error), ()).replace("named", key)) from None
    return construct(parser, config).named


def _check_built(cls: Any, arguments: dict[str, Any]) -> None:
    """Refuse classes where no kind is declared."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    for argument, value in arguments.items():
        if path := _left(value):
            raise UsageError(
                f"Expected the argument {argument} of {name} to say which class it takes. Received: class_path={path}, "
                f"for an argument of any type. Annotate it, such as {argument}: torch.nn.Module."
            )


def _left(value: Any) -> str | None:
    """A class path in a value that was not built."""
    if is_named(value):
        return value["class_path"]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(_left, inner)), None)


def _duration(value: Any) -> Duration:
    """Read what a parser would take for something else: "1:12:00:00" for a number (YAML 1.1), {hours: 2} for text."""
    if isinstance(value, Duration):
        return value
    if isinstance(value, dict) or (isinstance(value, str) and ":" in value):
        return Duration.parse(value, name="duration")
    raise ValueError("another way to write a duration")


def _duration_text(value: Any) -> str:
    if not isinstance(value, Duration):
        raise ValueError("another way to write a duration")
    return f"{int(value.value) if value.value == int(value.value) else value.value}{value.unit}"


def _failed_constructor(cls: type, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the call itself
    where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return (
        f"Expected {cls.__module__}.{cls.__qualname__} to be built from its init_args. "
        f"Received: {type(error).__name__}: {error}{where}. Correct its init_args or the class."
    )
