"""The page as text: what it shows, and that nothing of a run becomes more than text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from drivetrain.callbacks.report.page import duration, names_of, page, shown, size
from drivetrain.callbacks.report.runs import Run

HOSTILE = '</script><script>document.title="ran"</script><img src=x onerror=alert(1)>'


def made(name="run-0001", **options):
    return Run(Path("runs") / name, **{"metrics": {"train_loss": ([1.0, 2.0], [4.0, 3.0])}, **options})


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_the_numbers_are_in_the_page():
    text = page([made(timeline={"step": [1, 2], "elapsed": [0.5, 1.5], "samples": [8, 16], "lr": [0.1, 0.2]})])
    charts = {chart["title"]: chart["curves"] for chart in data_of(text)["charts"]}
    assert charts["train_loss"] == [{"x": [1, 2], "y": [4, 3]}]
    assert charts["learning rate"] == [{"x": [1, 2], "y": [0.1, 0.2]}]
    assert charts["samples a second"] == [{"x": [2], "y": [8]}]
    histogram = data_of(text)["histogram"]
    assert histogram["low"] == 1.0 and sum(histogram["counts"][0]) == 1


def test_what_is_no_number_is_a_gap():
    text = page([made(metrics={"loss": ([1.0, 2.0, 3.0], [1.0, math.nan, math.inf])})])
    assert data_of(text)["charts"][0]["curves"][0]["y"] == [1, None, None]


def test_runs_side_by_side():
    one = made("a", config={"lr": 0.1, "width": 3}, metrics={"val_loss": ([1.0], [5.0])})
    two = made("b", config={"lr": 0.2, "width": 3}, metrics={"val_loss": ([1.0], [7.0])})
    text = page([one, two])
    differing = text[text.index("What differs"):text.index("<details")]
    assert "lr" in differing and "0.1" in differing and "0.2" in differing and "width" not in differing
    assert "1 settings in common" in text and [c["title"] for c in data_of(text)["charts"]] == ["val_loss"]


def test_names_that_are_the_same_show_their_folders():
    one, two = Run(Path("x/runs/run-0001")), Run(Path("y/runs/run-0001"))
    assert names_of([one, two]) == ["x/run-0001", "y/run-0001"] and names_of([one]) == ["run-0001"]


def test_texts_of_a_run_stay_texts():
    starts = [{"status": "failed", "error": HOSTILE, "host": HOSTILE, "command": [HOSTILE]}]
    run = made(
        HOSTILE.replace("/", "_"), metrics={HOSTILE: ([1.0], [2.0])}, config={HOSTILE: HOSTILE}, status=HOSTILE,
        record={"starts": starts, "warnings": [{"message": HOSTILE}], "environment": {HOSTILE: HOSTILE}},
        checkpoints=[{"name": HOSTILE, "step": 1, "epoch": 1, "bytes": 3, "time": HOSTILE}],
        sections=[(HOSTILE, 1.0)], problems=[HOSTILE], provenance={HOSTILE: HOSTILE},
    )  # fmt: skip
    text = page([run])
    assert "<img" not in text and text.count("<script") == 2 and text.count("</script>") == 2
    assert data_of(text)["charts"][0]["title"] == HOSTILE


def test_it_needs_no_network():
    text = page([made()])
    assert "default-src 'none'" in text and not re.search(r"""(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", text)


def test_numbers_for_people():
    assert [shown(v) for v in (None, 3, 1234567, 0.123456, 1234.5678, 1.5e9, "x", True)] == [
        "", "3", "1,234,567", "0.1235", "1,235", "1.5e+09", "x", "True"]  # fmt: skip
    assert [duration(v) for v in (None, 4.21, 200, 7260)] == ["", "4.21 s", "3 min 20 s", "2 h 01 min"]
    assert [size(v) for v in (12, 2048, 3 * 2**20, 5 * 2**40)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 TiB"]
