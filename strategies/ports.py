"""Ports of this machine."""

from __future__ import annotations

import socket


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something listens on a port of this machine (default: 29500, where launchers let processes meet)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
