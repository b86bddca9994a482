"""Finds the iteration in which the policy began to exploit its reward, as judged by a stricter reward.

The search (`onset`) scores as few iterations as it needs again. It generates, claims and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.executors import StageHandle
from ratchet.infra.progress import StepProgress, report
from ratchet.infra.runs.forks import state_before
from ratchet.infra.runs.run import Run, own_answers
from ratchet.infra.workers.calls import RowsCall
from ratchet.infra.workers.worker import Worker
from ratchet.rlhf import consent
from ratchet.rlhf.errors import RatchetError, UserError
from ratchet.rlhf.rewards.registry import check_rewards
from ratchet.tasks.analysis.onset import Onset, Rescored, search
from ratchet.tasks.stages.score import SCORE
from ratchet.tasks.worker_calls import call_of, on_worker

COLUMNS = (
    "trajectory_id",
    "prompt_id",
    "replayed_from",
    "rollout_error",
    "environment_reward",
    "score",
    "reward_error",
)


@dataclass(frozen=True)
class Hack:
    """An exploited reward."""

    onset: Onset
    """Where it began, and how sure that is."""
    examples: pd.DataFrame
    """Its trajectories that show it, highest advantages first, with all columns, `strict` (the stricter score) and
    `advantage` (mean over the tokens in the loss)."""

    @property
    def iteration(self) -> int:
        """The first iteration whose generations show it; the update of the iteration before taught it."""
        return self.onset.iteration


def bisect(run: Run, reward: str, overrides: Sequence[str] = (), more: int = 0) -> tuple[list[Rescored], Hack | None]:
    """Finds the iteration in which the gap between the run's reward and a stricter one began to open.

    The search assumes that an open gap stays open.

    Args:
        reward: The stricter reward function, on the scale of the run's reward.
        overrides: Changes of the config, such as ``reward.options.strict.limit=3``.
        more: The number of iterations to score beyond the search, as far as they can narrow its interval.

    Returns:
        The iterations that were scored again, in order, and the hack; None if the gap has not grown by more than its
        noise.

    Raises:
        UserError: The run has closed fewer than two iterations, the reward does not fit, or there is no consent to
            the run's code.
        RatchetError: The stricter reward fails for too many trajectories.
    """
    last = run.state.iteration - 1
    if last < 1:
        raise UserError(f"{run.store.url} has closed {last + 1} iterations: bisect needs two at least")
    changes: dict[str, object] = {
        **dict.fromkeys(("reward.model", "reward.judge")),
        "reward.function": reward,
        "reward.options": {},
        # score in this process
        "pools": {},
        "placement": "colocated",
    }
    config = run.config.with_values(changes, overrides)
    consent.require(run.config, config)
    check_rewards(config.reward)
    driver = Driver(config, run.store)  # without a claim
    scored: dict[int, pd.DataFrame] = {}
    steps = 2 + int(np.ceil(np.log2(last))) + more

    def look(iteration: int) -> Rescored:
        report(StepProgress(what="iterations scored again", done=len(scored), total=steps))
        frame = scored[iteration] = _scored_again(driver, run, iteration)
        # by prompt, since the answers to one prompt are not independent
        gaps = (frame["score"] - frame["strict"]).groupby(frame["prompt_id"]).mean()
        error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else 0.0
        return Rescored(iteration, float(frame["score"].mean()), float(frame["strict"].mean()), error)

    try:
        rescored, onset = search(look, last, more)
    finally:
        driver.groups.close()
    if onset is None:
        return rescored, None
    examples = _examples(run, onset.iteration, scored[onset.iteration], onset.threshold)
    return rescored, Hack(onset, examples)


def _scored_again(driver: Driver, run: Run, iteration: int) -> pd.DataFrame:
    """Returns the trajectories of an iteration with the columns `score` and `strict`."""
    store = run.store
    manifests = store.manifests(iteration)
    began = state_before(store, iteration, ())
    inputs = SCORE.inputs_of({"generate": StageHandle.of(manifests["generate"])})
    frames = []
    for number in range(len(manifests["generate"].shards)):
        call = call_of(
            driver, SCORE, iteration, inputs, shard=number, config=SCORE.config.of(driver.config), began=began
        )
        rows = RowsCall(call, SCORE.compute, SCORE.writes, SCORE.begin)
        [output], _ = on_worker(driver, call.needs, partial(driver.groups.of(None).call, Worker.computed, [rows]))
        frames.append(output.batch.table.select(["trajectory_id", "score", "reward_error"]).to_pandas())
    strict = pd.concat(frames, ignore_index=True).rename(columns={"score": "strict", "reward_error": "strict_error"})
    both = own_answers(run.trajectories(iteration, COLUMNS)).merge(strict, on="trajectory_id")
    both = both.astype({"score": float, "strict": float})  # means of float32 are rounded
    if "environment_reward" in both:  # what an environment or an agent's program gave is in both scores
        both["strict"] -= both["environment_reward"].astype(float).fillna(0.0)
    whole = both["reward_error"].isna() & both["strict_error"].isna() & both["rollout_error"].isna()
    if not whole.any():
        raise RatchetError(f"no trajectory of iteration {iteration} has both scores")
    return both[whole]


def _examples(run: Run, iteration: int, scored: pd.DataFrame, threshold: float) -> pd.DataFrame:
    chosen = scored[scored["score"] - scored["strict"] > threshold][["trajectory_id", "strict"]]
    rows = run.trajectories(iteration).merge(chosen, on="trajectory_id")
    if "advantages" not in rows:
        return rows.assign(advantage=np.nan)
    means = [mean_in_loss(values, mask) for values, mask in zip(rows["advantages"], rows["loss_mask"], strict=True)]
    return rows.assign(advantage=means).sort_values("advantage", ascending=False, kind="stable", ignore_index=True)


def mean_in_loss(advantages: np.ndarray[Any, Any] | None, mask: np.ndarray[Any, Any] | None) -> float:
    """Returns the mean advantage of a trajectory; without a mask, of all its tokens; NaN if it has none."""
    if advantages is None or not len(advantages):
        return math.nan
    in_loss = advantages if mask is None else advantages[mask > 0]
    return float(np.mean(in_loss)) if len(in_loss) else 0.0
