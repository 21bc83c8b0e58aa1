"""Switches of torch that a run may ask for, put back at its end."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch


@contextmanager
def numerics(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> Iterator[None]:
    """Set deterministic algorithms (True, "warn" or None: leave it), cuDNN's search and anomaly detection."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    try:
        with torch.autograd.set_detect_anomaly(detect_anomaly or torch.is_anomaly_enabled()):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = cudnn
