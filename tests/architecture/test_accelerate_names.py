"""Every public name of Accelerate 1.15 is here, with its parameters, or on the list of what is deliberately absent.

`tests/data/accelerate_names.json` holds the names: exports, functions and methods with their parameters, fields of
dataclasses with their defaults, members of enumerations. `docs/absent.md` holds what is absent, and why.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from functools import cache

import pytest

import drivetrain
from drivetrain.strategies import state
from drivetrain.tests.architecture.source import ROOT

NAMES = json.loads((ROOT / "tests" / "data" / "accelerate_names.json").read_text())
SHARED = {"AcceleratorState": state._PLUGINS}  # set by name


@cache
def absent() -> set[str]:
    """Names in docs/absent.md that stand at the start of a list's item, before its colon."""
    return listed((ROOT / "docs" / "absent.md").read_text())


@cache
def later() -> set[str]:
    """Those of them that come with engines: present or not."""
    text = (ROOT / "docs" / "absent.md").read_text()
    return listed(text[text.index("## What comes with engines") :])


def listed(text: str) -> set[str]:
    items = re.findall(r"^- ([^:]*):", text, re.MULTILINE)
    return {name for item in items for name in re.findall(r"`([\w.]+)`", item)}


def exported() -> list[str]:
    every = [*NAMES["root"], *NAMES["utils"], *(name for names in NAMES["modules"].values() for name in names)]
    return sorted(set(every))


def parameters(function: object) -> list[str]:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function)
    return [marks.get(p.kind, "") + p.name for p in signature.parameters.values() if p.name != "self"]


def lacking(ours: list[str], theirs: list[str]) -> list[str]:
    """Parameters that a call for Accelerate may name, and that ours would not take."""
    takes_more = any(name.startswith("**") for name in ours)
    return [name for name in theirs if name not in ours and not name.startswith("*") and not takes_more]


@pytest.mark.parametrize("name", exported())
def test_name_is_here_or_on_the_list(name):
    assert hasattr(drivetrain, name) or name in absent(), f"add {name}, or say in docs/absent.md why it is absent"


def test_the_list_names_nothing_that_is_here():
    known = {*exported(), *NAMES["fields"], *NAMES["enums"]}
    assert not {name for name in absent() - later() if name in known and hasattr(drivetrain, name)}


def test_the_list_names_only_what_accelerate_has():
    members = {f"{kind}.{name}" for kind, methods in NAMES["classes"].items() for name in methods}
    members |= {f"{kind}.{name}" for kind, fields in NAMES["fields"].items() for name in fields}
    members |= {f"{name}.{parameter}" for name, given in NAMES["functions"].items() for parameter in given}
    known = {*exported(), *NAMES["fields"], *NAMES["enums"], *NAMES["classes"], *members}
    assert not absent() - known


@pytest.mark.parametrize("name", sorted(NAMES["functions"]))
def test_function_takes_the_same_parameters(name):
    value = getattr(drivetrain, name, None)
    if value is None or name in absent():
        assert name in absent()
        return
    missing = [p for p in lacking(parameters(value), NAMES["functions"][name]) if f"{name}.{p}" not in absent()]
    assert not missing


@pytest.mark.parametrize("kind", sorted(NAMES["classes"]))
def test_class_has_the_same_methods(kind):
    if kind in absent():
        return
    value = getattr(drivetrain, kind)
    wrong = []
    for name, given in NAMES["classes"][kind].items():
        if f"{kind}.{name}" in absent():
            continue
        method = getattr(value, name, None)
        if not (hasattr(value, name) or name in instance_attributes(value) or name in SHARED.get(kind, ())):
            wrong.append(name)
        elif given is not None and callable(method):
            ours = parameters(value if name == "__init__" else method)
            wrong += [f"{name}({p})" for p in lacking(ours, given) if f"{kind}.{p}" not in absent()]
    assert not wrong


def instance_attributes(kind: type) -> set[str]:
    """Attributes that methods of a class assign."""
    found: set[str] = set()
    for base in kind.__mro__[:-1]:
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(base)))):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                found |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
                          and isinstance(part.ctx, ast.Store)}  # fmt: skip
    return found


@pytest.mark.parametrize("kind", sorted(NAMES["fields"]))
def test_dataclass_has_the_same_fields_and_defaults(kind):
    if kind in absent():
        return
    ours = {field.name: field for field in dataclasses.fields(getattr(drivetrain, kind))}
    wrong = []
    for name, default in NAMES["fields"][kind].items():
        if f"{kind}.{name}" in absent():
            continue
        if name not in ours:
            wrong.append(name)
        elif re.fullmatch(r"None|True|False|-?[\d.]+|'.*'", default) and ours[name].default != ast.literal_eval(default):
            wrong.append(f"{name}={ours[name].default!r}, not {default}")
    assert not wrong


@pytest.mark.parametrize("kind", sorted(NAMES["enums"]))
def test_enumeration_has_the_same_members(kind):
    members = {name: member.value for name, member in getattr(drivetrain, kind).__members__.items()}
    assert {name: members.get(name) for name in NAMES["enums"][kind]} == NAMES["enums"][kind]
