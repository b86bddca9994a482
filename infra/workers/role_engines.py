"""The models of a worker: one engine per role, built on first use and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from ratchet.infra.workers.teachers import ServedTeacher, Teacher, Teachers, TextTeacher
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.config.engines import VLLMConfig
from ratchet.rlhf.config.roles import ROLES, is_critic
from ratchet.rlhf.data.chat_turns import treat_special_tokens
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.models.loading import actor_skeleton, critic_skeleton, load_reward_model
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.models.vision import vision_of
from ratchet.rlhf.rollout.rollout_team import RolloutTeam

if TYPE_CHECKING:
    from ratchet.rlhf.rollout.engine import RolloutEngine
    from ratchet.rlhf.train.engine import InferenceEngine
    from ratchet.rlhf.train.model_engine import ModelEngine
    from ratchet.rlhf.train.reward_engine import RewardEngine


class MovableEngine(Protocol):
    """Any engine whose model and optimizer can move between the device and host memory."""

    def place(self, *, model: bool, optimizer: bool) -> None: ...


class Engines:
    """The engines of one worker. With `offload_when_idle`, an engine is in host memory while another one computes."""

    def __init__(
        self,
        config: RunConfig,
        roles: Iterable[str],
        new_weights_follow: Callable[[], bool] = lambda: False,
        image: Callable[[str], bytes] | None = None,
    ) -> None:
        """Prepares the engines of some roles.

        Args:
            new_weights_follow: returns True if the rollout gets weights before it generates again, so that it need not
                keep its present ones.
            image: reads an image of the run by its digest; None: there is no run.
        """
        self.config = config
        self._image = image
        self.roles = frozenset(roles)
        self.new_weights_follow = new_weights_follow
        self.rollout_is_empty = False
        """True if the rollout has discarded its weights to make room."""
        self.lock = threading.RLock()
        """Guards the engines and their weights, because stages of different roles may compute at the same time."""
        self.team = RolloutTeam()
        """The ranks whose devices the rollout engine spans."""
        self._rollout_has_devices = False
        """True if it was the rollout's turn last; the same on all ranks of the team."""
        self._has_checked_memory = False
        self._models: dict[str, ModelEngine] = {}
        self._rollout: RolloutEngine | None = None
        self._reward_model: RewardEngine | None = None
        self._teachers: Teachers | None = None

    def inference(self, role: str) -> InferenceEngine:
        """Returns the engine of a role that has a model, ready for inference."""
        from ratchet.rlhf.train.model_engine import WithoutAdapters

        if ROLES[role].several is not None:
            return self._ready_teachers()
        owner = self.owner(role)
        return self.model(role) if owner == role else WithoutAdapters(self.model(owner))

    def model(self, role: str, *, learns: bool = False) -> ModelEngine:
        """Returns the engine of a role's own model, ready for inference, or with `learns` for training and loading."""
        with self.lock:
            self._check_memory()
            self._offload_others(role)
            if role not in self._models:
                self._models[role] = self._build(role)
            if self._offloads(role):
                self._models[role].place(model=True, optimizer=learns)
            return self._models[role]

    def follow_actor(self, role: str, share: float) -> None:
        """Moves a role's weights a share of the way to the actor's; all ranks must call it."""
        with self.lock:
            self.model(role).follow(self.state_of("actor"), share)

    def state_of(self, role: str) -> ModelEngine:
        """Returns the engine of a role's own model for reading its state in place: nothing moves."""
        with self.lock:
            return self._models[role] if role in self._models else self.model(role)

    def rollout(self, *, generates: bool = True) -> RolloutEngine:
        """Returns the rollout engine, ready to generate, or without `generates` only for new weights.

        If models take turns on the devices, all ranks of a rollout team call this before its first rank may call it
        alone.
        """
        from ratchet.rlhf.rollout.build import rollout_engine

        owner = self.owner("rollout")
        with self.lock:
            self._check_memory()
            self._offload_others(owner)
            if self._rollout is None:
                shared = self.model("actor").model if owner == "actor" else None
                self._rollout = rollout_engine(self.config, shared, self.team, self._image)
            if self._offloads(owner) and generates:
                self._engines()[owner].place(model=True, optimizer=False)
            return self._rollout

    def _ready_teachers(self) -> Teachers:
        computed = bool(self.config.models_of("teacher"))
        with self.lock:
            if computed:  # otherwise servers compute them, while the models of this process compute, too
                self._check_memory()
                self._offload_others("teacher")
            if self._teachers is None:
                self._teachers = self._build_teachers()
            if computed and self._offloads("teacher"):
                self._teachers.place(model=True, optimizer=False)
            return self._teachers

    def _build_teachers(self) -> Teachers:
        from ratchet.rlhf.models.hf_configs import longest_sequence, text_config
        from ratchet.rlhf.rollout.scoring_servers import ScoringServers

        config = self.config.teacher
        assert config is not None, "the config has a teacher"
        engines: dict[str, Teacher] = {}
        for source, teacher in config.by_source.items():
            if teacher.engine is None:
                engine: ModelEngine | ServedTeacher = self._build_model("teacher", teacher)
            else:
                servers = ScoringServers(teacher.engine.urls, timeout_s=teacher.engine.timeout_s)
                engine = ServedTeacher(servers, text_config(teacher).vocab_size)
            engines[source] = engine
            if teacher.align == "text":
                own, student = load_tokenizer(teacher), load_tokenizer(self.config.model)
                treat_special_tokens(own, self.config.data.special_tokens)
                engines[source] = TextTeacher(engine, own, student, longest_sequence(teacher))
        return Teachers(config, engines, in_turn=self._offloads("teacher"))

    def reward_model(self) -> RewardEngine:
        """Returns the classifier of `reward.model`, ready to compute."""
        from ratchet.rlhf.train.reward_engine import RewardEngine

        chosen = self.config.reward.model
        assert chosen is not None, "the config has a reward model"
        with self.lock:
            self._check_memory()
            self._offload_others("reward")
            if self._reward_model is None:
                tokenizer = load_tokenizer(chosen, writes=False)
                treat_special_tokens(tokenizer, self.config.data.special_tokens)
                self._reward_model = RewardEngine(load_reward_model(chosen), tokenizer)
            if self._offloads("reward"):
                self._reward_model.place(model=True, optimizer=False)
            return self._reward_model

    def forget(self, role: str) -> None:
        """Drops a role's engine and a rollout that shares its tensors. They are rebuilt from the model's files."""
        with self.lock:
            self._models.pop(role, None)
            if self.owner("rollout") == role:
                self.end_rollout()
            if ROLES[role].several is not None:
                self._end_teachers()

    def _end_teachers(self) -> None:
        if self._teachers is not None:
            self._teachers.close()
            self._teachers = None

    def end_rollout(self) -> None:
        """Closes the rollout engine; the next use builds a new one."""
        with self.lock:
            if self._rollout is not None:
                rollout, self._rollout = self._rollout, None
                self.rollout_is_empty = False
                rollout.close()

    def close(self) -> None:
        """Closes the rollout engine and drops all models, so that their memory is free for the next run of this
        process."""
        with self.lock:
            self.end_rollout()
            self._models.clear()
            self._reward_model = None
            self._end_teachers()

    def owner(self, role: str) -> str:
        """Returns the role whose tensors a role uses; see `Role.shares_actor`."""
        return "actor" if "actor" in self.roles and ROLES[role].shares_actor(self.config) else role

    def _engines(self) -> dict[str, MovableEngine]:
        optional = {"rollout": self._rollout, "reward": self._reward_model, "teacher": self._teachers}
        return {**self._models, **{role: engine for role, engine in optional.items() if engine is not None}}

    def _check_memory(self) -> None:
        """Raises `UserError` if vLLM does not fit beside the models that will stay. Runs before the first model is
        loaded."""

        from ratchet.rlhf.rollout import device_memory

        if self._has_checked_memory:
            return
        engine = self.config.rollout.engine
        if isinstance(engine, VLLMConfig) and "rollout" in self.roles and accelerator.is_available():
            _, total = accelerator.free_and_total()
            device_memory.check_config(self.config, engine, self.roles, total)
        self._has_checked_memory = True

    def _offload_others(self, owner: str) -> None:
        is_rollout = owner == "rollout"
        try:
            for role, engine in self._engines().items():
                if role == owner or self.owner(role) != role or not self._offloads(role):
                    continue
                if engine is self._rollout and not self.rollout_is_empty and self.new_weights_follow():
                    self.rollout_is_empty = self._rollout.discard()
                else:
                    engine.place(model=False, optimizer=False)
        finally:
            if is_rollout != self._rollout_has_devices and self._offloads("rollout"):
                self._rollout_has_devices = is_rollout
                self.team.meet()  # nobody uses the devices of another rank before they are free

    def _offloads(self, role: str) -> bool:
        trainer = self.config.trainer_of(role)
        return trainer.offload_when_idle if ROLES[role].computes else trainer.engine.moves_state

    def _build(self, role: str) -> ModelEngine:
        return self._build_model(role, self.config.model_of(role))

    def _build_model(self, role: str, model: ModelConfig) -> ModelEngine:
        from ratchet.rlhf.train.build import train_engine

        config, facts = self.config, ROLES[role]
        seed = config.run.seed
        if not facts.computes:  # in float32 an average takes steps that are too small for bfloat16
            model = model.model_copy(update={"dtype": "float32"})
        if is_critic(role):
            skeleton = critic_skeleton(model, seed)
        else:
            skeleton = actor_skeleton(model, seed, trainable=facts.learns)
        assert facts.head is not None, "the rollout has an engine of another kind"
        return train_engine(
            config.trainer_of(role),
            skeleton,
            facts.head,
            dtype=model.dtype,
            kernels=model.kernels,
            trainable=facts.learns,
            follows_routes=role == "actor" and config.rollout.router_replay,
            vision=vision_of(model, self._image),
        )
