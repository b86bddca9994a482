"""validate: held-out prompts, answered and scored by the actor as the iteration finds it."""

from __future__ import annotations

from infra.driver import Driver
from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.base import Sampling
from tasks.generate import respond
from tasks.score import scores
from tasks.stage import StageSpec, rows

SPEC = StageSpec(
    name="validate",
    writes=(
        "prompt_id",
        "sample",
        "data_source",
        "prompt",
        "response",
        "response_ids",
        "finish_reason",
        "policy_version",
        "ground_truth",
        "score",
        "reward_parts",
    ),
    config_keys=(
        "run.seed",
        "model.dtype",
        "data.max_prompt_tokens",
        "data.truncation",
        "rollout.top_p",
        "rollout.max_response_tokens",
        "rollout.prompts_per_shard",
        "validation.n",
        "validation.temperature",
        "reward",
    ),
    operational_keys=("validation.data",),
    digests=("validation", "reward", "tokenizer"),
    role="rollout",
)


def _shards(driver: Driver) -> int:
    assert driver.config.validation.data is not None
    prompts = len(driver.group.worker.dataset((driver.config.validation.data,)))
    return -(-prompts // driver.config.rollout.prompts_per_shard)


def validate_shard(context: Context) -> TrajectoryBatch:
    """Answer and score one shard of the held-out prompts."""
    config = context.config
    dataset = context.worker.dataset((config.validation.data,))
    first = context.shard * config.rollout.prompts_per_shard
    numbers = range(first, min(first + config.rollout.prompts_per_shard, len(dataset)))
    sampling = Sampling(
        temperature=config.validation.temperature,
        top_p=config.rollout.top_p,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed + 1,  # noise of its own: not that of the training prompts with the same numbers
    )
    answers = respond(context, dataset, [(number, number) for number in numbers], config.validation.n, sampling)
    scored = scores(context, answers)
    columns = {name: answers.array(name) if name in answers else scored[name] for name in SPEC.writes}
    return TrajectoryBatch.of({"trajectory_id": answers.array("trajectory_id"), **columns})


validate = rows(SPEC, count=_shards)(validate_shard)
