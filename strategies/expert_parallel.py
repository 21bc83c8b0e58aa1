"""Expert parallel: each rank holds some of the experts of every layer, and tokens travel to theirs and back.

A module of experts is one that has `num_experts`, parameters whose dimension 0 counts the experts, and one of these
forwards; its ranks work on different samples:

    forward(tokens, counts)    tokens [n, width], those of expert 0 first, then those of expert 1, …, `counts`
                               [num_experts] of them; returns the results in the same order
    forward(hidden_states, top_k_index, top_k_weights)     Hugging Face's: tokens [n, width], the experts of each token
                               [n, k] and their weights [n, k]; returns the weighted sums [n, width]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of experts in a model by their names."""
    return {name: part for name, part in model.named_modules() if _form(part) is not None}


def parallelize(model: nn.Module, mesh: Any) -> list[nn.Parameter]:
    """Shares experts out over a mesh of one dimension, in place; returns their parameters, which are DTensors then.

    Raises:
        ValueError: there are no modules of experts, or their number does not divide.
    """
    found = experts_of(model)
    if not found:
        raise ValueError(
            f"Expected modules of experts in {type(model).__name__} for ep_size={mesh.size()}. Received: none. They "
            "have num_experts, parameters whose dimension 0 counts them, and forward(tokens, counts) (see "
            "docs/parallelism.md)."
        )
    fresh = {name: part for name, part in found.items() if not _is_shared(part)}
    for name, part in fresh.items():
        number = int(part.num_experts)  # type: ignore[arg-type]
        if number % mesh.size():
            raise ValueError(
                f"Expected experts that ep_size divides. Received: {number} experts in {name}, ep_size={mesh.size()}. "
                "Use a degree that divides them."
            )
        _share_out(part, mesh)
    return [parameter for part in found.values() for parameter in part.parameters()]


def _is_shared(part: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False))


def _form(part: nn.Module) -> str | None:
    """Which of the two forwards a module has, if it is one of experts."""
    number, own = getattr(part, "num_experts", None), list(part.parameters(recurse=False))
    if not isinstance(number, int) or not own or any(p.ndim < 2 or len(p) != number for p in own):
        return None
    names = list(inspect.signature(part.forward).parameters)
    if names[1:] == ["top_k_index", "top_k_weights"]:
        return "weighted"
    return "sorted" if names == ["tokens", "counts"] else None


def _share_out(part: nn.Module, mesh: Any) -> None:
    weighted = _form(part) == "weighted"
    for name, parameter in list(part.named_parameters(recurse=False)):
        shared = distribute_tensor(parameter.data, mesh, [Shard(0)])
        part.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))
    route = _Route(part, mesh)
    chosen: Callable[..., Tensor] = route.weighted if weighted else route.sorted
    part.forward = chosen  # type: ignore[method-assign]


class _Route:
    """The way of tokens to the ranks of their experts, and back."""

    def __init__(self, part: nn.Module, mesh: Any) -> None:
        self.part, self.forward = part, part.forward
        self.group, self.size = mesh.get_group(), mesh.size()
        self.number = int(part.num_experts)  # type: ignore[arg-type]

    def sorted(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Computes tokens that are sorted by their experts."""
        return self._there_and_back(tokens, counts, lambda here, ids: self._local(here, self._counted(ids)))

    def weighted(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes tokens with the experts of each, and sums their results by weight."""
        chosen = top_k_index.shape[-1]
        order = top_k_index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.number)

        def compute(here: Tensor, ids: Tensor) -> Tensor:
            if not len(here):  # which the loop over experts would leave without a graph
                return here + 0 * sum(p.sum() for p in self._parameters().values())
            return self._local(here, ids[:, None], torch.ones_like(ids[:, None], dtype=here.dtype))

        found = self._there_and_back(hidden_states.repeat_interleave(chosen, 0)[order], counts, compute)
        found = found[order.argsort()].unflatten(0, (-1, chosen))
        return (found * top_k_weights[..., None].to(found.dtype)).sum(1)

    def _there_and_back(self, tokens: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sent = counts.reshape(self.size, -1).to(torch.int64).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        out, back = received.sum(1).tolist(), sent.sum(1).tolist()
        here = _Travel.apply(tokens, out, back, self.group)
        ids = torch.arange(sent.shape[1], device=tokens.device).repeat(self.size)
        ids = ids.repeat_interleave(received.reshape(-1))
        order = ids.argsort(stable=True)
        found = compute(here[order], ids[order])
        return _Travel.apply(found[order.argsort()], back, out, self.group)

    def _counted(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids, minlength=self.number // self.size)

    def _parameters(self) -> dict[str, Tensor]:
        """This rank's experts; each rank's loss is a mean over its own samples, and the whole loss that of all."""
        named = self.part.named_parameters(recurse=False)
        return {name: _Scaled.apply(parameter.to_local(), 1 / self.size) for name, parameter in named}

    def _local(self, *args: Any) -> Tensor:
        """Computes with this rank's experts in the place of all: its hooks, which may share out weights, run once."""
        own, number = vars(self.part), self.part.num_experts
        kept = own["_parameters"]
        own["_parameters"] = self._parameters()
        self.part.num_experts = self.number // self.size  # type: ignore[assignment]
        try:
            result: Tensor = self.forward(*args)
            return result
        finally:
            own["_parameters"] = kept
            self.part.num_experts = number


class _Travel(torch.autograd.Function):
    """Rows to other ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.way = (sent, out, group)
        return _travel(rows, out, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _travel(gradients[0], *ctx.way), None, None, None


def _travel(rows: Tensor, out: list[int], sent: list[int], group: Any) -> Tensor:
    received = rows.new_empty((sum(out), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), out, sent, group=group)
    return received


class _Scaled(torch.autograd.Function):
    """A tensor as it is, with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None
