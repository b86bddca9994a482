"""greedy_baseline: the score of the actor's greedy answer to each prompt, which ReMax compares with."""

from __future__ import annotations

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.base import Request, Sampling
from rlhf.engines.generation import answers as generated
from rlhf.schema import TRAJECTORY
from tasks.score import REWARD_KEYS, rewards
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="greedy_baseline",
    reads={
        "generate": ("prompt_id", "prompt_ids", "data_source", "ground_truth", "extra_info"),
        "select": (),
    },
    writes=TRAJECTORY.of("greedy_baseline"),
    config_keys=(
        "model.dtype",
        "rollout.engine",
        "rollout.max_response_tokens",
        "rollout.ignore_eos",
        "rollout.stop",
        "rollout.quantization",
        *REWARD_KEYS,
    ),
    operational_keys=("reward.workers",),
    digests=("reward", "tokenizer"),
    role="rollout",
)


@rows(SPEC)
def greedy_baseline(context: Context) -> TrajectoryBatch:
    """One answer a prompt, written beside each of its trajectories."""
    config, batch = context.config, context.batch
    prompts = {row["prompt_id"]: row for row in batch.table.drop_columns(["trajectory_id"]).to_pylist()}
    requests = [Request(f"{prompt_id}-greedy", tuple(row["prompt_ids"])) for prompt_id, row in prompts.items()]
    sampling = Sampling(
        temperature=0.0,
        top_p=1.0,
        max_tokens=config.rollout.max_response_tokens,
        seed=0,
        ignore_eos=config.rollout.ignore_eos,
        stop=config.rollout.stop,
    )
    responses = generated(context.engine, requests, sampling)
    texts = [context.tokenizer.decode(list(one.response_ids), skip_special_tokens=True) for one in responses]
    asked = [
        (row["data_source"], text, row["ground_truth"], row["extra_info"])
        for row, text in zip(prompts.values(), texts, strict=True)
    ]
    answers = {}
    for prompt_id, text, one, scored in zip(prompts, texts, responses, rewards(context, asked), strict=True):
        answers[prompt_id] = {
            "greedy_response": text,
            "greedy_tokens": len(one.response_ids),
            "greedy_score": scored.score,
        }
    found = [answers[prompt_id] for prompt_id in batch.list("prompt_id")]
    columns = {name: [answer[name] for answer in found] for name in SPEC.writes}
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **columns})
