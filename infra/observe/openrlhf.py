"""Records OpenRLHF's rollouts, which OpenRLHF itself writes nowhere: JSON lines for `ratchet import --from openrlhf`.

Name a file such as this one with ``--train.agent_func_path``:

>>> from openrlhf.utils.agent import SingleTurnAgentExecutor
>>> from ratchet.infra.observe.openrlhf import recorded
>>>
>>> class AgentExecutor(SingleTurnAgentExecutor):
...     def __init__(self):
...         super().__init__("/path/to/reward.py")  # what --reward.remote_url named
...     execute = recorded(SingleTurnAgentExecutor.execute, "/path/to/rollouts", per_step=1024)
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

Execute = Callable[..., Awaitable[dict[str, Any]]]
"""`AgentExecutorBase.execute`, whose result has the tokens and the reward of a trajectory."""


def recorded(execute: Execute, folder: str, *, per_step: int, validation_temperature: float | None = 0.6) -> Execute:
    """Wraps the method `execute` of an executor of OpenRLHF so that it writes down each trajectory.

    Each process of the rollout writes a file of its own. OpenRLHF does not tell an executor the step, so an import
    takes the first `per_step` trajectories as step 1, the next ones as step 2, and so on. These are the steps of the
    trainer, except with dynamic filtering or asynchronous training.

    Args:
        execute: the method.
        folder: an existing or new folder that all nodes share. Each start of the trainer needs one of its own.
        per_step: ``--rollout.batch_size`` times ``--rollout.n_samples_per_prompt``.
        validation_temperature: ``--eval.temperature``, by which answers to held-out prompts are told apart; None: there
            is no validation. It must not be the temperature of training.
    """
    file = Path(folder, f"{socket.gethostname()}-{os.getpid()}.jsonl")

    @wraps(execute)
    async def recording(
        self: Any,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        temperature = sampling_params.temperature  # an environment may replace the parameters
        result = await execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        row = {
            "time": time.time(),
            "per_step": per_step,
            "split": "validation" if temperature == validation_temperature else "train",
            **_columns(result, hf_tokenizer),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.write(json.dumps(row, default=str) + "\n")
        return result

    return recording


def _columns(result: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns a result of `execute` as Ratchet's columns."""
    tokens, ranges = list(result["observation_tokens"]), result["action_ranges"]
    first = ranges[0][0] if ranges else len(tokens)
    mask = [0] * len(tokens)
    for start, end in ranges:
        mask[start:end] = [1] * (end - start)
    columns = {
        "prompt": result["prompt"],
        "ground_truth": result["label"],
        "response": tokenizer.decode(tokens[first:], skip_special_tokens=False),
        "prompt_ids": tokens[:first],
        "response_ids": tokens[first:],
        "response_mask": mask[first:],
        "finish_reason": "length" if result["truncated"] else "stop",
    }
    if result["rollout_log_probs"] is not None:
        columns["rollout_log_probs"] = list(result["rollout_log_probs"])[first:]
    if result["reward"] is None:
        return columns | {"reward_error": "OpenRLHF got no reward"}
    parts = {"score": result["scores"], **result["extra_logs"]}
    numbers = {name: number for name, value in parts.items() if (number := _number(value)) is not None}
    return columns | {"score": _number(result["reward"]), "reward_parts": numbers}


def _number(value: Any) -> float | None:
    """Returns a number, or the first one of a tensor, as OpenRLHF does."""
    while hasattr(value, "flatten"):
        value = value.flatten()[0].item()
    return float(value) if isinstance(value, bool | int | float) else None
