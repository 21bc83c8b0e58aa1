"""Sequences that several ranks share: which part of a batch each gets, and attention that sees all of it.

Rank r of n gets positions [r * length / n, (r + 1) * length / n). Everything that a token knows of its place has to
be in the batch, or to be added here: positions, and the label of each token (the next token, for language models).
For Hugging Face models `position_ids` and `shift_labels` are added; other modules get their labels as the data has
them, which is one label for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .parallel_options import TorchContextParallelConfig
from .sequence_attention import Exchanged, Gathered, Ring, replaced
from .tensor_parallel import check_heads
from .world import World

IGNORED = -100  # the label that torch's cross-entropy leaves out
_KINDS = {"cp": "context parallel", "sp": "sequence parallel"}


class Sequences:
    """Divides sequences among the ranks of a group.

    Args:
        kind: "cp" (keys and values are gathered) or "sp" (heads are exchanged).
        group: the process group of the ranks that share sequences.
        device: where they compute.
    """

    def __init__(self, kind: str, group: Any, handler: TorchContextParallelConfig, device: torch.device) -> None:
        self.kind, self.handler = kind, handler
        around = handler.cp_comm_strategy == "alltoall" or device.type == "cuda"
        ring = Ring(group, handler.cp_comm_strategy or "allgather") if around else Gathered(group)
        self._attention: Any = Exchanged(group) if kind == "sp" else ring
        self.rank, self.size = self._attention.rank, self._attention.size
        self.length: int | None = None  # that sequences are promised to have
        self._positions = self._next_labels = False
        self._calls: int | None = None  # of attention in the present step
        self._known = False  # some step has called it

    def look_at(self, model: torch.nn.Module) -> None:
        """Learns from a model what a batch has to bring.

        Raises:
            ValueError: its attention cannot be divided; the message says how.
        """
        for part in model.modules():
            word = getattr(getattr(part, "config", None), "_attn_implementation", None)
            if word not in (None, "sdpa"):
                raise ValueError(
                    f"Expected attn_implementation='sdpa' under {_KINDS[self.kind]}. Received: {word!r} in "
                    f"{type(part).__name__}. Load the model with attn_implementation='sdpa'."
                )
            self._positions |= word == "sdpa"
            self._next_labels |= word == "sdpa" and "CausalLM" in type(part).__name__
        if self.kind == "sp":
            check_heads(model, self.size, "sp_size", only=("num_attention_heads",))

    # Attention

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Lets attention see whole sequences inside of the block."""
        with replaced(self._attention, self._called):
            yield

    @contextmanager
    def step(self, world: World | None = None) -> Iterator[None]:
        """The same around a method that works on a divided batch; `world`: the ranks that share its layers.

        Raises:
            ValueError: there is no attention in it that could be divided.
        """
        self._calls = 0
        with self.attention():
            yield
        called = self._known or bool(self._calls)
        if not self._known and world is not None:
            called = world.agree(called)
        if not called:
            raise ValueError(
                f"Expected attention by torch.nn.functional.scaled_dot_product_attention under {_KINDS[self.kind]}. "
                "Received: a step that never calls it, whose tokens would see a part of their sequence only. Use it."
            )
        self._known = True

    def _called(self) -> None:
        self._calls = (self._calls or 0) + 1

    # Batches

    def divide(self, batch: Any) -> tuple[Any, float]:
        """Returns this rank's part of a batch, and its share in a mean over all labels, times the number of ranks.

        Raises:
            ValueError: a length does not divide, or sequences are padded in front; the message names the entry.
        """
        batch = self._completed(batch)
        dims = self._dims(batch)
        self._check_length({key: _entry(batch, key).shape[dim] for key, dim in dims.items()})
        parts = {key: self.part(_entry(batch, key), dim, name=str(key)) for key, dim in dims.items()}
        share = self._share(batch, parts)
        if isinstance(batch, Tensor):
            return parts.get(0, batch), share
        if isinstance(batch, Mapping):
            kind: Any = type(batch)
            merged = {**batch, **parts}
            return merged if kind is dict else kind(merged), share
        items = [parts.get(index, item) for index, item in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items), share

    def part(self, tensor: Tensor, dim: int, *, name: str) -> Tensor:
        """Returns this rank's part of a tensor.

        Raises:
            ValueError: its length does not divide.
        """
        length = tensor.shape[dim]
        if length % self.size:
            raise ValueError(
                f"Expected sequences whose length {self.kind}_size divides. Received: {name} of shape "
                f"{list(tensor.shape)}, dimension {dim}, {self.kind}_size={self.size}. Pad them to a multiple of "
                f"{self.size} (labels by {IGNORED})."
            )
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def _check_length(self, lengths: Mapping[Any, int]) -> None:
        others = {key: length for key, length in lengths.items() if self.length not in (None, length)}
        if others:
            raise ValueError(
                f"Expected sequences of sp_seq_length={self.length}. Received: lengths {others}. Correct it, or set "
                "sp_seq_length_is_variable=True."
            )

    def _dims(self, batch: Any) -> dict[Any, int]:
        if self.handler.sequence_dims is not None:
            missing = [key for key in self.handler.sequence_dims if _entry(batch, key) is None]
            if missing:
                raise ValueError(
                    f"Expected the entries of sequence_dims in each batch. Received: a batch without {missing}. "
                    "Correct the names."
                )
            return dict(self.handler.sequence_dims)
        long = {key: item for key, item in _entries(batch) if isinstance(item, Tensor) and item.ndim > 1}
        length = next((item.shape[1] for item in long.values()), None)
        if length is None:
            raise ValueError(
                "Expected a batch with tensors of sequences along dimension 1. Received: "
                f"{type(batch).__name__} without one. Say which in TorchContextParallelConfig(sequence_dims=...)."
            )
        return {key: 1 for key, item in long.items() if item.shape[1] == length}

    def _completed(self, batch: Any) -> Any:
        """The batch with what Hugging Face's models would make of whole sequences themselves."""
        if not self._positions or not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return batch
        tokens, added = batch["input_ids"], {}
        if "position_ids" not in batch:
            added["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        labels = batch.get("labels")
        if self._next_labels and isinstance(labels, Tensor) and "shift_labels" not in batch:
            added["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._check_padding(mask)
            added["attention_mask"] = torch.ones_like(mask)
        return {**batch, **added}

    def _check_padding(self, mask: Tensor) -> None:
        behind = bool((mask[:, 1:] <= mask[:, :-1]).all()) and self._next_labels
        if not behind and not bool(mask.all()):
            raise ValueError(
                f"Expected sequences that are padded at their end, and causal attention, under {_KINDS[self.kind]}. "
                "Received: an attention_mask with other zeros. Pad on the right, or give sequences of one length."
            )

    def _share(self, batch: Any, parts: Mapping[Any, Tensor]) -> float:
        key = _labels_key(batch)
        if key not in parts or parts[key].is_floating_point():
            return 1.0
        total = int((_entry(batch, key) != IGNORED).sum())
        own = int((parts[key] != IGNORED).sum())
        return own * self.size / total if total else 1.0

    # Buffers of a loop of one's own

    @contextmanager
    def buffers(self, buffers: list[Tensor], dims: list[int], kept: set[Tensor]) -> Iterator[None]:
        """Cuts tensors to this rank's part in place, with attention over all parts, and puts them back afterwards.

        Raises:
            ValueError: not as many dimensions as tensors are given, or a length does not divide.
        """
        if len(buffers) != len(dims):
            raise ValueError(
                f"Expected a dimension for each buffer. Received: {len(buffers)} buffers and {len(dims)} of "
                "buffer_seq_dims. Give as many."
            )
        parts = [self.part(tensor, dim, name="a buffer").clone() for tensor, dim in zip(buffers, dims)]
        before = [None if any(tensor is one for one in kept) else tensor.clone() for tensor in buffers]
        for tensor, part in zip(buffers, parts):
            _become(tensor, part)
        try:
            with self.attention():
                yield
        finally:
            for tensor, whole in zip(buffers, before):
                if whole is not None:
                    _become(tensor, whole)


def _become(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        tensor.resize_(value.shape)
        tensor.copy_(value)


def _entries(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Tensor):
        return [(0, batch)]
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if isinstance(batch, (list, tuple)) else []


def _entry(batch: Any, key: Any) -> Any:
    return dict(_entries(batch)).get(key)


def _labels_key(batch: Any) -> Any:
    """The entry with one label for each token: by its usual name, or the last of a sequence of several."""
    if isinstance(batch, Mapping):
        return next((name for name in ("shift_labels", "labels") if name in batch), None)
    return len(batch) - 1 if isinstance(batch, (list, tuple)) and len(batch) > 1 else None
