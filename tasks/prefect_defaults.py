"""Sets defaults for Prefect; environment variables of the user take precedence.

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

TEMPORARY_SERVER = {
    # task runs are written in batches: a transaction for each event took more CPU time than everything else it does
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    # the feed of events, its subscribers, and automations; runs and tasks are recorded without them, with their states
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
}
"""Settings of the temporary server that Prefect starts without `PREFECT_API_URL`: it only records, and nobody watches
it. It inherits the environment."""

for name, value in (DEFAULTS if os.environ.get("PREFECT_API_URL") else DEFAULTS | TEMPORARY_SERVER).items():
    os.environ.setdefault(name, value)

logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # it logs its remaining events when a process ends
