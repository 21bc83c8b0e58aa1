"""Says the parser's errors as one message: what was expected, what came and from where, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .classes import class_arguments
from .help import KEYS
from .sources import DEFAULT, Layer, source_of, unknown

_NOT_ACCEPTED = re.compile(r"(?:Option '([^']+)' is not accepted|does not accept option '([^']+)')")
_CLASS = re.compile(r"Problem with given class_path '([^']+)':")
_KEY = re.compile(r"^Parser key \"([^\"]+)\":")
_INNER_KEY = re.compile(r"Parser key \"([^\"]+)\":")
_MISSING = re.compile(r"the following arguments are required: (.+)")
_SIMPLE = re.compile(r"Expected an? (?:<class '|typing\.)?(.+?)(?:'>)?\. Got value: (.*)")
_SUBCLASS = re.compile(r"Import path does not correspond to a subclass of (\w+)")
_NOISE = re.compile(
    r"\s*(?:- )?(?:Expected a <class 'NoneType'>|Given value|Subtypes:|Errors:|Does not validate|Expected a path but)"
)


def explain(message: str, layers: Sequence[Layer]) -> str:
    """Say a jsonargparse error as one message: the innermost reason, the nearest key, where the value came from."""
    match = _KEY.match(message)
    if match is None:
        return _about_no_key(message)
    key, block = match[1], _first_problem(message[match.end() :])
    classes, inner = _CLASS.findall(block), _INNER_KEY.findall(block)
    option = _NOT_ACCEPTED.search(block)
    path = ".".join([key, *inner, *([option[1] or option[2]] if option else [])])
    source = _nested_source(path, layers)
    if option and classes:
        known = [f"{path.rpartition('.')[0]}.{name}" for name in class_arguments(classes[-1])]
        return unknown(path, known, source).replace("a known key", f"an argument of {classes[-1]}", 1)
    if simple := _SIMPLE.search(block):
        return f"Expected {path} to be of type {simple[1]}. Received: {simple[2]} ({source}). Correct it."
    if base := _SUBCLASS.search(block):
        return f"Expected {path} to be a subclass of {base[1]}. Received: {_said(message)} ({source}). Name one."
    lines = [line.strip(" -") for line in block.splitlines() if line.strip() and not _NOISE.match(line)]
    reason = "; ".join(dict.fromkeys(line for line in lines if not line.endswith(":")))[:200]
    return f"Expected another value of {path}. Received: {_said(message)} ({source}). {reason}"


def _about_no_key(message: str) -> str:
    if missing := _MISSING.search(message):
        key = missing[1].split(",")[0]
        return f"Expected {missing[1]}. Received: none. Add for example --{key} my.Net, or name it in a config file."
    if option := _NOT_ACCEPTED.search(message):
        return unknown(option[1] or option[2], KEYS)
    return message.strip()


def _first_problem(message: str) -> str:
    """Return the part of a message about the first class that did not take its arguments, or all of it.

    A value may be one class or a list of them: every reading is reported, the first is the one that was meant.
    """
    lines = message.splitlines()
    first = next((number for number, line in enumerate(lines) if _CLASS.search(line)), None)
    if first is None:
        return message
    indent = _indent(lines[first])
    following = range(first + 1, len(lines))
    end = next((n for n in following if lines[n].strip() and _indent(lines[n]) <= indent), len(lines))
    return "\n".join(lines[first:end])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _nested_source(key: str, layers: Sequence[Layer]) -> str:
    """Return the source of the innermost part of ``key`` that a layer mentions."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        for path in (parts[:count], [*parts[: count - 1], "init_args", parts[count - 1]]):
            if (source := source_of(tuple(path), layers)) != DEFAULT:
                return source
    return DEFAULT


def _said(message: str) -> str:
    found = re.search(r"Given value: (.*)", message)
    return found[1].strip() if found else "a value that does not fit"
