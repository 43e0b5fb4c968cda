"""Ports of this machine, and addresses in URLs."""

import socket

import pytest

from app.utils.net import bracketed, free_port, port_is_free, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_free_port_can_be_bound(host: str) -> None:
    with socket.socket() as server:
        server.bind((host, free_port(host)))


def test_a_port_that_is_in_use_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not port_is_free("127.0.0.1", taken.getsockname()[1])
    assert port_is_free("127.0.0.1", free_port())


def test_an_ipv6_address_gets_brackets() -> None:
    assert bracketed("10.0.0.1") == "10.0.0.1"
    assert bracketed("fe80::1") == "[fe80::1]"
    assert url_of("10.0.0.7", 30000) == "http://10.0.0.7:30000"
    assert url_of("fd00::7", 30000) == "http://[fd00::7]:30000"
