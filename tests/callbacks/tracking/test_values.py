"""Values for trackers: copies, plain forms, flat names."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path

import numpy as np
import torch
import yaml

from drivetrain.callbacks.tracking.values import flatten, plain, settle, snapshot


class Colour(str, enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Options:
    rate: float
    sizes: tuple[int, ...]


def test_snapshot_is_not_reached_by_later_changes():
    tensor, array, nested = torch.tensor(1.5), np.array(2.5), {"inner": torch.tensor([3.0])}
    taken = snapshot({"tensor": tensor, "array": array, "nested": nested, "number": 4})
    tensor.add_(1)
    array += 1
    nested["inner"].add_(1)
    assert settle(taken) == {"tensor": 1.5, "array": 2.5, "nested": {"inner": torch.tensor([3.0])}, "number": 4}


def test_settle_gives_python_numbers():
    values = settle({"a": torch.tensor(3), "b": np.float32(0.5), "c": [torch.tensor(True)], "d": "x", "e": None})
    assert values == {"a": 3, "b": 0.5, "c": [True], "d": "x", "e": None}
    assert [type(value) for value in values.values()] == [int, float, list, str, type(None)]
    assert settle(torch.tensor(0.5, dtype=torch.bfloat16)) == 0.5


def test_plain_keeps_numbers_and_writes_out_the_rest():
    value = {
        "optim": {"betas": (0.9, 0.999), "type": torch.optim.Adam, "rate": np.float64(1e-3)},
        "path": Path("a") / "b",
        "dtype": torch.float16,
        "colour": Colour.RED,
        "options": Options(0.5, (1, 2)),
        "names": {"b", "a"},
        "none": None,
        "flag": True,
        3: torch.tensor([1, 2]),
    }
    written = {
        "optim": {"betas": [0.9, 0.999], "type": "torch.optim.adam.Adam", "rate": 0.001},
        "path": "a/b",
        "dtype": "torch.float16",
        "colour": "red",
        "options": {"rate": 0.5, "sizes": [1, 2]},
        "names": ["a", "b"],
        "none": None,
        "flag": True,
        "3": [1, 2],
    }
    assert plain(value) == written
    assert json.loads(json.dumps(plain(value))) == written
    assert yaml.safe_load(yaml.safe_dump(plain(value))) == written
    assert type(plain(Colour.RED)) is str and type(plain(np.float64(1.0))) is float


def test_plain_does_not_write_out_large_tensors():
    assert plain(torch.zeros(100, 100)) == "Tensor(100, 100)"


def test_flatten_names_every_leaf():
    nested = {"a": {"b": [5, {"c": [6]}]}, "d": (), "e": {}, "f": None}
    assert flatten(nested) == {"a/b/0": 5, "a/b/1/c/0": 6, "d": "[]", "e": "{}", "f": None}
