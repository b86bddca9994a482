"""Default settings for Prefect; environment variables of the user take precedence.

They must be set before Prefect is imported, so `tasks` and `flows` import this module first.
"""

import logging
import os

DEFAULTS = {
    # a temporary server migrates a new database before it answers, which takes longer than the default of 20 s
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # a run continues without a server that does not answer; these bound the time it waits first
    "PREFECT_API_REQUEST_TIMEOUT": "20",
    "PREFECT_CLIENT_MAX_RETRIES": "2",
}

for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)

logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # it logs its remaining events when a process ends
