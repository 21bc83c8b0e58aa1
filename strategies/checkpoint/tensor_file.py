"""The safetensors file format, written and read as a stream: no copy of the tensors is made on the way.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian header length, a JSON header, the tensors'
bytes without gaps). What the format does not know is told in the header's `__metadata__`: under "drivetrain.aliases"
which further names a tensor has, under "drivetrain.complex" which tensors are complex (stored as pairs of reals).
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .files import CHUNK, CheckpointError, HashingReader, HashingWriter

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
ALIASES = "drivetrain.aliases"
COMPLEX = "drivetrain.complex"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGE = 4 * 1024 * 1024
_HUGE_PAGES = 14  # MADV_HUGEPAGE on Linux
_PIECE = 64 * 1024 * 1024  # bytes; how much of a tensor is copied at once where it has to be


class Readable(Protocol):
    """A file that is read from its start; `take` returns the next bytes, or raises CheckpointError."""

    path: Any
    size: int

    def take(self, count: int) -> bytes | bytearray: ...  # noqa: D102, E704


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in the file's data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def split_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (each tensor once under its first name, further name → first name).

    Two names are one tensor when they show the same memory in the same way (tied weights). Tensors that share only a
    part of their memory count as different ones. Raises TypeError for what a file cannot hold, by name.
    """
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        problem = unstorable(tensor) if isinstance(name, str) and name != "__metadata__" else "a name for no tensor"
        if problem:
            raise TypeError(f"Expected dense tensors with names. Received: {name}: {problem}.")
        place = tensor.data_ptr() or id(tensor)  # XLA's tensors have no address
        view = (tensor.device, place, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        first = seen.setdefault(view, name) if tensor.numel() else name
        if first == name:
            unique[name] = tensor
        else:
            aliases[name] = first
    return unique, aliases


def data_size(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes these tensors take in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def unstorable(tensor: Any) -> str:
    """Return why a file cannot hold this ("a DTensor, ..."), or an empty text."""
    kind = f"a {type(tensor).__name__}"
    if not isinstance(tensor, Tensor):
        return kind
    if is_lazy(tensor):
        return f"{kind} without values yet: run the module once first"
    if not _is_plain(tensor):
        return f"{kind}, which is more than its memory: gather or convert it first"
    if tensor.is_nested:
        return "a nested tensor: save what it is made of"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: call to_dense() first"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if not tensor.is_complex() and tensor.dtype not in _NAMES:
        return f"a tensor of {tensor.dtype}"
    return ""


def write_tensors(
    file: HashingWriter,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a whole safetensors file.

    Tensors may lie on any device, be non-contiguous or share memory; tied ones are stored once. `aliases` are further
    names, name → name of the stored tensor, for tensors that were taken out before. `metadata` holds text only.
    With `read` the tensors only tell type and shape, and `read(name)` gives each one when its turn comes.
    Extra memory: none for contiguous tensors on the CPU, else at most 64 MiB. Raises TypeError by the tensor's name.
    """
    if sys.byteorder != "little":
        raise CheckpointError("Expected a little-endian machine: the file's numbers are. Received: a big-endian one.")
    unique, found = split_aliases(tensors)
    real = {name: _as_real(tensor) for name, tensor in unique.items()}
    order = write_order(real)
    notes = {"format": "pt", **(metadata or {})}
    if found or aliases:
        notes[ALIASES] = json.dumps({**(aliases or {}), **found})
    if complex_names := [name for name in unique if unique[name].is_complex()]:
        notes[COMPLEX] = json.dumps(complex_names)
    file.write([_header(real, order, notes)])
    content = (real[name] if read is None else _as_real(read(name)) for name in order)
    file.write(_bytes(piece) for tensor in content for piece in _pieces(tensor))


def write_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order in which `write_tensors` writes: large elements first, so that all lie aligned."""
    sizes = {name: _as_real(tensor).element_size() for name, tensor in tensors.items()}
    return sorted(sizes, key=lambda name: -sizes[name])  # stable


def read_tensors(
    file: HashingReader, *, into: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a whole safetensors file; returns (tensors on the CPU, metadata). All names of shared tensors come back.

    With `into`, a tensor whose name is in it is read into that one instead, whatever its device, dtype and layout;
    the shapes have to be the same. The caller compares `file.digest()` before it uses anything.
    Raises CheckpointError naming file and tensor, before anything is written into `into`.
    """
    entries, notes = read_header(file)
    stored = {entry.name: entry for entry in entries}
    complex_names = _complex_names(file, notes, stored)
    aliases = _aliases(file, notes, stored)
    targets = dict(into or {})
    for alias, name in aliases.items():
        if alias in targets:
            targets.setdefault(name, targets[alias])
    for entry in entries:
        _check_shape(file, entry, targets.get(entry.name), entry.name in complex_names)
    slots = [_Slot(file, entry, targets.get(entry.name), entry.name in complex_names) for entry in entries]
    _fill(file, sorted(slots, key=lambda slot: slot.entry.start))
    tensors = {slot.entry.name: slot.value for slot in slots}
    for alias, name in aliases.items():
        tensors[alias] = tensors[name]
        if alias in targets and targets[alias] is not tensors[name]:
            tensors[alias] = targets[alias].detach().copy_(tensors[name])
    return tensors, notes


class LazyTensors:
    """A safetensors file that gives one tensor at a time, each read when it is asked for; it verifies nothing.

    `entries` tells type and shape of each, `aliases` further names: name → name of an entry.
    """

    def __init__(self, path: Path) -> None:
        with HashingReader(path, follow=True) as file:
            stored, notes = read_header(file)
            self._path, self._start = path, file.position
            self._places = {entry.name: entry for entry in stored}
            self._complex = _complex_names(file, notes, self._places)
            self.aliases = _aliases(file, notes, self._places)
        self.entries = {name: self._seen(name, entry) for name, entry in self._places.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor; raises CheckpointError for a file that ends before it."""
        entry = self._places[name]
        raw = torch.empty(entry.shape, dtype=entry.dtype)
        rest = _bytes(raw)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._start + entry.start)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise CheckpointError(f"{self._path}: ends early, within {name}.")
        return torch.view_as_complex(raw) if name in self._complex else raw

    def _seen(self, name: str, entry: Entry) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in self._complex:
            return entry.dtype, entry.shape
        return torch.view_as_complex(torch.empty(2, dtype=entry.dtype)).dtype, entry.shape[:-1]


class _Slot:
    """Where one tensor of a file goes: straight into its target, or by way of a new tensor."""

    def __init__(self, file: HashingReader, entry: Entry, target: Tensor | None, is_complex: bool) -> None:
        self.entry, self.target, self.is_complex = entry, target, is_complex
        self._file = file
        self._raw = self._straight()
        self._value = target

    @property
    def value(self) -> Tensor:
        """The tensor that was read."""
        assert self._value is not None
        return self._value

    def buffer(self) -> memoryview:
        """The memory to read into."""
        if self._raw is None:
            self._raw = _empty(self._file, self.entry)
        return _bytes(self._raw)

    def finish(self) -> None:
        """The memory has been read."""
        raw, self._raw = self._raw, None
        assert raw is not None
        if self.target is None:
            self._value = torch.view_as_complex(raw) if self.is_complex else raw
        elif raw.data_ptr() != self.target.data_ptr() or not raw.numel():
            self.target.detach().copy_(torch.view_as_complex(raw) if self.is_complex else raw)

    def _straight(self) -> Tensor | None:
        target = self.target
        if target is None or target.device.type != "cpu" or not _is_plain(target) or not target.is_contiguous():
            return None
        if target.is_conj() or target.is_neg() or target.is_complex() != self.is_complex:
            return None
        raw = torch.view_as_real(target.detach()) if self.is_complex else target.detach()
        return raw if raw.dtype == self.entry.dtype else None


def _fill(file: HashingReader, slots: list[_Slot]) -> None:
    """Read the slots in the order of the file, small ones together."""
    waiting: list[_Slot] = []
    size = 0
    for slot in slots:
        waiting.append(slot)
        size += slot.entry.stop - slot.entry.start
        if size >= CHUNK or slot is slots[-1]:
            file.fill(slot.buffer() for slot in waiting)
            for done in waiting:
                done.finish()
            waiting, size = [], 0


def _header(tensors: Mapping[str, Tensor], order: list[str], notes: Mapping[str, str]) -> bytes:
    places, offset = {}, 0
    for name in order:
        size = data_size([tensors[name]])
        places[name] = [offset, offset + size]
        offset += size
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    for name, tensor in tensors.items():
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(file: Readable) -> tuple[list[Entry], dict[str, str]]:
    (length,) = struct.unpack("<Q", file.take(8))
    if not 2 <= length <= min(MAX_HEADER, file.size - 8):
        raise CheckpointError(f"{file.path}: is no safetensors file (a header of {length} bytes).")
    try:
        header = json.loads(bytes(file.take(length)), object_pairs_hook=_once)
        notes = header.pop("__metadata__", {})
        entries = [_entry(name, record) for name, record in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: its safetensors header is damaged ({error!r}).") from error
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise CheckpointError(f"{file.path}: its safetensors metadata is not text.")
    offset = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != offset:
            raise CheckpointError(f"{file.path}: {entry.name} does not begin where the tensor before it ends.")
        offset = entry.stop
    if offset != file.size - 8 - length:
        raise CheckpointError(f"{file.path}: holds {file.size} bytes, its header says {offset + 8 + length}.")
    return entries, notes


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(name: str, record: Any) -> Entry:
    shape, (start, stop) = record["shape"], record["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name}: shape {shape}, offsets {[start, stop]}")
    dtype = DTYPES[record["dtype"]]
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{name}: shape {shape} does not take {stop - start} bytes of {dtype}")
    return Entry(name, dtype, tuple(shape), start, stop)


def _complex_names(file: HashingReader, notes: Mapping[str, str], stored: Mapping[str, Entry]) -> set[str]:
    names = _note(file, notes, COMPLEX, list)
    for name in names:
        entry = stored.get(name) if isinstance(name, str) else None
        if entry is None or entry.shape[-1:] != (2,) or not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise CheckpointError(f"{file.path}: {name} is said to be complex, but is no tensor of pairs.")
    return set(names)


def _aliases(file: HashingReader, notes: Mapping[str, str], stored: Mapping[str, Entry]) -> dict[str, str]:
    aliases = _note(file, notes, ALIASES, dict)
    if ALIASES not in notes:  # safetensors.torch.save_model tells it so: further name → name
        aliases = {alias: name for alias, name in notes.items() if name in stored and alias not in stored}
        aliases.pop("format", None)
    for alias, name in aliases.items():
        if alias in stored or not isinstance(name, str) or name not in stored:
            raise CheckpointError(f"{file.path}: {alias} is said to be the tensor {name}, which cannot be.")
    return aliases


def _note(file: HashingReader, notes: Mapping[str, str], key: str, kind: type) -> Any:
    try:
        value = json.loads(notes[key]) if key in notes else kind()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise CheckpointError(f"{file.path}: its metadata {key} is damaged.")
    return value


def _check_shape(file: HashingReader, entry: Entry, target: Tensor | None, is_complex: bool) -> None:
    shape = entry.shape[:-1] if is_complex else entry.shape
    if target is not None and tuple(target.shape) != shape:
        raise CheckpointError(
            f"{file.path}: expected {entry.name} to have the shape {list(target.shape)}. Received: {list(shape)}."
        )


def _empty(file: HashingReader, entry: Entry) -> Tensor:
    try:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise CheckpointError(f"{file.path}: {entry.name} has the impossible shape {list(entry.shape)}.") from error
    if entry.stop - entry.start >= _LARGE and sys.platform == "linux":
        # Fresh memory in large pages: touching it for the first time otherwise takes longer than reading the file.
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_ptr() + entry.stop - entry.start - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _HUGE_PAGES)
    return tensor


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its memory, and no wrapper around others (DTensor, FakeTensor, quantized ones)."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _as_real(tensor: Tensor) -> Tensor:
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as contiguous ones on the CPU, in the order of its elements; copied, piece by piece, where needed."""
    tensor = tensor.detach()
    size = data_size([tensor])
    if (tensor.device.type == "cpu" and tensor.is_contiguous()) or size <= _PIECE or tensor.dim() == 0:
        yield tensor.cpu().contiguous()
    elif size // len(tensor) > _PIECE:
        for row in tensor:
            yield from _pieces(row)
    else:
        rows = max(1, _PIECE // (size // len(tensor)))
        for start in range(0, len(tensor), rows):
            yield tensor[start : start + rows].cpu().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
