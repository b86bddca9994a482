"""Ends the temporary Prefect servers of drivers that were killed.

If no server is configured, Prefect starts a temporary one and ends it with the process. A killed process leaves its
server behind. So a driver marks the environment that its server inherits, and the next command ends the servers whose
driver no longer runs.
"""

import os

import psutil

from infra.store.clock import born, is_same

MARK = "RATCHET_TEMPORARY_SERVER_OF"


def mark() -> None:
    """Mark the environment of this process, which its temporary server inherits."""
    process = psutil.Process()
    os.environ[MARK] = f"{process.pid}@{born(process)}"


def end_orphans() -> None:
    """End the temporary servers whose driver no longer runs."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            owner = environment.get(MARK)
            if owner is not None and environment.get("PREFECT__SERVER_EPHEMERAL") and not _is_alive(owner):
                process.terminate()
        except psutil.Error:
            continue  # a process of another user, or one that has just ended


def _is_alive(owner: str) -> bool:
    pid, _, born_at = owner.partition("@")
    try:
        return is_same(psutil.Process(int(pid)), float(born_at))
    except psutil.NoSuchProcess:
        return False
