"""Gradients of which this process holds a part: their norm, clipping and scaling, always by the unsharded values.

Parameters may be DTensors on several meshes beside whole (replicated) tensors, a mix that torch's own functions refuse.
So this works on the local parts: those that are shared out over the same groups of ranks together, each group's sum
over its ranks, and then the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint.pieces import is_shared_out
from .precision import Scaled
from .world import World

Groups = tuple[Any, ...]


def local(tensor: Any) -> Tensor:
    """Returns what this process holds of a tensor: of a DTensor its part, of any other the tensor itself."""
    if not is_shared_out(tensor):
        return tensor  # type: ignore[no-any-return]
    part: Any = tensor._local_tensor
    return part.wait() if hasattr(part, "wait") else part  # a collective that still runs


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients that these parameters have; one that is kept as partial sums is summed up first."""
    found = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if is_shared_out(gradient) and any(placement.is_partial() for placement in gradient.placements):
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if one.is_partial() else one for one in gradient.placements]
            gradient = parameter.grad = gradient.redistribute(placements=whole)
        found.append(gradient)
    return found


def total_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    across: Groups = (),
    sharing: Callable[[Tensor], Groups] | None = None,
) -> Tensor:
    """Returns the norm of all gradients together, as one process that holds them whole would find it (0 dimensions).

    `across` are process groups of ranks that hold other parameters, such as the stages of a pipeline, whose norms are
    included. `sharing` gives the groups over which a parameter is shared out, where it is no DTensor that tells them.
    Every rank of the meshes and groups has to call this.
    """
    parameters, kind = list(parameters), float(norm_type)
    gradients = gradients_of(parameters)
    shared: dict[Groups, list[Tensor]] = {}
    for parameter in parameters:
        held = parameter if parameter.grad is None else parameter.grad
        groups = _sharing(held) if sharing is None else sharing(parameter)
        parts = shared.setdefault(groups, [])  # every rank sums up, though it may have no gradient itself
        if parameter.grad is not None:
            parts.append(local(parameter.grad))
    device = local(gradients[0]).device if gradients else local(parameters[0]).device if parameters else None
    powers = [_over_ranks(_power(parts, kind, device), kind, groups) for groups, parts in shared.items()]
    power = _over_ranks(_joined(powers, kind, device), kind, across)
    norm = power if math.isinf(kind) else power ** (1.0 / kind)
    return norm.to(torch.promote_types(torch.float32, gradients[0].dtype) if gradients else torch.float32)


def clip_norm(parameters: Any, max_norm: float, norm_type: float = 2.0, **options: Any) -> Tensor:
    """Clips gradients by their total norm, which is returned as it was before; options: see `total_norm`."""
    parameters = _listed(parameters)
    norm = total_norm(parameters, norm_type, **options)
    if not math.isinf(max_norm):
        scale(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def clip_value(parameters: Any, clip_value: float) -> None:
    """Clips every element of the gradients to [-clip_value, clip_value]."""
    for parts in _alike(gradients_of(_listed(parameters))):
        torch._foreach_clamp_min_(parts, -float(clip_value))
        torch._foreach_clamp_max_(parts, float(clip_value))


def scale(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiplies gradients in place by one factor, which has to be the same on all ranks."""
    for parts in _alike([parameter.grad for parameter in parameters if parameter.grad is not None]):
        torch._foreach_mul_(parts, factor.to(parts[0].device) if isinstance(factor, Tensor) else factor)


def average(parameters: Iterable[Tensor], world: World) -> None:
    """Averages the gradients of whole parameters over all ranks; one without counts as zero, if another has one."""
    parameters = list(parameters)
    if world.size == 1 or not parameters:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    for parameter, count in zip(parameters, world.all_reduce(present).tolist()):
        if count:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            world.all_reduce(parameter.grad, "mean")


class ShardedScaled(Scaled):
    """float16 with a scaled loss, where each rank sees an overflow only in its own part: any rank's skips all steps."""

    agree: Callable[[Tensor], Tensor]  # the largest value of all ranks, in place

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._unscaled or not self.scaler.is_enabled():
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        inverse = self.scaler._scale.double().reciprocal().float()
        found = torch.zeros((), dtype=torch.float32, device=inverse.device)
        for parts in _alike(gradients_of(parameters)):
            own = found.to(parts[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, own, inverse.to(own.device))
            found = torch.maximum(found, own.to(found.device))
        state = self.scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found.device: self.agree(found)}
        state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
        self._unscaled.add(id(optimizer))


def _sharing(tensor: Any) -> Groups:
    """The process groups over which a tensor is shared out; none for a whole one."""
    if not is_shared_out(tensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, place in enumerate(tensor.placements) if not place.is_replicate())


def _power(parts: list[Tensor], kind: float, device: torch.device | None) -> Tensor:
    """The sum of the elements' absolute values to the power `kind`; their largest for infinity."""
    parts = [part for part in parts if part.numel()]
    wide = torch.float32 if any(part.dtype.itemsize < 4 for part in parts) else None
    norms = [norm.to(device) for norm in torch._foreach_norm(parts, kind, dtype=wide)] if parts else []
    return _joined([norm.double() if math.isinf(kind) else norm.double() ** kind for norm in norms], kind, device)


def _joined(powers: list[Tensor], kind: float, device: torch.device | None) -> Tensor:
    if not powers:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(powers)
    return stacked.max() if math.isinf(kind) else stacked.sum()


def _over_ranks(power: Tensor, kind: float, groups: Groups) -> Tensor:
    for group in groups:
        dist.all_reduce(power, dist.ReduceOp.MAX if math.isinf(kind) else dist.ReduceOp.SUM, group=group)
    return power


def _alike(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Local parts in lists of one device and dtype, which torch treats in one call; empty ones are left out."""
    found: dict[Any, list[Tensor]] = {}
    for part in map(local, gradients):
        if part.numel():
            found.setdefault((part.device, part.dtype), []).append(part)
    return list(found.values())


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
