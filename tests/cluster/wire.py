"""A cable between two network namespaces that can be cut.

    python -m tests.cluster.wire FIRST SECOND

Each namespace gets a TUN device `wire`; this process carries the packets between them. `cut` on standard input drops
all packets from then on, with no sign to either side; `mend` ends it. The process ends with its standard input.
(The kernel's own emulator, `tc netem`, is a module that many machines lack.)
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
from contextlib import suppress

DEVICE = b"wire"
MAX_PACKET = 65536
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000


def carry(first: int, second: int) -> None:
    """Carry packets in both directions, and follow the commands."""
    other = {first: second, second: first}
    cut = False
    while True:
        readable, _, _ = select.select([0, *other], [], [])
        if 0 in readable:
            if not (command := os.read(0, 1024)):
                return
            cut = command.split()[-1] == b"cut"
            os.write(1, command)  # done
        for end in other.keys() & set(readable):
            packet = os.read(end, MAX_PACKET)
            with suppress(OSError):  # the device is down
                if not cut:
                    os.write(other[end], packet)


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
    first, second = map(open_end, sys.argv[1:])
    os.write(1, b"ready\n")
    carry(first, second)


if __name__ == "__main__":
    main()
