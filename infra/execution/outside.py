"""Inputs of a run outside its store and config: models, data and code, each identified by a digest."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Literal

from ratchet.infra.execution.claims import code_digest, package_versions
from ratchet.infra.store.records import Weights
from ratchet.infra.workers.resources import Resources
from ratchet.rlhf.agents.agent import agent_digest
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.config.user_algorithms import UserAlgorithm
from ratchet.rlhf.environments.environment import environment_digest
from ratchet.rlhf.models.model_folders import files_digest, initial_digest, model_folder
from ratchet.rlhf.models.tokenizers import tokenizer_digest
from ratchet.rlhf.rewards.registry import reward_digest

Outside = Literal[
    "dataset", "experts", "validation", "reward", "reward_model", "tokenizer", "environment", "loss", "advantage"
]


class OutsideInputs:
    """The inputs of a config outside the store. Each is digested once."""

    def __init__(self, config: RunConfig, resources: Resources) -> None:
        self._config, self._resources = config, resources
        self._digests: dict[Outside, str | None] = {}

    def digest(self, name: Outside) -> str | None:
        """Returns the digest of an input of stages; None if the config does not use it."""
        if name not in self._digests:
            self._digests[name] = self._digest(name)
        return self._digests[name]

    def _digest(self, name: Outside) -> str | None:
        config, resources = self._config, self._resources
        if config.only_scores and name in ("dataset", "tokenizer"):
            return None
        model = config.reward.model
        match name:
            case "dataset":
                return resources.dataset(config.data.train).digest
            case "experts":
                replay = config.data.replay
                return None if replay is None or replay.files is None else resources.experts(replay.files).digest
            case "validation":
                return None if (held_out := config.validation.data) is None else resources.dataset((held_out,)).digest
            case "reward_model":
                if model is None:
                    return None
                return f"{files_digest(model_folder(model))} {tokenizer_digest(model, writes=False)}"
            case "environment":
                environment, agent = config.rollout.environment, config.rollout.agent
                if agent is not None:
                    return agent_digest(agent.name, agent.options)
                return None if environment is None else environment_digest(environment.name, environment.options)
            case "reward":
                functions = reward_digest(config.reward.functions)
                return functions if model is None else f"{functions} {self.digest('reward_model')}"
            case "tokenizer":
                return tokenizer_digest(config.model)
            case "loss":
                return _source_digest(config.algorithm.loss)
            case "advantage":
                return _source_digest(config.algorithm.advantage)

    @cached_property
    def initial_weights(self) -> dict[str, Weights]:
        """Each role's initial weights, by digest of its model's files."""
        return {
            role: Weights(version=0, digest=self._initial_digest(role))
            for role in self._config.roles
            if ROLES[role].has_versions
        }

    def _initial_digest(self, role: str) -> str:
        seed, models = self._config.run.seed, self._config.all_models_of(role)
        digests = {key: initial_digest(model, seed) for key, model in models.items()}
        for key, model in models.items():
            if model.reads_text:  # in its own tokens, which are then a part of what it computes
                digests[key] = f"{digests[key]} {tokenizer_digest(model)}"
        if len(digests) == 1:
            return next(iter(digests.values()))
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()

    def identity(self) -> str:
        """Identifies everything outside the config that workers hold: code, packages, models and stages' inputs."""
        inputs: list[Outside] = ["dataset", "reward", "tokenizer", "environment", "validation", "loss", "advantage"]
        digests = {name: digest for name in inputs if (digest := self.digest(name)) is not None}
        models = {role: weights.digest for role, weights in self.initial_weights.items()}
        return json.dumps([code_digest(), package_versions(), models, digests], sort_keys=True)


def _source_digest(algorithm: object) -> str | None:
    if not isinstance(algorithm, UserAlgorithm):
        return None
    return hashlib.sha256(algorithm.source.encode()).hexdigest()
