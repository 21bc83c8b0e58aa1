"""The processes of a run: who this one is (`World`), and how it talks to the others.

`World` itself is one process: a null object whose collectives give back what they got, so that nothing asks whether
there are others. `TorchWorld` is torch.distributed. Every rank has to make the same calls in the same order. Tensors
travel by the group that serves their device, all else by a group for CPU tensors; nothing here records gradients.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import os
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import rendezvous

if TYPE_CHECKING:
    from .environment import Placement

Value = TypeVar("Value")
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT}
# What no backend reduces, or only by losing digits: half precision is summed in float32, so that two halves whose
# sum overflows still have a mean.
_WIRE = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


class DistributedOperationException(ValueError):
    """The ranks of a collective brought different things; raised on all of them."""


class World:
    """One process. Every collective returns at once what one process would see."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    backend: str = ""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def barrier(self, name: str = "") -> None:
        """Wait until every rank has come here; `name` is shown if one does not."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over all ranks by `sum mean max min product`; in place, and returned. Any strided dtype.

        Booleans: `sum` and `max` are "any", `product` and `min` are "all". Raises TypeError for a mean of integers
        or booleans, which could not be stored in place: convert them first.
        """
        _check_op(tensor, op)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order, on this tensor's device; the shapes have to be equal."""
        return [tensor.detach().clone()]

    def all_gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """As `all_gather`, for tensors whose dimension 0 may differ between ranks (0 rows too).

        Raises ValueError, on every rank, when the other dimensions or the dtypes differ.
        """
        return [tensor.detach().clone()]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite the tensor by that of rank `src`; shape and dtype have to be equal. In place, and returned."""
        return tensor

    def broadcast_object(self, value: Value, src: int = 0) -> Value:
        """Rank `src`'s value on every rank (by pickle, between the processes of one run)."""
        return value

    def gather_object(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order, on every rank."""
        return [value]

    def placed(self, values: list[Value], missing: Value) -> list[Value]:
        """What was gathered, by rank of the whole world; only where some of its ranks are gone (see survivors.py) is
        there something missing."""
        return values

    def agree(self, flag: bool, *, how: str = "any") -> bool:
        """Whether `any` (or `all`) of the ranks say so; the same answer on every rank."""
        _check_how(how)
        return bool(flag)

    def private(self) -> World:
        """The same ranks over a group of their own, for another thread (on the CPU); every rank has to call this."""
        return self

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks, and the agent that started them, that this rank ends by `error`."""

    def peer_failure(self) -> str | None:
        """What another rank has reported of its end ("rank 1: ValueError: …"), if one has; never waits."""
        return None

    def close(self) -> None:
        """Leave the others; may be called more than once."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, device='{self.device}')"


class TorchWorld(World):
    """The ranks of torch.distributed's default process group, which has to be initialised (see `create`)."""

    def __init__(self, placement: Placement, device: torch.device | str, *, owned: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        known = (placement.rank, placement.size) == (self.rank, self.size)
        # A group that the user initialised without a launcher's variables: taken to be on one node.
        self.local_rank = placement.local_rank if known else self.rank
        self.local_size = placement.local_size if known else self.size
        self.node_rank, self.num_nodes = (placement.node_rank, placement.num_nodes) if known else (0, 1)
        super().__init__(rendezvous.select_device(torch.device(device), self.local_rank))
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        self.backend = backends.get(self.device.type) or dist.get_backend()
        self._devices = set(backends) - {"mps"}  # gloo says that it serves mps, and fails
        self._group: Any = None  # torch's name for the group of all ranks
        self._cpu_group = dist.group.WORLD if "cpu" in backends else dist.new_group(backend="gloo")
        self._owned, self._closed, self._pid = owned, False, os.getpid()
        if self.backend == "gloo":
            atexit.register(self.close)

    @classmethod
    def create(cls, placement: Placement, device: torch.device | str, *, backend: str | None = None,
               timeout: timedelta | float | None = None, init_method: str | None = None) -> TorchWorld:
        """Initialise the process group (see `rendezvous.join`), unless one exists already.

        A group that the user has initialised is used, and `close` leaves it alone.
        """
        device = torch.device(device)
        if dist.is_initialized():
            return cls(placement, device)
        device = rendezvous.select_device(device, placement.local_rank)
        rendezvous.join(placement, device, backend=backend, timeout=timeout, init_method=init_method)
        return cls(placement, device, owned=True)

    def barrier(self, name: str = "") -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=self._cpu_group)
        except RuntimeError as error:
            raise RuntimeError(
                f"Expected all {self.size} ranks to come to the barrier {name!r}. Received: rank {self.rank} waited "
                f"there in vain. Look for the rank that stopped or went another way. ({error})"
            ) from error

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        _check_op(tensor, op)
        kind = _OPS[op]
        if tensor.dtype is torch.bool:
            kind = dist.ReduceOp.MAX if op in ("sum", "max") else dist.ReduceOp.MIN
        routed, group = self._route(tensor)
        small = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
        wire = routed.to(torch.float32 if small else _WIRE.get(tensor.dtype, tensor.dtype)).contiguous()
        with torch.inference_mode(tensor.is_inference()):
            dist.all_reduce(wire, kind, group=group)
            if op == "mean":
                wire /= self.size
            return _write(tensor, wire)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if tensor.dtype is torch.uint8 and tensor.ndim == 1 and tensor.device.type == "cpu" and len(tensor):
            bytes_of_all = [torch.empty_like(tensor) for _ in range(self.size)]  # what travels is bytes in any case
            dist.all_gather(bytes_of_all, tensor.contiguous(), group=self._cpu_group)
            return bytes_of_all
        routed, group = self._route(tensor)
        sent = as_bytes(routed)
        if sent.numel() == 0:
            return [tensor.detach().clone() for _ in range(self.size)]
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=group)
        return [data.view(tensor.dtype).reshape(tensor.shape).to(tensor.device) for data in received]

    def all_gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        if tensor.ndim == 0:
            raise ValueError("Expected a tensor with rows. Received: one without dimensions. Use all_gather.")
        header = torch.tensor([tensor.shape[0], signature(tuple(tensor.shape[1:]), tensor.dtype)])
        headers = [header.tolist() for header in self.all_gather(header)]
        if len({kind for _, kind in headers}) > 1:
            raise_unequal(self.gather_object(f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"))
        rows = [count for count, _ in headers]
        padded = tensor.detach()
        if tensor.shape[0] < max(rows):
            padded = padded.new_zeros((max(rows), *tensor.shape[1:]))
            padded[: tensor.shape[0]] = tensor.detach()
        return [part[:count] for part, count in zip(self.all_gather(padded), rows, strict=True)]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        routed, group = self._route(tensor)
        wire = routed.contiguous()
        if wire.numel():
            dist.broadcast(as_bytes(wire), group=group, group_src=src)
        with torch.inference_mode(tensor.is_inference()):
            return _write(tensor, wire)

    def broadcast_object(self, value: Value, src: int = 0) -> Value:
        data = _as_tensor(value) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        size = self.broadcast(torch.tensor([data.numel()]), src)
        if self.rank == src:
            self.broadcast(data, src)
            return value
        return unpacked(self.broadcast(torch.empty(int(size), dtype=torch.uint8), src).numpy().tobytes())

    def gather_object(self, value: Value) -> list[Value]:
        return [unpacked(data.numpy().tobytes()) for data in self.all_gather_uneven(_as_tensor(value))]

    def agree(self, flag: bool, *, how: str = "any") -> bool:
        _check_how(how)
        votes = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX if how == "any" else dist.ReduceOp.MIN, group=self._cpu_group)
        return bool(votes.item())

    def private(self) -> World:
        other = copy.copy(self)  # which closes nothing but that group
        other._cpu_group, other._devices, other._owned = dist.new_group(backend="gloo"), set(), False
        return other

    def report_failure(self, error: BaseException) -> None:
        rendezvous.report_failure(error)

    def peer_failure(self) -> str | None:
        return rendezvous.peer_failure()

    def close(self) -> None:
        if current() is self:
            set_current(World(self.device))
        closed, self._closed = self._closed, True
        if closed or not dist.is_initialized() or os.getpid() != self._pid:
            return
        if self._owned:
            rendezvous.leave()
        elif self._cpu_group is not dist.group.WORLD:
            rendezvous.leave(self._cpu_group)
        else:
            rendezvous.settle()

    def _route(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor without its graph where a group can reach it, and that group."""
        data = tensor.detach()
        return (data, self._group) if data.device.type in self._devices else (data.cpu(), self._cpu_group)


def current() -> World:
    """The world of this process: one process, until a strategy has set another up."""
    return _current


def set_current(world: World) -> None:
    """Make `world` the one that `current` returns."""
    global _current
    _current = world


def packed(value: Any) -> bytes:
    """Any object as bytes, for another process of this run (never for a file: unpacking may run code)."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """The object that another process of this run has packed."""
    return pickle.loads(data)


def signature(*parts: Any) -> int:
    """A number that stands for `parts` (by their repr), the same in every process; fits an int64."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def raise_unequal(descriptions: list[str]) -> None:
    """Say which rank brought what to a collective that needs the same from all; `descriptions` in rank order."""
    received = ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(descriptions))
    raise DistributedOperationException(
        f"Expected tensors of the same structure, dtype and shape on every rank. Received: {received}. "
        "Pad them first (pad_across_processes), or gather them as objects (gather_object)."
    )


def _write(target: Tensor, source: Tensor) -> Tensor:
    if source.data_ptr() != target.data_ptr() or source.dtype != target.dtype:
        target.detach().copy_(source)
    return target


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory (a copy where it is not contiguous) as bytes, which every backend carries for every dtype."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()  # one element may keep any stride
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _as_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)


def _check_op(tensor: Tensor, op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"Expected op to be one of {', '.join(_OPS)}. Received: op={op!r}.")
    if op == "mean" and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise TypeError(
            f"Expected a floating-point tensor for a mean in place. Received: dtype={tensor.dtype}. "
            "Convert it first: tensor.float()."
        )


def _check_how(how: str) -> None:
    if how not in ("any", "all"):
        raise ValueError(f"Expected how to be 'any' or 'all'. Received: how={how!r}.")


_current: World = World()
