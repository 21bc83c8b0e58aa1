"""What the checkpoint tests share: a small state, comparing bit for bit, and forked children that may die."""

from __future__ import annotations

import math
import os
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain.strategies.checkpoint import Checkpoint, Writer


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return a few small tensors that differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "linear.weight": torch.randn(8, 4, generator=generator),
        "linear.bias": torch.randn(8, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(step),
    }


def save(directory: Path, step: int, **options: Any) -> Path:
    """Write a small checkpoint of three files."""
    with Writer(directory, **options) as writer:
        writer.tensors("model.safetensors", weights(step))
        writer.json("training.json", {"step": step, "name": "run"})
        writer.json("rank-00000.json", [step] * 5)
        return writer.commit({"step": step, "epoch": step // 10, "samples": step * 4, "strategy": "single"})


def check(directory: Path, step: int) -> None:
    """Assert that a checkpoint is exactly what `save` wrote for this step."""
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.manifest["step"] == step
    assert same(checkpoint.tensors("model.safetensors"), weights(step))
    assert checkpoint.json("training.json") == {"step": step, "name": "run"}
    assert checkpoint.json("rank-00000.json") == [step] * 5


def visible(parent: Path) -> list[str]:
    """Return the names in a folder that do not begin with a dot."""
    return sorted(name for name in os.listdir(parent) if not name.startswith("."))


def hidden(parent: Path) -> list[str]:
    """Return the names in a folder that begin with a dot."""
    return sorted(name for name in os.listdir(parent) if name.startswith("."))


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal in type and in every bit (NaN equals the same NaN, 0.0 is not -0.0)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def forked(function: Callable[[], Any]) -> int:
    """Run a function in a forked child; return 0, or minus the number of the signal that killed it.

    An exception in it is an AssertionError here, with its traceback.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at every fork
        pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            torch.set_num_threads(1)
            function()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        problem = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert not problem, problem
    return status


def megabytes(count: float) -> torch.Tensor:
    """Return a tensor of so many MiB."""
    return torch.arange(math.ceil(count * 2**20 / 4), dtype=torch.int32).view(torch.float32)
