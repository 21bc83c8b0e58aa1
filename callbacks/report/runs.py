"""Reads run folders: what a report or a list of runs shows of them. Nothing here runs code of what it reads."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Curve = tuple[list[float], list[float]]
POINTS = 1000
"""A curve with more points is thinned out to about as many, keeping the extremes."""


@dataclass
class Run:
    """One run's folder, read."""

    path: Path
    record: dict[str, Any] = field(default_factory=dict)
    status: str = "unknown"
    metrics: dict[str, Curve] = field(default_factory=dict)
    timeline: dict[str, list[float]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    sections: list[tuple[str, float]] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)  # where the last start came from
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's id, which is its folder's name."""
        return self.path.name

    @property
    def step(self) -> int:
        """The last step of which anything is known."""
        ends = [steps[-1] for steps, _ in self.metrics.values() if steps] + self.timeline.get("step", [])[-1:]
        return int(max(ends, default=0))

    @property
    def seconds(self) -> float | None:
        """Seconds trained, over all interruptions."""
        ends = self.timeline.get("elapsed", [])[-1:] + [s["seconds"] for s in self.starts if "seconds" in s][-1:]
        return max(ends, default=None)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """One entry for each time that the run was started."""
        found: list[dict[str, Any]] = self.record.get("starts", [])
        return found


def find(places: list[Path]) -> list[Path]:
    """Return the run folders at or below some places: a run's folder, a folder `runs`, or one that holds it.

    Raises:
        FileNotFoundError: there is no such place.
        ValueError: a place holds no run.
    """
    found: list[Path] = []
    for place in places:
        here = next((p for p in (place, Path("runs") / place) if p.exists()), None)
        if here is None:
            raise FileNotFoundError(f"Expected a run's folder. Received: {str(place)!r}, which does not exist.")
        below = sorted({*here.glob("runs/*"), *here.glob("*")}) if not _is_run(here) else [here]
        runs = [path for path in below if _is_run(path)]
        if not runs:
            raise ValueError(
                f"Expected a run's folder, or one with runs below it. Received: {str(here)!r}, which has no run.json, "
                "status.json or metrics.csv. Name a folder such as runs/run-0001."
            )
        found += [path for path in runs if path not in found]
    return found


def read(path: Path) -> Run:
    """Read a run's folder; what is damaged or missing is left out and told in `problems`."""
    run = Run(path)
    _attempt(run, "run.json", _read_record)
    _attempt(run, "metrics.csv", _read_metrics)
    _attempt(run, "timeline.csv", _read_timeline)
    for name in ("config.yaml", "hparams.yaml"):
        if not run.config:
            _attempt(run, name, _read_config)
    _attempt(run, "profile-simple.txt", _read_sections)
    _attempt(run, "provenance.json", _read_provenance)
    for manifest in sorted(path.glob("checkpoints/*/manifest.json")):
        _attempt(run, str(manifest.relative_to(path)), _read_checkpoint)
    run.checkpoints.sort(key=lambda one: one["step"])
    status = run.starts[-1].get("status") if run.starts else None
    run.status = str(status or _status(path))
    return run


def thinned(steps: list[float], values: list[float], points: int = POINTS) -> Curve:
    """Return a curve of about as many points: the lowest and the highest of each stretch of steps."""
    if len(steps) <= points:
        return steps, values
    size = math.ceil(len(steps) / (points // 2))
    kept: list[int] = []
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        finite = [i for i in stretch if math.isfinite(values[i])] or [start]
        kept += sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})
    kept = sorted({0, *kept, len(steps) - 1})
    return [steps[i] for i in kept], [values[i] for i in kept]


def step_times(run: Run) -> list[tuple[float, float]]:
    """Return (seconds a step, how many steps took so long on average) between the rows of a run's timeline."""
    steps, elapsed = run.timeline.get("step", []), run.timeline.get("elapsed", [])
    pairs = zip(zip(steps, elapsed), zip(steps[1:], elapsed[1:]))
    return [((t1 - t0) / (s1 - s0), s1 - s0) for (s0, t0), (s1, t1) in pairs if s1 > s0 and t1 >= t0]


def rates(run: Run) -> Curve:
    """Return samples a second between the rows of a run's timeline, by step."""
    columns = [run.timeline.get(name, []) for name in ("step", "elapsed", "samples")]
    rows = list(zip(*columns))
    found = [(s1, (n1 - n0) / (t1 - t0)) for (s0, t0, n0), (s1, t1, n1) in zip(rows, rows[1:]) if s1 > s0 and t1 > t0]
    return [step for step, _ in found], [rate for _, rate in found]


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("run.json", "status.json", "metrics.csv"))


def _attempt(run: Run, name: str, reader: Any) -> None:
    path = run.path / name
    if not path.is_file():
        return
    try:
        reader(run, path)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, csv.Error, RecursionError) as error:
        run.problems.append(f"{name} could not be read: {type(error).__name__}: {error}")


def _read_record(run: Run, path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not all(isinstance(s, dict) for s in content.get("starts", [])):
        raise ValueError("it is no record of a run")
    run.record = content


def _read_metrics(run: Run, path: Path) -> None:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [(float(row.pop("step")), row) for row in csv.DictReader(file)]
    for name in dict.fromkeys(name for _, row in rows for name in row if name not in (None, "epoch")):
        cells = [(step, _number(row.get(name))) for step, row in rows]
        curve = [(step, value) for step, value in cells if value is not None]
        if curve:
            run.metrics[name] = ([step for step, _ in curve], [value for _, value in curve])


def _number(text: str | None) -> float | None:
    """A cell's number; None for an empty one and for a text, which has no curve."""
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _read_timeline(run: Run, path: Path) -> None:
    columns: dict[str, list[float]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                columns.setdefault(name, []).append(float(text) if text else math.nan)
    run.timeline = columns


def _read_config(run: Run, path: Path) -> None:
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoAliases)
    run.config = _flat(content) if isinstance(content, dict) else {}


class _NoAliases(yaml.SafeLoader):
    """Reads plain values; an alias, by which a small file can stand for a huge one, is refused."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias")
        return super().compose_node(parent, index)


def _flat(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by names such as "trainer/callbacks/0/class_path"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        items = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        nested = any(isinstance(item, (dict, list)) for item in items.values())
        if nested or (items and isinstance(value, dict)):
            found |= _flat(items, f"{prefix}{name}/")
        else:
            simple = isinstance(value, (str, int, float, bool, list, type(None)))
            found[f"{prefix}{name}"] = value if simple else str(value)
    return found


def _read_sections(run: Run, path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines()[2:]:
        name, seconds, _, _ = line.rsplit(None, 3)
        if name != "total":
            run.sections.append((name, float(seconds)))


def _read_provenance(run: Run, path: Path) -> None:
    starts = json.loads(path.read_text(encoding="utf-8"))
    run.provenance = dict(starts[-1]) if starts else {}


def _read_checkpoint(run: Run, path: Path) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    size = sum(int(entry["size"]) for entry in manifest["files"].values())
    run.checkpoints.append({
        "name": path.parent.name, "step": int(manifest["step"]), "epoch": manifest.get("epoch"),
        "time": manifest.get("time"), "bytes": size,
    })  # fmt: skip


def _status(path: Path) -> str:
    try:
        return str(json.loads((path / "status.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
