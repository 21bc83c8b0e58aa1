"""The JSON Lines tracker, read back with the json module."""

from __future__ import annotations

import json

import torch

from drivetrain.callbacks.tracking.jsonl import JSONLinesTracker


def opened(folder, **options):
    tracker = JSONLinesTracker("", folder, **options)
    tracker.start()
    return tracker


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_L6_values_and_configuration_stay_nested(tmp_path):
    tracker = opened(tmp_path)
    tracker.store_init_configuration({"a": {"b": [1, {"c": (2.5,)}]}})
    tracker.logged_at = 1234.5
    tracker.log({"loss": {"train": 1 / 3}, "tensor": torch.tensor(2)}, step=7)
    tracker.fail("ValueError: no")
    tracker.finish()
    assert lines(tmp_path) == [
        {"config": {"a": {"b": [1, {"c": [2.5]}]}}},
        {"step": 7, "time": 1234.5, "values": {"loss": {"train": 1 / 3}, "tensor": 2}},
        {"error": "ValueError: no"},
    ]


def test_L3_lines_after_the_restored_step_are_dropped(tmp_path):
    first = opened(tmp_path)
    first.store_init_configuration({"a": 1})
    for step in range(1, 6):
        first.log({"loss": float(step)}, step=step)
    first.finish()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "ti')
    second = opened(tmp_path, resume_step=3)
    second.store_init_configuration({"a": 1})
    second.log({"loss": 3.0}, step=3)
    second.log({"val": 0.5}, step=3)
    second.log({"loss": 40.0}, step=4)
    second.finish()
    assert lines(tmp_path)[0] == {"config": {"a": 1}}
    assert [(line["step"], line["values"]) for line in lines(tmp_path)[1:]] == [
        (1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0}), (3, {"val": 0.5}), (4, {"loss": 40.0}),
    ]
