"""The routes that a stage's model follows."""

from __future__ import annotations

from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import ROUTES


def with_routes(batch: TrajectoryBatch, router_replay: bool) -> TrajectoryBatch:
    """Returns a batch with the column of routes if the model follows them, and otherwise without any.

    Raises UserError if a trajectory has no routes. An expert's answer has an empty list: the model chooses.
    """
    if not router_replay:
        # else the same batch, which is computed together with those of other shards
        return batch.without(ROUTES) if batch.has_values(ROUTES) else batch
    missing = batch.array(ROUTES).is_null().to_pylist()
    if any(missing):
        raise UserError(
            f"{batch.list('trajectory_id')[missing.index(True)]} has no {ROUTES}: it was generated without "
            "rollout.router_replay: generate the iteration again, or set rollout.router_replay: false"
        )
    return batch
