"""Notes for the user on a committed stage: failures that did not stop the run, and budgets that are too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ratchet.infra.store.manifest import Manifest
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.sections import AgentConfig, EnvironmentConfig
from ratchet.tasks.stages.generate import FIRST_TURN_CLIP_RATIO, GENERATE
from ratchet.tasks.stages.greedy_baseline import GREEDY_BASELINE
from ratchet.tasks.stages.score import SCORE
from ratchet.tasks.stages.validate import VALIDATE


@dataclass(frozen=True)
class Failure:
    """A kind of failure of trajectories."""

    metric: str
    column: str
    what: str | None
    """The part that failed; None: the environment or the agent, by the config."""


REWARD = "the reward"
FAILURES: dict[str, tuple[Failure, ...]] = {
    VALIDATE.name: (
        Failure("val/rollout_errors", "rollout_error", None),
        Failure("val/tool_errors", "tool_error", "a tool"),
        Failure("val/reward_errors", "reward_error", REWARD),
    ),
    GENERATE.name: (
        Failure("rollout/errors", "rollout_error", None),
        Failure("rollout/tool_errors", "tool_error", "a tool"),
    ),
    SCORE.name: (Failure("reward/errors", "reward_error", REWARD),),
    GREEDY_BASELINE.name: (Failure("reward/greedy_errors", "greedy_error", REWARD),),
}
"""By the stage that commits them."""
METRICS = frozenset(failure.metric for failures in FAILURES.values() for failure in failures)
MANY_CUT = 0.1
"""Share of an iteration's conversations whose first turn used the whole budget at which a note reports it."""


def told(store: RunStore, config: RunConfig, manifest: Manifest) -> Iterator[str]:
    """Yields a line for each kind of failure of a committed stage, with the first one, and for a budget too small."""
    place = f"{'the validation before ' if manifest.stage == VALIDATE.name else ''}iteration {manifest.iteration}"
    for failure in FAILURES.get(manifest.stage, ()):
        if count := int(manifest.metrics.get(failure.metric, 0)):
            what = failure.what or (EnvironmentConfig if config.rollout.agent is None else AgentConfig).noun
            trajectories = "1 trajectory" if count == 1 else f"{count} trajectories"
            yield f"{place}: {what} failed for {trajectories}; the first: {_first(store, manifest, failure.column)}"
    if (share := manifest.metrics.get(FIRST_TURN_CLIP_RATIO, 0.0)) > MANY_CUT:
        yield (
            f"{place}: {share:.0%} of the conversations ended in their first turn, which took all of "
            f"rollout.max_response_tokens {config.rollout.max_response_tokens}, the budget of a whole conversation: "
            "raise it, or shorten the turns"
        )


def _first(store: RunStore, manifest: Manifest, column: str) -> str:
    """Returns the first error in a column, with its trajectory."""
    for shard in manifest.shards:
        for row in store.read_shard(shard, ["trajectory_id", column]).to_pylist():
            if (error := row[column]) is not None:
                named: str = row["trajectory_id"]
                return str(error) if named in error else f"{named}: {error}"
    raise AssertionError(f"{column} has no error, though {manifest.stage} counts some")
