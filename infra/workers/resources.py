"""Inputs of stages other than rows and models: prompts, the tokenizer, environments, and reward processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ratchet.infra.progress import note
from ratchet.infra.store.images import Images
from ratchet.rlhf import event_loop
from ratchet.rlhf.agents.agent import load_agent
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.programs import AgentCalls
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.sections import EnvironmentConfig, OnError
from ratchet.rlhf.data.expert_answers import ExpertAnswers
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.environments.environment import load_environment
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer
from ratchet.rlhf.rewards.reward_processes import AnswerStore, RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RewardSettings:
    """The settings of the reward processes."""

    functions: Mapping[str, float]
    options: Mapping[str, Mapping[str, Any]]
    workers: int
    timeout_s: float
    concurrency: int


class Resources:
    """The resources of one worker, each loaded on first use and kept."""

    def __init__(self, config: RunConfig, answers: AnswerStore | None = None, images: Images | None = None) -> None:
        self.config = config
        self.images = images
        """The images of the run; None: there is no run."""
        self._answers = answers
        self._datasets: dict[tuple[str, ...], PromptDataset] = {}
        self._experts: dict[tuple[str, ...], ExpertAnswers] = {}
        self._environments: dict[str, EnvironmentCalls] = {}
        self._agents: dict[str, AgentCalls] = {}
        self._gateways: dict[str, Gateway] = {}
        self._rewards: tuple[RewardSettings, RewardPool] | None = None
        self._lock = threading.Lock()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        config = self.config
        return policy_tokenizer(config.model, config.rollout.environment, config.data.special_tokens)

    def environments(self, config: EnvironmentConfig) -> EnvironmentCalls:
        """Returns the environments of trajectories; see `EnvironmentCalls`."""
        key = config.model_dump_json()
        # the class is loaded once, so that a change of its file has no effect during a run
        if key not in self._environments:
            self._environments[key] = EnvironmentCalls(
                load_environment(config.name),
                config.options,
                timeout_s=config.timeout_s,
                concurrency=config.concurrency,
                on_error=config.on_error,
            )
        return self._environments[key]

    def agents(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        host: str,
        max_calls: int,
        timeout_s: float,
        on_error: OnError,
    ) -> AgentCalls:
        """Returns the programs that call the policy; see `AgentCalls`. All of them share this process's endpoint."""
        key = json.dumps([name, options, host, max_calls, timeout_s, on_error], sort_keys=True)
        if key not in self._agents:
            data, reward = self.config.data, self.config.reward
            self._agents[key] = AgentCalls(
                load_agent(name),
                options,
                gateway=self._gateways.setdefault(host, Gateway(host)),
                context=data.max_prompt_tokens + self.config.rollout.max_response_tokens,
                max_calls=max_calls,
                timeout_s=timeout_s,
                on_error=on_error,
                must_reward=not reward.functions and reward.model is None,
            )
        return self._agents[key]

    def dataset(self, paths: Sequence[str]) -> PromptDataset:
        """Returns the prompts of some files; with `data.truncation: drop`, without overlong prompts."""
        key = tuple(paths)
        if key not in self._datasets:
            dataset, data = PromptDataset(key), self.config.data
            if data.truncation == "drop":
                kept = dataset.without_overlong(self.tokenizer, data.max_prompt_tokens, data.system_prompt)
                left_out = len(dataset) - len(kept)
                if left_out:
                    note(f"{left_out} of {len(dataset)} prompts are longer than data.max_prompt_tokens: left out")
                dataset = kept
            self._datasets[key] = dataset
        return self._datasets[key]

    def experts(self, paths: tuple[str, ...]) -> ExpertAnswers:
        """Returns the answers of experts in some files."""
        if paths not in self._experts:
            self._experts[paths] = ExpertAnswers(paths)
        return self._experts[paths]

    def rewards(self, settings: RewardSettings) -> RewardPool:
        """Returns the reward processes, restarted if the settings have changed."""
        with self._lock:
            if self._rewards is None or self._rewards[0] != settings:
                self._end_rewards()
                pool = RewardPool(
                    settings.functions,
                    settings.options,
                    workers=settings.workers,
                    timeout_s=settings.timeout_s,
                    concurrency=settings.concurrency,
                    answers=self._answers,
                    note=note,
                )
                self._rewards = settings, pool
            return self._rewards[1]

    def close(self) -> None:
        """Ends the reward processes, and the endpoints that agents call."""
        with self._lock:
            self._end_rewards()
        for gateway in self._gateways.values():
            event_loop.run(gateway.stop())

    def _end_rewards(self) -> None:
        if self._rewards is not None:
            self._rewards[1].close()
            self._rewards = None
