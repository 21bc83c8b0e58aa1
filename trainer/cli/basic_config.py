"""Writing this machine's launch file from a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch

from .launch_file import own_place

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Writes a launch file for all accelerators of this machine, or one process on the CPU; returns its place.

    Default place: where `drivetrain launch` looks first. Returns False, and writes nothing, where a file is already.

    Raises:
        ValueError: there is no such precision.
    """
    import yaml

    precision = mixed_precision.lower()
    if precision not in _PRECISIONS:
        known = ", ".join(_PRECISIONS)
        raise ValueError(f"Expected mixed_precision of {known}. Received: {mixed_precision=}. Choose one of these.")
    path = own_place() if save_location is None else Path(save_location)
    if path.exists():
        print(f"There is a configuration at {path} already; it stays as it is.")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(_settings(precision), sort_keys=False), encoding="utf-8")
    return path


def _settings(precision: str) -> dict[str, Any]:
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator(check_available=True)
    label = "GPU" if kind is None or kind.type == "cuda" else kind.type.upper()
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": f"MULTI_{label}" if devices > 1 else "NO",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": max(devices, 1),
        "use_cpu": devices == 0,
    }
