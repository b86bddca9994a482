"""Converts epochs into the number of iterations that a run stores."""

from __future__ import annotations

import math
from functools import cache

from ratchet.infra.progress import note
from ratchet.rlhf.config import DataConfig, EnvironmentConfig, ModelConfig, RunConfig
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer
from ratchet.rlhf.errors import counted


def with_iterations(config: RunConfig) -> RunConfig:
    """Converts `train.epochs`, if it is set, into `train.iterations`. Raises `UserError` if the prompts cannot be
    read."""
    epochs, per_iteration = config.train.epochs, config.data.prompts_per_iteration
    if epochs is None:
        return config
    environment = config.rollout.environment
    prompts = _size_of(config.model, config.data, None if environment is None else environment.model_dump_json())
    iterations = max(1, math.ceil(epochs * prompts / per_iteration))
    total = f"{counted(iterations, 'iteration')} of {counted(per_iteration, 'prompt')}"
    note(f"train.epochs {epochs:g} of {counted(prompts, 'prompt')}: {total}")
    return config.with_values({"train.iterations": iterations, "train.epochs": None})


@cache  # called by the command line and by the flow
def _size_of(model: ModelConfig, data: DataConfig, environment: str | None) -> int:
    dataset = PromptDataset(data.train)
    if data.truncation == "drop":
        of_environment = None if environment is None else EnvironmentConfig.model_validate_json(environment)
        tokenizer = policy_tokenizer(model, of_environment, data.special_tokens)
        dataset = dataset.without_overlong(tokenizer, data.max_prompt_tokens, data.system_prompt)
    return len(dataset)
