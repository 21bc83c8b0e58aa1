"""Makes the report: one HTML page of one or several runs that needs nothing else."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .runs import Run, rates, read, step_times, thinned

_BINS = 24
_CURVES = (
    '<form id="controls"></form><div id="charts"></div><noscript>Curves are drawn by a script.</noscript>'
)


def write(runs: Sequence[Path], path: Path) -> None:
    """Write the report of some run folders to a file, which is there as a whole or as it was before."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(page([read(run) for run in runs]), encoding="utf-8")
    os.replace(beside, path)


def page(runs: Sequence[Run]) -> str:
    """Return the report as HTML. Texts of the runs are shown as texts, whatever they hold."""
    names = names_of(runs)
    title = ", ".join(names)
    data = json.dumps(_charts(runs, names), allow_nan=False).replace("<", "\\u003c")
    here = files(__package__)
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = [
        _overview(runs, names), _section("Curves", _CURVES), _where(runs, names), _table_of_config(runs, names),
        _table_of_checkpoints(runs, names), _warnings(runs, names), _environment(runs, names),
    ]  # fmt: skip
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} · drivetrain</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{html.escape(title)}</h1>"
        '<button type="button" id="theme">Dark or light</button></header>\n<main>\n'
        + "\n".join(part for part in parts if part)
        + f'\n</main>\n<script type="application/json" id="data">{data}</script>\n<script>\n{script}</script>\n'
        "</body>\n</html>\n"
    )


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return what tells the runs apart: their ids, with the folder above them where two have the same."""
    short = [run.name for run in runs]
    if len(set(short)) == len(short):
        return short
    folders = [str(run.path) for run in runs]
    common = os.path.commonpath(folders)
    return [os.path.relpath(folder, common).replace("/runs/", "/") for folder in folders]


def shown(value: Any) -> str:
    """Return a number in about four digits, anything else as its text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return seconds as "1 h 02 min", "3 min 20 s" or "4.2 s"."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(number: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


# What the script draws


def _charts(runs: Sequence[Run], names: list[str]) -> dict[str, Any]:
    own = [dict(run.metrics) for run in runs]
    for run, curves in zip(runs, own):
        curves.pop("throughput/samples_per_sec", None)
        steps = run.timeline.get("step", [])
        for label, column in (("learning rate", "lr"), ("memory (GiB)", "memory_gib")):
            values = run.timeline.get(column)
            told = label == "learning rate" and any(name.startswith("lr-") for name in curves)
            if values and not told and any(math.isfinite(value) and value for value in values):
                curves[label] = (steps, values)
        if any(value > 0 for value in rates(run)[1]):
            curves["samples a second"] = rates(run)
    titles = sorted({title for curves in own for title in curves}, key=_order)
    charts = [
        {"title": title, "curves": [_curve(*curves[title]) if title in curves else None for curves in own]}
        for title in titles
    ]
    times = [_clock(run) for run in runs]
    return {"runs": names, "charts": charts, "clocks": times, "histogram": _histogram(runs)}


def _order(title: str) -> tuple[int, str]:
    """Losses first, what belongs to the machine last."""
    machine = ("learning rate", "samples a second", "memory (GiB)")
    if title in machine:
        return 3, str(machine.index(title))
    if "loss" in title:
        return 0, title
    return (2 if title.startswith(("throughput/", "cpu/", "device/", "lr-", "grad_norm", "weight_norm")) else 1), title


def _curve(steps: list[float], values: list[float]) -> dict[str, Any]:
    steps, values = thinned(steps, values)
    return {"x": steps, "y": [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]}


def _clock(run: Run) -> dict[str, list[float]]:
    steps, elapsed = thinned(run.timeline.get("step", []), run.timeline.get("elapsed", []))
    return {"x": steps, "y": elapsed}


def _histogram(runs: Sequence[Run]) -> dict[str, Any] | None:
    """How many steps took how long, in bins of equal width up to a time that 99 of 100 steps stay below."""
    each = [step_times(run) for run in runs]
    times = sorted(pair for run in each for pair in run)
    total = sum(count for _, count in times)
    if not total:
        return None
    passed, top = 0.0, times[-1][0]
    for time, count in times:
        passed += count
        if passed >= 0.99 * total:
            top = time
            break
    low = times[0][0]
    width = (top - low) / _BINS or max(top, 1e-9)
    counts = [[0.0] * (_BINS + 1) for _ in runs]
    for own, bins in zip(each, counts):
        for time, count in own:
            bins[min(int((time - low) / width), _BINS)] += count
    return {"low": low, "width": width, "counts": counts}


# What is there without a script


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:]) for row in rows)
    body = "".join(f'<tr><th scope="row">{html.escape(row[0])}</th>{rest}</tr>' for row, rest in zip(rows, cells))
    return _scrolled(f"<table>{_caption(caption)}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")


def _scrolled(table: str) -> str:
    """A table that is too wide is scrolled by itself, by keyboard too."""
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _caption(text: str) -> str:
    return f"<caption>{html.escape(text)}</caption>" if text else ""


def _section(title: str, content: str) -> str:
    name = "-".join(title.lower().split())
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{html.escape(title)}</h2>{content}</section>'


