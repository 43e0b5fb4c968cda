"""Ports of this machine."""

import socket

import pytest

from app.utils.net import reserve_port

IN_USE = "Address already in use"


@pytest.mark.parametrize("fixed", [False, True], ids=["any", "fixed"])
def test_a_reserved_port_is_kept_for_a_server_and_the_source_of_no_connection(fixed: bool) -> None:
    with reserve_port("127.0.0.1") as first:
        port = first.getsockname()[1]
    with reserve_port("127.0.0.1", port if fixed else 0) as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match=IN_USE):
            other.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=10)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            with pytest.raises(OSError, match=IN_USE):
                socket.create_connection(listening.getsockname(), timeout=10, source_address=address)

        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            server.bind(address)
            server.listen()
            with socket.create_connection(address, timeout=10) as client:
                accepted, _ = server.accept()
                accepted.sendall(b"here")
                assert client.recv(4) == b"here"
                accepted.close()

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection is in TIME_WAIT
        other.bind(address)
