"""greedy_baseline: the score of the actor's greedy answer to each prompt, which ReMax compares with."""

from __future__ import annotations

import numpy as np

from infra.workers.worker import Context
from rlhf.batch import TrajectoryBatch
from rlhf.engines.base import Request, Sampling
from rlhf.engines.generation import answers as generated
from rlhf.schema import TRAJECTORY
from tasks.reward_model import MODEL_KEYS, MODEL_OPERATIONAL_KEYS
from tasks.score import REWARD_KEYS, scores
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
)


@rows(SPEC)
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
    columns = {
        "greedy_response": texts,
        "greedy_tokens": [len(one.response_ids) for one in responses],
        "greedy_score": scores(context, answers)["score"],
    }
    spread = {name: [values[prompt] for prompt in of_row] for name, values in columns.items()}
    return TrajectoryBatch.of({"trajectory_id": batch.array("trajectory_id"), **spread})
