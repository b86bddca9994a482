"""Runs a rollout worker of a run; see `ratchet.tasks.rollout_worker`."""

from __future__ import annotations

from prefect import flow

from ratchet.tasks.recording import noted
from ratchet.tasks.rollout_worker import work


@flow(name="rollout-worker", flow_run_name="rollout worker of {run}", persist_result=False)
@noted
def rollout_worker(run: str) -> int:
    """Generate shards of a run beside its driver, until the run is complete.

    Args:
        run: The URL of the run's folder.

    Returns:
        The number of shards that this worker has committed.
    """
    return work(run)
