"""Rendezvous of a group of processes, on a port that no other process can have taken."""

from __future__ import annotations

import socket
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import TCPStore  # type: ignore[attr-defined]


class Rendezvous:
    """The place where the members of a group find each other; one of them opens it."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listens on a free port.

        Args:
            timeout_s: how long members wait for each other, in seconds.
        """
        # the listening socket is passed on, so that no other process can take the port in between
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        self.url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def connected(url: str, timeout: timedelta) -> TCPStore:
    """Connects to a rendezvous that another member has opened."""
    place = urlsplit(url)
    assert place.hostname is not None and place.port is not None
    return TCPStore(place.hostname, place.port, is_master=False, timeout=timeout)
