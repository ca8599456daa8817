"""Captures of what goes over a wire: of one TCP connection, and of a whole LAN.

Streams are put together again when a capture is read, so that nothing hides at the border between
two packets.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support import sniffer
from support.commands import Command
from support.namespaces import Host

IP, IP6, TCP, UDP = 0x0800, 0x86DD, 6, 17


# --- one connection -------------------------------------------------------------------------------


class Tap:
    """Forwards one TCP connection to a port of this machine and keeps what its client says."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.said = bytearray()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._thread.join()

    def _run(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection(("127.0.0.1", self._target)) as real:
            back = threading.Thread(target=_pump, args=(real, client, bytearray()))
            back.start()
            _pump(client, real, self.said)
            back.join()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# --- a LAN ----------------------------------------------------------------------------------------


@dataclass
class Capture:
    """What was seen: TCP streams put together, and datagrams."""

    streams: list[bytes] = field(default_factory=list)
    datagrams: list[bytes] = field(default_factory=list)
    lost: int = 0

    @property
    def size(self) -> int:
        """Bytes of all streams."""
        return sum(map(len, self.streams))

    def holds(self, needle: bytes) -> bool:
        """Whether it was said by anybody in clear."""
        return any(needle in said for said in (*self.streams, *self.datagrams))


@contextmanager
def capturing(host: Host, into: Path) -> Iterator[Capture]:
    """Capture all that passes the switch of a LAN; the result is filled in at the end."""
    capture = Capture()
    inside = [
        "ip",
        "netns",
        "exec",
        host.switch,
        sys.executable,
        "-S",
        sniffer.__file__,
        str(into),
    ]
    with Command(command=inside) as listening:
        listening.until_out("capturing")
        yield capture
        time.sleep(0.2)  # the last packets
        listening.signal(signal.SIGTERM)
        done = listening.done()
        assert done.code == 0, done
        capture.lost = int(done.out.split()[-1])
    _read(into.read_bytes(), capture)


def _read(stored: bytes, capture: Capture) -> None:
    pieces: dict[tuple[bytes, bytes], dict[int, bytes]] = defaultdict(dict)
    seen: set[bytes] = set()
    at = 0
    while at < len(stored):
        (length,) = struct.unpack_from(">I", stored, at)
        packet = stored[at + 4 : at + 4 + length]
        at += 4 + length
        addresses, protocol, payload = _of_packet(packet)
        if protocol == UDP and payload[8:] not in seen:
            seen.add(payload[8:])
            capture.datagrams.append(payload[8:])
        elif protocol == TCP:
            sequence, data = (
                struct.unpack_from(">I", payload, 4)[0],
                payload[payload[12] >> 4 << 2 :],
            )
            known = pieces[addresses, payload[:4]]
            if len(data) > len(known.get(sequence, b"")):
                known[sequence] = data
    capture.streams += map(_stream, pieces.values())


def _of_packet(packet: bytes) -> tuple[bytes, int, bytes]:
    """Both addresses, the protocol, and what is behind the IP header; (b"", 0, b"") of others."""
    (kind,) = struct.unpack_from(">H", packet, 12)
    body = packet[14:]
    if kind == IP:
        (length,) = struct.unpack_from(">H", body, 2)
        body = body[: length or None]  # without what fills a short packet up
        return body[12:20], body[9], body[(body[0] & 15) * 4 :]
    if kind == IP6:
        (length,) = struct.unpack_from(">H", body, 4)
        return body[8:40], body[6], body[40 : 40 + length or None]
    return b"", 0, b""


def _stream(pieces: dict[int, bytes]) -> bytes:
    """In order, what was sent twice once. A sequence number that wraps cuts a stream in two."""
    out, end = bytearray(), 0
    for sequence in sorted(pieces):
        data = pieces[sequence]
        out += data[max(end - sequence, 0) :]
        end = max(end, sequence + len(data))
    return bytes(out)
