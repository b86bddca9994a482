"""generate: the rollout engine answers the iteration's prompts, shard by shard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import JsonValue

from infra.execution.driver import Driver
from infra.workers.calls import C, Context, ShardOutput, ShardSummary
from rlhf.batch import TrajectoryBatch, ragged
from rlhf.config import DynamicSamplingConfig, RunConfig
from rlhf.data.prompts import PromptDataset, encode
from rlhf.engines.base import Generation, Request, Sampling
from rlhf.environments.dialogues import Beginning, Dialogue, Environments, multi_turn
from rlhf.schema import TRAJECTORY
from rlhf.stage_config import StageConfig, key
from tasks.score import ScoreSummary
from tasks.stage import RowsStage, Until

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptConfig(StageConfig):
    """How a row of the dataset becomes a prompt."""

    section = "data"
    max_prompt_tokens: int = key("max_prompt_tokens")
    truncation: str = key("truncation")
    system_prompt: str | None = key("system_prompt")


class EnvironmentStageConfig(StageConfig):
    section = "rollout.environment"
    name: str = key("name")
    options: dict[str, Any] = key("options")
    max_turns: int = key("max_turns")
    timeout_s: float = key("timeout_s", operational=True)


class GenerateConfig(StageConfig):
    seed: int = key("run.seed")
    dtype: str = key("model.dtype")
    prompts_per_iteration: int = key("data.prompts_per_iteration")
    prompt: PromptConfig
    engine: str = key("rollout.engine")
    n: int = key("rollout.n")
    temperature: float = key("rollout.temperature")
    top_p: float = key("rollout.top_p")
    max_response_tokens: int = key("rollout.max_response_tokens")
    ignore_eos: bool = key("rollout.ignore_eos")
    stop: tuple[str, ...] = key("rollout.stop")
    environment: EnvironmentStageConfig | None
    quantization: str | None = key("rollout.quantization")
    prompts_per_shard: int = key("rollout.prompts_per_shard")
    dynamic_sampling: DynamicSamplingConfig | None = key("algorithm.dynamic_sampling")
    # operational: the dataset's digest covers the content of the files, and the assigned weights cover `partial`
    train: tuple[str, ...] = key("data.train", operational=True)
    partial: bool = key("rollout.partial", operational=True)
    partial_tokens: int = key("rollout.partial_tokens", operational=True)


class GenerateSummary(ShardSummary):
    tokens: int
    oldest_version: int | None = None
    """The oldest version of the policy that drew any of the tokens."""


def shards_of(driver: Driver) -> int:
    """Number of shards; the maximum, with dynamic sampling."""
    return -(-driver.config.max_prompts // driver.config.rollout.prompts_per_shard)


def samples_dynamically(config: RunConfig) -> bool:
    return config.algorithm.dynamic_sampling is not None


def enough_prompts_differ(config: RunConfig, scored: Sequence[Mapping[str, JsonValue]]) -> bool:
    """Whether dynamic sampling has enough prompts whose scores differ; `scored` has a summary per scored shard."""
    differ = sum(ScoreSummary.model_validate(shard).prompts_that_differ for shard in scored)
    return differ >= config.data.prompts_per_iteration


def generated_tokens(summaries: Sequence[GenerateSummary]) -> dict[str, float]:
    return {"perf/generated_tokens": float(sum(shard.tokens for shard in summaries))}


def generate(context: Context[GenerateConfig]) -> ShardOutput[GenerateSummary]:
    """Answer the prompts of one shard.

    Args:
        context: The call, which has the shard and the position in the dataset at which the iteration begins.

    Returns:
        `rollout.n` trajectories for each prompt, and the position after the shard's last prompt.
    """
    config = context.config
    dataset = context.resources.dataset(config.train)
    sampling_more = config.dynamic_sampling
    limit = config.prompts_per_iteration if sampling_more is None else sampling_more.max_prompts
    first = context.shard * config.prompts_per_shard
    end = min(first + config.prompts_per_shard, limit)
    drawn = dataset.draw(config.seed, context.call.cursor + first, end - first)
    prompts = list(enumerate(drawn, first))
    sampling = Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_response_tokens,
        seed=config.seed,
        ignore_eos=config.ignore_eos,
        stop=config.stop,
    )
    piece_tokens = config.partial_tokens if config.partial else None
    batch, versions = respond(
        context, config.prompt, config.environment, dataset, prompts, config.n, sampling, piece_tokens
    )
    summary = GenerateSummary(
        tokens=int(batch.flat("response_mask").sum()),
        oldest_version=min(map(min, versions)),
        cursor=context.call.cursor + end,
    )
    return ShardOutput(batch, summary)


def respond(
    context: Context[C],
    data: PromptConfig,
    environment: EnvironmentStageConfig | None,
    dataset: PromptDataset,
    prompts: list[tuple[int, int]],
    n: int,
    sampling: Sampling,
    piece_tokens: int | None = None,
) -> tuple[TrajectoryBatch, list[list[int]]]:
    """Let the policy answer prompts, alone or in turns with an environment.

    Args:
        context: Gives the rollout engine, the tokenizer and the environment.
        data: How a row of the dataset becomes a prompt.
        environment: The environment; None: the policy answers alone.
        dataset: The prompts.
        prompts: For each prompt, its number in the iteration and its row in the dataset.
        n: Trajectories per prompt.
        sampling: Sampling parameters and seed.
        piece_tokens: Number of tokens after which generation may continue with newer weights; None: never.

    Returns:
        Trajectories with all columns of `generate`, and for each the version of the policy that drew each token.
    """
    tokenizer = context.resources.tokenizer

    def write(requests: Sequence[Request], sampling: Sampling) -> tuple[list[Generation], list[list[int]]]:
        return context.generate(requests, sampling, piece_tokens)

    requests: list[Request] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("trajectory_id", *TRAJECTORY.names("generate"))}
    beginnings: list[Beginning] = []
    for number, row in prompts:
        prompt = dataset.prompts[row]
        text, ids = encode(
            prompt,
            tokenizer,
            max_tokens=data.max_prompt_tokens,
            truncation=data.truncation,
            system_prompt=data.system_prompt,
        )
        turns = prompt.after(data.system_prompt)
        messages = json.dumps(turns, ensure_ascii=False)
        prompt_id = f"it{context.iteration:06d}-p{number:05d}"
        for sample in range(n):
            requests.append(Request(f"{prompt_id}-s{sample:02d}", tuple(ids)))
            of_prompt = (prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
            beginnings.append(Beginning(requests[-1].trajectory_id, turns, *of_prompt))
            columns["trajectory_id"].append(requests[-1].trajectory_id)
            columns["prompt_id"].append(prompt_id)
            columns["sample"].append(sample)
            columns["data_source"].append(prompt.data_source)
            columns["messages"].append(messages)
            columns["prompt"].append(text)
            columns["prompt_ids"].append(ids)
            columns["ground_truth"].append(prompt.ground_truth)
            columns["ground_truth_is_json"].append(prompt.ground_truth_is_json)
            columns["extra_info"].append(prompt.extra_info)
            columns["seed"].append(sampling.seed)
    if environment is None:
        written = _alone(*write(requests, sampling))
    else:
        make = context.resources.environment(environment.name)
        environments = Environments(make, environment.options, beginnings, timeout_s=environment.timeout_s)
        dialogues = [Dialogue(request) for request in requests]
        multi_turn(write, dialogues, environments, sampling, tokenizer, environment.max_turns)
        written = _together(dialogues, tokenizer)
    versions = written.pop("versions")
    batch = TrajectoryBatch.of(
        columns
        | written
        | {
            "policy_version": [row[0] for row in versions],
            "token_versions": [None if len(set(row)) == 1 else row for row in versions],
            "response": tokenizer.batch_decode(
                [list(ids) for ids in written["response_ids"]], skip_special_tokens=True
            ),
        }
    )
    return batch, versions


def _alone(generations: Sequence[Generation], versions: list[list[int]]) -> dict[str, Any]:
    """Columns of responses that the policy wrote alone."""
    lengths = np.array([len(generation.response_ids) for generation in generations])
    return {
        "response_ids": [generation.response_ids for generation in generations],
        "rollout_log_probs": [generation.log_probs for generation in generations],
        "response_mask": ragged(np.ones(lengths.sum(), dtype=np.int8), lengths),
        "finish_reason": [generation.finish_reason for generation in generations],
        "turns": [None] * len(generations),
        "environment_reward": [None] * len(generations),
        "versions": versions,
    }


def _together(dialogues: Sequence[Dialogue], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Columns of responses that the policy and an environment wrote in turns."""
    return {
        "response_ids": [dialogue.ids for dialogue in dialogues],
        "rollout_log_probs": [dialogue.log_probs for dialogue in dialogues],
        "response_mask": [dialogue.mask for dialogue in dialogues],
        "finish_reason": [dialogue.finish_reason for dialogue in dialogues],
        "turns": [dialogue.turns(tokenizer) for dialogue in dialogues],
        "environment_reward": [dialogue.reward for dialogue in dialogues],
        "versions": [dialogue.versions for dialogue in dialogues],
    }


def exists(config: RunConfig) -> bool:
    return True


GENERATE = RowsStage(
    name="generate",
    label="gen",
    config=GenerateConfig,
    exists=exists,
    writes=TRAJECTORY.of("generate"),
    compute=generate,
    summary=GenerateSummary,
    metrics=generated_tokens,
    count=shards_of,
    until=Until(applies=samples_dynamically, follow=("reward_model", "score"), enough=enough_prompts_differ),
    outside=("dataset", "tokenizer", "environment"),
    role="rollout",
)
