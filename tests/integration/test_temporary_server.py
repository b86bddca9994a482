"""A killed driver's temporary Prefect server does not outlive the next command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from flows.temporary_server import MARK, end_orphans
from infra.store.clock import born


def server_of(owner: str) -> psutil.Popen:
    environment = {**os.environ, MARK: owner, "PREFECT__SERVER_EPHEMERAL": "1"}
    return psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)


def test_only_orphans_end(tmp_path: Path) -> None:
    me = psutil.Process()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    orphan, recycled, alive = (
        server_of(owner) for owner in (f"{gone.pid}@1.0", f"{me.pid}@1.0", f"{me.pid}@{born(me)}")
    )
    try:
        end_orphans()
        assert orphan.wait(timeout=60) == -15
        assert recycled.wait(timeout=60) == -15  # another process has the dead driver's number
        assert alive.poll() is None
    finally:
        alive.kill()
        alive.wait()
