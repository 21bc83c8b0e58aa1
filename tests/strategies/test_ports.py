"""Ports of this machine."""

from __future__ import annotations

import socket

from drivetrain import get_free_port, is_port_in_use


def test_a_port_is_in_use_while_somebody_listens():
    port = get_free_port()
    assert not is_port_in_use(port)
    with socket.socket() as listener:
        listener.bind(("localhost", port))
        listener.listen()
        assert is_port_in_use(port)