def _overview(runs: Sequence[Run], names: list[str]) -> str:
    facts: list[tuple[str, list[str]]] = [
        ("status", [run.status for run in runs]),
        ("steps", [shown(run.step) for run in runs]),
        ("time trained", [duration(run.seconds) for run in runs]),
        ("started", [str(run.starts[0].get("time", ""))[:16].replace("T", " ") if run.starts else "" for run in runs]),
        ("times started", [str(len(run.starts) or "") for run in runs]),
        ("strategy", [_setting(run) for run in runs]),
        ("parameters", [shown(run.record.get("parameters")) for run in runs]),
        ("failed with", [str((run.starts[-1].get("error") if run.starts else None) or "") for run in runs]),
    ]
    for title in sorted({title for run in runs for title in run.metrics}, key=_order):
        if "loss" in title or title.startswith(("val", "test")):
            facts.append((f"{title}: last", [shown(_last(run, title)) for run in runs]))
            facts.append((f"{title}: lowest", [shown(_extreme(run, title, min)) for run in runs]))
            facts.append((f"{title}: highest", [shown(_extreme(run, title, max)) for run in runs]))
    return _section("Overview", _table(["", *names], [(name, *values) for name, values in facts if any(values)]))


def _setting(run: Run) -> str:
    record = run.record
    if "strategy" not in record:
        return ""
    words = [f"{record['strategy']} × {record.get('world_size', 1)}", record.get("precision"), record.get("device")]
    return ", ".join(str(word) for word in words if word)


def _last(run: Run, title: str) -> float | None:
    return run.metrics[title][1][-1] if title in run.metrics else None


def _extreme(run: Run, title: str, choose: Any) -> float | None:
    values = [value for value in run.metrics.get(title, ([], []))[1] if math.isfinite(value)]
    return choose(values, default=None)


def _where(runs: Sequence[Run], names: list[str]) -> str:
    parts = ['<div id="histogram"></div>']
    for run, name in zip(runs, names):
        rows = run.sections
        caption = f"{name}: by Profiler('simple')"
        if not rows:
            rows = _coarse(run)
            caption = f"{name}: train with Profiler('simple') to see more"
        total = sum(seconds for _, seconds in rows)
        if total:
            bars = "".join(
                f'<tr><th scope="row">{html.escape(part)}</th><td>{duration(seconds)}</td>'
                f"<td>{seconds / total:.1%}</td>"
                f'<td class="bar"><span style="width:{100 * seconds / total:.2f}%"></span></td></tr>'
                for part, seconds in rows
            )
            parts.append(_scrolled(f'<table class="bars">{_caption(caption)}<tbody>{bars}</tbody></table>'))
    return _section("Where the time went", "".join(parts))


def _coarse(run: Run) -> list[tuple[str, float]]:
    validating = sum(start.get("validation_seconds", 0.0) for start in run.starts)
    training = (run.seconds or 0.0) - validating
    return [("training", training), ("validation", validating)] if run.starts and training > 0 else []


def _table_of_config(runs: Sequence[Run], names: list[str]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    rows, differing = [], []
    for key in keys:
        values = [_text(run.config[key]) if key in run.config else "—" for run in runs]
        (differing if len(set(values)) > 1 else rows).append((key, *values))
    parts = []
    if differing:
        parts.append(_table(["", *names], differing, "What differs between the runs"))
    if rows:
        table = _table(["", *names], rows)
        parts.append(f"<details{' open' if len(runs) == 1 else ''}><summary>{len(rows)} settings"
                     f"{' in common' if len(runs) > 1 else ''}</summary>{table}</details>")  # fmt: skip
    return _section("Settings", "".join(parts))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table_of_checkpoints(runs: Sequence[Run], names: list[str]) -> str:
    rows = [
        (one["name"], *([name] if len(runs) > 1 else []), shown(one["step"]), shown(one["epoch"]), size(one["bytes"]),
         str(one["time"] or ""))
        for run, name in zip(runs, names) for one in run.checkpoints
    ]  # fmt: skip
    head = ["checkpoint", *(["run"] if len(runs) > 1 else []), "step", "epoch", "size", "written"]
    return _section("Checkpoints kept", _table(head, rows)) if rows else ""


def _warnings(runs: Sequence[Run], names: list[str]) -> str:
    items = []
    for run, name in zip(runs, names):
        prefix = f"{name}: " if len(runs) > 1 else ""
        for entry in run.record.get("warnings", []):
            count = f" (×{entry.get('count')})" if entry.get("count", 1) != 1 else ""
            items.append(f"{prefix}{entry.get('message', '')}{count}")
        items += [f"{prefix}{problem}" for problem in run.problems]
    listed = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return _section("Warnings", f"<ul>{listed}</ul>" if items else "<p>None.</p>")


def _environment(runs: Sequence[Run], names: list[str]) -> str:
    each = [_facts(run) for run in runs]
    keys = list(dict.fromkeys(key for facts in each for key in facts))
    if not keys:
        return ""
    rows = [(key, *(facts.get(key, "") for facts in each)) for key in keys]
    return _section("Environment", _table(["", *names], rows))


def _facts(run: Run) -> dict[str, str]:
    """Versions, machine, command line and source, as they were when the run was started last."""
    facts = {str(key): str(value) for key, value in run.record.get("environment", {}).items()}
    if run.starts:
        facts["host"] = str(run.starts[-1].get("host", ""))
        facts["command"] = " ".join(map(str, run.starts[-1].get("command", [])))
    for key, value in run.provenance.items():
        if key == "packages" and isinstance(value, dict):
            facts["packages"] = ", ".join(f"{name} {version}" for name, version in value.items())
        elif not isinstance(value, (dict, list)) and key != "diff":
            facts.setdefault(str(key), str(value))
        elif isinstance(value, dict) and key not in ("torch", "diff"):
            facts |= {f"{key} {name}": str(one) for name, one in value.items() if name != "diff"}
    return facts
