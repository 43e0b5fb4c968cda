"""Ports of this machine, and addresses in URLs. IPv4 and IPv6."""

import socket


class Listener:
    """A listening socket at one address of this machine, at a free port."""

    def __init__(self, host: str):
        self._socket = _socket_for(host)
        self._socket.bind((host, 0))
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]

    def detach(self) -> int:
        """Return the file descriptor. Whoever takes it closes it."""
        return self._socket.detach()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that was free a moment ago."""
    with _socket_for(host) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    """Return whether a server could listen at this address of this machine."""
    with _socket_for(host) as probe:
        # Servers set it too: a closed port in TIME_WAIT does not keep them from starting.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def bracketed(host: str) -> str:
    """Return a host as it appears in a URL.

    >>> bracketed("10.0.0.7"), bracketed("fd00::7")
    ('10.0.0.7', '[fd00::7]')
    """
    return f"[{host}]" if ":" in host else host


def url_of(host: str, port: int) -> str:
    """Return the HTTP URL of a server.

    >>> url_of("fd00::7", 30000)
    'http://[fd00::7]:30000'
    """
    return f"http://{bracketed(host)}:{port}"


def _socket_for(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
