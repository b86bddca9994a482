"""validate: held-out prompts, answered and scored by the actor as the iteration finds it."""

from __future__ import annotations

from typing import Any

from infra.driver import Driver
from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.base import Sampling
from tasks.generate import respond
from tasks.score import REWARD_KEYS, scores
from tasks.spec import StageSpec
from tasks.stage import rows

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
        "rollout.engine",
        "rollout.top_p",
        "rollout.max_response_tokens",
        "rollout.stop",
        "rollout.quantization",
        "rollout.prompts_per_shard",
        "validation.n",
        "validation.temperature",
        *REWARD_KEYS,
    ),
    operational_keys=("validation.data", "reward.workers"),
    digests=("validation", "reward", "tokenizer"),
    role="rollout",
)


def _shards(driver: Driver) -> int:
    assert driver.config.validation.data is not None
    prompts = len(driver.groups.local.worker.dataset((driver.config.validation.data,)))
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
        stop=config.rollout.stop,
        seed=config.run.seed + 1,  # noise of its own: not that of the training prompts with the same numbers
    )
    answers = respond(context, dataset, [(number, number) for number in numbers], config.validation.n, sampling)
    scored = scores(context, answers)
    context.outputs["scores"] = sums = dict[str, list[float]]()
    for source, score in zip(answers.list("data_source"), scored["score"], strict=True):
        total, count = sums.get(source, (0.0, 0))
        sums[source] = [total + score, count + 1]
    columns = {name: answers.array(name) if name in answers else scored[name] for name in SPEC.writes}
    return TrajectoryBatch.of({"trajectory_id": answers.array("trajectory_id"), **columns})


def _solve_rates(outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean score by data source: pass@1 where scores are 0 or 1."""
    sums: dict[str, list[list[float]]] = {}
    for shard in outputs:
        for source, total_and_count in shard["scores"].items():
            sums.setdefault(source, []).append(total_and_count)
    return {
        f"val/{source}/mean_score": sum(total for total, _ in parts) / sum(count for _, count in parts)
        for source, parts in sums.items()
    }


validate = rows(SPEC, count=_shards, summary=_solve_rates)(validate_shard)
