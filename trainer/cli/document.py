"""Configuration files as text: reading YAML without its surprises, writing it with the source of each value."""

from __future__ import annotations

import json
import re
from typing import Any, Callable

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_MOST = 1_000_000  # values in a document
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan"}  # what some YAML reader converts
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+)$")

Source = Callable[[tuple], str]


def read(text: str) -> Any:
    """Return what a YAML or JSON text says; raises yaml.YAMLError.

    Unlike YAML 1.1: ``1e-3`` is a number, ``1:12:00:00`` and ``2026-01-31`` are strings (a time is written so). Tags
    that make objects are refused, and so are texts that say far more than they hold, by aliases of aliases.
    """
    import yaml

    try:
        tree = yaml.load(text, Loader=_loader())
        size = _size(tree, {})
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or contains itself") from None
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from None
    if size > _MOST:
        raise yaml.YAMLError(f"its aliases stand for more than {_MOST:,} values")
    return tree


def write(tree: dict[str, Any], source: Source) -> str:
    """Return ``tree`` as YAML, each value followed by a comment: what ``source`` answers for its path."""
    return "\n".join(_mapping(tree, (), source)) + "\n"


def _size(tree: Any, known: dict[int, int]) -> int:
    """How many values a tree shows, each alias counted as what it stands for."""
    if not isinstance(tree, (dict, list)):
        return 1
    if id(tree) not in known:
        inner = tree.values() if isinstance(tree, dict) else tree
        known[id(tree)] = 1 + sum(_size(value, known) for value in inner)
    return known[id(tree)]


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 but for numbers and times."""

    changed = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in changed]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return Loader


def _mapping(tree: dict[str, Any], path: tuple, source: Source) -> list[str]:
    lines: list[str] = []
    for key, value in tree.items():
        lines += _entry(f"{_scalar(key)}:", value, (*path, key), source)
    return lines


def _entry(head: str, value: Any, path: tuple, source: Source) -> list[str]:
    """Return the lines of one value under ``head``, which ends in ":" or is the "-" of a list."""
    if isinstance(value, dict) and value:
        inner = _mapping(value, path, source)
        if head == "-":
            return [f"- {inner[0]}", *(f"  {line}" for line in inner[1:])]
        return [head, *(f"  {line}" for line in inner)]
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        lines = [line for index, item in enumerate(value) for line in _entry("-", item, (*path, index), source)]
        return [head, *(f"  {line}" for line in lines)]
    return [f"{head} {_scalar(value)}  # {source(path)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON is YAML; escapes beyond the basic plane are where the two differ
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


def _number(value: float) -> str:
    text = repr(value)
    if "e" in text and "." not in text:  # 1e-05: YAML 1.1 readers want the point
        text = text.replace("e", ".0e")
    return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
