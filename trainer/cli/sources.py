"""Where the settings of a run come from: files, environment and command line, in the order of their precedence.

Command line > config files (a later one over an earlier one) > environment > default config of the machine > default.
Nothing here imports torch, so that a misspelled key is an error before anything heavy begins.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...strategies import environment
from . import document

COMMAND_LINE = "command line"
DEFAULT = "default"
_CONFIG = {"config", "c"}
_SWITCHES = {"help", "h", "print-config", "print_config"}
_FILES = (".yaml", ".yml", ".json")
_PREFIX = "DRIVETRAIN_"


class UsageError(Exception):
    """A setting that cannot be meant; shown as one message, without a traceback."""


class ConstructionError(Exception):
    """The constructor of a class that the config names has raised; its own exception is the cause."""


@contextmanager
def plain_errors(prog: str) -> Iterator[None]:
    """Show a UsageError or ConstructionError as one message and exit with status 2 or 1.

    With DRIVETRAIN_DEBUG=1 the whole traceback is shown instead.
    """
    try:
        yield
    except (UsageError, ConstructionError) as error:
        if environment.flag("DEBUG"):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None


@dataclass(frozen=True)
class Layer:
    """Settings that came from one place: ``values`` is nested like a config file; ``argument`` is for the parser."""

    source: str
    values: dict[str, Any]
    argument: tuple[str, ...]
    outside: bool = False  # true for what this run's own files and command line do not say


def default_config() -> Path:
    """Return where the machine's default config lies: ``$XDG_CONFIG_HOME/drivetrain/default.yaml`` (~/.config)."""
    # a child's environment is this process's; an unset or relative XDG_CONFIG_HOME means ~/.config
    # (https://specifications.freedesktop.org/basedir-spec/latest/)
    home = Path(environment.child_environment().get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".config") / "drivetrain" / "default.yaml"


def collect(args: Sequence[str], keys: Iterable[str]) -> list[Layer]:
    """Return the layers of a run, lowest precedence first.

    ``keys`` are the dotted keys that may come from the environment: ``trainer.max_epochs`` is read from
    ``DRIVETRAIN_TRAINER__MAX_EPOCHS``. Raises UsageError for a file that is missing or is no mapping.
    """
    layers = [_file(str(path), outside=True)] if (path := default_config()).is_file() else []
    layers += _variables(set(keys))
    files, rest = [], []
    for name, value, tokens in _options(args):
        if name in _CONFIG:
            files.append(_file(value or ""))
        else:
            rest.append(Layer(COMMAND_LINE, _nested(name, value), tokens))
    return layers + files + rest


def check(layers: Iterable[Layer], keys: Iterable[str]) -> None:
    """Raise UsageError for the first key that is not in ``keys``, with the nearest one that is.

    Below a key that has no members in ``keys`` anything may stand: arguments of classes that are not imported yet.
    """
    known = set(keys)
    groups = {prefix for key in known for prefix in prefixes(key)}
    for layer in layers:
        for key in _leaves(layer.values, "", groups):
            plain = key.removesuffix("+").removesuffix(".help")
            if plain not in known and not any(prefix in known - groups for prefix in prefixes(plain)):
                raise UsageError(unknown(plain, known, layer.source))


def prefixes(key: str) -> list[str]:
    """Return the groups that a dotted key lies in: a and a.b for a.b.c."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def unknown(key: str, known: Iterable[str], source: str | None = None) -> str:
    """Return the message about an unknown key, with the nearest known one: in its group, else elsewhere."""
    names = sorted(known)
    group, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == group}
    near = [siblings[word] for word in difflib.get_close_matches(last, siblings, n=1)]
    near += [name for name in names if name.rpartition(".")[2] == last]  # max_epochs for trainer.max_epochs
    near += difflib.get_close_matches(key, names, n=1, cutoff=0.7) if not siblings else []
    advice = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(siblings.values() or names)}."
    return f"Expected a known key. Received: {key}{f' ({source})' if source else ''}. {advice}"


def source_of(path: tuple, layers: Sequence[Layer]) -> str:
    """Return the source of the value at ``path``, keys and list positions of the resolved config."""
    views = [(layer.source, layer.values) for layer in layers]
    for part in path:
        views = _item(part, views) if isinstance(part, int) else _member(part, views)
    return views[-1][0] if views else DEFAULT


def outside(tree: Any, layers: Sequence[Layer], path: tuple = ()) -> dict[str, list[str]]:
    """Return what the machine's default config and the environment decide: source → its "key=value" texts."""
    if isinstance(tree, (dict, list)) and tree:
        found: dict[str, list[str]] = {}
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            for source, settings in outside(value, layers, (*path, key)).items():
                found.setdefault(source, []).extend(settings)
        return found
    source = source_of(path, layers)
    if source not in {layer.source for layer in layers if layer.outside}:
        return {}
    return {source: [f"{'.'.join(map(str, path))}={tree}"]}


