"""Runs whose rollout has weights of its own: each transfer is checked, and a wrong rollout never generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from torch import Tensor

from ratchet.infra.runs.vacuum import unreached
from ratchet.infra.runs.verify import verify
from ratchet.infra.store.records import CANARIES, CanaryCheck
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.rollout.canary import TEXTS
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes

BROKEN = 3
"""The transfer that fails: of the weights after two updates, with which iteration 2 begins."""


def transfers_fail() -> None:
    """In the driver: from the transfer `BROKEN`, new weights do not reach the rollout."""
    from ratchet.rlhf.rollout.hf_engine import HFRollout

    load = HFRollout.load_weights
    loads = 0

    def load_weights(
        self: HFRollout, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None
    ) -> int:
        nonlocal loads
        loads += 1
        return load(self, weights, adapter_config) if loads < BROKEN else sum(tensor.nbytes for _, tensor in weights)

    HFRollout.load_weights = load_weights  # type: ignore[method-assign]


def no_transfer_succeeds() -> None:
    """In the driver: the rollout keeps the weights of the model's files, which are older."""
    from ratchet.rlhf.rollout.hf_engine import HFRollout

    def load_weights(
        self: HFRollout, weights: Iterable[tuple[str, Tensor]], adapter_config: bytes | None = None
    ) -> int:
        return sum(tensor.nbytes for _, tensor in weights)

    HFRollout.load_weights = load_weights  # type: ignore[method-assign]


@pytest.fixture
def config(workspace: Path, processes: Processes) -> RunConfig:
    return own_copy(workspace, processes)


def own_copy(workspace: Path, processes: Processes, **changes: Any) -> RunConfig:
    """The actor is sharded, so that the rollout in the same process has a copy."""
    return tiny.config(
        workspace,
        run__store=f"file://{processes.folder}/runs",
        reward__function="tests.rewards:letters",
        **{"train__iterations": 4, "actor__engine": "fsdp"} | changes,
    )


def train(processes: Processes, config: RunConfig, *faults: Fault, setup: Callable[[], None] | None = None) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path, faults=faults, setup=setup)


def test_every_transfer_is_checked(config: RunConfig, processes: Processes) -> None:
    child = train(processes, config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    checks = history.commits(CanaryCheck)
    assert [(check.iteration, check.weights.version, check.problem) for check in checks] == [
        (number, number, None) for number in range(4)
    ]
    metrics = history.run.metrics()
    assert (metrics["canary/difference"] < metrics["canary/tolerance"]).all()
    assert metrics["canary/tolerance"].tolist() == [2e-3, 2e-3, 2e-3, 2e-6], "three checks teach it"
    frame = pd.read_parquet(f"{history.folder}/canaries")
    assert len(frame) == 4 * TEXTS and frame["version"].nunique() == 4
    assert frame["ids"].map(tuple).nunique() == TEXTS, "the texts of a run are always the same"
    assert frame["trainer_log_probs"].map(tuple).nunique() == 4 * TEXTS, "and the policy learns"
    pd.testing.assert_frame_equal(
        history.run.canary(2).reset_index(drop=True), frame[frame["version"] == 2].reset_index(drop=True)
    )
    assert not unreached(history.run.store)
    assert not list(verify(history.run.store))


def test_a_rollout_with_old_weights_stops_the_run(config: RunConfig, processes: Processes) -> None:
    child = train(processes, config, setup=transfers_fail)
    assert child.wait() == 1
    assert (
        "the rollout should have the actor's weights after 2 updates, but still has the weights from before"
        in child.text
    )
    assert "Traceback" not in child.text
    then = History.of(config)
    assert (then.state.iteration, then.state.shards, then.state.stages) == (2, {}, {}), "nothing was generated"
    assert then.commits(CanaryCheck)[-1].problem is not None
    again = processes.cli("resume", config.run.name, "--store", config.run.store, setup=no_transfer_succeeds)
    assert again.wait() == 1, "the fault is still there"
    assert not History.of(config).state.shards
    resumed = processes.cli("resume", config.run.name, "--store", config.run.store)
    assert resumed.wait() == 0, resumed.text
    undisturbed = config.with_values({"run.name": "undisturbed"})
    assert train(processes, undisturbed).wait() == 0
    assert History.of(config).results == History.of(undisturbed).results


def test_or_is_noted(processes: Processes, workspace: Path) -> None:
    config = own_copy(workspace, processes, rollout__canary="note")
    child = train(processes, config, setup=transfers_fail)
    assert child.wait() == 0, child.text
    assert child.text.count("still has the weights from before the last update") == 2
    problems = [check.problem is not None for check in History.of(config).commits(CanaryCheck)]
    assert problems == [False, False, True, True]


def test_or_not_checked(processes: Processes, workspace: Path) -> None:
    config = own_copy(workspace, processes, rollout__canary="off", train__iterations=2)
    child = train(processes, config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    assert not history.commits(CanaryCheck)
    assert history.run.canary(1).empty


@pytest.mark.parametrize("fault", [Fault("put", "canaries/000001"), Fault("create", '{"kind":"canary","iteration":1')])
def test_killed_at_a_check(config: RunConfig, processes: Processes, fault: Fault) -> None:
    """The check is made again, and the run goes on as if nothing had happened."""
    killed = train(processes, config, fault)
    assert killed.wait() == -9, killed.text
    resumed = processes.cli("resume", config.run.name, "--store", config.run.store)
    assert resumed.wait() == 0, resumed.text
    undisturbed = config.with_values({"run.name": "undisturbed"})
    assert train(processes, undisturbed).wait() == 0
    history, expected = History.of(config), History.of(undisturbed)
    assert history.results == expected.results
    assert len(history.state.canary_differences) == CANARIES
    assert {check.weights for check in history.commits(CanaryCheck)} == {
        check.weights for check in expected.commits(CanaryCheck)
    }
