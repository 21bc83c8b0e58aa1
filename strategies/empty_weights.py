"""Building models whose parameters are somewhere else while they are built: on "meta", or on a given device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Modules made inside have their parameters on "meta": without values or memory; buffers too, if so asked.

    Load weights by `load_checkpoint_in_model` or `model.to_empty(device=...)`.
    """
    with init_on_device(torch.device("meta"), include_buffers=bool(include_buffers)):
        yield


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Modules made inside have their parameters on `device`, and their buffers too with `include_buffers`."""
    device = torch.device(device)
    if include_buffers:
        with device, _registering(device, buffers=True):
            yield
    else:
        with _registering(device, buffers=False):
            yield


@contextmanager
def _registering(device: torch.device, *, buffers: bool) -> Iterator[None]:
    module: Any = torch.nn.Module
    plain_parameter, plain_buffer = module.register_parameter, module.register_buffer

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        plain_parameter(self, name, param)
        if param is not None:
            self._parameters[name] = _moved(param, device)

    def register_buffer(
        self: torch.nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        plain_buffer(self, name, tensor, persistent)
        if tensor is not None:
            self._buffers[name] = tensor.to(device)

    module.register_parameter = register_parameter
    if buffers:
        module.register_buffer = register_buffer
    try:
        yield
    finally:
        module.register_parameter, module.register_buffer = plain_parameter, plain_buffer


def _moved(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    if parameter.device == device:
        return parameter
    moved = torch.nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    moved.__dict__.update(parameter.__dict__)
    return moved
