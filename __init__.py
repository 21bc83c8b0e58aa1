"""drivetrain: PyTorch training that is exact, durable, thin and plain."""

from __future__ import annotations

__version__ = "0.1.0"
