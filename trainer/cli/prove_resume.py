"""`drivetrain prove-resume`: shows that a config's run, interrupted, goes on as if it had not been, or what differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from . import help as pages
from .main import COMMANDS
from .reporting import log_to_stderr
from .run import import_from_here
from .sources import check, collect, plain_errors


def main(command: str, args: Sequence[str]) -> int:
    """Run the proof; 0: the same, 1: a difference, which is named, or a run that fails; 2: wrong usage."""
    prog = f"drivetrain {command}"
    options, rest = _parser(prog).parse_known_args(args)
    if options.help:
        print(_help(command), end="")
        return 0
    with plain_errors(prog):
        check(collect(rest, pages.keys()), pages.keys())
        import_from_here()
    log_to_stderr()
    from ..proof import prove_resume

    try:
        proof = prove_resume(lambda: _make(rest, prog), steps=options.steps, interrupt_at=options.interrupt_at)
    except (ValueError, RuntimeError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    print(proof)
    return 0 if proof else 1


def _make(args: Sequence[str], prog: str) -> tuple[Any, dict[str, Any]]:
    from .train_cli import TrainCLI

    cli = TrainCLI(args=args, run=False, save_config_callback=None, parser_kwargs={"prog": prog})
    return cli.trainer, {"model": cli.model, "datamodule": cli.datamodule}


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interrupt-at", type=int, default=None)
    return parser


def _help(command: str) -> str:
    own = (
        "  --steps N              optimizer steps to train (default: 20)\n"
        "  --interrupt-at N       step after which the run is interrupted (default: half of them)\n\n"
    )
    return pages.page(command, COMMANDS[command][1]).replace("keys:\n", f"options:\n{own}keys:\n", 1)
