"""Nested state as JSON plus named tensors, and back, bit for bit, without pickle.

What JSON has is written as it is. Everything else is an object with one key that begins with "$" and names the kind:
{"$tuple": [1, 2]}, {"$tensor": "optimizer.state.0.exp_avg"}. docs/checkpoint-format.md lists all kinds.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .files import CheckpointError
from .pieces import Pieces
from .tensor_file import unstorable

MAX_DEPTH = 200
_INT_LIMIT = 2**63
_NATIVE_KINDS = "biufc"  # numpy kinds that torch may know; the rest travels as bytes
_PLAIN = {type(None), bool, str, int, float}
_DTYPE = re.compile(r"[<>|=][a-zA-Z]\d{0,9}(\[\w{1,10}\])?")
_NAN = struct.pack(">d", math.nan)


def encode(value: Any, path: str = "state", *, sharded: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return (JSON tree, tensors by name) for nested state.

    Holds: dict (any subclass becomes dict; keys: text, numbers, bool, None, tuples of these), list, tuple (named ones
    become plain), set, frozenset, None, bool, int, float, complex, str, bytes, numpy scalars and arrays, torch tensors
    (without graph), dtype, device, Size, pathlib paths, datetime, date, time, timedelta. Enum members that are text or
    integers become these. One tensor in two places stays one. `path` is what the state is called in names and errors.
    With `sharded`, DTensors and Pieces too: who writes them has to know what to do with them.
    Raises TypeError for anything else, naming the object and its path: "hparams.loss: a Linear".
    """
    encoder = _Encoder(path, sharded)
    return encoder.encode(value), encoder.tensors


