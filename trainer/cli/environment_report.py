"""`drivetrain env`: what somebody who helps needs to know of this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from . import launch_file
from .sources import plain_errors

_PACKAGES = ("numpy", "torchmetrics", "tensorboard", "safetensors", "jsonargparse", "torchao", "torchdata", "deepspeed",
             "megatron-core", "torch_xla", "transformers", "accelerate")  # fmt: skip


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain env`."""
    prog = f"drivetrain {command}"
    parser = argparse.ArgumentParser(prog, description="Describe this machine and its launch file.", allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file", help="launch file (default: the one in force)")
    taken = parser.parse_args(list(args))
    with plain_errors(prog):
        file = launch_file.load(taken.config_file)
        for name, value in facts().items():
            print(f"- {name}: {value}")
        print(f"- Launch file: {'none' if file is None else f'{file.path} ({file.why})'}")
        for name, value in ({} if file is None else file.values).items():
            print(f"    - {name}: {value}")
    return 0


def facts() -> dict[str, str]:
    """Return what there is: versions, processors, accelerators and the ways to communicate."""
    import torch
    import torch.distributed as dist

    from ... import __version__

    found = {
        "drivetrain": __version__, "Platform": platform.platform(), "Python": sys.version.split()[0],
        "PyTorch": torch.__version__, "CPU cores": str(os.cpu_count()), "Memory": _memory(),
    }  # fmt: skip
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if accelerator is None else torch.accelerator.device_count()
    found["Accelerators"] = "none" if accelerator is None else f"{count} × {accelerator.type}{_names(accelerator.type)}"
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    found["Communication"] = ", ".join(name for name, there in backends.items() if there())
    return found | {name: version for name in _PACKAGES if (version := _version(name))}


def _names(kind: str) -> str:
    import torch

    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "get_device_name"):
        return ""
    return f" ({', '.join(sorted({module.get_device_name(index) for index in range(module.device_count())}))})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):  # not on every system
        return "unknown"
