"""Prefect's settings as this project needs them, unless the reader's environment says otherwise.

They have to be in place before Prefect is imported, so `tasks` and `flows` import this first.
"""

import logging
import os

DEFAULTS = {
    # a temporary server on a fresh database runs its migrations first, which takes longer than the default of 20 s
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # a run goes on without a server that does not answer, and it should not be long until it does
    "PREFECT_API_REQUEST_TIMEOUT": "20",
    "PREFECT_CLIENT_MAX_RETRIES": "2",
}

for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)

logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # it counts its last events aloud when a process ends
