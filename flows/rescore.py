"""Rescores old generations: a run that reuses the trajectories of another and scores them again."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import flow

from ratchet.flows.overrides import Override
from ratchet.flows.train import train
from ratchet.infra.execution.claims import run_url
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.log import RunLog
from ratchet.infra.store.object_store import ObjectStore
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis.plan import fork_run


@flow(name="rescore", flow_run_name="{config.run.name}", persist_result=False)
def rescore(config: RunConfig, take_over: bool = False, overrides: Sequence[Override] = ()) -> None:
    """Create the run that `config` names next to the run at `data.generations`, unless it exists, and drive it.
    `overrides` change single values of `config`."""
    config = config.with_values({}, overrides)
    consent.give(config)
    begin(config)
    train(config, take_over=take_over)


def rescoring_config(
    source: str, run: str, reward: str | None, learn: bool, overrides: Sequence[str] = ()
) -> RunConfig:
    """Returns the config of a run that scores the generations of another run.

    Args:
        source: URL of the run that has the generations.
        run: Name of the new run.
        reward: Its reward function; None: that of `source`.
        learn: True to train on the new scores; otherwise the run only scores.
        overrides: Changes, as on the command line.

    Raises:
        UserError: `source` has not closed an iteration, or there is no consent to its code; or another trainer
            computes it, and `learn` is true or `reward` is missing.
    """
    parent = open_run(source)
    if parent.state.iteration == 0:
        raise UserError(f"{source} has not closed an iteration yet: there is nothing to score again")
    if reward is None and not any(change.startswith("reward.") for change in overrides):
        parent.config.require_own("has no reward for it", "name one with --reward, or reward.model=PATH")
    if learn:
        parent.config.require_own("cannot train on it", "leave --train out to only score its answers")
    changes = {
        "run.name": run,
        "run.store": source.rpartition("/")[0],
        "data.generations": source,
        "observed": None,
        **(
            {}
            if reward is None
            else dict.fromkeys(("reward.model", "reward.judge")) | {"reward.function": reward, "reward.options": {}}
        ),
        "train": {"iterations": parent.state.iteration, "updates": learn},
        "validation": parent.config.validation.model_dump() if learn else {},
        "tracking": list(parent.config.tracking) if learn else [],
    }
    # training on another run's generations is off-policy, so it needs importance weights
    if learn and (correction := parent.config.algorithm.rollout_correction) is not None and correction.weights is None:
        changes["algorithm.rollout_correction"] = {"weights": {}, "rejection": [*correction.model_dump()["rejection"]]}
    elif learn and correction is None:
        changes["algorithm.rollout_correction"] = {"weights": {}}
    config = parent.config.with_values(changes, overrides)
    consent.require(parent.config, config)
    return config


def begin(config: RunConfig) -> None:
    """Forks the run from its source at iteration 0, unless it exists, so that both start with the same weights."""
    assert config.data.generations is not None
    if RunLog(ObjectStore(run_url(config.run.store, config.run.name))).read().slot < 0:
        fork_run(open_run(config.data.generations), config, 0, None)
