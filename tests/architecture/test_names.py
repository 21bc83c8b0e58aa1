"""The public names: a table, a list, a block for editors: all the same, and each is there."""

from __future__ import annotations

import ast
import importlib
import pickle

import pytest

import drivetrain
from drivetrain.tests.architecture.source import ROOT


def test_all_is_the_table_of_exports():
    assert drivetrain.__all__ == ["__version__", *drivetrain._EXPORTS]
    assert len(set(drivetrain.__all__)) == len(drivetrain.__all__)


@pytest.mark.parametrize("name", drivetrain._EXPORTS)
def test_public_name_resolves(name):
    value = getattr(drivetrain, name)
    module = importlib.import_module(f"drivetrain.{drivetrain._EXPORTS[name]}")
    assert value is getattr(module, name)
    assert name in dir(drivetrain)
    if isinstance(value, type):  # the table names where it is defined, not a place that hands it on
        assert value.__module__ == module.__name__


@pytest.mark.parametrize("name", drivetrain._EXPORTS)
def test_public_name_is_documented(name):
    value = getattr(drivetrain, name)
    if callable(value):
        assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"


def test_public_classes_travel_to_other_processes():
    """Workers and spawned ranks get classes by their qualified name."""
    for name in drivetrain._EXPORTS:
        if isinstance(value := getattr(drivetrain, name), type):
            assert pickle.loads(pickle.dumps(value)) is value


def test_editors_see_the_same_names():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: (module, name) for name, module in drivetrain._EXPORTS.items()}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trayner'"):
        drivetrain.Trayner
    with pytest.raises(ImportError, match="cannot import name 'Trayner'"):
        from drivetrain import Trayner  # noqa: F401


def test_star_import_gives_the_public_names():
    scope: dict = {}
    exec("from drivetrain import *", scope)
    assert set(drivetrain.__all__) <= set(scope)
