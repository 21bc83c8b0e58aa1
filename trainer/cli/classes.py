"""The classes that a config names: importing them, and what arguments they have.

A module is imported only because a config file, a variable or the command line of this run names a class in it.
"""

from __future__ import annotations

import difflib
import importlib
import re
import traceback
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from .sources import COMMAND_LINE, Layer, UsageError

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_SKIPPED: dict[str, set[str]] = {"model": set(), "data": set(), "optimizer": {"params"}, "lr_scheduler": {"optimizer"}}
"""Key that names a class → arguments that the trainer gives to that class, not the config."""


def preload(layers: Sequence[Layer]) -> None:
    """Import what the layers name as a class, so that a module that cannot be imported is said clearly."""
    for layer in layers:
        names = [path for key in _SKIPPED for path in _named(layer.values.get(key))]
        for path in dict.fromkeys([*names, *_class_paths(layer.values)]):
            import_class(path, layer.source)


def import_class(path: str, source: str) -> Any:
    """Return the object at a dotted path; raises UsageError that says what is missing, with the nearest name."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            value: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                continue  # no such module: the rest of the path may be attributes
            raise UsageError(_failed_import(path, source, error)) from error
        except Exception as error:
            raise UsageError(_failed_import(path, source, error)) from error
        for index in range(count, len(parts)):
            if not hasattr(value, parts[index]):
                raise UsageError(_no_attribute(".".join(parts[:index]), parts[index], dir(value), source))
            value = getattr(value, parts[index])
        return value
    raise UsageError(
        f"Expected the dotted path of a class. Received: class_path={path} ({source}), and there is no module "
        f"{parts[0]}. Install it, or start drivetrain in the folder that holds {parts[0]}.py."
    )


def class_arguments(path: str) -> list[str]:
    """Return the names of the arguments of the class at ``path`` (bases included), or none if it cannot be read."""
    try:
        names = ArgumentParser(exit_on_error=False).add_class_arguments(import_class(path, ""), fail_untyped=False)
    except Exception:  # only advice hangs on it: a short name, a class without readable signature
        return []
    return [name.partition(".")[0] for name in names]


def class_pages(layers: Sequence[Layer]) -> list[str]:
    """Return a help text about each class that the layers name: the arguments of its constructor."""
    pages = []
    for key, skip in _SKIPPED.items():
        named = [path for layer in layers for path in _named(layer.values.get(key))]
        if named:
            cls = import_class(named[-1], COMMAND_LINE)
            parser = ArgumentParser(exit_on_error=False, add_help=False, usage=SUPPRESS)
            parser.add_class_arguments(cls, key, fail_untyped=False, skip=skip)
            pages.append(f"{key}: {cls.__module__}.{cls.__qualname__}: {shortened(parser.format_help()).strip()}\n")
    return pages


def shortened(help_text: str) -> str:
    """Leave the lists of all known subclasses out of a help text: there are hundreds of torch.nn.Modules."""
    return re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", help_text)


def _class_paths(values: Any) -> Iterator[str]:
    if isinstance(values, dict):
        yield from _named(values)
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _class_paths(value)


def _named(value: Any) -> list[str]:
    """Return the class path in a value that has one: as class_path, or as a mere name."""
    path = value.get("class_path") if isinstance(value, dict) else value
    if not isinstance(path, str) or not _DOTTED.fullmatch(path) or path.endswith((".yaml", ".yml", ".json")):
        return []
    return [path]


def _failed_import(path: str, source: str, error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename}:{last.lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    return (
        f"Expected to import class_path={path} ({source}). Received: {type(error).__name__}: {error} ({place}). "
        "Correct that module."
    )


def _no_attribute(module: str, name: str, names: Sequence[str], source: str) -> str:
    near = difflib.get_close_matches(name, [other for other in names if not other.startswith("_")], n=1)
    advice = f"Did you mean {module}.{near[0]}?" if near else f"Define it in {module}."
    return f"Expected a class. Received: class_path={module}.{name} ({source}), and {module} has no {name}. {advice}"
