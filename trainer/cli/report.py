"""`drivetrain report` and `drivetrain runs`: how runs went, as a page, a list, or curves in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...callbacks.report.page import duration, names_of, shown, write
from ...callbacks.report.plot import plot
from ...callbacks.report.runs import Run, find, read

_WIDEST = 100


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain report ARGS` or `drivetrain runs ARGS`; 2: wrong usage, or nothing found."""
    try:
        return _report(args) if command == "report" else _runs(args)
    except (OSError, ValueError) as error:
        print(f"drivetrain {command}: error: {error}", file=sys.stderr)
        return 2


def _report(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "drivetrain report", description="Write one HTML page that shows runs side by side.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, its id, or a folder with runs below it")
    parser.add_argument("--output", "-o", help="the page (default: report.html, of one run in its folder)")
    options = parser.parse_args(list(args))
    folders = find([Path(run) for run in options.runs])
    path = Path(options.output or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write(folders, path)
    print(path)
    return 0


def _runs(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "drivetrain runs", description="List runs, or show the curves of one.", allow_abbrev=False,
        usage="drivetrain runs [PLACE ...] [--json]\n       drivetrain runs show RUN [--metric NAME ...]",
    )  # fmt: skip
    words = list(args)
    show = words[:1] == ["show"]
    if show:
        parser.add_argument("run", metavar="RUN", help="a run's folder, or its id")
        parser.add_argument("--metric", action="append", help="only this one; may be given more than once")
        parser.add_argument("--height", type=int, default=8, help="lines of a curve (default: 8)")
        options = parser.parse_args(words[1:])
        return _show(read(_one(options.run)), options.metric, max(2, options.height))
    parser.add_argument("places", nargs="*", default=["."], metavar="PLACE", help="where runs lie (default: here)")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(words)
    runs = [read(path) for path in find([Path(place) for place in options.places])]
    rows = [_row(run, name) for run, name in zip(runs, names_of(runs))]
    print(json.dumps(rows, indent=1) if options.json else _table(rows))
    return 0


def _one(place: str) -> Path:
    found = find([Path(place)])
    if len(found) > 1:
        raise ValueError(f"Expected one run. Received: {place!r}, which holds {len(found)}. Name one of them.")
    return found[0]


def _row(run: Run, name: str) -> dict[str, str]:
    row = {"run": name, "status": run.status, "steps": str(run.step), "time": duration(run.seconds)}
    row["started"] = str(run.starts[0].get("time", ""))[:16].replace("T", " ") if run.starts else ""
    for title in sorted(run.metrics, key=lambda title: ("val" not in title, title)):
        if "loss" in title or title.startswith(("val", "test")):
            row[title] = shown(run.metrics[title][1][-1])
    return row


def _table(rows: list[dict[str, str]]) -> str:
    """The rows as a table, with as many of the metrics' columns as a terminal has room for."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    widths = {key: max(len(key), *(len(row.get(key, "")) for row in rows)) for key in columns}
    room, kept = _width(), []
    for index, key in enumerate(columns):
        if index < 5 or sum(widths[k] + 2 for k in [*kept, key]) <= room:
            kept.append(key)
    lines = ["  ".join(f"{key:{widths[key]}}" for key in kept).rstrip()]
    lines += ["  ".join(f"{row.get(key, ''):{widths[key]}}" for key in kept).rstrip() for row in rows]
    return "\n".join(lines)


def _show(run: Run, wanted: list[str] | None, height: int) -> int:
    unknown = [name for name in wanted or [] if name not in run.metrics]
    if unknown:
        known = ", ".join(sorted(run.metrics)) or "none"
        raise ValueError(f"Expected metrics of {run.name}: {known}. Received: {', '.join(unknown)}. Use one of these.")
    print(f"{run.name}: {run.status}, {run.step} steps, {duration(run.seconds)}".rstrip(", "))
    for name in wanted or sorted(run.metrics, key=lambda title: ("loss" not in title, title)):
        steps, values = run.metrics[name]
        print(f"\n{name}: {shown(values[-1])} at step {steps[-1]:g}")
        print(plot(steps, values, width=min(_WIDEST, _width()) - 14, height=height))
    for problem in run.problems:
        print(f"\n{problem}", file=sys.stderr)
    return 0


def _width() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:  # no terminal
        return _WIDEST
