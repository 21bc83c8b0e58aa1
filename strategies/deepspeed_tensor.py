"""AutoTP: layers that DeepSpeed has shared out among ranks, whole again for checkpoints, and cut as it has cut them.

DeepSpeed replaces linear layers when an engine is made, and notes at each parameter along which dimension and in which
sizes it was cut (DeepSpeed 0.19, module_inject/layers.py). Everything here is collective among the ranks of one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from .initial_weights import synchronize
from .world import World

_NOTE = "ds_autotp_universal_checkpoint_meta"


def share(model: torch.nn.Module, world: World) -> None:
    """Gives the ranks that share a model the first one's values, before it is cut (DeepSpeed cuts what each has)."""
    synchronize([*model.parameters(), *model.buffers()], world)


def check(module: torch.nn.Module) -> None:
    """Raises NotImplementedError for a parameter that was cut in a way that its note does not describe."""
    for name, parameter in module.named_parameters():
        note = getattr(parameter, _NOTE, None)
        if getattr(parameter, "tensor_model_parallel", False) and (note is None or not _plain(note)):
            raise NotImplementedError(
                f"Expected layers that AutoTP cuts into one block for each rank. Received: {name!r}, of which each "
                "rank holds several (a fused layer), and which could not be saved whole. Use "
                "ParallelismConfig(tp_size=…) without DeepSpeed."
            )


def _plain(note: Mapping[str, Any]) -> bool:
    if note["replicated"]:
        return True
    return bool(note["partition_sizes"]) and note["partition_dim"] is not None and note["sub_param_shape"] is None


def _cut(parameter: Any) -> tuple[int, tuple[int, ...]] | None:
    """The dimension along which a parameter was cut, and the sizes of its parts; None where each rank has all of it."""
    note = getattr(parameter, _NOTE, None)
    if note is None or note["replicated"] or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return note["partition_dim"], tuple(note["partition_sizes"])


def _group() -> Any:
    return import_module("deepspeed.utils.groups").get_tensor_model_parallel_group()


def whole(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the parameter's own shape (itself, a moment) as it is for the whole layer."""
    cut = _cut(parameter)
    if cut is None:
        return value
    dim, sizes = cut
    group, largest = _group(), max(sizes)
    moved = value.detach().movedim(dim, 0).contiguous()
    padded = moved.new_zeros((largest, *moved.shape[1:]))
    padded[: moved.shape[0]] = moved
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)]).movedim(0, dim).contiguous()


def part(parameter: Any, value: Any) -> Any:
    """Returns this rank's part of a tensor for the whole layer; what is no such tensor comes back as it is."""
    cut = _cut(parameter)
    if cut is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    dim, sizes = cut
    if value.shape[dim] != sum(sizes):
        return value  # whoever loads it says what is wrong with its shape
    rank = torch.distributed.get_rank(_group())
    return value.narrow(dim, sum(sizes[:rank]), sizes[rank])


def total_norm(module: torch.nn.Module) -> torch.Tensor:
    """Returns the 2-norm of the gradients that parameters hold, those of each rank's parts counted once."""
    squares = [torch.zeros(()), torch.zeros(())]  # of what each rank has, and of parts
    for parameter in module.parameters():
        if parameter.grad is not None:
            squares[_cut(parameter) is not None] += parameter.grad.float().norm().square().cpu()
    parts = squares[1].to(next(module.parameters()).device)
    torch.distributed.all_reduce(parts, group=_group())
    return (squares[0] + parts.cpu()).sqrt()


def is_shared(module: torch.nn.Module) -> bool:
    """Whether AutoTP has cut layers of a module."""
    return any(_cut(parameter) is not None for parameter in module.parameters())
