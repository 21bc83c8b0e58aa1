"""`drivetrain plan`: what a config's step takes of each device's memory under each strategy, and which to use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import help as pages
from .main import COMMANDS
from .run import import_from_here
from .sources import UsageError, check, collect, plain_errors

_OPTIONS = (
    "  --devices N            how many there will be (default: 1)\n"
    "  --memory SIZE          of each, such as 80GB (default: this machine's)\n"
    "  --strategies NAME ...  only these (default: all that can be planned for)\n\n"
)


def main(command: str, args: Sequence[str]) -> int:
    """Run the plan; 0: something fits, 1: nothing does, 2: wrong usage."""
    prog = f"drivetrain {command}"
    options, rest = _parser(prog).parse_known_args(args)
    if options.help:
        print(pages.page(command, COMMANDS[command][1]).replace("keys:\n", f"options:\n{_OPTIONS}keys:\n", 1), end="")
        return 0
    with plain_errors(prog):
        check(collect(rest, pages.keys()), pages.keys())
        import_from_here()
        return _plan(options, rest, prog)


def _plan(options: argparse.Namespace, args: Sequence[str], prog: str) -> int:
    from ..planning import STRATEGIES, device_memory, plan
    from .unbuilt import Unbuilt

    unknown = [name for name in options.strategies or [] if name not in STRATEGIES]
    if unknown or options.devices < 1:
        received = f"--strategies {' '.join(unknown)}" if unknown else f"--devices {options.devices}"
        known = ", ".join(STRATEGIES)
        raise UsageError(f"Expected strategies of {known}, and one device or more. Received: {received}.")
    memory = device_memory(ranks=options.devices) if options.memory is None else _size(options.memory)
    cli = Unbuilt(args=args, run=False, save_config_callback=None, parser_kwargs={"prog": prog})
    precision = str(cli.config.trainer.get("precision") or "32")
    found = plan(
        cli.make_module, cli.first_batch(), devices=options.devices, memory=memory, precision=precision,
        strategies=options.strategies,
    )  # fmt: skip
    print(table(found))
    return 0 if found.choice is not None else 1


def table(plan: Any) -> str:
    """Return a plan as a text table with its reason below."""
    head = ["strategy", "weights", "gradients", "optimizer", "activations", "at most", "fits"]
    rows = [head]
    for one in plan.footprints:
        parts = (one.weights, one.gradients, one.optimizer, one.activations, one.peak)
        sizes = [_text(part) for part in parts] if one.problem is None else ["-"] * len(parts)
        rows.append([one.name, *sizes, "?" if one.problem is not None else "yes" if plan.fits(one) else "no"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    of = "" if plan.memory is None else f" of {_text(plan.memory)}, of which a tenth is left free"
    lines += ["", f"Per process, × {plan.footprints[0].devices}{of}.", plan.reason]
    if plan.choice is not None and plan.choice.devices > 1:
        lines.append(f"Use --trainer.devices={plan.choice.devices} {_words(plan.choice)}")
    lines += [f"{one.name}: {one.problem}" for one in plan.footprints if one.problem is not None]
    return "\n".join(lines)


def _words(choice: Any) -> str:
    if not choice.checkpointing:
        return f"--trainer.strategy={choice.strategy}"
    return (
        "--trainer.strategy=drivetrain.FullyShardedDataParallelPlugin "
        "--trainer.strategy.init_args.activation_checkpointing=true --trainer.strategy.init_args.fsdp_version=2"
    )


def _text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _size(text: str) -> int:
    from ...strategies.sizes import convert_file_size_to_int

    try:
        return convert_file_size_to_int(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--memory")
    parser.add_argument("--strategies", nargs="+")
    return parser
