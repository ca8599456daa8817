"""A coordinator that only announces itself and takes connections: HOST PORT MODEL [CLUSTER].

It says "announcing" before it is announced, and withdraws at SIGTERM.
"""

from __future__ import annotations

import signal
import socket
import sys

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.advertising import Advertising
from edgespec.daemon.process import start_logging


def main(host: str, port: str, model: str, cluster: str = "") -> None:
    """Announce until told to stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    start_logging()
    config = CoordinatorConfig(model, "", 2, "float32", Address(host, int(port)))
    advertising = Advertising(config, int(port), cluster)
    family = socket.AF_INET6 if config.address.is_ipv6 else socket.AF_INET
    where = socket.getaddrinfo(host, int(port), family)[0][4]
    both = host == "::"
    with socket.create_server(where, family=family, dualstack_ipv6=both):
        advertising.start()
        print("announcing", flush=True)
        signal.sigwait({signal.SIGTERM})
        advertising.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
