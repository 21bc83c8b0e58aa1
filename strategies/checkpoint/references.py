"""Nested state whose tensors stay in the checkpoint until somebody reads a part of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .format import Checkpoint
from .pieces import Box
from .sharded import Parts, is_sharded, open_parts
from .state import decode


@dataclass(frozen=True)
class Reference:
    """A tensor in a checkpoint, of which any box can be read."""

    parts: Parts
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.parts.stored(self.name).shape

    def read(self, box: Box | None = None) -> Tensor:
        """See `Parts.read`."""
        return self.parts.read(self.name, box)


def open_state(checkpoint: Checkpoint, stem: str) -> Any:
    """Return nested state that `save_sharded_state` or `Writer.state` wrote, with a Reference for each tensor."""
    tree = checkpoint.json(f"{stem}.json")
    if not is_sharded(checkpoint, stem) and not checkpoint.has(f"{stem}.safetensors"):
        return decode(tree, {})
    return decode(tree, _References(open_parts(checkpoint, stem=stem)))


class _References(Mapping[str, Any]):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Reference:
        return Reference(self._parts, name)

    def __contains__(self, name: object) -> bool:
        return name in self._parts.tensors or name in self._parts.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.names())

    def __len__(self) -> int:
        return len(self._parts.names())
