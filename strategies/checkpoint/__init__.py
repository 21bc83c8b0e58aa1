"""Checkpoints: complete and verified directories of safetensors and JSON, or nothing."""

from __future__ import annotations

from .files import CheckpointError
from .format import Checkpoint, Writer, complete, newest, remove
from .state import decode, encode
from .tensors import clean_keys, load_weights, save_weights

__all__ = [
    "Checkpoint", "CheckpointError", "Writer", "clean_keys", "complete", "decode", "encode", "load_weights", "newest",
    "remove", "save_weights",
]  # fmt: skip
