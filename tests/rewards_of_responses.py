"""Rewards that fail, or wait, on responses of a tiny policy, but not on the trial answers before a start."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import rewards

LONGEST = 100
"""Characters of the longest response of a tiny policy; a start tries a reward on longer answers, and an empty one."""

Reward = Callable[[str, str, str, Any], float]


def tail_length(solution_str: str, prompt_tail: str, **_: Any) -> float:
    """Rewards the length of the end of the prompt."""
    return len(prompt_tail)


def _of_responses(reward: Callable[..., float]) -> Reward:
    @functools.wraps(reward)
    def scored(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        is_response = solution_str != ground_truth and 0 < len(solution_str) <= LONGEST
        return (reward if is_response else rewards.letters)(data_source, solution_str, ground_truth, extra_info)

    return scored


fails_on_some = _of_responses(rewards.fails_on_some)
fails_on_a_third = _of_responses(rewards.fails_on_a_third)
not_a_number = _of_responses(rewards.not_a_number)


@_of_responses
def held_letters(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Answers once the file `HOLD` is gone."""
    while Path(os.environ["HOLD"]).exists():
        time.sleep(0.05)
    return rewards.letters(data_source, solution_str, ground_truth)
