"""greedy_baseline: the score of the actor's greedy answer to each prompt, which ReMax compares with."""

from __future__ import annotations

from typing import Any

import numpy as np

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.base import Request, Sampling
from rlhf.engines.generation import answers as generated
from rlhf.schema import TRAJECTORY
from tasks.reward_model import MODEL_KEYS, MODEL_OPERATIONAL_KEYS
from tasks.score import REWARD_KEYS, counting, scores
from tasks.spec import StageSpec
from tasks.stage import rows

SPEC = StageSpec(
    name="greedy_baseline",
    reads={
        "generate": (
            "prompt_id",
            "messages",
            "prompt_ids",
            "data_source",
            "ground_truth",
            "ground_truth_is_json",
            "extra_info",
        ),
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
        *MODEL_KEYS,
    ),
    operational_keys=("reward.workers", *MODEL_OPERATIONAL_KEYS),
    digests=("reward", "tokenizer"),
    role="rollout",
    version=2,
)


def _errors(outputs: list[dict[str, Any]]) -> dict[str, float]:
    errors = sum(shard.get("errors", 0) for shard in outputs)
    return {"reward/greedy_errors": float(errors)} if errors else {}


@rows(SPEC, summary=_errors)
def greedy_baseline(context: Context) -> TrajectoryBatch:
    """One answer a prompt, written beside each of its trajectories."""
    config, batch = context.config, context.batch
    _, first, of_row = np.unique(batch.numpy("prompt_id").astype(str), return_index=True, return_inverse=True)
    prompts = batch.take(first)
    ids = zip(prompts.list("prompt_id"), prompts.list("prompt_ids"), strict=True)
    requests = [Request(f"{prompt_id}-greedy", tuple(prompt)) for prompt_id, prompt in ids]
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
    written = {
        "response": texts,
        "response_ids": [one.response_ids for one in responses],
        "response_mask": [[1] * len(one.response_ids) for one in responses],
    }
    answers = TrajectoryBatch.of({name: prompts.array(name) for name in prompts.columns} | written)
    scored = scores(context, answers)
    counted = counting(config, scored["reward_error"])
    columns = {
        "greedy_response": texts,
        "greedy_tokens": [len(one.response_ids) for one in responses],
        "greedy_score": [score if counts else None for score, counts in zip(scored["score"], counted, strict=True)],
        "greedy_error": scored["reward_error"],
    }
    context.outputs["errors"] = sum(error is not None for error in scored["reward_error"])
    spread = {name: [values[prompt] for prompt in of_row] for name, values in columns.items()}
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **spread})