def decode(tree: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return what `encode` was given. Raises CheckpointError for a tree that `encode` cannot have made."""
    try:
        return _Decoder(tensors or {}).decode(tree)
    except RecursionError as error:
        raise CheckpointError("Expected a tree of state. Received: one that is nested too deeply.") from error


class _Encoder:
    def __init__(self, path: str, sharded: bool = False) -> None:
        self._sharded = sharded
        self.tensors: dict[str, Tensor] = {}
        self._trail: list[Any] = [path]
        self._open: set[int] = set()  # containers that we are inside of
        self._names: dict[int, str] = {}  # tensors and arrays seen, by identity
        self._owners: list[Any] = []  # these very objects, so that no identity is used again

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_INT_LIMIT <= value < _INT_LIMIT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _float_text(value)}
        if isinstance(value, (dict, list, tuple, set, frozenset)) and not isinstance(value, torch.Size):
            return self._container(value)
        for types, method in _LEAVES:
            if isinstance(value, types):
                return method(self, value)
        self._refuse(value)

    def _container(self, value: Any) -> Any:
        if id(value) in self._open or len(self._trail) > MAX_DEPTH:
            self._refuse(value, "contains itself" if id(value) in self._open else f"is more than {MAX_DEPTH} deep")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value)
            items = [self._item(index, item) for index, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        if isinstance(value, list):
            return items
        if isinstance(value, tuple):
            return {"$tuple": items}
        # Sorted, so that the same set gives the same bytes whatever the hash seed of the process.
        return {"$set" if isinstance(value, set) else "$frozenset": sorted(items, key=json.dumps)}

    def _dict(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self._item(key, item) for key, item in value.items()}
        return {"$dict": [[self._key(key), self._item(key, item)] for key, item in value.items()]}

    def _key(self, key: Any) -> Any:
        if not _is_key(key):
            self._refuse(key, "is a key; keys are text, numbers, bool, None or tuples of these")
        return self._item("key", key)

    def _item(self, step: Any, value: Any) -> Any:
        if type(value) in _PLAIN:  # most of what there is; never refused, so that its path is not needed
            return self.encode(value)
        self._trail.append(step)
        try:
            return self.encode(value)
        finally:
            self._trail.pop()

    def _number_or_text(self, value: Any) -> Any:
        """A subclass of str, int or float as what it is beneath."""
        base = next(base for base in (str, int, float) if isinstance(value, base))
        plain = {str: str.__str__, int: int.__int__, float: float.__float__}[base](value)
        return self.encode(plain)

    def _tensor(self, value: Tensor) -> Any:
        if not (self._sharded and hasattr(value, "device_mesh")) and (problem := unstorable(value)):
            self._refuse(value, f"is {problem}")
        return {"$tensor": self._store(value, value.detach())}

    def _pieces(self, value: Any) -> Any:
        if not self._sharded:
            self._refuse(value, "is a part of a tensor")
        return {"$tensor": self._store(value, value)}

    def _array(self, value: np.ndarray) -> Any:
        plain = type(value) in (np.ndarray, np.memmap) and value.dtype.itemsize
        if not plain or value.dtype.hasobject or value.dtype.names:
            self._refuse(value, f"has dtype {value.dtype}; plain arrays of numbers, text and times are kept")
        if _is_native(value.dtype):
            usable = value.flags.c_contiguous and value.flags.writeable and value.flags.aligned
            return {"$array": self._store(value, torch.from_numpy(value if usable else value.copy(order="C")))}
        raw = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))
        return {"$bytearray": [self._store(value, raw), value.dtype.str, list(value.shape)]}

    def _scalar(self, value: np.generic) -> Any:
        if isinstance(value, (str, bytes)):
            return self.encode(value.item())
        if value.dtype.hasobject or value.dtype.names:
            self._refuse(value, f"has dtype {value.dtype}")
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}

    def _complex(self, value: complex) -> Any:
        return {"$complex": [self.encode(value.real), self.encode(value.imag)]}

    def _path(self, value: pathlib.PurePath) -> Any:
        return {"$path": str(value)}

    def _torch_word(self, value: torch.dtype | torch.device) -> Any:
        kind = "device" if isinstance(value, torch.device) else "dtype"
        return {f"${kind}": str(value).removeprefix("torch.")}

    def _size(self, value: torch.Size) -> Any:
        return {"$size": list(value)}

    def _bytes(self, value: bytes) -> Any:
        return {"$bytes": base64.b64encode(value).decode()}

    def _time(self, value: datetime.date | datetime.time) -> Any:
        kind = next(kind for kind in _TIMES if isinstance(value, kind))
        return {f"${kind.__name__}": value.isoformat()}

    def _timedelta(self, value: datetime.timedelta) -> Any:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}

    def _store(self, owner: Any, tensor: Tensor) -> str:
        if id(owner) not in self._names:
            name = stem = ".".join(map(str, self._trail))
            number = 1
            while name in self.tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
                number += 1
                name = f"{stem}~{number}"
            self.tensors[name], self._names[id(owner)] = tensor, name
            self._owners.append(owner)
        return self._names[id(owner)]

    def _refuse(self, value: Any, why: str = "") -> NoReturn:
        hint = f" It {why}." if why else " Leave it out, or save its settings or its state_dict() instead."
        if dataclasses.is_dataclass(value) and not why:
            hint = " Save dataclasses.asdict() of it instead."
        elif isinstance(value, enum.Enum):
            hint = " Save its name or value instead."
        elif isinstance(value, torch.Generator):
            hint = " Save its get_state() instead."
        path = ".".join(map(str, self._trail))
        raise TypeError(
            "Expected numbers, text, containers, tensors, arrays, paths or times, which is what a checkpoint holds. "
            f"Received: {path}: a {type(value).__name__}.{hint}"
        )


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        kind = next((key for key in tree if key.startswith("$")), None)
        if kind is None:
            return {key: self.decode(item) for key, item in tree.items()}
        if len(tree) != 1 or kind not in _KINDS:
            raise CheckpointError(f"Expected one of the kinds {', '.join(_KINDS)}. Received: {sorted(tree)}.")
        try:
            return _KINDS[kind](self, tree[kind])
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
            if isinstance(error, RecursionError):
                raise
            raise CheckpointError(f"Expected the content of a {kind}. Received: {str(tree[kind])[:200]!r}.") from error

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"Expected the tensor {name!r}, which the state refers to. It is not in the file.")
        return self._tensors[name]

    def _array(self, name: str) -> np.ndarray:
        return self._tensor(name).numpy()

    def _bytearray(self, parts: list[Any]) -> np.ndarray:
        name, dtype, shape = parts
        return np.frombuffer(bytearray(self._array(name).tobytes()), dtype=_dtype(dtype)).reshape(shape)

    def _scalar(self, parts: list[Any]) -> Any:
        dtype, data = parts
        (value,) = np.frombuffer(base64.b64decode(data, validate=True), dtype=_dtype(dtype))
        return value

    def _torch_dtype(self, name: str) -> torch.dtype:
        value = getattr(torch, name)
        if not isinstance(value, torch.dtype):
            raise TypeError(name)
        return value

    def _pairs(self, pairs: list[Any]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in pairs}

    def _complex(self, parts: list[Any]) -> complex:
        real, imaginary = map(self.decode, parts)
        return complex(real, imaginary)


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return key is None or isinstance(key, (str, int, float, np.generic))


def _is_native(dtype: np.dtype) -> bool:
    return dtype.kind in _NATIVE_KINDS and dtype.isnative and dtype not in (np.longdouble, np.clongdouble)


def _dtype(text: str) -> np.dtype:
    if not _DTYPE.fullmatch(text):  # before numpy, which reads much more than what `dtype.str` gives
        raise TypeError(text)
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.names or not dtype.itemsize:
        raise TypeError(text)
    return dtype


def _float_text(value: float) -> str:
    data = struct.pack(">d", value)
    return str(value) if math.isinf(value) or data == _NAN else f"0x{data.hex()}"  # a NaN that carries something


def _float(text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text[2:]))[0] if text.startswith("0x") else float(text)


_TIMES = (datetime.datetime, datetime.date, datetime.time)  # a datetime is a date as well
_LEAVES: tuple[tuple[Any, Callable[[_Encoder, Any], Any]], ...] = (
    (Tensor, _Encoder._tensor),
    (Pieces, _Encoder._pieces),
    (np.ndarray, _Encoder._array),
    (np.generic, _Encoder._scalar),
    ((str, int, float), _Encoder._number_or_text),
    (complex, _Encoder._complex),
    (bytes, _Encoder._bytes),
    (torch.Size, _Encoder._size),
    ((torch.dtype, torch.device), _Encoder._torch_word),
    (pathlib.PurePath, _Encoder._path),
    (_TIMES, _Encoder._time),
    (datetime.timedelta, _Encoder._timedelta),
)
_KINDS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$dict": _Decoder._pairs,
    "$tuple": lambda decoder, items: tuple(map(decoder.decode, items)),
    "$set": lambda decoder, items: set(map(decoder.decode, items)),
    "$frozenset": lambda decoder, items: frozenset(map(decoder.decode, items)),
    "$int": lambda decoder, text: int(text, 16),
    "$float": lambda decoder, text: _float(text),
    "$complex": _Decoder._complex,
    "$bytes": lambda decoder, text: base64.b64decode(text, validate=True),
    "$tensor": _Decoder._tensor,
    "$array": _Decoder._array,
    "$bytearray": _Decoder._bytearray,
    "$scalar": _Decoder._scalar,
    "$size": lambda decoder, items: torch.Size(items),
    "$dtype": _Decoder._torch_dtype,
    "$device": lambda decoder, text: torch.device(text),
    "$path": lambda decoder, text: pathlib.Path(text),
    "$datetime": lambda decoder, text: datetime.datetime.fromisoformat(text),
    "$date": lambda decoder, text: datetime.date.fromisoformat(text),
    "$time": lambda decoder, text: datetime.time.fromisoformat(text),
    "$timedelta": lambda decoder, parts: datetime.timedelta(*parts),
}
