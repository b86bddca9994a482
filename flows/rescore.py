"""New scores on old generations: a run that takes the trajectories of another, and scores them anew."""

from __future__ import annotations

from collections.abc import Iterable

from prefect import flow

from flows.train import train
from infra.execution.claims import run_url
from infra.runs import open_run
from infra.store.log import RunLog
from infra.store.object_store import ObjectStore
from rlhf.config import RunConfig
from rlhf.errors import UserError
from tasks.plan import fork_run


@flow(name="rescore", flow_run_name="{config.run.name}", persist_result=False)
def rescore(config: RunConfig, take_over: bool = False) -> None:
    """Begin the run that `config` names beside the run at `data.generations`, if it is not there yet, and drive it."""
    begin(config)
    train(config, take_over=take_over)


def rescoring_config(
    source: str, run: str, reward: str | None, learn: bool, overrides: Iterable[str] = ()
) -> RunConfig:
    """The config of the run at `source`, a URL, with its generations, and another reward function, if one is named.

    Without `learn`, only scores are made. With it, every iteration also updates: off-policy, and so corrected.
    """
    parent = open_run(source)
    if parent.state.iteration == 0:
        raise UserError(f"{source} has not closed an iteration yet: there is nothing to score again")
    changes = {
        "run.name": run,
        "run.store": source.rpartition("/")[0],
        "data.generations": source,
        **({} if reward is None else {"reward.function": reward, "reward.model": None, "reward.options": {}}),
        "train": {"iterations": parent.state.iteration, "updates": learn},
        "validation": parent.config.validation.model_dump() if learn else {},
    }
    if learn and (correction := parent.config.algorithm.rollout_correction) is not None and correction.weights is None:
        changes["algorithm.rollout_correction"] = {"weights": {}, "rejection": [*correction.model_dump()["rejection"]]}
    elif learn and correction is None:
        changes["algorithm.rollout_correction"] = {"weights": {}}
    return parent.config.with_values(changes, overrides)


def begin(config: RunConfig) -> None:
    """Make the run a fork of its source at the start, so that it begins with the same weights and the same claims."""
    assert config.data.generations is not None
    if RunLog(ObjectStore(run_url(config.run.store, config.run.name))).read().slot < 0:
        fork_run(open_run(config.data.generations), config, 0, None)
