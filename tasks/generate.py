"""generate: the rollout engine answers the iteration's prompts, shard by shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.driver import Driver
from infra.lanes import Output
from infra.manifest import Manifest
from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch, ragged
from rlhf.data.prompts import PromptDataset, encode
from rlhf.engines.base import Generation, Request, Sampling
from rlhf.environments.dialogues import Beginning, Dialogue, Environments, converse
from rlhf.schema import TRAJECTORY
from tasks.reward_model import reward_model
from tasks.score import score
from tasks.spec import StageSpec
from tasks.stage import rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEC = StageSpec(
    name="generate",
    writes=TRAJECTORY.of("generate"),
    config_keys=(
        "run.seed",
        "model.dtype",
        "data.prompts_per_iteration",
        "data.max_prompt_tokens",
        "data.truncation",
        "data.system_prompt",
        "rollout.engine",
        "rollout.n",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.max_response_tokens",
        "rollout.ignore_eos",
        "rollout.stop",
        "rollout.environment.name",
        "rollout.environment.options",
        "rollout.environment.max_turns",
        "rollout.quantization",
        "rollout.prompts_per_shard",
        "algorithm.dynamic_sampling",
    ),
    # where the files lie, while what they hold is in the dataset's digest; and when new weights come
    operational_keys=("data.train", "rollout.environment.timeout_s", "rollout.partial", "rollout.partial_tokens"),
    digests=("dataset", "tokenizer", "environment"),
    role="rollout",
)


def _shards(driver: Driver) -> int:
    return -(-driver.config.most_prompts // driver.config.rollout.prompts_per_shard)


def _until_enough_prompts_differ(iteration: int) -> Callable[[Manifest], bool] | None:
    """Dynamic sampling: every shard is scored as soon as it is generated."""
    driver = Driver.current()
    if driver.config.algorithm.dynamic_sampling is None:
        return None
    stages = [score] if driver.config.reward.model is None else [reward_model, score]
    attempts = {stage.spec.name: driver.store.begin_attempt(iteration, stage.spec.name) for stage in stages}

    def enough(generated: Manifest) -> bool:
        count = len(generated.shards)
        inputs: tuple[Output, ...] = (Output.of(generated),)
        for stage in stages:
            name = stage.spec.name
            found, was_committed = stage.shard(iteration, inputs, count - 1, attempts[name])
            if not was_committed:
                driver.store.commit(found)
            shards = driver.store.committed_shards(name, iteration)  # a driver that died may have left later ones
            inputs += (Output.so_far(name, [shards[number].data for number in range(count)]),)
        differ = sum(shards[number].outputs["prompts_that_differ"] for number in range(count))
        return bool(differ >= driver.config.data.prompts_per_iteration)

    return enough


def _generated_tokens(outputs: list[dict[str, Any]]) -> dict[str, float]:
    return {"perf/generated_tokens": float(sum(shard["tokens"] for shard in outputs))}


@rows(SPEC, count=_shards, summary=_generated_tokens, until=_until_enough_prompts_differ)
def generate(context: Context) -> TrajectoryBatch:
    config = context.config
    dataset = context.worker.dataset(config.data.train)
    sampling_more = config.algorithm.dynamic_sampling
    most = config.data.prompts_per_iteration if sampling_more is None else sampling_more.max_prompts
    first = context.shard * config.rollout.prompts_per_shard
    after = min(first + config.rollout.prompts_per_shard, most)
    context.outputs["cursor"] = context.call.cursor + after
    drawn = dataset.draw(config.run.seed, context.call.cursor + first, after - first)
    prompts = list(enumerate(drawn, first))
    sampling = Sampling(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
        ignore_eos=config.rollout.ignore_eos,
        stop=config.rollout.stop,
    )
    return respond(context, dataset, prompts, config.rollout.n, sampling)


def respond(
    context: Context, dataset: PromptDataset, prompts: list[tuple[int, int]], n: int, sampling: Sampling
) -> TrajectoryBatch:
    """`n` trajectories for each (number in the iteration, row of the dataset), with every column of `generate`."""
    data, tokenizer, environment = context.config.data, context.tokenizer, context.config.rollout.environment
    requests, columns = [], {name: [] for name in ("trajectory_id", *SPEC.writes)}  # type: ignore[var-annotated]
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
        said = prompt.after(data.system_prompt)
        messages = json.dumps(said, ensure_ascii=False)
        prompt_id = f"it{context.iteration:06d}-p{number:05d}"
        for sample in range(n):
            requests.append(Request(f"{prompt_id}-s{sample:02d}", tuple(ids)))
            of_prompt = (prompt.ground_truth, prompt.ground_truth_is_json, prompt.extra_info)
            beginnings.append(Beginning(requests[-1].trajectory_id, said, *of_prompt))
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
        written = _alone(*context.generate(requests, sampling))
    else:
        make = context.worker.environment(environment.name)
        others = Environments(make, environment.options, beginnings, timeout_s=environment.timeout_s)
        dialogues = [Dialogue(request) for request in requests]
        converse(context.generate, dialogues, others, sampling, tokenizer, environment.max_turns)
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
    tokens = int(batch.flat("response_mask").sum())
    context.outputs |= {"tokens": tokens, "oldest_version": min(map(min, versions))}
    return batch


def _alone(generations: Sequence[Generation], versions: list[list[int]]) -> dict[str, Any]:
    """Columns of responses that the policy wrote from one end to the other."""
    lengths = np.array([len(one.response_ids) for one in generations])
    return {
        "response_ids": [one.response_ids for one in generations],
        "rollout_log_probs": [one.log_probs for one in generations],
        "response_mask": ragged(np.ones(lengths.sum(), dtype=np.int8), lengths),
        "finish_reason": [one.finish_reason for one in generations],
        "turns": [None] * len(generations),
        "environment_reward": [None] * len(generations),
        "versions": versions,
    }


def _together(dialogues: Sequence[Dialogue], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Columns of responses that policy and environment wrote."""
    return {
        "response_ids": [each.ids for each in dialogues],
        "rollout_log_probs": [each.log_probs for each in dialogues],
        "response_mask": [each.mask for each in dialogues],
        "finish_reason": [each.finish_reason for each in dialogues],
        "turns": [each.turns(tokenizer) for each in dialogues],
        "environment_reward": [each.reward for each in dialogues],
        "versions": [each.versions for each in dialogues],
    }
