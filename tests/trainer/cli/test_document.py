"""Config files as text: what is read, and that what is written means the same."""

from __future__ import annotations

import math

import pytest
import yaml

from drivetrain.trainer.cli import document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-.5", -0.5),
        (".inf", math.inf),
        ("1_000", 1000),
        ("0x10", 16),
        ("1:12:00:00", "1:12:00:00"),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("10ep", "10ep"),
        ("true", True),
        ("~", None),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
        ('{"a": [true, null]}', {"a": [True, None]}),
    ],
)
def test_values_are_read_as_a_user_means_them(text, value):
    found = document.read(text)
    assert found == value and type(found) is type(value)


VALUES = {
    "number": 3,
    "small": 1e-05,
    "large": 1e300,
    "infinite": -math.inf,
    "flag": True,
    "nothing": None,
    "words": ["yes", "no", "null", "~", "on", "1e-3", "3", "1:30", "10ep", "a b", "", "-", "a: b", "a #b", "2026-01-31"],
    "lines": "first\nsecond\t\"third\"\\",
    "letters": "größe 🚂",
    "empty list": [],
    "empty": {},
    "nested": [{"class_path": "a.B", "init_args": {"c": [1, [2, 3]], "d": {}}}, "plain", [1, {"e": 2}], []],
    "on": {"1": "a", 2: "b"},
}


@pytest.mark.parametrize("read", [document.read, yaml.safe_load], ids=["document", "yaml"])
def test_what_is_written_is_read_as_the_same(read):
    assert read(document.write(VALUES, lambda path: "somewhere")) == VALUES


def test_each_value_carries_the_source_of_its_path():
    text = document.write({"a": {"b": 1}, "c": [{"d": "x"}]}, lambda path: "/".join(map(str, path)))
    assert text.splitlines() == ["a:", "  b: 1  # a/b", "c:", "  - d: x  # c/0/d"]
