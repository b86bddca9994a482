"""Ending the temporary Prefect servers of drivers that were killed.

Without a server configured, Prefect starts a temporary one beside the flow and ends it with the process. A process that
is killed cannot: its server would stay for ever. So a driver leaves its mark in the environment that the server
inherits, and the next command ends the servers whose driver is gone.
"""

import os

import psutil

from infra.store.clock import born, is_same

MARK = "RATCHET_TEMPORARY_SERVER_OF"


def mark() -> None:
    me = psutil.Process()
    os.environ[MARK] = f"{me.pid}@{born(me)}"


def end_orphans() -> None:
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            owner = environment.get(MARK)
            if owner is not None and environment.get("PREFECT__SERVER_EPHEMERAL") and not _is_alive(owner):
                process.terminate()
        except psutil.Error:
            continue  # another user's, or gone meanwhile


def _is_alive(owner: str) -> bool:
    pid, _, born_at = owner.partition("@")
    try:
        return is_same(psutil.Process(int(pid)), float(born_at))
    except psutil.NoSuchProcess:
        return False
