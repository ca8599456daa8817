"""Writes every packet that any interface of a network namespace sees, until SIGTERM; as root.

    python sniffer.py FILE

Each is behind its length in four bytes. At the end it says how many were lost.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
import threading
from contextlib import suppress

EVERYTHING = 0x0003  # ETH_P_ALL
SO_RCVBUFFORCE = 33
SOL_PACKET, PACKET_STATISTICS = 263, 6


def main(into: str) -> None:
    """Write packets until told to stop; then say how many were lost."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING)) as wire,
        open(into, "wb") as file,
    ):
        wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        wire.settimeout(0.1)
        print("capturing", flush=True)
        while not over.is_set():
            with suppress(TimeoutError):
                packet = wire.recv(1 << 18)
                file.write(struct.pack(">I", len(packet)) + packet)
        _, lost = struct.unpack("II", wire.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    print(lost, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
