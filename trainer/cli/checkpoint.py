"""`drivetrain checkpoint`: look at checkpoints, verify, compare, convert and prune them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...strategies.checkpoint import Checkpoint

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

    if not _is_checkpoint(options.path):
        rows = [overview(path) for path in _within(options.path)]
        print(json.dumps(rows, indent=1) if options.json else table(rows), end="\n" if options.json else "")
        return 0
    found = described(_opened(options.path), every=options.all or options.json)
    print(json.dumps(found, indent=1, default=str) if options.json else page(found), end="\n" if options.json else "")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ...strategies.checkpoint import Checkpoint, CheckpointError

    paths = [Path(options.path)] if _is_checkpoint(options.path) else _within(options.path)
    problems = []
    for path in paths:
        try:
            found = Checkpoint.open(path, verify=False).verify()
        except CheckpointError as error:
            found = [str(error)]
        problems += found
        print(f"{path}: {'whole' if not found else 'damaged'}")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _diff(options: argparse.Namespace) -> int:
    from .comparison import differences

    lines = 0
    for line in differences(_opened(options.a), _opened(options.b)):
        print(line)
        lines += 1
    if not lines:
        print("no difference")
    return 1 if lines else 0


def _convert(options: argparse.Namespace) -> int:
    from ...strategies.checkpoint import load_weights, save_weights

    if options.source is not None:
        from ..foreign_checkpoints import import_checkpoint

        told = import_checkpoint(options.source, options.path, options.target)
        print(f"{options.target}: a checkpoint with {told}")
        return 0
    if not _is_checkpoint(options.path):
        raise ValueError(
            f"Expected a checkpoint of drivetrain. Received: {options.path}. Say --from lightning or --from accelerate "
            "for one of these."
        )
    checkpoint = _opened(options.path, verify=True)
    Path(options.target).mkdir(parents=True, exist_ok=True)
    for stem in sorted({name.split(".")[0].split("-0")[0] for name in checkpoint.files if name.startswith("model")}):
        weights = load_weights(checkpoint, name=stem)
        names = save_weights(options.target, weights, name=stem, max_shard_size=options.max_shard_size)
        print(f"{options.target}: {len(weights)} tensors in {', '.join(names)}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    from ...strategies.checkpoint import remove

    if options.keep < 1:
        raise ValueError(f"Expected a number of checkpoints to keep, at least 1. Received: --keep {options.keep}.")
    whole = []
    for path in _within(options.path):
        checkpoint = _opened(path)
        problems = checkpoint.verify()
        if problems:
            print(f"{path}: damaged, and left where it is ({problems[0]})", file=sys.stderr)
        else:
            step = checkpoint.manifest.get("step")
            whole.append((-1 if step is None else step, checkpoint.manifest["time"], path))
    linked = {Path(os.path.realpath(entry)) for entry in Path(options.path).iterdir() if entry.is_symlink()}
    for _, _, path in sorted(whole)[: -options.keep]:
        if path.resolve() in linked:
            print(f"{path}: kept, since a link points to it")
            continue
        if not options.dry_run:
            remove(path)
        print(f"{path}: {'would be removed' if options.dry_run else 'removed'}")
    return 0


def _is_checkpoint(path: str | Path) -> bool:
    from ...strategies.checkpoint.format import MANIFEST

    if not os.path.isdir(path):
        imported = "a file. Import one of Lightning by: convert FILE TARGET --from lightning"
        what = imported if os.path.exists(path) else ""
        raise ValueError(
            f"Expected the folder of a checkpoint, or of several. Received: {path}, {what or 'which is not there'}."
        )
    return os.path.lexists(Path(path) / MANIFEST)


def _within(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, damaged ones too; raises ValueError where there is none."""
    found = list(_candidates(Path(folder)))
    if not found:
        raise ValueError(
            f"Expected checkpoints. Received: {folder}, which has no manifest.json and holds no folder that has."
        )
    return found


def _candidates(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(".") and _is_checkpoint(entry):
            yield entry


def _opened(path: str | Path, *, verify: bool = False) -> Checkpoint:
    from ...strategies.checkpoint import Checkpoint

    return Checkpoint.open(path, verify=verify)


_ACTIONS = {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert, "prune": _prune}
