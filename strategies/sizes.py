"""Sizes: of files and tensors, and in words."""

from __future__ import annotations

import re
from typing import Any

import torch

from .settings import CustomDtype

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def convert_bytes(size: float) -> str:
    """A number of bytes in words, each unit 1024 of the one below: 1536 is "1.5 KB"."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as "5GB" (units of 1000), "2GiB" (units of 1024), or of a number of bytes.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|B)?\s*", str(size).upper())
    if match is None:
        raise ValueError(f'Expected a size such as "10GB" or a number of bytes. Received: size={size!r}.')
    return int(float(match[1]) * _UNITS[match[2] or ""])


def dtype_byte_size(dtype: Any) -> float:
    """Bytes of one element; 1/8 for booleans, which libraries pack, and fractions for 4 and 2 bits."""
    packed = {torch.bool: 1 / 8, CustomDtype.FP8: 1.0, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}
    return packed[dtype] if dtype in packed else dtype.itemsize


def compute_module_sizes(
    model: torch.nn.Module,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every module of a model by name ("" for the whole), and of its parameters and buffers by theirs.

    `dtype` computes as if floating-point tensors were of no larger one; `special_dtypes` names some tensors' own.
    """
    sizes: dict[str, int] = {}
    named = [*model.named_buffers()] if buffers_only else [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        size = int(tensor.numel() * _element(name, tensor, dtype, special_dtypes or {}))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            module = ".".join(parts[:depth])
            sizes[module] = sizes.get(module, 0) + size
    return sizes


def _element(name: str, tensor: torch.Tensor, dtype: Any, special: dict[str, Any]) -> float:
    if name in special:
        return dtype_byte_size(special[name])
    own = dtype_byte_size(tensor.dtype)
    return own if dtype is None or not tensor.dtype.is_floating_point else min(own, dtype_byte_size(dtype))


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What tells two tensors' memories apart: device, address, bytes (of a tensor on "meta": its own identity)."""
    if tensor.device.type == "meta":
        return tensor.device, id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()
