"""The benchmarks run; what they measure is for a person to read, no test asserts a time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_a_workload_is_measured_and_printed():
    command = [sys.executable, str(HERE / "run.py"), "--rounds", "2", "prepared loader", "everything"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "µs" in line]
    assert len(rows) == 2 and all(re.search(r"\d+\.\d µs +\d\.\d+ +\[", row) for row in rows), done.stdout


def test_every_contender_exists():
    sys.path.insert(0, str(HERE))
    try:
        import run
        import workloads
    finally:
        sys.path.remove(str(HERE))
    names = {name for workload in [*run.WORKLOADS, run.FURTHER_LOGS] for name in (workload.base, workload.contender)}
    assert all(callable(getattr(workloads, name)) for name in names)
