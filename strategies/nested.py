"""Operations on nested data (lists, tuples, named tuples, mappings of tensors) on one rank.

Names and meanings are those of Hugging Face Accelerate's `utils.operations`; `collectives` has those between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Data = TypeVar("Data")


@dataclass(frozen=True)
class TensorInformation:
    """Shape and dtype of a tensor that is somewhere else."""

    shape: torch.Size
    dtype: torch.dtype


def recursively_apply(func: Callable[..., Any], data: Any, *args: Any,
                      test_type: Callable[[Any], bool] = torch.is_tensor, error_on_other_type: bool = False,
                      **kwargs: Any) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf for which `test_type` holds, keeping the structure's types.

    Other leaves stay as they are, or raise TypeError with `error_on_other_type`.
    """
    def walk(item: Any) -> Any:
        if test_type(item):
            return func(item, *args, **kwargs)
        if isinstance(item, (tuple, list)):
            return honor_type(item, (walk(part) for part in item))
        if isinstance(item, Mapping):
            return _like(item, {key: walk(part) for key, part in item.items()})
        if error_on_other_type:
            raise unsupported(getattr(func, "__name__", repr(func)), item)
        return item

    return walk(data)


def send_to_device(tensor: Data, device: torch.device | str | int, non_blocking: bool = False,
                   skip_keys: str | Sequence[str] | None = None) -> Data:
    """Nested data with all that has a `to` method moved to `device`, except the values under `skip_keys`."""
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def walk(item: Any) -> Any:
        if torch.is_tensor(item):
            return item.to(device, non_blocking=non_blocking)
        if isinstance(item, (tuple, list)) and not hasattr(item, "to"):
            return honor_type(item, (walk(part) for part in item))
        if isinstance(item, Mapping) and (skipped or not hasattr(item, "to")):
            return _like(item, {key: part if key in skipped else walk(part) for key, part in item.items()})
        return _move(item, device, non_blocking) if hasattr(item, "to") else item

    return cast("Data", walk(tensor))


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The generated items as a sequence of `obj`'s type, named tuples included."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def is_namedtuple(data: Any) -> bool:
    """Whether it is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return torch.is_tensor(tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it describes a tensor (see `get_data_structure`)."""
    return isinstance(tensor_info, TensorInformation)


def find_batch_size(data: Any) -> int:
    """Size of dimension 0 of the first tensor in nested data.

    Raises ValueError where that tensor has no dimensions or nothing is there, TypeError where nothing is a tensor.
    """
    leaf = next((leaf for leaf in leaves_of(data) if torch.is_tensor(leaf)), None)
    if leaf is not None and leaf.ndim:
        return leaf.shape[0]
    if leaf is not None:
        raise ValueError("Expected a batch whose first tensor has rows. Received: a tensor without dimensions.")
    if isinstance(data, (tuple, list, Mapping)) and not data:
        raise ValueError(f"Expected a batch that holds something. Received: an empty {type(data).__name__}.")
    raise TypeError(f"Expected a batch that holds a tensor. Received: {type(data).__name__} without one.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where it raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested data, if there is one."""
    return next((leaf.device for leaf in leaves_of(data) if torch.is_tensor(leaf)), None)


def listify(data: Any) -> Any:
    """Nested data with tensors as nested lists of numbers (bfloat16 by way of float32)."""
    return recursively_apply(lambda leaf: leaf.detach().cpu().tolist(), data)


def get_shape(data: Any) -> Any:
    """Nested data with each tensor's shape, as a list, in its place."""
    return recursively_apply(lambda leaf: list(leaf.shape), data)


def get_data_structure(data: Any) -> Any:
    """Nested data with a `TensorInformation` in each tensor's place."""
    return recursively_apply(lambda leaf: TensorInformation(leaf.shape, leaf.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Nested data with an uninitialised tensor in place of each `TensorInformation`."""
    return recursively_apply(lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure,
                             test_type=is_tensor_information)


def slice_tensors(data: Any, tensor_slice: slice, process_index: int | None = None,
                  num_processes: int | None = None) -> Any:
    """Nested data with every tensor sliced along dimension 0; the last two arguments are Accelerate's, and unused."""
    return recursively_apply(lambda leaf: leaf[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join a list of equally nested data, tensor by tensor, along `dim`."""
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([one[i] for one in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return _like(first, {key: concatenate([one[key] for one in data], dim) for key in first})
    if not torch.is_tensor(first):
        raise unsupported("concatenate", first)
    return torch.cat(list(data), dim=dim)


def pad_input_tensors(tensor: Data, batch_size: int, num_processes: int, dim: int = 0) -> Data:
    """Nested data whose tensors are filled with zeros, from `batch_size` to a multiple of `num_processes`."""
    missing = -batch_size % num_processes
    return cast("Data", recursively_apply(lambda leaf: fill_to(leaf, dim, leaf.shape[dim] + missing), tensor))


def convert_to_fp32(tensor: Data) -> Data:
    """Nested data with half-precision tensors in float32."""
    return cast("Data", recursively_apply(lambda leaf: leaf.float(), tensor, test_type=_is_half))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward function that returns `convert_to_fp32` of what `model_forward` returns."""
    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def leaves_of(data: Any) -> Iterator[Any]:
    """Every leaf of nested data."""
    return (leaf for _, leaf in paths_of(data))


def paths_of(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its place, in the order in which `recursively_apply` comes to them."""
    if isinstance(data, (tuple, list)):
        for number, part in enumerate(data):
            yield from paths_of(part, f"{path}[{number}]")
    elif isinstance(data, Mapping):
        for key, part in data.items():
            yield from paths_of(part, f"{path}[{key!r}]")
    else:
        yield path, data


def fill_to(leaf: Tensor, dim: int, size: int, value: float = 0, first: bool = False) -> Tensor:
    """The tensor with `value` up to `size` along `dim`, at the end or in front; itself where nothing is missing."""
    own = leaf.shape[dim]
    if own == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, value)
    padded.narrow(dim, size - own if first else 0, own).copy_(leaf)
    return padded


def unsupported(operation: str, item: Any, path: str = "") -> TypeError:
    """The error for a leaf that is no tensor."""
    where = f" at {path}" if path else ""
    return TypeError(
        f"Expected tensors in lists, tuples or mappings for {operation}. Received: {type(item).__name__}{where}. "
        "Take it out, or use gather_object for objects."
    )


def _move(item: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:  # its `to` knows no such argument
        return item.to(device)


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type; a defaultdict keeps its factory."""
    kind: Any = type(mapping)
    factory = getattr(mapping, "default_factory", None)
    return kind(factory, items) if factory is not None else kind(items)


def _is_half(leaf: Any) -> bool:
    return torch.is_tensor(leaf) and leaf.dtype in (torch.float16, torch.bfloat16)
