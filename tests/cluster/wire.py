"""A cable between two network namespaces that can be cut, and can lose and delay packets.

    python -m tests.cluster.wire FIRST SECOND [--delay-ms 25] [--loss 0.02]

Each namespace gets a TUN device `wire`; this process carries the packets between them. `cut` on standard input drops
all packets from then on, with no sign to either side; `mend` ends it. The process ends with its standard input.
(The kernel's own emulator, `tc netem`, is a module that many machines lack.)
"""

import argparse
import ctypes
import fcntl
import os
import random
import select
import struct
import time
from collections import deque
from contextlib import suppress

DEVICE = b"wire"
MAX_PACKET = 65536
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000


class Wire:
    """Carries packets in both directions: each is lost with probability `loss`, or arrives after `delay_s`."""

    def __init__(self, ends: tuple[int, int], *, delay_s: float, loss: float) -> None:
        self.other = {ends[0]: ends[1], ends[1]: ends[0]}
        self.delay_s = delay_s
        self.loss = loss
        self.cut = False
        self._random = random.Random(0)
        self._on_the_way: deque[tuple[float, int, bytes]] = deque()  # arrival, end, packet

    def run(self) -> None:
        while True:
            readable, _, _ = select.select([0, *self.other], [], [], self._seconds_to_arrival())
            if 0 in readable and not self._obey(os.read(0, 1024)):
                return
            for end in self.other.keys() & set(readable):
                self._send(self.other[end], os.read(end, MAX_PACKET))
            self._deliver()

    def _obey(self, command: bytes) -> bool:
        """Follow a command; return whether to go on."""
        if command:
            self.cut = command.split()[-1] == b"cut"
            self._on_the_way.clear()
            os.write(1, command)  # done
        return bool(command)

    def _send(self, end: int, packet: bytes) -> None:
        if not self.cut and self._random.random() >= self.loss:
            self._on_the_way.append((time.monotonic() + self.delay_s, end, packet))

    def _seconds_to_arrival(self) -> float | None:
        return max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, end, packet = self._on_the_way.popleft()
            with suppress(OSError):  # the device is down
                os.write(end, packet)


def open_end(namespace: str) -> int:
    """Create the device in a network namespace and return its descriptor."""
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespace}") as target:
        _enter(target.fileno())
        try:
            end = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", DEVICE, IFF_TUN | IFF_NO_PI))
        finally:
            _enter(home.fileno())
    return end


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--loss", type=float, default=0)
    options = parser.parse_args()

    first, second = options.namespaces
    wire = Wire((open_end(first), open_end(second)), delay_s=options.delay_ms / 1000, loss=options.loss)
    os.write(1, b"ready\n")
    wire.run()


if __name__ == "__main__":
    main()
