"""A coordinator that only announces itself and takes connections, as a program: HOST PORT MODEL.

It says "announcing" before it is announced, and withdraws at SIGTERM.
"""

from __future__ import annotations

import signal
import socket
import sys

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.advertising import Advertising
from edgespec.daemon.process import start_logging


def main(host: str, port: str, model: str) -> None:
    """Announce until told to stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    start_logging()
    config = CoordinatorConfig(model, "", 2, "float32", Address(host, int(port)))
    advertising = Advertising(config, int(port))
    with socket.create_server((host, int(port))):
        advertising.start()
        print("announcing", flush=True)
        signal.sigwait({signal.SIGTERM})
        advertising.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
