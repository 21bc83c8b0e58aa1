"""`drivetrain replay`: hand over to trackers what they did not take while a run went on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain replay ARGS`; 1: something is left, 2: wrong usage."""
    options = _parser().parse_args(args)
    from ...callbacks.tracking.replay import replay  # imports torch, which --help does not need

    left = 0
    for path in _journals(options.paths):
        if options.list:
            print(path)
            continue
        try:
            done = replay(path)
        except (ImportError, OSError, TypeError, ValueError) as error:
            print(f"drivetrain replay: error: {error}", file=sys.stderr)
            left += 1
            continue
        print(f"{path}: {done.name} took {done.taken} entries, {done.left} are left. {done.problem}".rstrip())
        left += done.left
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drivetrain replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("paths", nargs="+", metavar="RUN", help="a run's folder, a folder of runs, or a journal")
    parser.add_argument("--list", action="store_true", help="only say which journals there are")
    return parser


def _journals(paths: Sequence[str]) -> Iterator[Path]:
    from ...callbacks.tracking.replay import journals_of

    for given in map(Path, paths):
        if given.is_file():
            yield given
            continue
        found = [path for folder in [given, *sorted(given.glob("runs/*")), *sorted(given.glob("*"))] if folder.is_dir()
                 for path in journals_of(folder)]  # fmt: skip
        if not found:
            print(f"{given}: nothing to replay")
        yield from dict.fromkeys(found)
