"""Attention over sequences of which each rank holds a part, exact in forward and backward.

    Gathered    every rank gathers all keys and values and attends by its own queries (context parallel)
    Ring        keys and values travel around the ranks, by torch's ring attention (context parallel, "alltoall")
    Exchanged   ranks exchange parts of sequences for some of the heads, and each attends as usual (Ulysses)

Each is called in the place of `torch.nn.functional.scaled_dot_product_attention` while `replaced` is entered. Parts
are contiguous: rank r holds positions [r * length, (r + 1) * length).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

_attend = F.scaled_dot_product_attention


class Gathered:
    """Attends by this rank's queries to the keys and values of all ranks."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        length = query.shape[-2]
        if is_causal and key.shape[-2] != length:
            raise ValueError(
                f"Expected as many keys as queries in causal attention. Received: {key.shape[-2]} and {length} on rank "
                f"{self.rank}. Pass a mask, or leave this attention out of context parallel."
            )
        key, value = (_Gather.apply(tensor, self.group) for tensor in (key, value))
        _check_mask(attn_mask, key.shape[-2])
        if is_causal:
            seen = (self.rank + 1) * length
            key, value = key[..., :seen, :], value[..., :seen, :]
            is_causal = self.rank == 0
            if not is_causal:
                attn_mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
        options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)


class Exchanged:
    """Attends over whole sequences by a part of the heads."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        heads = query.shape[-3]
        if heads % self.size:
            raise ValueError(
                f"Expected heads that sp_size divides. Received: {heads} heads, sp_size={self.size}. Use a degree that "
                "divides them, or cp_size."
            )
        if key.shape[-3] % self.size:  # fewer heads of keys than ranks: each gets copies of those that it needs
            key, value = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (key, value))
        query, key, value = (_Exchange.apply(tensor, -3, -2, self.group) for tensor in (query, key, value))
        _check_mask(attn_mask, key.shape[-2])
        if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == heads:
            attn_mask = attn_mask.chunk(self.size, -3)[self.rank]
        gqa: dict[str, Any] = {"enable_gqa": True} if enable_gqa and key.shape[-3] != query.shape[-3] else {}
        found = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **gqa)
        return _Exchange.apply(found, -2, -3, self.group)


class Ring(Gathered):
    """Attends by torch's ring attention where it can (no mask, no dropout), else as `Gathered`."""

    def __init__(self, group: Any, method: str) -> None:
        super().__init__(group)
        self.method = method

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        able = attn_mask is None and not dropout_p and query.shape[-2] == key.shape[-2] and query.ndim == 4
        if query.device.type != "cpu":  # what the flash kernel of CUDA takes
            able = able and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0
        if not able:
            return super().__call__(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        return _Ring.apply(query, key, value, is_causal, scale, self.group, self.method)


@contextmanager
def replaced(attention: Callable[..., Tensor], called: Callable[[], None]) -> Iterator[None]:
    """Lets `attention` be called in the place of torch's inside of the block; each call is told to `called`."""
    before, multihead = F.scaled_dot_product_attention, F.multi_head_attention_forward

    def instead(*args: Any, **kwargs: Any) -> Tensor:
        called()
        return attention(*args, **kwargs)

    def without_weights(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("need_weights", True):
            raise ValueError(
                "Expected attention without its weights where sequences are divided. Received: need_weights=True in "
                "nn.MultiheadAttention. Pass need_weights=False."
            )
        return multihead(*args, **kwargs)

    F.scaled_dot_product_attention, F.multi_head_attention_forward = instead, without_weights
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.multi_head_attention_forward = before, multihead


def _check_mask(mask: Tensor | None, keys: int) -> None:
    if mask is not None and mask.shape[-1] not in (1, keys):
        raise ValueError(
            f"Expected an attention mask over whole sequences where they are divided. Received: shape "
            f"{list(mask.shape)} for {keys} keys. Use is_causal=True, or make the mask for all keys."
        )


class _Gather(torch.autograd.Function):
    """All ranks' parts one behind the other along dimension -2; gradients go back to where they came from, summed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        size = dist.get_world_size(ctx.group)
        parts = [part.contiguous() for part in gradients[0].chunk(size, -2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """Gives up parts along one dimension for parts along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, give: int, take: int, group: Any) -> Tensor:
        ctx.dims, ctx.group = (give, take), group
        return _exchange(tensor, give, take, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        give, take = ctx.dims
        return _exchange(gradients[0], take, give, ctx.group), None, None, None


def _exchange(tensor: Tensor, give: int, take: int, group: Any) -> Tensor:
    sent = [part.contiguous() for part in tensor.chunk(dist.get_world_size(group), give)]
    received = [torch.empty_like(sent[0]) for _ in sent]
    dist.all_to_all(received, sent, group=group)
    return torch.cat(received, take)


class _Ring(torch.autograd.Function):
    """torch's ring attention, without its reordering of sequences, over the flash kernel of the device."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: Any, group: Any, method: str
    ) -> Tensor:
        ring = _ring_module(method)
        options = {"dropout_p": 0.0, "scale": scale}
        op = _flash(query)
        found = ring._templated_ring_attention(group, 2, op, query, key, value, is_causal=causal, **options)
        out, sums, *rest = found
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.rest, ctx.settings = rest, (causal, group, method, options)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        causal, group, method, options = ctx.settings
        query, key, value, out, sums = ctx.saved_tensors
        ring = _ring_module(method)
        more = {} if query.device.type == "cpu" else _flash_rest(ctx.rest)
        found = ring._templated_ring_attention_backward(
            group, 2, _flash_backward(query), gradients[0].contiguous(), "grad_out", query, key, value, out, sums,
            is_causal=causal, **options, **more,
        )  # fmt: skip
        return *found[:3], None, None, None, None


def _ring_module(method: str) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = False
    _attention.set_rotate_method(method)
    return _attention


def _flash(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return torch.ops.aten._scaled_dot_product_flash_attention


def _flash_backward(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def _flash_rest(rest: list[Any]) -> dict[str, Any]:
    names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
    return dict(zip(names, rest))
