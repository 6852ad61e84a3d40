"""A switch whose every path takes time.

    python relay.py --seconds=0.01 DEVICE DEVICE ...

Whatever arrives at one of these network devices leaves by the one behind which
its receiver is, that much later, in the order in which it came. Says "ready"
once it listens. Needs nothing but the standard library, Linux, and root.
"""

import argparse
import collections
import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

# Of <linux/if_ether.h>, <linux/if_packet.h>, and <asm-generic/socket.h>.
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
# In front of every frame; says which checksum is left to the network card.
VNET_HEADER_BYTES = 10
BUFFER_BYTES = 64 << 20
LARGEST_FRAME = 1 << 16


def relay(devices: Sequence[str], seconds: float) -> None:
    """Carries frames between devices, for ever.

    Args:
        devices: network devices of this namespace.
        seconds: from a frame's arrival to its departure, >= 0.
    """
    ports = [_port(device) for device in devices]
    print("ready", flush=True)
    behind: dict[bytes, socket.socket] = {}
    waiting: collections.deque[tuple[float, socket.socket, bytes]]
    waiting = collections.deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], left)[0]:
            with contextlib.suppress(BlockingIOError):
                while frame := port.recv(LARGEST_FRAME):
                    waiting.append((time.monotonic() + seconds, port, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, frame = waiting.popleft()
            receiver, sender = _addresses(frame)
            behind[sender] = port
            for other in [behind[receiver]] if receiver in behind else ports:
                if other is not port:
                    other.send(frame)


def _port(device: str) -> socket.socket:
    """A socket that hears what arrives at a device, and sends by it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for buffer in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
    port.bind((device, ETH_P_ALL))
    port.setblocking(False)
    return port


def _addresses(frame: bytes) -> tuple[bytes, bytes]:
    """Of the network cards of a frame's receiver and sender."""
    start = VNET_HEADER_BYTES
    return frame[start : start + 6], frame[start + 6 : start + 12]


def main() -> None:
    """Relays, ahead of all that share its processors if that is allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("devices", nargs="+")
    flags = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    relay(flags.devices, flags.seconds)


if __name__ == "__main__":
    main()
