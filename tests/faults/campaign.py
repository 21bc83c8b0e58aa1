"""Kills runs at random places, lets them go on, and compares them with runs that nobody killed.

`python -m drivetrain.tests.faults.campaign --points 2000` is the long version of test_interruption.py and of
test_interruption_sharded.py.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drivetrain.tests.distributed import RankFailed, run
from drivetrain.tests.faults.killing import CLOCK
from drivetrain.tests.faults.runs import RUNS, Run, plain
from drivetrain.tests.faults.sharded_runs import SHARDED_RUNS

SEED = 20_260_131
AGAIN = 0.6  # how often a run that goes on is killed once more
ALL = {**RUNS, **SHARDED_RUNS}
_MEMORY = Path("/dev/shm")  # what a killed process has handed to the system is there without waiting for a disk


class Campaign:
    """One run, killed again and again."""

    def __init__(self, name: str, seed: int = SEED) -> None:
        self.name, self.run = name, ALL[name]
        self.draw = random.Random(f"{seed} {name}")
        self.killed: Counter[str] = Counter()
        importlib.import_module("torch._dynamo")  # what optimizers import: once here, not in every child
        gc.freeze()
        with scratch():
            self.whole, self.places = finish(self.run)

    def kill(self, points: int) -> list[str]:
        """Kill the run at least ``points`` times; return what was different afterwards, one text each."""
        differences: list[str] = []
        while sum(self.killed.values()) < points:
            with scratch():
                differences += self._life()
        return differences

    def _life(self) -> list[str]:
        """One run from its start to its end, killed once or several times."""
        deaths = []
        goal = self._place()
        while goal is not None:
            rank = self.draw.randrange(self.run.ranks)
            torn = self.draw.random() < 0.5
            if not attempt(self.run, goal, rank, torn):
                break  # it ended before
            place = self.places[goal] if not deaths else "going on"
            deaths.append((goal, place, rank))
            self.killed[place] += 1
            goal = self.draw.randrange(len(self.places) // 2) if self.draw.random() < AGAIN else None
        try:
            end, _ = finish(self.run)
        except AssertionError as error:
            return [f"{self.name}, killed at {deaths}: {error}"]
        return [f"{self.name}, killed at {deaths}: {found}" for found in difference(self.whole, end)[:3]]

    def _place(self) -> int:
        """A place of a random kind, so that the rare ones have their turn."""
        kind = self.draw.choice(sorted(set(self.places)))
        return self.draw.choice([index for index, place in enumerate(self.places) if place == kind])


def attempt(what: Run, deadline: int | None, rank: int = 0, torn: bool = False) -> bool:
    """Start a run that is to be killed on ``rank``; tell whether it was. Its end and its places lie in files."""

    def body(own: int) -> None:
        CLOCK.wind_up(deadline if own == rank else None, torn=torn)
        end = plain(what.script())
        CLOCK.deadline = None
        Path(f"end-{own}").write_bytes(pickle.dumps((end, CLOCK.places)))

    if what.ranks > 1:
        try:
            run(body, what.ranks, patience=0.0, timeout=300)
        except RankFailed as failure:
            if "SIGKILL" not in str(failure):
                raise AssertionError(str(failure)) from failure
            return True
        return False
    return _forked(body)


def finish(what: Run) -> tuple[list[Any], list[str]]:
    """Let a run end; return how it did (of each rank), and the places it passed."""
    if attempt(what, None):
        raise AssertionError("was killed by somebody else")
    ends = [pickle.loads(Path(f"end-{rank}").read_bytes()) for rank in range(what.ranks)]
    return [end for end, _ in ends], ends[0][1]


def difference(whole: Any, end: Any, path: str = "") -> list[str]:
    """Return where two nested values differ."""
    if isinstance(whole, dict) and isinstance(end, dict):
        keys = [*whole, *(key for key in end if key not in whole)]
        return [d for key in keys for d in difference(whole.get(key), end.get(key), f"{path}.{key}")]
    if isinstance(whole, list) and isinstance(end, list) and len(whole) == len(end):
        return [d for index, pair in enumerate(zip(whole, end)) for d in difference(*pair, f"{path}[{index}]")]
    return [] if whole == end else [f"{path}: {str(whole)[:300]} became {str(end)[:300]}"]


def _forked(body: Any) -> bool:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _be_child(body)
    _, status = os.waitpid(child, 0)
    _end_group(child)  # workers whose parent is dead
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise AssertionError(Path("output").read_text()[-4000:])
    return False


def _be_child(body: Any) -> None:
    try:
        os.setpgid(0, 0)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        body(0)
        os._exit(0)
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def _end_group(child: int) -> None:
    try:
        os.killpg(child, 9)
    except (ProcessLookupError, PermissionError):
        pass


@contextmanager
def scratch() -> Any:
    """A new current folder."""
    here = os.getcwd()
    root = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="killed-", dir=root, ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def main() -> int:
    """Run all campaigns; exit status 1 where a run ended differently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=2000, help="how often runs are killed in all")
    parser.add_argument("--seed", type=int, default=SEED, help="another one kills at other places")
    parser.add_argument("--only", default="", help="name of a run: " + ", ".join(ALL))
    options = parser.parse_args()
    names, failed = [name for name in ALL if options.only in ("", name)], []
    for name in names:
        start, campaign = time.monotonic(), Campaign(name, options.seed)
        failed += campaign.kill(-(-options.points // len(names)))
        total = sum(campaign.killed.values())
        print(f"{name}: {total} kills, {len(failed)} differences so far, {time.monotonic() - start:.1f} s", flush=True)
        print("  " + ", ".join(f"{place} {count}" for place, count in campaign.killed.most_common()), flush=True)
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
