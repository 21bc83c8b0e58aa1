"""Measure what drivetrain costs beside a raw torch loop: `python tests/benchmarks/run.py [--rounds 30] [WORKLOAD ...]`.

Every contender runs in a process of its own, one torch thread each; they take turns, so that whatever else the machine
does hits both. Time is process CPU time (all threads). A ratio is taken within each turn; the table shows its median and
quartiles beside the bar that it has to stay under. Calls are counted by `sys.setprofile` and are the same on every machine.
"""

from __future__ import annotations

import argparse
import os
import pty
import resource
import statistics
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARM_UP = 3  # turns that are not counted


@dataclass(frozen=True)
class Workload:
    """Two contenders and the bar for their ratio."""

    name: str
    base: str
    contender: str
    bar: float
    steps: int = 500  # a turn


WORKLOADS = [
    Workload("Trainer, bare", "raw_bare", "trainer_bare", 1.08),
    Workload("  with a fused optimizer", "raw_bare", "trainer_fused", float("inf")),
    Workload("Trainer, everything on", "raw_bare", "trainer_everything", 1.12),
    Workload("  the same by hand", "raw_bare", "raw_everything", float("inf")),
    Workload("Trainer, accumulation + clipping + scheduler", "raw_accumulation", "trainer_accumulation", 1.10, 1000),
    Workload("Trainer, language model", "raw_lm", "trainer_lm", 1.01, 20),
    Workload("Trainer, evaluation with a metric", "raw_evaluation", "trainer_evaluation", 1.10),
    Workload("Accelerator evaluation, gather_for_metrics", "raw_gather", "accelerator_gather", 1.10),
    Workload("  the same on 2 ranks", "raw_gather_2", "accelerator_gather_2", 1.30),
    Workload("Accelerator loop with accumulate", "raw_bare", "accelerator_accumulate", 1.08),
    Workload("iterating a prepared loader", "raw_loader", "accelerator_loader", 1.02, 2000),
]
FURTHER_LOGS = Workload("each further self.log", "trainer_log_1", "trainer_log_101", 1.5)
IMPORT = Workload("from drivetrain import Trainer", "import torch", "from drivetrain import Trainer", 1.05)


class Contender:
    """A process that measures one turn after another, whenever it is told to."""

    def __init__(self, name: str, steps: int) -> None:
        down, up = os.pipe(), os.pipe()
        screen, terminal = pty.openpty()  # bars are drawn as they are for a person
        command = [sys.executable, str(HERE / "workloads.py"), name, str(steps), str(down[0]), str(up[1])]
        self.process = subprocess.Popen(command, pass_fds=(down[0], up[1]), env=environment(), stdout=terminal,
                                        stderr=terminal, stdin=subprocess.DEVNULL)  # fmt: skip
        for descriptor in (down[0], up[1], terminal):
            os.close(descriptor)
        self.go, self.results = down[1], os.fdopen(up[0])
        self.shown = bytearray()
        threading.Thread(target=self._drain, args=(screen,), daemon=True).start()

    def turn(self) -> float:
        """Let it work for one turn; return its CPU seconds."""
        line = self.results.readline()
        if not line:
            sys.exit(f"A contender ended:\n{self.shown[-4000:].decode(errors='replace')}")
        return float(line)

    def on(self) -> None:
        os.write(self.go, b".")

    def stop(self) -> None:
        os.close(self.go)
        self.process.terminate()
        self.process.wait()

    def _drain(self, screen: int) -> None:
        try:
            while data := os.read(screen, 65536):
                self.shown += data
                del self.shown[:-8000]
        except OSError:  # the terminal's other end is closed
            pass


def measure(workload: Workload, rounds: int) -> tuple[list[float], list[float]]:
    """Return the CPU microseconds of a step for base and contender, turn by turn."""
    pair = [Contender(workload.base, workload.steps), Contender(workload.contender, workload.steps)]
    try:
        for contender in pair:
            contender.turn()
        times: list[list[float]] = [[], []]
        for index in range(rounds + WARM_UP):
            order = (0, 1) if index % 2 else (1, 0)
            for which in order:
                pair[which].on()
                times[which].append(pair[which].turn() / workload.steps * 1e6)
        return times[0][WARM_UP:], times[1][WARM_UP:]
    finally:
        for contender in pair:
            contender.stop()


def measure_import(workload: Workload, rounds: int) -> tuple[list[float], list[float]]:
    """Return the CPU microseconds of two statements, each in a new interpreter."""
    times: dict[str, list[float]] = {workload.base: [], workload.contender: []}
    for index in range(rounds + 1):
        for code in sorted(times, reverse=bool(index % 2)):
            times[code].append(cpu_of_child([sys.executable, "-c", code]) * 1e6)
    return times[workload.base][1:], times[workload.contender][1:]


def environment() -> dict[str, str]:
    """Return this process's environment with one torch thread, and with compiled modules kept as they usually are."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def cpu_of_child(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, middle, high


def row(name: str, base: list[float], values: list[float], bar: float, unit: str) -> bool:
    """Print one line of the table; return whether it is under its bar."""
    low, middle, high = quartiles(values)
    good = middle <= bar
    verdict = "" if bar == float("inf") else f"≤ {bar:<5g} {'ok' if good else 'OVER'}"
    cost = f"{statistics.median(base):10.1f} µs"
    print(f"{name:46} {cost:>14} {middle:7.3f}{unit} [{low:6.3f} … {high:6.3f}]  {verdict}", flush=True)
    return good


def report(workload: Workload, rounds: int) -> bool:
    """Measure one workload and print its line."""
    if workload is FURTHER_LOGS:
        base, more = measure(workload, rounds)
        return row(workload.name, base, [(b - a) / 100 for a, b in zip(base, more)], workload.bar, " µs")
    how = measure_import if workload is IMPORT else measure
    base, values = how(workload, min(rounds, 10) if workload is IMPORT else rounds)
    return row(workload.name, base, [b / a for a, b in zip(base, values)], workload.bar, "   ")


def report_counts() -> bool:
    """Print the counts of Python calls a step, and the frames between `fit` and `training_step`."""
    sys.path.insert(0, str(HERE))
    from counting import calls_per_step, frames_to_training_step

    good = True
    for name, value, bar in (
        ("frames from fit to training_step", frames_to_training_step(), 4),
        ("own Python calls a step, bare", calls_per_step("bare"), 45),
        ("own Python calls a step, everything on", calls_per_step("everything"), 45),
    ):
        good &= value <= bar
        print(f"{name:46} {'':14} {value:7.2f}    {'':17}  ≤ {bar:<5g} {'ok' if value <= bar else 'OVER'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="words of the names of those to run (all)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each contender (30)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a bar is passed")
    options = parser.parse_args()
    chosen = [
        workload
        for workload in [*WORKLOADS, FURTHER_LOGS, IMPORT]
        if not options.workloads or any(word.lower() in workload.name.lower() for word in options.workloads)
    ]
    print(f"{'':46} {'base, a step':>14} {'ratio':>7}    {'[quartiles]':17}  bar")
    good = all([report(workload, options.rounds) for workload in chosen])
    if not options.workloads:
        good &= report_counts()
    return int(options.strict and not good)


if __name__ == "__main__":
    sys.exit(main())
