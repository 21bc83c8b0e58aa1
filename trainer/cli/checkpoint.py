"""`drivetrain checkpoint`: look at checkpoints, verify, compare, convert and prune them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

_FOREIGN = ("lightning", "accelerate")


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain checkpoint ARGS`; 1: damaged, different or not done, 2: wrong usage."""
    options = _parser().parse_args(args)
    from ...strategies.checkpoint import CheckpointError  # imports torch, which --help does not need

    try:
        return _ACTIONS[options.action](options)
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        print(f"drivetrain checkpoint: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drivetrain checkpoint", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="what a checkpoint holds; of a folder of checkpoints, a list")
    inspect.add_argument("path")
    inspect.add_argument("--all", action="store_true", help="list the tensors of optimizers and the rest too")
    inspect.add_argument("--json", action="store_true", help="for programs")
    verify = actions.add_parser("verify", help="read every byte of a checkpoint, or of all in a folder")
    verify.add_argument("path")
    diff = actions.add_parser("diff", help="what differs between two checkpoints, and by how much")
    diff.add_argument("a")
    diff.add_argument("b")
    convert = actions.add_parser("convert", help="write its weights as a plain Hugging Face folder, or import")
    convert.add_argument("path")
    convert.add_argument("target")
    convert.add_argument("--from", dest="source", choices=_FOREIGN, help="import that library's checkpoint")
    convert.add_argument("--max-shard-size", default="10GB", help="a file's limit (default: 10GB)")
    prune = actions.add_parser("prune", help="remove all but the newest checkpoints of a folder")
    prune.add_argument("path")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _inspect(options: argparse.Namespace) -> int:
    from .inspection import described, overview, page, table
    from .places import Place

    place = Place(options.path)
    if not place.is_checkpoint():
        rows = [overview(each) for each in place.within(unfinished=True)]
        print(json.dumps(rows, indent=1) if options.json else table(rows), end="\n" if options.json else "")
        return 0
    found = described(place, every=options.all or options.json)
    print(json.dumps(found, indent=1, default=str) if options.json else page(found), end="\n" if options.json else "")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .places import Place

    place = Place(options.path)
    problems = []
    for each in [place] if place.is_checkpoint() else place.within():
        found = each.problems()
        problems += found
        print(f"{each}: {'whole' if not found else 'damaged'}")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _diff(options: argparse.Namespace) -> int:
    from .comparison import differences
    from .places import Place

    lines = 0
    with Place(options.a).brought() as a, Place(options.b).brought() as b:
        for line in differences(a, b):
            print(line)
            lines += 1
    if not lines:
        print("no difference")
    return 1 if lines else 0


def _convert(options: argparse.Namespace) -> int:
    from ...strategies.checkpoint import save_weights
    from .places import Place
    from .stems import content, weights

    if options.source is not None:
        from ..foreign_checkpoints import import_checkpoint

        told = import_checkpoint(options.source, options.path, options.target)
        print(f"{options.target}: a checkpoint with {told}")
        return 0
    place = Place(options.path)
    if not place.is_checkpoint():
        raise ValueError(
            f"Expected a checkpoint of drivetrain. Received: {options.path}. Say --from lightning or --from accelerate "
            "for one of these."
        )
    with place.brought(verified=True) as checkpoint:
        Path(options.target).mkdir(parents=True, exist_ok=True)
        for stem in weights(checkpoint):
            tensors = content(checkpoint, stem)
            names = save_weights(options.target, tensors, name=stem, max_shard_size=options.max_shard_size)
            print(f"{options.target}: {len(tensors)} tensors in {', '.join(names)}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    from .places import Place

    if options.keep < 1:
        raise ValueError(f"Expected a number of checkpoints to keep, at least 1. Received: --keep {options.keep}.")
    folder = Place(options.path)
    if folder.is_checkpoint():
        raise ValueError(f"Expected a folder of checkpoints. Received: {folder}, which is one. Name the folder above.")
    would = "would be removed" if options.dry_run else "removed"
    whole = []
    for place in folder.within():
        problems = place.problems()
        if problems:
            print(f"{place}: damaged, and left where it is ({problems[0]})", file=sys.stderr)
        else:
            step = place.manifest().get("step")
            whole.append((-1 if step is None else step, place.manifest()["time"], str(place), place))
    for *_, place in sorted(whole, key=lambda row: row[:3])[: -options.keep]:
        if place.linked():
            print(f"{place}: kept, since a link points to it")
            continue
        if not options.dry_run:
            place.remove()
        print(f"{place}: {would}")
    for left in folder.leftovers():
        if not options.dry_run:
            left.remove()
        print(f"{left}: {would}, {left.unfinished()}")
    return 0


_ACTIONS = {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert, "prune": _prune}
