"""`drivetrain fit`, `validate`, `test` and `predict`: one run from config files and the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import help as pages
from .main import COMMANDS
from .reporting import log_to_stderr
from .sources import check, collect, plain_errors


def main(command: str, args: Sequence[str]) -> int:
    """Run ``command``; what can be said without torch (help, unknown keys) is said before it is imported."""
    prog = f"drivetrain {command}"
    with plain_errors(prog):
        layers = collect(args, pages.keys())
        if {"-h", "--help"} & set(args):
            print(pages.page(command, COMMANDS[command][1]), end="")
        else:
            check(layers, pages.keys())
        import_from_here()
        if {"-h", "--help"} & set(args):
            return _class_help(layers)
    log_to_stderr()
    from .train_cli import TrainCLI

    TrainCLI(args=[command, *args], parser_kwargs={"prog": prog})
    return 0


def _class_help(layers: Sequence) -> int:
    if any(key in layer.values for layer in layers for key in ("model", "data", "optimizer", "lr_scheduler")):
        from .classes import class_pages

        print("", *class_pages(layers), sep="\n", end="")
    return 0


def import_from_here() -> None:
    """Let a class_path name modules of the current folder, as `python train.py` would its own."""
    here = str(Path.cwd())
    if not getattr(sys.flags, "safe_path", False) and here not in sys.path:
        sys.path.insert(0, here)
