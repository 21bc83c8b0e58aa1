"""The parts of a checkpoint by name, whichever files they are in: whole, in shards, or in parts by rank."""

from __future__ import annotations

import re
from typing import Any

from ...strategies.checkpoint import Checkpoint, CheckpointError, decode, load_weights

_ENDING = re.compile(
    r"(\.shards\.json|\.shard-\d{5}\.safetensors|-\d{5}-of-\d{5}\.safetensors|\.safetensors\.index\.json"
    r"|\.safetensors|\.json)$"
)
_WEIGHTS = re.compile(r"model(_\d+)?")


def stem_of(name: str) -> str:
    """Return what a file belongs to: "model" for model-00001-of-00003.safetensors and model.shards.json."""
    return _ENDING.sub("", name)


def stems(checkpoint: Checkpoint) -> list[str]:
    """Return the parts of a checkpoint, in the order of its files."""
    return list(dict.fromkeys(map(stem_of, checkpoint.files)))


def weights(checkpoint: Checkpoint) -> list[str]:
    """Return the parts that are weights of models."""
    return [stem for stem in stems(checkpoint) if _WEIGHTS.fullmatch(stem)]


def content(checkpoint: Checkpoint, stem: str) -> Any:
    """Return a part, verified: tensors by name, or the state that they are in."""
    tensors = _tensors(checkpoint, stem)
    if checkpoint.has(f"{stem}.json"):
        return decode(checkpoint.json(f"{stem}.json"), tensors)
    return checkpoint.read(stem) if checkpoint.has(stem) else tensors  # a file of another kind


def _tensors(checkpoint: Checkpoint, stem: str) -> Any:
    from ...strategies.checkpoint.sharded import is_sharded, open_parts

    if is_sharded(checkpoint, stem):
        own = [name for name in checkpoint.files if stem_of(name) == stem]
        if problems := checkpoint.examine(own):
            raise CheckpointError(f"{checkpoint.directory} is damaged: " + "; ".join(problems))
        parts = open_parts(checkpoint, stem=stem)
        return {name: parts.read(name) for name in parts.names()}
    if checkpoint.has(f"{stem}.safetensors") or checkpoint.has(f"{stem}.safetensors.index.json"):
        return load_weights(checkpoint, name=stem)
    return {}
