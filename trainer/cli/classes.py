"""The classes that a config names: importing them, and what arguments they have.

A module is imported only because a config file, a variable or the command line of this run names a class in it, and
never one of Python's standard library. docs/security.md has the whole rule.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser, Namespace
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from ...callbacks.base import Callback
from ..datamodule import DataModule
from .sources import COMMAND_LINE, Layer, UsageError

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_MADE = (Module, Dataset, DataLoader, Sampler, Optimizer, LRScheduler, Callback, DataModule)
"""What functions that a config names may make."""
_HARMLESS = ("builtins", "math", "cmath", "statistics", "collections", "copy", "string", "itertools", "random")
"""Standard modules with functions that one may well want in a model; of builtins the parser leaves the bad ones out."""
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
    _refuse_standard(parts[0], path, source)
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
            _refuse_standard(_home(value), path, source)
        return value
    raise UsageError(
        f"Expected the dotted path of a class. Received: class_path={path} ({source}), and there is no module "
        f"{parts[0]}. Install it, or start drivetrain in the folder that holds {parts[0]}.py."
    )


def is_named(value: Any) -> bool:
    """Tell whether the parser has taken a value for a class to be built: class_path and init_args."""
    return isinstance(value, Namespace) and isinstance(value.get("class_path"), str)


def denied_modules() -> list[str]:
    """Return the standard modules of which a config may not even name a function, for an argument that takes one."""
    return [name for name in standard_modules() if name not in _HARMLESS]


def standard_modules() -> list[str]:
    """Return the names of the standard library's modules, without those that a module of yours here has taken."""
    here = Path.cwd()

    def own(name: str) -> bool:
        return (here / f"{name}.py").exists() or (here / name / "__init__.py").exists()

    return [name for name in sorted(sys.stdlib_module_names) if name in sys.builtin_module_names or not own(name)]


def check_callables(values: Any) -> None:
    """Refuse, before anything is built, each function that a class_path names and that does not say what it makes."""
    for path in dict.fromkeys(_recognized(values)):
        made = import_class(path, "config")
        if not isinstance(made, type) and not _makes(made):
            raise UsageError(
                f"Expected a class, or a function that says which class it returns. Received: class_path={path}. "
                "A config calls no other functions."
            )


def _recognized(values: Any) -> Iterator[str]:
    """The class paths that the parser has taken for such; in an argument that is annotated as a dict they are data."""
    if isinstance(values, Namespace):
        yield from _named(values.get("class_path"))
        values = vars(values)
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ():
        yield from _recognized(value)


def _makes(function: Any) -> bool:
    try:
        made = get_type_hints(function).get("return")
    except Exception:  # whatever a foreign signature does
        return False
    return isinstance(made, type) and issubclass(made, _MADE)


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


def _home(value: Any) -> str:
    """The top-level package in which something is defined, wherever it is imported from."""
    if inspect.ismodule(value):
        return value.__name__.partition(".")[0]
    kind = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return (getattr(kind, "__module__", None) or "").partition(".")[0]


def _refuse_standard(top: str, path: str, source: str) -> None:
    """Nothing that a run is made of lies in the standard library, but much that runs commands does."""
    if top not in standard_modules():
        return
    raise UsageError(
        f"Expected a class of drivetrain, torch, another installed package or your own. Received: class_path={path} "
        f"({source}), which is part of Python's standard library ({top}). A config cannot name what lies there."
    )


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
