"""Modules that are built without the memory of their weights, which get the values they would have had when asked for.

Inside `Deferred` a large new tensor has an address, but no memory behind it, as nothing ever writes there: what is done
to it is written down, by storages, and each random operation with the state that its generator had (which moves on, as
if it had run). `Recording.value` runs what has led to one tensor, again and alone. So a model is built with one large
tensor in memory at a time, at the price of drawing its random numbers twice, and has the same values as ever.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # memory is only counted when it is used
LEAST = 64 * 1024  # bytes; smaller tensors are made at once


@dataclass(frozen=True)
class _Place:
    """A tensor on a storage that is written down."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Operation:
    """One call: what it reads and writes, by storages, and the state of its generator."""

    function: Any
    args: Any
    kwargs: Any
    reads: set[int]
    writes: set[int]
    made: list[_Place]  # what it returned on new storages
    whole: bool  # nothing of what was written before is left
    random: Tensor | None = None


@dataclass
class Recording:
    """What was done to tensors without memory."""

    operations: list[_Operation] = field(default_factory=list)
    storages: dict[int, tuple[Any, int]] = field(default_factory=dict)  # by identity: itself, and its size in bytes

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was made inside, and has no memory."""
        if isinstance(tensor, DTensor):
            return False
        return not tensor.is_meta and _identity(tensor) in self.storages

    def value(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with its values."""
        needed, chosen = {_identity(tensor)}, []
        for operation in reversed(self.operations):
            if operation.writes & needed:
                chosen.append(operation)
                needed = needed - operation.writes if operation.whole else needed
                needed |= operation.reads
        real: dict[int, Tensor] = {}
        state = torch.default_generator.get_state()
        try:
            with torch.no_grad():
                for operation in reversed(chosen):
                    self._run(operation, real)
                return self._view(_place(tensor), real).detach()
        finally:
            torch.default_generator.set_state(state)

    def _run(self, operation: _Operation, real: dict[int, Tensor]) -> None:
        if operation.random is not None:
            torch.default_generator.set_state(operation.random)

        def restored(leaf: Any) -> Any:
            return self._view(leaf, real) if _is_place(leaf) else leaf

        args, kwargs = tree_map(restored, (operation.args, operation.kwargs), is_leaf=_is_place)
        results = [leaf for leaf in tree_leaves(operation.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for place, result in zip(operation.made, results if operation.made else ()):
            self._view(place, real).copy_(result)

    def _view(self, place: _Place, real: dict[int, Tensor]) -> Tensor:
        if place.storage not in real:
            size = self.storages[place.storage][1]
            real[place.storage] = _empty(torch.empty(size, dtype=torch.uint8, device="meta"))
        storage = real[place.storage].untyped_storage()
        empty = torch.empty(0, dtype=place.dtype)
        return empty.set_(storage, place.offset, place.size, place.stride)


class Deferred:
    """The context in which large tensors get their values later.

    They are made on the CPU, as without it; a device that is asked for by name gets real ones at once.

    Args:
        recording: where it is written down.
        least: bytes; smaller tensors, and such of integers, are made at once.
    """

    def __init__(self, recording: Recording, *, least: int = LEAST) -> None:
        self._mode = _Mode(recording, least)

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


class _Mode(TorchDispatchMode):
    def __init__(self, recording: Recording, least: int) -> None:
        super().__init__()
        self._recording, self._least = recording, least

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(self._is_known, tree_leaves((args, kwargs)))):
            return self._follow(function, args, kwargs)
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cpu":
            return self._make(function, args, kwargs)
        return function(*args, **kwargs)

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor: without memory if it is large."""
        outline = function(*args, **{**kwargs, "device": torch.device("meta")})
        large = isinstance(outline, Tensor) and outline.untyped_storage().nbytes() >= self._least
        if not large or not outline.is_floating_point():
            return function(*args, **kwargs)
        state = self._state_before(function)
        if state is not None:
            function(*args, **kwargs)  # so that the generator moves on
        made = _empty(outline, untouched=True)
        self._write_down(function, args, kwargs, [made], state)
        return made

    def _follow(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An operation on tensors of which some have no memory."""
        returns = function._schema.returns
        if torch.Tag.inplace_view in function.tags:
            return function(*args, **kwargs)
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return function(*args, **kwargs)  # a view, which looks at no element
        if function is torch.ops.aten._local_scalar_dense.default or self._leaves(function, args, kwargs):
            value = self._recording.value
            args, kwargs = tree_map(lambda leaf: value(leaf) if self._is_known(leaf) else leaf, (args, kwargs))
            return function(*args, **kwargs)
        state = self._state_before(function)
        if state is not None:
            scratch = tree_map(lambda leaf: _empty(_outline(leaf)) if self._is_known(leaf) else leaf, (args, kwargs))
            function(*scratch[0], **scratch[1])
        outlines = tree_map(_outline, (args, kwargs))
        if "device" in kwargs:
            outlines[1]["device"] = torch.device("meta")
        result = function(*outlines[0], **outlines[1])
        written = _written(function, args, kwargs)
        if written:
            self._write_down(function, args, kwargs, [], state)
            return written[0] if len(returns) == 1 else None if not returns else tuple(written)
        result = tree_map(lambda leaf: _empty(leaf, untouched=True) if isinstance(leaf, Tensor) else leaf, result)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._write_down(function, args, kwargs, made, state)
        return result

    def _leaves(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether values go into a tensor that is real."""
        return any(isinstance(leaf, Tensor) and not self._is_known(leaf) for leaf in _written(function, args, kwargs))

    def _write_down(self, function: Any, args: Any, kwargs: Any, made: list[Tensor], state: Tensor | None) -> None:
        written = [leaf for leaf in _written(function, args, kwargs) if isinstance(leaf, Tensor)]
        if not made and not written:
            return
        for tensor in (*made, *written):
            storage = tensor.untyped_storage()
            self._recording.storages[_identity(tensor)] = (storage, storage.nbytes())
        args, kwargs = tree_map(self._noted, (args, kwargs))
        places = [leaf for leaf in tree_leaves((args, kwargs), is_leaf=_is_place) if _is_place(leaf)]
        writes = {_identity(tensor) for tensor in (*made, *written)}
        reads = {place.storage for place in places}
        whole = bool(made) and not written or (len(written) == 1 and _overwrites(function) and _is_whole(written[0]))
        if whole and written:
            own = _identity(written[0])
            reads = {place.storage for place in places if place.storage != own}
        self._recording.operations.append(
            _Operation(function, args, kwargs, reads, writes, [_place(t) for t in made], whole, state)
        )

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self._is_known(leaf):
            return _place(leaf)
        return leaf.detach().clone() if leaf.untyped_storage().nbytes() < self._least else leaf.detach()

    def _is_known(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and self._recording.knows(leaf)

    def _state_before(self, function: Any) -> Tensor | None:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        return torch.default_generator.get_state()


def materialize(module: nn.Module, recording: Recording) -> None:
    """Gives the tensors of a module and its parts their values: parameters, buffers, and what attributes hold."""

    def known(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and recording.knows(leaf)

    def real(leaf: Any) -> Any:
        return recording.value(leaf) if known(leaf) else leaf

    if not recording.storages:
        return
    new: dict[int, Tensor] = {}  # tied ones stay one
    for owned in (owned for part in module.modules() for owned in (part._parameters, part._buffers)):
        for name, tensor in owned.items():
            if known(tensor):
                owned[name] = _once(new, tensor, recording)
    for part in module.modules():
        for name, value in vars(part).items():
            held = name not in _OWN and isinstance(value, (Tensor, list, tuple, dict))
            if held and any(map(known, tree_leaves(value))):
                vars(part)[name] = tree_map(real, value)


def _once(new: dict[int, Any], tensor: Any, recording: Recording) -> Any:
    if id(tensor) not in new:
        new[id(tensor)] = _with_value(tensor, recording)
    return new[id(tensor)]


def _with_value(tensor: Any, recording: Recording) -> Any:
    """A new parameter or buffer: who holds the old one, such as an optimizer, holds no memory."""
    value = recording.value(tensor)
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


_OWN = {"_parameters", "_buffers", "_modules"}
_OVERWRITE = {"normal_", "uniform_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
              "geometric_", "random_"}  # fmt: skip


def _overwrites(function: Any) -> bool:
    return function.overloadpacket.__name__ in _OVERWRITE


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation changes."""
    found: list[Any] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if place >= len(args) or argument.kwarg_only else args[place]
            found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found


def _outline(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _empty(outline: Tensor, *, untouched: bool = False) -> Tensor:
    """A tensor with memory of its own, which goes back to the system with it: an allocator may keep what is freed.

    One that stays `untouched` takes none. It is no neighbour of others, of whose large pages a part could lie in it.
    """
    size = max(outline.untyped_storage().nbytes(), 1)
    if sys.platform == "win32":
        storage = torch.UntypedStorage(size)
    else:
        flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if untouched else mmap.MAP_PRIVATE)
        storage = torch.frombuffer(mmap.mmap(-1, size, flags=flags | _NO_RESERVE), dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=outline.dtype)
    return empty.set_(storage, outline.storage_offset(), outline.size(), outline.stride())


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: Tensor) -> _Place:
    return _Place(_identity(tensor), tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.storage_offset())


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, _Place)
