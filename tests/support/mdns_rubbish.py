"""A stranger who fills multicast DNS with rubbish, as a program: OWN_ADDRESS SEED.

Random bytes, announcements of what cannot be, and mutations of them, until it is killed.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import time

GROUP = ("224.0.0.251", 5353)
SERVICE = (b"_edgespec", b"_tcp", b"local")
A, PTR, TXT, AAAA, SRV = 1, 12, 16, 28, 33


def name(*labels: bytes) -> bytes:
    """A name on the wire."""
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def record(owner: bytes, kind: int, data: bytes) -> bytes:
    """One answer that is valid for two minutes."""
    return owner + struct.pack("!HHIH", kind, 1, 120, len(data)) + data


def announcement(instance: bytes, port: int, addresses: list[bytes], text: bytes) -> bytes:
    """All that a coordinator says of itself."""
    owner, host = name(instance, *SERVICE), name(b"host-" + instance[:20], b"local")
    answers = [
        record(name(*SERVICE), PTR, owner),
        record(owner, SRV, struct.pack("!HHH", 0, 0, port) + host),
        record(owner, TXT, text),
        *(record(host, A if len(one) == 4 else AAAA, one) for one in addresses),
    ]
    return struct.pack("!HHHHHH", 0, 0x8400, 0, len(answers), 0, 0) + b"".join(answers)


def impossible() -> list[bytes]:
    """Announcements of what nobody can connect to, and of names that nobody has."""
    loopback, everyone, group = b"\x7f\0\0\1", b"\xff" * 4, b"\xe0\0\0\xfb"
    neighbour = b"\x0a\x4d\0\1"
    loopback6, group6, mapped = bytes(15) + b"\1", b"\xff\2" + bytes(13) + b"\xfb", b"\xff\xff"
    nobody = b"\xfe\x80" + bytes(13) + b"\x99"
    return [
        announcement(b"loopback", 7430, [loopback, everyone, group, bytes(4)], b"\3a=b"),
        announcement(
            b"loopback6", 7430, [loopback6, group6, bytes(16), bytes(10) + mapped + loopback], b""
        ),
        announcement(b"nobody", 7430, [nobody], b"\x0ccluster=\x1b]0;"),
        announcement(b"no port", 0, [neighbour], b"\3a=b"),
        announcement(b"no address", 7430, [], b"\3a=b"),
        announcement(b"\x1b[2J\0\r\n\xff\xfe", 7430, [loopback], b"\xff" + b"model=\x1b" * 40),
        announcement(b"." * 63, 7430, [loopback], bytes(200)),
        *(announcement(b"unknown-%d" % i, 7430, [], b"") for i in range(50)),
    ]


def main(own: str, seed: str) -> None:
    """Send for ever."""
    chance = random.Random(int(seed))
    valid = impossible()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        out.bind((own, GROUP[1]))
        out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
        print("sending", flush=True)
        while True:
            packet = bytearray(chance.choice(valid))
            if chance.random() < 0.3:
                packet = bytearray(chance.randbytes(chance.randrange(1, 1400)))
            elif chance.random() < 0.5:
                for _ in range(chance.randrange(1, 8)):
                    packet[chance.randrange(len(packet))] = chance.randrange(256)
            out.sendto(packet, GROUP)
            time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
