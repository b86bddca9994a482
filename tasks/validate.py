"""validate: held-out prompts, answered and scored by the actor as the iteration finds it."""

from __future__ import annotations

from itertools import compress
from typing import Any

from infra.driver import Driver
from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.base import Sampling
from rlhf.rewards import solved_score
from rlhf.validation import means, sums
from tasks.generate import respond
from tasks.reward_model import MODEL_KEYS, MODEL_OPERATIONAL_KEYS
from tasks.score import REWARD_KEYS, counting, scores
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
        "reward_error",
    ),
    config_keys=(
        "run.seed",
        "model.dtype",
        "data.max_prompt_tokens",
        "data.truncation",
        "data.system_prompt",
        "rollout.engine",
        "rollout.top_p",
        "rollout.max_response_tokens",
        "rollout.stop",
        "rollout.environment.name",
        "rollout.environment.options",
        "rollout.environment.max_turns",
        "rollout.quantization",
        "rollout.prompts_per_shard",
        "validation.n",
        "validation.temperature",
        "validation.solved_score",
        *REWARD_KEYS,
        *MODEL_KEYS,
    ),
    operational_keys=(
        "validation.data",
        "rollout.environment.timeout_s",
        "reward.workers",
        *MODEL_OPERATIONAL_KEYS,
    ),
    digests=("validation", "reward", "tokenizer", "environment"),
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
    kept = counting(config, scored["reward_error"])
    columns = (*map(answers.list, ("data_source", "prompt_id", "response")), scored["score"])
    sources, prompts, texts, found = (list(compress(column, kept)) for column in columns)
    context.outputs["sums"] = sums(sources, prompts, texts, found, config.validation.n, solved_score(config))
    context.outputs["errors"] = sum(error is not None for error in scored["reward_error"])
    written = {name: answers.array(name) if name in answers else scored[name] for name in SPEC.writes}
    return TrajectoryBatch.of({"trajectory_id": answers.array("trajectory_id"), **written})


def _metrics(outputs: list[dict[str, Any]]) -> dict[str, float]:
    found = means(shard["sums"] for shard in outputs)
    errors = sum(shard.get("errors", 0) for shard in outputs)
    metrics = {f"val/{source}/{name}": value for source, each in found.items() for name, value in each.items()}
    return metrics | ({"val/reward_errors": float(errors)} if errors else {})


validate = rows(SPEC, count=_shards, summary=_metrics)(validate_shard)
