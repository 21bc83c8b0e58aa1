"""`drivetrain to-fsdp2`: a launch file for version 1 of FSDP becomes one for version 2."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import launch_file
from .sources import UsageError, plain_errors

_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_DROPPED = {
    "fsdp_backward_prefetch": "version 2 prefetches by itself",
    "fsdp_forward_prefetch": "version 2 prefetches by itself",
    "fsdp_use_orig_params": "version 2 always keeps the parameters",
    "fsdp_sync_module_states": "version 2 loads weights by fsdp_cpu_ram_efficient_loading",
}


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain to-fsdp2 --config_file FILE`."""
    prog = f"drivetrain {command}"
    parser = argparse.ArgumentParser(prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file", required=True, help="the file for version 1")
    parser.add_argument("--output_file", "--output-file", help="where the new one goes")
    parser.add_argument("--overwrite", action="store_true", help="put it in the old one's place, or over another file")
    taken = parser.parse_args(list(args))
    with plain_errors(prog):
        _convert(Path(taken.config_file), taken.output_file, overwrite=taken.overwrite)
    return 0


def converted(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a launch file for version 2, and what was changed in words.

    Raises UsageError for a file that has no FSDP, is for version 2, or shards nothing.
    """
    old = {name: value for name, value in values.items() if name.startswith("fsdp_")}
    if not old or old.get("fsdp_version") == "2":
        raise UsageError("Expected a launch file for version 1 of FSDP. Received: one without, or for version 2.")
    if old.get("fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        raise UsageError(
            "Expected a state dict that version 2 has. Received: LOCAL_STATE_DICT. Choose SHARDED_STATE_DICT."
        )
    # Accelerate's questionnaire writes the strategy's word for version 1 under the newer key
    word = old.get("fsdp_sharding_strategy") or old.get("fsdp_reshard_after_forward")
    name = str(word or "FULL_SHARD").upper()
    strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(name, name)
    if strategy not in _RESHARD:
        raise UsageError(f"Expected a strategy that shards. Received: {strategy}. Use MULTI_GPU, which is DDP.")
    new = {name: value for name, value in values.items() if name not in {*_DROPPED, "fsdp_sharding_strategy"}}
    notes = [f"{name} is left out: {reason}" for name, reason in _DROPPED.items() if name in old]
    new |= {"fsdp_version": "2", "fsdp_reshard_after_forward": _RESHARD[strategy]}
    if strategy.startswith("HYBRID"):  # version 2 takes it, too: each machine holds a replica
        new["fsdp_sharding_strategy"] = strategy
    return new, [*notes, f"fsdp_sharding_strategy {strategy} is fsdp_reshard_after_forward {_RESHARD[strategy]}"]


def _convert(path: Path, output: str | None, *, overwrite: bool) -> None:
    import yaml

    if output is None and not overwrite:
        raise UsageError("Expected a place for the new file. Received: none. Write --output_file, or --overwrite.")
    target = Path(output) if output else path
    if target.exists() and not overwrite:
        raise UsageError(f"Expected a new file. Received: {target}, which is there. Add --overwrite.")
    new, notes = converted(launch_file.values(launch_file.tree(path), str(path)))
    target.write_text(yaml.safe_dump(launch_file.nested(new), sort_keys=True), encoding="utf-8")
    print("\n".join([*notes, f"Written: {target}"]))
