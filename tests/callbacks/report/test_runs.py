"""Reading run folders, thinning curves, times of steps, and drawing them in a terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from drivetrain.callbacks.report.plot import plot
from drivetrain.callbacks.report.runs import Run, find, rates, read, step_times, thinned


def folder(path, **files):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_a_long_curve_keeps_its_ends_and_extremes():
    values = [math.sin(i / 50) for i in range(100_000)]
    values[31_234], values[77_777] = 99.0, -99.0
    steps, thin = thinned([float(i) for i in range(100_000)], values)
    assert len(steps) <= 1100 and steps[0] == 0 and steps[-1] == 99_999 and steps == sorted(steps)
    assert dict(zip(steps, thin))[31_234] == 99.0 and dict(zip(steps, thin))[77_777] == -99.0
    assert all(values[int(step)] == value for step, value in zip(steps, thin))


def test_a_stretch_without_numbers_is_no_error():
    steps, values = thinned([float(i) for i in range(5000)], [math.nan] * 5000)
    assert len(steps) <= 1100 and all(math.isnan(value) for value in values)


def test_times_and_rates_between_rows():
    """Steps 10 to 20 in 5 s, 20 to 40 in 2 s; a validation's row at step 20, 3 s later, counts for no step."""
    run = Run(Path("x"), timeline={"step": [10, 20, 20, 40], "elapsed": [1, 6, 9, 11], "samples": [100, 200, 200, 400]})
    assert step_times(run) == [(0.5, 10), (0.1, 20)]
    assert rates(run) == ([20, 40], [20.0, 100.0])
    assert run.step == 40 and run.seconds == 11


def test_runs_are_found_below_a_place(tmp_path, monkeypatch):
    one = folder(tmp_path / "runs" / "run-0001", metrics__csv="step,loss\n1,2\n")
    two = folder(tmp_path / "runs" / "run-0002", status__json='{"status": "failed"}')
    (tmp_path / "runs" / "notes").mkdir()
    assert find([tmp_path]) == find([tmp_path / "runs"]) == [one, two]
    assert find([two, tmp_path]) == [two, one]
    monkeypatch.chdir(tmp_path)
    assert find([Path("run-0002")]) == [Path("runs/run-0002")]
    assert read(two).status == "failed"
    with pytest.raises(FileNotFoundError, match="Received: 'nothing'"):
        find([Path("nothing")])
    with pytest.raises(ValueError, match="has no run.json"):
        find([tmp_path / "runs" / "notes"])


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", "{"), ("run.json", "[]"), ("run.json", '{"starts": [1]}'), ("metrics.csv", "loss\n1\n"),
        ("metrics.csv", "step,loss\nx,1\n"), ("timeline.csv", "step,elapsed\n1,x\n"), ("config.yaml", BOMB),
        ("config.yaml", "a: !!python/object/apply:os.system ['touch ran']"), ("config.yaml", "a: [1"),
        ("hparams.yaml", "{"), ("profile-simple.txt", "x\ny\nz"), ("provenance.json", "3"),
        ("run.json", "[" * 100_000),
    ],
)  # fmt: skip
def test_damaged_and_hostile_files_are_named_and_left_out(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    place = folder(tmp_path / "run-1", metrics__csv="step,loss\n1,2\n")
    (place / name).write_text(text)
    (problem,) = read(place).problems
    assert problem.startswith(f"{name} could not be read")
    assert not (tmp_path / "ran").exists()


def test_checkpoints_sizes_and_settings(tmp_path):
    place = folder(tmp_path / "run-1", status__json='{"status": "finished"}', hparams__yaml="model:\n  width: 3\n  sizes: [1, 2]\n")
    for step in (20, 3):
        manifest = {"step": step, "epoch": 1, "time": "t", "files": {"a": {"size": 5}, "b": {"size": 6}}}
        folder(place / "checkpoints" / f"c{step}", manifest__json=json.dumps(manifest))
    folder(place / "checkpoints" / "broken", manifest__json='{"step": "x"}')
    run = read(place)
    assert [(c["name"], c["step"], c["bytes"]) for c in run.checkpoints] == [("c3", 3, 11), ("c20", 20, 11)]
    assert run.config == {"model/width": 3, "model/sizes": [1, 2]}
    assert len(run.problems) == 1 and "broken" in run.problems[0]


def test_text_is_no_curve_and_gaps_are_none(tmp_path):
    place = folder(tmp_path / "r", metrics__csv="step,epoch,loss,note\n1,0,2.5,hi\n2,0,,\n3,1,nan,\n")
    curves = read(place).metrics
    assert list(curves) == ["loss"] and curves["loss"][0] == [1, 3] and curves["loss"][1][0] == 2.5


def test_a_plot_shows_where_a_curve_goes():
    """A falling line: its first character is in the first line, its last in the last one."""
    lines = plot(range(11), [10.0 - i for i in range(11)], width=20, height=4).splitlines()
    assert len(lines) == 5 and lines[0].startswith("10 ┤") and lines[3].strip().startswith("0 ┤")
    curve = [line.split("┤")[1] for line in lines[:4]]
    assert [len(line) for line in curve] == sorted(len(line) for line in curve) and len(curve[3]) == 20
    assert lines[4].split() == ["0", "10"]


def test_plots_of_few_or_odd_values():
    assert plot([], []) == "nothing to show" and plot([1, 2], [math.nan, math.inf]) == "nothing to show"
    assert "┤" in plot([5], [3.0]) and "┤" in plot([1, 2, 3], [2.0, 2.0, 2.0])
