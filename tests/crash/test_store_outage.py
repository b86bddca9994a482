"""The store is away for a while: a stage is tried again in the same process, and nothing is applied twice."""

from __future__ import annotations

import pytest

from ratchet.rlhf.config import RunConfig
from tests.crash.test_two_drivers import check_finished
from tests.history import History
from tests.processes import Fault, Processes

OUTAGE = {
    "data": Fault("put", "trajectories/score/iteration=000001/.*part-00001", "after", outage_s=1.0),
    "manifest of an update": Fault("put", "manifests/iteration=000001/update_actor", "before", outage_s=1.0),
    "record of a stage": Fault("create", '{"kind":"stage","iteration":1,"stage":"values"', "before", outage_s=1.0),
    "record of an update": Fault(
        "create", '{"kind":"stage","iteration":1,"stage":"update_critic"', "before", outage_s=1.0
    ),
    "checkpoint": Fault("put", "checkpoints/critic/000002.*/optimizer", "before", outage_s=1.0),
    "record of a close": Fault("create", '{"kind":"close","iteration":1', "before", outage_s=1.0),
}


def _little_patience() -> None:
    from ratchet.infra.store.object_store import ObjectStore

    kwdefaults = ObjectStore.__init__.__kwdefaults__
    assert kwdefaults is not None
    kwdefaults["deadline_s"] = 0.3


@pytest.mark.parametrize("where", OUTAGE)
def test_outage(where: str, config: RunConfig, processes: Processes, uninterrupted: dict[int, History]) -> None:
    driver = processes.train(config, OUTAGE[where], setup=_little_patience)
    assert driver.wait() == 0, driver.text
    check_finished(config, uninterrupted)
    updates = [(update, place) for update in ("update_critic", "update_actor") for place in range(3)]
    assert sorted(call for call in driver.engine_calls if call[0].startswith("update")) == sorted(updates)
