"""Ports of this machine. IPv4 and IPv6."""

import socket


def listen(host: str) -> socket.socket:
    """Return a listening socket at one address of this machine, at a free port."""
    listening = socket.socket(_family(host))
    listening.bind((host, 0))
    listening.listen()
    return listening


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Keep a port (0: a free one) for a server that starts later, until the returned socket is closed.

    The socket is bound and does not listen: a server with SO_REUSEADDR can listen there, no other socket can.
    """
    reserved = socket.socket(_family(host))
    try:
        if port:  # a closed connection in TIME_WAIT does not keep a server from starting
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    # Not before a free port is chosen: it could be one that another process has reserved.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
