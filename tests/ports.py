"""Ports for the servers of tests."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import TextIO

_held: list[TextIO] = []


def free_port() -> int:
    """Returns a port that no other process of these tests gets before this one ends.

    It is below the ports that the kernel gives to outgoing connections, which could otherwise take it before its
    server binds it, or while its server restarts.
    """
    folder = Path(tempfile.gettempdir()) / f"ratchet-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        claim = (folder / str(port)).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _held.append(claim)
        return port
