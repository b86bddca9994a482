"""The names of the built-in rewards, and facts about them that configs, rewards and validations share.

This module is outside of `rlhf/config`, because reward processes start without pydantic, and outside of `rlhf/rewards`,
because reading a config imports no reward.
"""

from __future__ import annotations

from collections.abc import Mapping

JUDGE = "judge"
"""The built-in that asks a model for scores; its settings are the section `reward.judge`."""
COMPARING = ("auto", "code", "countdown", "gsm8k", "math", "reasoning_gym")
"""Built-ins that compare with a ground truth and give 1 to a correct response."""
BUILT_IN = ("auto", "code", "constant", "countdown", "format", "gsm8k", JUDGE, "length", "math", "reasoning_gym")


def solved_score(chosen: float | None, function: str | Mapping[str, float] | None, *, alone: bool) -> float | None:
    """Returns the minimum score of a solved answer; None if the scores do not tell right from wrong.

    Args:
        alone: the score comes from the function only, without a reward model or an environment.
    """
    return 1.0 if chosen is None and alone and function in COMPARING else chosen
