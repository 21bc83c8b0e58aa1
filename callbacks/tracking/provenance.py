"""What a run was made from: its command line, the code's git commit and changes, Python and the packages."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .files import replace

SUMMARY = "provenance.json"
_SECONDS = 10.0  # that git may take
_LARGEST_DIFF = 5_000_000  # characters


def gathered() -> tuple[dict[str, Any], str]:
    """Return what this process runs, as plain values, and the changes to the code since its commit ("" for none).

    The code is the git repository of the program, else of the current folder; "git" is missing where there is none.
    """
    values: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.executable).name, *_arguments()]),
        "folder": os.getcwd(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "packages": packages(),
    }
    git, changes = _git(_repository())
    return ({**values, "git": git} if git else values), changes


def record(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Add this process to `provenance.json` in a run's folder; return all but the packages, and the files of it.

    The file holds a list, one object a process: a run that went on has several. Changes to the code are beside it in
    `changes-1.diff`, … A recording that fails to be written raises OSError.
    """
    values, changes = gathered()
    path = folder / SUMMARY
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(path)
    files = [str(path)]
    if changes:
        diff = folder / f"changes-{len(before) + 1}.diff"
        diff.write_text(changes, encoding="utf-8", errors="surrogateescape")
        values["git"]["diff"] = diff.name
        files.append(str(diff))
    replace(path, [json.dumps([*before, values], indent=1), "\n"])
    return {name: value for name, value in values.items() if name != "packages"}, files


@functools.cache
def packages() -> dict[str, str]:
    """Return the installed packages and their versions."""
    found = ((dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions())
    return dict(sorted((str(name), version) for name, version in found if name))


def _arguments() -> list[str]:
    """Return the command line after Python's own name, as it was typed where Python knows."""
    return list(getattr(sys, "orig_argv", ["", *sys.argv])[1:])


def _repository() -> Path | None:
    program: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    if program is None or Path(program).is_relative_to(sys.prefix):  # a test runner is not the run's code
        program = ""
    for start in ([Path(program).resolve().parent] if program else []) + [Path.cwd()]:
        for folder in (start, *start.parents):
            if (folder / ".git").exists():
                return folder
    return None


def _git(repository: Path | None) -> tuple[dict[str, Any], str]:
    if repository is None:
        return {}, ""
    commit = _said(repository, "rev-parse", "HEAD")
    if commit is None:
        return {}, ""
    changes = _said(repository, "diff", "--no-ext-diff", "--no-color", "HEAD") or ""
    status = _said(repository, "status", "--porcelain") or ""
    found = {
        "commit": commit,
        "branch": _said(repository, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(status),
        "untracked": [line[3:] for line in status.splitlines() if line.startswith("??")][:100],
    }
    return found, changes[:_LARGEST_DIFF] + ("\n" if changes else "")


def _said(repository: Path, *command: str) -> str | None:
    """Return what git says, None where it fails; it neither asks nor locks anything."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(repository), *command], capture_output=True, timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape").strip("\n") if done.returncode == 0 else None


def _read(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
