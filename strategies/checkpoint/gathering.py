"""One Hugging Face checkpoint from tensors in parts: gathered one after the other while the first rank writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .files import CheckpointError
from .sharded import once
from .tensor_file import write_order
from .tensors import save_weights, shards_of


def save_gathered(
    writer: Any,
    tensors: Mapping[str, Tensor],
    gather: Callable[[Tensor], Tensor],
    *,
    name: str = "model",
    max_shard_size: int | str = "10GB",
) -> None:
    """Write tensors as `save_weights` does; every rank of the writer has to call this.

    `gather` gives the whole of one of them, on the first rank at least, and is called for each on all ranks together.
    No rank holds more than one whole tensor at a time. After an error on the first rank all raise.
    """
    unique, aliases = once(tensors)
    world = writer.world

    def read(key: str) -> Tensor:
        if world.agree(False):
            raise CheckpointError(f"Could not save {writer.directory}: rank 0 failed while it wrote.")
        return gather(unique[key])

    # An element stands for a whole tensor: it has its shape and takes no memory.
    outlines = {key: torch.empty((), dtype=tensor.dtype).expand(tensor.shape) for key, tensor in unique.items()}
    if world.rank != 0:
        for shard in shards_of(outlines, max_shard_size):
            for key in write_order(shard):
                read(key)
        world.agree(False)
        return
    try:
        save_weights(_Streaming(writer, read, aliases), outlines, name=name, max_shard_size=max_shard_size)
    except BaseException:
        world.agree(True)
        raise
    world.agree(False)


class _Streaming:
    """A writer whose tensors are read when their turn comes."""

    def __init__(self, writer: Any, read: Callable[[str], Tensor], aliases: Mapping[str, str]) -> None:
        self._writer, self._read, self._aliases = writer, read, aliases
        self.json = writer.json

    def tensors(self, name: str, tensors: Mapping[str, Tensor], **options: Any) -> None:
        own = {alias: first for alias, first in self._aliases.items() if first in tensors}
        options["aliases"] = {**own, **(options.get("aliases") or {})}
        self._writer.tensors(name, tensors, read=self._read, **options)