def _file(name: str, *, outside: bool = False) -> Layer:
    import yaml

    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"Expected a config file. Received: --config={name}, and there is no file {path}.")
    try:
        values = document.read(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise UsageError(f"Expected YAML. Received: {path}{where}: {reason}. Correct it.") from None
    if not isinstance(values, (dict, type(None))):
        raise UsageError(f"Expected keys and values. Received: {path} with {type(values).__name__}. See --help.")
    return Layer(str(path), values or {}, ("--config", str(path)) if values else (), outside)


def _variables(keys: set[str]) -> list[Layer]:
    """Return a layer for each variable that is set; a misspelled DRIVETRAIN_TRAINER__ one is an error."""
    variables = environment.child_environment()
    names = {f"{_PREFIX}{key.upper().replace('.', '__')}": key for key in keys - {"config", "trainer"}}
    for name in variables:
        if name.startswith(f"{_PREFIX}TRAINER__") and name not in names:
            raise UsageError(unknown(name, names, "environment"))
    return [
        Layer(name, _nested(key, variables[name]), (f"--{key}={variables[name]}",), outside=True)
        for name, key in sorted(names.items())
        if variables.get(name)
    ]


def _options(args: Sequence[str]) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """Split a command line into (name, value, tokens); switches are left out, further values stay with their option."""
    found: list[tuple[str, str | None, tuple[str, ...]]] = []
    for token in args:
        name, equals, value = token.lstrip("-").partition("=")
        if token.startswith("--") or (token.startswith("-") and not _takes_value(found)):
            found.append((name, value if equals else None, (token,)))
        elif _takes_value(found):
            name, _, tokens = found.pop()
            found.append((name, token, (*tokens, token)))
        elif not found or found[-1][0] in {*_CONFIG, *_SWITCHES}:
            advice = f"Write --config {token}." if token.endswith(_FILES) else "Write --key=value."
            raise UsageError(f"Expected options. Received: {token!r} ({COMMAND_LINE}). {advice}")
        else:
            name, first, tokens = found.pop()
            found.append((name, first, (*tokens, token)))
    return [option for option in found if option[0] not in _SWITCHES]


def _takes_value(found: Sequence[tuple[str, str | None, tuple[str, ...]]]) -> bool:
    return bool(found) and found[-1][1] is None and found[-1][0] not in _SWITCHES


def _nested(key: str, value: str | None) -> dict[str, Any]:
    tree: Any = _structure(value)
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def _structure(value: str | None) -> Any:
    """Return mappings and lists as such, everything else as it was written: only the shape matters for sources."""
    if value is None or not value.lstrip().startswith(("{", "[")):
        return value
    import yaml

    try:
        return document.read(value)
    except yaml.YAMLError:
        return value


def _leaves(values: dict[str, Any], prefix: str, groups: set[str]) -> Iterator[str]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted in groups:
            yield from _leaves(value, f"{dotted}.", groups)
        else:
            yield dotted


Views = list[tuple[str, Any]]
"""What each layer says about one place of the config, lowest precedence first: (source, value as written)."""


def _member(key: str, views: Views) -> Views:
    """Step to a key. ``init_args`` may be left out and a class may be a mere name, as the parser allows."""
    found: Views = []
    for source, value in views:
        if isinstance(value, str):
            source, value = _included(source, value)
        if isinstance(value, dict):
            found += [(source, value[key])] if key in value else []
            more = value.get(f"{key}+", [])  # appended to the list so far, one or many
            found += [(source, item) for item in (more if isinstance(more, list) else [more])]
            if key == "init_args" and not {"class_path", "init_args"} & set(value):
                found.append((source, value))
        elif key == "class_path" and value is not None:
            found.append((source, value))
    return found


def _included(source: str, value: str) -> tuple[str, Any]:
    """A group or class given as the name of another file: look into that file."""
    if value.endswith(_FILES):
        for path in (Path(source).parent / value, Path(value)):
            if path.is_file():
                return str(path.absolute()), document.read(path.read_text(encoding="utf-8"))
    return source, value


def _item(index: int, views: Views) -> Views:
    """Step into a list: a later list replaces, ``key+`` appends, and plain members go to the last item so far."""
    items: list[Views] = []
    for source, value in views:
        if isinstance(value, list):
            items = [[(source, item)] for item in value]
        elif isinstance(value, dict) and "class_path" not in value and items:
            items[-1].append((source, value))
        elif value is not None:
            items.append([(source, value)])
    return items[index] if index < len(items) else []
