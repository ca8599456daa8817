"""A switch whose cables take time: what `lan` of namespaces runs in place of a bridge.

    python switch.py DELAY_MS MBIT PORT PORT…

It forwards frames between the ports by the addresses that it has seen, each DELAY_MS after its last
bit has passed a cable of MBIT. For kernels without netem. Frames come and go with the kernel's own
header (PACKET_VNET_HDR), so that checksums and large segments stay what they are.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import struct
import sys
import time

ALL = 0x0003  # ETH_P_ALL
SOL_PACKET, VNET_HDR, IGNORE_OUTGOING, RCVBUFFORCE = 263, 15, 23, 33
HEADER = 10
"""Bytes of the kernel's own header."""
ROOM = 1 << 17


def main() -> None:
    """Until it is ended."""
    delay, bytes_per_s = float(sys.argv[1]) / 1e3, float(sys.argv[2]) * 125e3
    ports = [opened(name) for name in sys.argv[3:]]
    behind: dict[bytes, socket.socket] = {}
    free = dict.fromkeys(ports, 0.0)
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    numbers = itertools.count()
    print("up", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            port.send(frame)
        left = waiting[0][0] - now if waiting else None
        for port in select.select(ports, [], [], left)[0]:
            frame = port.recv(ROOM)
            to, of = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            behind[of] = port
            one = behind.get(to)
            now = time.monotonic()
            for out in [one] if one else [other for other in ports if other is not port]:
                free[out] = max(free[out], now) + (len(frame) - HEADER) / bytes_per_s
                heapq.heappush(waiting, (free[out] + delay, next(numbers), out, frame))


def opened(name: str) -> socket.socket:
    """A port, with room for what comes while another one is served."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    port.setsockopt(SOL_PACKET, VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, IGNORE_OUTGOING, struct.pack("i", 1))
    port.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, 1 << 25)
    port.bind((name, 0))
    return port


if __name__ == "__main__":
    os.nice(-5)
    main()
