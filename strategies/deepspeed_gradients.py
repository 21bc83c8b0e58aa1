"""Where the engines of DeepSpeed keep the gradients of a window, by stage, and what is done to them there.

Stages 0 and 1 leave them on the parameters until the window ends. Stages 1 and 2 then hold this rank's part in
`averaged_gradients`, stage 2 before that in `all_grad_tensors`; stage 3 in one flat buffer (DeepSpeed 0.19,
runtime/zero/stage_1_and_2.py and stage3.py). These names are its own, so everything that uses them stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from . import deepspeed_tensor as tensor


def total_norm(engine: Any) -> torch.Tensor:
    """Returns the 2-norm of all gradients of all ranks at the end of a window, unscaled (collective)."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_get_norm_groups"):
        combine = import_module("deepspeed.runtime.utils").combine_grad_norm_groups
        norm = torch.as_tensor(combine(optimizer._get_norm_groups()))
    elif hasattr(optimizer, "scaled_global_norm"):
        norm = torch.as_tensor(optimizer.scaled_global_norm())
    elif tensor.is_shared(engine.module):
        norm = tensor.total_norm(engine.module)
    else:
        found = list(_held(engine))
        norm = torch.nn.utils.get_total_norm(found) if found else torch.zeros(())
    return norm / float(getattr(optimizer, "loss_scale", 1.0))


def holders(engine: Any) -> list[Any]:
    """Returns what holds the gradients that a window has so far, each as its `grad`."""
    return [SimpleNamespace(grad=found) for found in _held(engine)]


def forget(engine: Any) -> None:
    """Drops the gradients of a window, as the engine itself does where they overflowed."""
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        parameter.grad = parameter.grad_accum = None
    if hasattr(optimizer, "all_grad_tensors"):
        optimizer.zero_grad(set_to_none=True)
        optimizer.micro_step_id = -1
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
        for group in list(optimizer.all_grad_tensors):
            optimizer.all_grad_tensors[group] = None
    elif hasattr(optimizer, "grad_partitions_flat_buffer"):
        optimizer.zero_grad(set_to_none=True)
        optimizer.averaged_gradients = {}
    elif optimizer is not None:
        optimizer.zero_grad()
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        optimizer.reset_cpu_buffers()


def _held(engine: Any) -> Iterator[torch.Tensor]:
    optimizer = engine.optimizer
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if flat is not None:  # stage 3: gradients leave the parameters during backward
        yield flat
        return
    for parameter in engine.module.parameters():
        for found in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if found is not None:
                yield found
    for tensors in getattr(optimizer, "all_grad_tensors", {}).values():
        yield from tensors or ()
    for tensors in getattr(optimizer, "averaged_gradients", {}).values():
        yield from tensors or ()
    yield from getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
