"""Finds the reward functions that a config names, checks them, and computes their digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING, get_type_hints

from ratchet.rlhf.built_in_rewards import BUILT_IN, JUDGE
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.named import load_named, source_of
from ratchet.rlhf.rewards import auto
from ratchet.rlhf.rewards.functions import KEY, Reward, RewardFunction

if TYPE_CHECKING:
    from ratchet.rlhf.config.sections import JudgeConfig, RewardConfig
    from ratchet.rlhf.data.prompts import Prompt


def load_reward(name: str) -> RewardFunction:
    """Loads a reward function; raises UserError if there is none, or its module cannot be imported.

    Args:
        name: a built-in, ``package.module:function`` or ``folder/file.py:function``. A built-in or a file alone means
            its `compute_score`, or else its `compute_scores`.
    """
    function: RewardFunction = load_named(
        name, KEY, "ratchet.rlhf.rewards", ("compute_score", "compute_scores"), BUILT_IN
    )
    return function


def check_rewards(config: RewardConfig, greedy: str | None = None) -> None:
    """Checks the reward functions before any response is generated.

    Args:
        greedy: the advantage estimator that needs scores of greedy answers, each without a group; None: none does.

    Raises:
        UserError: a function does not accept its arguments or options, has no Python source, runs programs without
            `reward.allow_code`, or takes groups where an answer has none; or the judge's key is missing.
    """
    from pydantic import TypeAdapter, ValidationError  # imported here: the reward processes do not need pydantic

    from ratchet.rlhf.rewards import code

    for name in config.functions:
        function, chosen = load_reward(name), config.options.get(name, {})
        source_of(function, KEY, name)
        if config.judge is not None and name == JUDGE:
            _check_key(config.judge)
            continue
        reward = Reward(name, function, chosen)
        try:
            reward.check()
            if function.__module__ in (f"ratchet.rlhf.rewards.{built_in}" for built_in in BUILT_IN):
                hints = get_type_hints(function)
                for option, value in chosen.items():
                    TypeAdapter(hints[option]).validate_python(value)
        except ValidationError as error:
            raise UserError(f"reward.options.{name}.{option} {value!r}: {error.errors()[0]['msg']}") from None
        if reward.takes_group and greedy is not None:
            raise UserError(
                f"{KEY} {name} scores the responses to a prompt together, but algorithm.advantage {greedy} scores "
                "greedy answers, each of which is alone: choose a reward of single responses, or another estimator "
                "(grpo)"
            )
        if function is code.compute_score:
            if not config.allow_code:
                raise UserError(
                    f"{KEY} {name} runs programs that the model wrote: read docs/security.md, and set "
                    "reward.allow_code: true"
                )
            code.check_sandbox(**chosen)


def _check_key(judge: JudgeConfig) -> None:
    if judge.api_key_env != type(judge).model_fields["api_key_env"].default and judge.api_key_env not in os.environ:
        raise UserError(
            f"reward.judge.api_key_env names the environment variable {judge.api_key_env}, which is not set: set it to "
            "the judge's key"
        )


def can_be_right(names: Collection[str], prompt: Prompt) -> bool:
    """Returns True if a response to a prompt can be right, judging by the form of its ground truth.

    Only built-ins that compare look at the truth.
    """
    from ratchet.rlhf.data.prompts import structures  # imported here: the reward processes do not need it

    for name in names:
        built_in = auto.reward_of(prompt.data_source, prompt.style) if name == "auto" else name
        if built_in in ("code", "gsm8k", "math"):
            truth, _ = structures(prompt.ground_truth, prompt.ground_truth_is_json, "{}")
            try:
                import_module(f"ratchet.rlhf.rewards.{built_in}").check_truth(truth)
            except ValueError:
                return False
    return True


def reward_digest(names: Collection[str]) -> str:
    """Computes a digest of the sources of the reward modules: changed code is a different reward.

    Args:
        names: functions in `reward.function`, in any order. ``auto`` includes the sources of all built-ins except
            ``judge``, which it never chooses.
    """
    sources = [_source(name) for name in sorted(names)]
    if "auto" in names:
        sources += [_source(name) for name in BUILT_IN if name not in ("auto", JUDGE)]
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _source(name: str) -> str:
    return source_of(load_reward(name), KEY, name)
