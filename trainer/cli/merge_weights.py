"""`drivetrain merge-weights`: weights in many pieces become one Hugging Face checkpoint, a tensor at a time."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from .sources import UsageError, plain_errors


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain merge-weights CHECKPOINT OUTPUT`."""
    prog = f"drivetrain {command}"
    parser = argparse.ArgumentParser(prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint_directory", help="a checkpoint, or a folder of sharded weights")
    parser.add_argument("output_path", help="the folder for model.safetensors, or for its shards and their index")
    parser.add_argument("--max_shard_size", "--max-shard-size", default="10GB", help="a file's limit (default: 10GB)")
    parser.add_argument("--foreign", action="store_true", help="read the index of torch's checkpoints, a pickle")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Accelerate's .bin files: refused here")
    parser.add_argument("--remove_checkpoint_dir", "--remove-checkpoint-dir", action="store_true",
                        help="remove the checkpoint when the merged one is there")  # fmt: skip
    taken = parser.parse_args(list(args))
    with plain_errors(prog):
        if taken.unsafe_serialization:
            raise UsageError("Expected safetensors. Received: --unsafe_serialization. No pickles are written here.")
        _merge(taken)
    return 0


def _merge(taken: argparse.Namespace) -> None:
    from ...strategies.checkpoint import CheckpointError, merging

    directory, target = Path(taken.checkpoint_directory), Path(taken.output_path)
    if not directory.is_dir():
        raise UsageError(f"Expected a folder. Received: {directory}, which is none.")
    if taken.remove_checkpoint_dir and target.resolve().is_relative_to(directory.resolve()):
        raise UsageError(f"Expected another folder for the output. Received: {target} in {directory}, which goes.")
    try:
        source = merging.find(directory, foreign=taken.foreign)
        files = merging.merge(source, target, max_shard_size=taken.max_shard_size)
    except (CheckpointError, ValueError) as error:
        raise UsageError(str(error)) from None
    print(f"{len(source.entries)} tensors of {source.text}, {directory}, are in {target}: {', '.join(files)}.")
    if taken.remove_checkpoint_dir:
        shutil.rmtree(directory)
        print(f"Removed: {directory}.")
