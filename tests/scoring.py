"""Responses and pools for tests of rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ratchet.rlhf.rewards.functions import Trajectory
from ratchet.rlhf.rewards.reward_processes import AnswerStore, RewardPool, TrialAnswer


def trajectory(
    data_source: str = "any",
    solution_str: str = "",
    ground_truth: Any = "",
    extra_info: Any = None,
    prompt: Any = "",
    *,
    prompt_id: str = "p0",
    turns: list[dict[str, str]] | None = None,
) -> Trajectory:
    return Trajectory(
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info,
        prompt=prompt,
        turns=turns or [{"role": "policy", "content": solution_str}],
        metadata={
            "trajectory_id": f"{prompt_id}-s00",
            "prompt_id": prompt_id,
            "sample": 0,
            "iteration": 3,
            "policy_version": 2,
            "finish_reason": "stop",
            "response_length": len(solution_str),
        },
        response_ids=letters_of(solution_str),
    )


def letters_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def pool_of(
    functions: Mapping[str, float],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    workers: int = 1,
    timeout_s: float = 30.0,
    concurrency: int = 8,
    answers: AnswerStore | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> RewardPool:
    return RewardPool(
        functions,
        options or {},
        workers=workers,
        timeout_s=timeout_s,
        concurrency=concurrency,
        answers=answers,
        note=note,
    )


def written(prompt: Any, text: str) -> TrialAnswer:
    """Returns an answer of a policy whose tokens are letters, after a prompt without a chat template."""
    return TrialAnswer("", letters_of(text), text)
