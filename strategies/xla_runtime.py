"""torch_xla as the engine uses it: found and checked when it is chosen, its devices, random states and transfers.

torch_xla records what is computed on its device and hands it over as one graph when `sync` is called or a value is
read. A graph that was handed over before is not compiled again.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .availability import has_package

_INSTALL = "Run `pip install 'drivetrain[xla]'` in an environment of its own"


@functools.cache  # each step asks for it, and looking a version up reads files
def package() -> Any:
    """Returns torch_xla.

    Raises:
        ImportError: it is missing, or made for another torch; the message says what to install.
    """
    if not has_package("torch_xla"):
        raise ImportError(f"Expected torch_xla for strategy='xla'. Received: it is not installed. {_INSTALL}.")
    ours, theirs = torch.__version__, _installed()
    if theirs is not None and _short(ours) != _short(theirs):
        raise _other_torch(ours, theirs)
    try:
        return import_module("torch_xla")
    except ImportError as error:  # such as an undefined symbol
        raise _other_torch(ours, theirs or "") from error


def part(name: str) -> Any:
    """Returns a module of torch_xla: "core.xla_model", "runtime", "distributed.spmd"."""
    package()
    return import_module(f"torch_xla.{name}")


def _installed() -> str | None:
    try:
        return importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:  # found without being installed, from a folder
        return None


def _short(version: str) -> tuple[str, ...]:
    return tuple(re.split(r"[.+]", version)[:2])


def _other_torch(ours: str, theirs: str) -> ImportError:
    wanted = ".".join(_short(theirs)) if theirs else "its own version"
    return ImportError(
        f"Expected torch {wanted} for torch_xla {theirs}: the two are made for each other. Received: torch {ours}. "
        f"{_INSTALL}, with torch=={wanted}.* there." if theirs else
        f"Expected a torch that torch_xla was made for. Received: torch {ours}. {_INSTALL}."
    )  # fmt: skip


def kind() -> str:
    """Returns which devices torch_xla has: "TPU", "CPU" (PJRT_DEVICE=CPU), …"""
    return str(part("runtime").device_type() or "CPU")


def start(*, spmd: bool) -> torch.device:
    """Returns the device of this process; with `spmd` one that stands for all of its devices.

    Raises:
        RuntimeError: the process runs on one device and is to have all, or the other way round.
    """
    runtime = part("runtime")
    if spmd and not runtime.is_spmd():
        runtime.use_spmd()
    if not spmd and runtime.is_spmd() and runtime.global_runtime_device_count() > 1:
        raise RuntimeError(
            "Expected a process that uses one XLA device. Received: one that uses all of them already (SPMD), which "
            "cannot be taken back. Use strategy='xla_spmd', or start a new process."
        )
    device: torch.device = package().device()
    return device


def device_count() -> int:
    """Returns how many devices the processes of this run have together."""
    return int(part("runtime").global_runtime_device_count())


def memory(device: torch.device) -> dict[str, float]:
    """Returns the bytes in use on a device, and the most so far; nothing where it does not tell (the CPU)."""
    try:
        found = part("core.xla_model").get_memory_info(device)
    except RuntimeError:
        return {}
    names = {"allocated": "bytes_used", "peak_allocated": "peak_bytes_used"}
    return {name: float(found[key]) for name, key in names.items() if key in found}


def sync() -> None:
    """Hands over what was recorded, and returns before it is computed; random states stay as they are.

    torch_xla gives the device another seed each time, so that what is drawn would depend on when values are read.
    """
    seed = _seed()
    package().sync()
    Generator.manual_seed(seed)


def on_cpu(values: Iterable[Any]) -> list[Any]:
    """Returns these values with XLA tensors on the CPU, all in one transfer; a tensor that comes twice stays one."""
    values = list(values)
    unique = {id(value): value for value in values if isinstance(value, Tensor) and value.device.type == "xla"}
    if not unique:
        return values
    sync()
    fetched = package()._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in unique.values()])
    found = dict(zip(unique, fetched, strict=True))
    return [found.get(id(value), value) for value in values]


def _seed() -> int:
    return int(part("core.xla_model").get_rng_state()) & (2**64 - 1)


class Generator:
    """The random states of the XLA device, as torch's device modules offer theirs; a number of 64 bits each."""

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seeds the device."""
        part("core.xla_model").set_rng_state(seed & (2**64 - 1))

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        """Returns the state, without waiting for the device."""
        return torch.tensor(list(_seed().to_bytes(8, "little")), dtype=torch.uint8, device="cpu")

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        """Puts a state back."""
        part("core.xla_model").set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))
