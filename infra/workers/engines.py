"""The models of a worker: each role's engine, built when it is first asked for, and kept."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from rlhf.config import RunConfig
from rlhf.models import load_actor, load_critic, load_reward_model, load_tokenizer

if TYPE_CHECKING:
    from rlhf.engines.base import InferenceEngine, RolloutEngine
    from rlhf.engines.model_engine import ModelEngine
    from rlhf.engines.reward_engine import RewardEngine


class Engine(Protocol):
    """What every engine can do: give way to another model of the same process."""

    def place(self, *, model: bool, optimizer: bool) -> None: ...


class Engines:
    """Engines that give way (`offload_when_idle`) lie in host memory while another one computes."""

    def __init__(self, config: RunConfig, roles: Iterable[str]) -> None:
        self.config = config
        self.roles = frozenset(roles)
        self.lock = threading.RLock()
        """Of what engines there are, and whose weights they have: stages of different roles may compute at once."""
        self._models: dict[str, ModelEngine] = {}
        self._rollout: RolloutEngine | None = None
        self._reward_model: RewardEngine | None = None

    def inference(self, role: str) -> InferenceEngine:
        """The actor, the critic or the reference, ready to be asked."""
        from rlhf.engines.model_engine import WithoutAdapters

        if role == "reference" and self.owner(role) == "actor":
            return WithoutAdapters(self.model("actor"))
        return self.model(role)

    def model(self, role: str, *, learns: bool = False) -> ModelEngine:
        """A model of this worker's own, ready to compute; or to learn, to be saved or loaded."""
        with self.lock:
            self._make_room(role)
            if role not in self._models:
                self._models[role] = self._build(role)
            if self._gives_way(role):
                self._models[role].place(model=True, optimizer=learns)
            return self._models[role]

    def rollout(self) -> RolloutEngine:
        """What generates, ready to."""
        from rlhf.engines.build import rollout_engine

        owner = self.owner("rollout")
        with self.lock:
            self._make_room(owner)
            if self._rollout is None:
                shared = self.model("actor").model if owner == "actor" else None
                self._rollout = rollout_engine(self.config, shared)
            if self._gives_way(owner):
                self._engines()[owner].place(model=True, optimizer=False)
            return self._rollout

    def reward_model(self) -> RewardEngine:
        """The classifier of `reward.model`, ready to compute."""
        from rlhf.engines.reward_engine import RewardEngine

        chosen = self.config.reward.model
        assert chosen is not None, "the config has a reward model"
        with self.lock:
            self._make_room("reward")
            if self._reward_model is None:
                self._reward_model = RewardEngine(load_reward_model(chosen), load_tokenizer(chosen, writes=False))
            if self._gives_way("reward"):
                self._reward_model.place(model=True, optimizer=False)
            return self._reward_model

    def forget(self, role: str) -> None:
        """Drop a role's model, and what computes with its tensors: it is built anew from the model's files."""
        with self.lock:
            self._models.pop(role, None)
            if self._rollout is not None and self.owner("rollout") == role:
                self._rollout = None

    def end_rollout(self) -> None:
        with self.lock:
            if self._rollout is not None:
                rollout, self._rollout = self._rollout, None
                rollout.close()

    def owner(self, role: str) -> str:
        """Whose tensors a role computes with: a rollout's may be the actor's own, and a LoRA actor's reference is its
        base."""
        config = self.config
        actor = config.actor
        plain = config.rollout.engine == "hf" and actor.engine == "torch" and actor.sequence_parallel == 1
        own_base = config.model.lora is not None and config.reference.model is None
        shares = {"rollout": plain, "reference": own_base}
        return "actor" if "actor" in self.roles and shares.get(role) else role

    def _engines(self) -> dict[str, Engine]:
        others = {"rollout": self._rollout, "reward": self._reward_model}
        return {**self._models, **{role: engine for role, engine in others.items() if engine is not None}}

    def _make_room(self, owner: str) -> None:
        for other, engine in self._engines().items():
            if other != owner and self.owner(other) == other and self._gives_way(other):
                engine.place(model=False, optimizer=False)

    def _gives_way(self, role: str) -> bool:
        trainer = self.config.critic if role == "critic" else self.config.actor
        return trainer is not None and trainer.offload_when_idle

    def _build(self, role: str) -> ModelEngine:
        from rlhf.engines.build import train_engine

        config, seed = self.config, self.config.run.seed
        if role == "critic":
            assert config.critic is not None
            chosen = config.critic_model
            return train_engine(config.critic, load_critic(chosen, seed), "value", dtype=chosen.dtype)
        chosen = config.model if role == "actor" else config.reference_model
        trainable = role == "actor"
        return train_engine(config.actor, load_actor(chosen, seed), "policy", dtype=chosen.dtype, trainable=trainable)
