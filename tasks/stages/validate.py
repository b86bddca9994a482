"""validate: answers held-out prompts with the actor before the iteration, and scores the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from ratchet.infra.execution.driver import Driver
from ratchet.infra.workers.calls import Context, ShardOutput, ShardStart, ShardSummary
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.built_in_rewards import solved_score
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.engines import RolloutEngine
from ratchet.rlhf.config.sections import AgentConfig, EnvironmentConfig, PromptConfig, ResponseConfig, RewardConfig
from ratchet.rlhf.metrics import validation_metrics as named
from ratchet.rlhf.rollout.engine import Sampling
from ratchet.rlhf.schema import TRAJECTORY
from ratchet.rlhf.stage_config import StageConfig, key, section
from ratchet.rlhf.validation import Sums, means, reported, sums
from ratchet.tasks.stage import RowsStage
from ratchet.tasks.stages.generate import (
    Prompts,
    begin_trajectories,
    trajectories,
)
from ratchet.tasks.stages.reward_model import is_complete
from ratchet.tasks.stages.score import counting, scores

WRITES = tuple(
    TRAJECTORY[name]
    for name in (
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
        "rollout_error",
        "tool_error",
    )
)


class ValidateConfig(StageConfig):
    seed: int = key("run.seed")
    dtype: str = key("model.dtype")
    prompt: PromptConfig = section("data")
    engine: RolloutEngine = key("rollout.engine")
    response: ResponseConfig = section("rollout")
    environment: EnvironmentConfig | None = section("rollout.environment")
    agent: AgentConfig | None = section("rollout.agent")
    prompts_per_shard: int = key("rollout.prompts_per_shard")
    n: int = key("validation.n")
    temperature: float = key("validation.temperature")
    top_p: float | None = key("validation.top_p")
    top_k: int | None = key("validation.top_k")
    solved_score: float | None = key("validation.solved_score")
    reward: RewardConfig = section("reward")
    data: str = key("validation.data", operational=True)


class ValidateSummary(ShardSummary):
    sums: Sums
    errors: int = 0
    rollout_errors: int = 0
    tool_errors: int = 0
    n: int
    """Answers per prompt."""


def shards_of(driver: Driver) -> int:
    assert driver.config.validation.data is not None
    prompts = len(driver.groups.local.worker.resources.dataset((driver.config.validation.data,)))
    return -(-prompts // driver.config.rollout.prompts_per_shard)


def prompts_of(context: Context[ValidateConfig]) -> Prompts:
    """Returns one shard of the held-out prompts."""
    config = context.config
    dataset = context.resources.dataset((config.data,))
    first = context.shard * config.prompts_per_shard
    numbers = range(first, min(first + config.prompts_per_shard, len(dataset)))
    seed = config.seed + 1  # different noise from the training prompts with the same numbers
    sampling = Sampling.of(config.response, temperature=config.temperature, seed=seed)
    if config.top_p is not None:
        sampling = replace(sampling, top_p=config.top_p)
    if config.top_k is not None:
        sampling = replace(sampling, top_k=config.top_k)
    rows = [(number, number) for number in numbers]
    return Prompts(dataset, rows, config.prompt, config.n, sampling, config.environment, config.agent)


def begin(context: Context[ValidateConfig]) -> ShardStart:
    return begin_trajectories(context, prompts_of(context))


def validate(context: Context[ValidateConfig]) -> ShardOutput[ValidateSummary]:
    config = context.config
    answers = trajectories(context, prompts_of(context))
    answers = answers.take(answers.last_branches())
    scored = scores(context, config.reward, config.reward.model, answers)
    complete = is_complete(answers)
    kept = counting(config.reward.on_error, scored["reward_error"]) & complete
    columns = (*map(answers.list, ("data_source", "prompt_id", "response")), scored["score"])
    sources, prompt_ids, texts, counted = (list(compress(column, kept)) for column in columns)
    alone = config.reward.model is None and config.environment is None and config.agent is None
    solved = solved_score(config.solved_score, config.reward.function, alone=alone)
    summary = ValidateSummary(
        sums=sums(sources, prompt_ids, texts, counted, config.n, solved),
        errors=sum(error is not None for error in scored["reward_error"]),
        rollout_errors=int((~complete).sum()),
        tool_errors=sum(error is not None for error in answers.list("tool_error")),
        n=config.n,
    )
    names = [column.name for column in WRITES]
    written = {name: answers.array(name) if name in answers else scored[name] for name in names}
    return ShardOutput(TrajectoryBatch.of({"trajectory_id": answers.array("trajectory_id"), **written}), summary)


def validation_metrics(summaries: Sequence[ValidateSummary]) -> dict[str, float]:
    by_source = means(shard.sums for shard in summaries)
    metrics: dict[str, float] = {}
    for source, statistics in by_source.items():
        metrics |= named(source, statistics, max(shard.n for shard in summaries))
    failed = {
        "val/reward_errors": sum(shard.errors for shard in summaries),
        "val/rollout_errors": sum(shard.rollout_errors for shard in summaries),
        "val/tool_errors": sum(shard.tool_errors for shard in summaries),
    }
    return metrics | {name: float(count) for name, count in failed.items() if count}


def validation_columns(driver: Driver) -> list[str]:
    """Returns the metrics that a validation of the run may report, in addition to those of `ratchet.rlhf.metrics`."""
    validation = driver.config.validation
    if validation.data is None:
        return []
    prompts = driver.groups.local.worker.resources.dataset((validation.data,))
    return reported((prompt.data_source for prompt in prompts), validation.n)


def exists(config: RunConfig) -> bool:
    return config.validation.data is not None


VALIDATE = RowsStage(
    name="validate",
    label="valid",
    config=ValidateConfig,
    exists=exists,
    writes=WRITES,
    compute=validate,
    begin=begin,
    summary=ValidateSummary,
    metrics=validation_metrics,
    count=shards_of,
    outside=("validation", "reward", "tokenizer", "environment"),
    role="rollout",
)
