"""The configuration of a run: one frozen tree for YAML files, overrides and Prefect's forms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from ratchet.rlhf.built_in_rewards import solved_score
from ratchet.rlhf.config.engine_args import VLLM_ROUNDS
from ratchet.rlhf.config.engines import ENGINES, RolloutEngineConfig
from ratchet.rlhf.config.incompatibilities import incompatible
from ratchet.rlhf.config.reading import INTERNAL, overridden, read_yaml, set_value, validated, write_out
from ratchet.rlhf.config.roles import ROLES, PlacedRole
from ratchet.rlhf.config.section import NULL_IS_OFF, OneOrMore, Section
from ratchet.rlhf.config.sections import (
    UNKNOWN_MODEL,
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    JudgeConfig,
    ModelConfig,
    ObservedConfig,
    PartnerConfig,
    PoolConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
    Tracker,
    TrainConfig,
    TrainerConfig,
    TrainRunSection,
    ValidationConfig,
)
from ratchet.rlhf.errors import UserError

ALLOW_INCOMPATIBLE = "anything fits"
"""Validation context in which incompatible combinations are accepted."""


LEARNED: dict[str, bool | set[str]] = {
    **dict.fromkeys(("data", "reward", "algorithm"), True),
    "rollout": {"n", "environment", "agent"},
    "reference": {"sync_every", "mix"},
}
"""Sections that determine what a run learns from; models are compared by their files instead."""
HOW_COMPUTED: dict[str, dict[str, bool | set[str]]] = {
    "reward": {
        **dict.fromkeys((*RewardConfig.operational, "timeout_s", "on_error"), True),
        "judge": {*JudgeConfig.operational},
    },
    "rollout": {key: {*PartnerConfig.operational, "on_error"} for key in ("environment", "agent")},
}
"""Keys of these sections that only determine how it is computed."""


class RunConfig(Section):
    """The whole configuration of a run."""

    run: TrainRunSection = Field(TrainRunSection(), description="name, store and seed of the run")
    model: ModelConfig = Field(description="model of the actor; default for the critic and the reference")
    data: DataConfig = Field(description="prompts")
    rollout: RolloutConfig = Field(RolloutConfig(), description="how responses are generated")
    reward: RewardConfig = Field(RewardConfig(), description="how responses are scored")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="advantages, loss and KL")
    actor: ActorConfig = Field(ActorConfig(), description="how the actor is updated")
    critic: CriticConfig | None = Field(CriticConfig(), description="how the critic is updated; null: no critic")
    reference: ReferenceConfig = Field(ReferenceConfig(), description="reference model")
    teacher: TeacherConfig | None = Field(
        None, description="model that algorithm.distillation learns from, with the actor's vocabulary; null: none"
    )
    pools: Annotated[dict[str, PoolConfig], NULL_IS_OFF] = Field(
        {}, description="worker groups on Ray, by name; {}: everything runs in the driver's process"
    )
    placement: Literal["colocated", "separate"] | dict[PlacedRole, str] = Field(
        "colocated",
        description="pool of each role: colocated (all in the only pool), separate (the pool with the role's name) or "
        "a mapping of roles to pools",
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="snapshots")
    validation: Annotated[ValidationConfig, NULL_IS_OFF] = Field(
        ValidationConfig(), description="validation on held-out prompts"
    )
    tracking: OneOrMore[Tracker] = Field(
        (), description="services that receive the metrics, in addition to the store; one that fails is left out"
    )
    train: TrainConfig = Field(TrainConfig(), description="length of the run, and handling of NaN")
    observed: ObservedConfig | None = Field(
        None,
        description="set by `ratchet import` and `ratchet.observe` alone: another trainer computes the run",
        json_schema_extra=INTERNAL,
    )

    @model_validator(mode="before")
    @classmethod
    def _another_policy_is_corrected(cls, tree: Any, info: ValidationInfo) -> Any:
        """Defaults to truncated importance weights if another policy than the trainer's generates; {} turns them
        off."""
        if info.context == ALLOW_INCOMPATIBLE or not isinstance(tree, dict):
            return tree
        algorithm = tree.get("algorithm") or {}
        is_left_out = isinstance(algorithm, dict) and algorithm.get("rollout_correction") is None
        if is_left_out and (_generates_stale(tree) or _generates_with_other_rounding(tree)):
            return {**tree, "algorithm": {**algorithm, "rollout_correction": {"weights": {}}}}
        return tree

    @property
    def iterations(self) -> int:
        """Total number of iterations, in a config whose epochs were converted; see `with_iterations`."""
        assert self.train.iterations is not None, "a run starts with a number of iterations"
        return self.train.iterations

    @property
    def known_iterations(self) -> int | None:
        """Total number of iterations; None if another trainer computes the run, and has not said it."""
        return self.iterations if self.observed is None else self.observed.iterations

    def require_own(
        self,
        cannot: str,
        instead: str = "`ratchet import` adds its new steps, and `ratchet rescore` scores its answers again",
    ) -> None:
        """Raises `UserError` if another trainer computes the run.

        Args:
            cannot: what Ratchet then cannot do, such as ``cannot resume it``.
            instead: what the user can do.
        """
        if self.observed is not None:
            raise UserError(f"{self.observed.trainer} computes {self.run.name}, so Ratchet {cannot}: {instead}")

    def require_weights(self) -> None:
        """Raises `UserError` if another trainer computes the run, and so has its weights."""
        self.require_own(
            "has none of its weights",
            "they are in the trainer's checkpoints, and `ratchet evaluate FOLDER` takes a model folder",
        )

    @property
    def only_scores(self) -> bool:
        """True if the run has no prompts: it scores another run's generations, and no policy computes anything."""
        return not self.data.train

    @property
    def knows_model(self) -> bool:
        """False if another trainer has computed the generations, and has not said with which model."""
        return self.model.path != UNKNOWN_MODEL

    def validates(self, iteration: int) -> bool:
        """Returns True if an iteration starts with a validation. The end of the run is always validated, too."""
        if self.validation.data is None:
            return False
        if iteration == 0:
            return self.validation.before_train
        return self.validation.every > 0 and iteration % self.validation.every == 0

    def ends_early(self, scores: Mapping[int, float]) -> bool:
        """Returns True if the last validations were no better than the best one before them; see `validation.patience`.

        `scores` are those of validations before closed iterations, by iteration, in order.
        """
        patience, values = self.validation.patience, [scores[k] for k in scores if self.validates(k)]
        return patience is not None and len(values) > patience and max(values[-patience:]) <= max(values[:-patience])

    @property
    def trajectories_per_iteration(self) -> int:
        return self.data.prompts_per_iteration * self.rollout.n

    @property
    def max_prompts(self) -> int:
        """Maximum number of prompts that an iteration draws."""
        sampling = self.algorithm.dynamic_sampling
        return self.data.prompts_per_iteration if sampling is None else sampling.max_prompts

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the run, in the order of `ROLES`."""
        names = (name for name, role in ROLES.items() if role.exists(self))
        return tuple(name for name in names if name == "reward" or not self.only_scores)

    @property
    def averages(self) -> tuple[str, ...]:
        """Roles whose weights follow the actor's."""
        return tuple(name for name in self.roles if ROLES[name].follows(self)) if self.train.updates else ()

    def syncs_reference(self, iteration: int) -> bool:
        """Returns True if the reference follows the actor at the end of an iteration."""
        every = self.reference.sync_every
        return "reference" in self.averages and every is not None and (iteration + 1) % every == 0

    @property
    def trainers(self) -> dict[str, TrainerConfig]:
        """The trainer config of each role that learns."""
        learners = {name: ROLES[name].trainer(self) for name in self.roles if ROLES[name].learns}
        return {name: trainer for name, trainer in learners.items() if trainer is not None}

    def trainer_of(self, role: str) -> TrainerConfig:
        """The section whose engine computes a role that exists."""
        trainer = ROLES[role].trainer(self)
        assert trainer is not None
        return trainer

    def model_of(self, role: str) -> ModelConfig:
        """The model that a role begins as."""
        return ROLES[role].own_model(self) or ROLES[role].default_model(self)

    def all_models_of(self, role: str) -> dict[str, ModelConfig]:
        """The models that a role begins as, also those that servers compute, by key of the config."""
        facts = ROLES[role]
        if facts.several is not None:
            return dict(facts.several(self))
        return {"model" if facts.own_model(self) is None else facts.model_key: self.model_of(role)}

    def models_of(self, role: str) -> dict[str, ModelConfig]:
        """The models that a role computes here, by key of the config."""
        return {key: model for key, model in self.all_models_of(role).items() if not model.is_served}

    @property
    def named_models(self) -> dict[str, ModelConfig]:
        """The models that the config names, also those of roles that it does not have, by key."""
        models: dict[str, ModelConfig | None] = {}
        for role in ROLES.values():
            models |= {role.model_key: role.own_model(self)} if role.several is None else role.several(self)
        return {key: model for key, model in models.items() if model is not None}

    @property
    def models(self) -> dict[str, dict[str, ModelConfig]]:
        """The models that the run computes here from its start, by role and key of the config."""
        models = {role: self.models_of(role) for role in self.roles if ROLES[role].head is not None}
        return {role: own for role, own in models.items() if own}

    @property
    def readers(self) -> tuple[str, ...]:
        """Roles that compute models here which read the policy's trajectories as the tokens that they are."""
        computed = (role for role in self.roles if ROLES[role].has_versions and ROLES[role].computes)
        return tuple(role for role in computed if self.models_of(role))

    def pool_of(self, role: str) -> str | None:
        """Returns the name of the pool that serves a role, or None for the driver's own process."""
        if not self.pools or not self.models_of(role):  # servers are asked by the driver
            return None
        role = ROLES[role].placed_with or role
        if isinstance(self.placement, dict):
            return self.placement.get(role)  # type: ignore[call-overload, no-any-return]
        return role if self.placement == "separate" else next(iter(self.pools))

    @property
    def devices(self) -> int:
        """Number of devices of the run: the GPUs of its pools, where a worker without a GPU is one device."""
        return sum(math.ceil(pool.workers * max(1.0, pool.gpus_per_worker)) for pool in self.pools.values()) or 1

    @property
    def rollout_team_size(self) -> int:
        """Number of a pool's workers whose devices one rollout engine spans; a worker without a GPU is one device."""
        pool = self.pool_of("rollout")
        if pool is None:
            return 1
        return math.ceil(self.rollout.engine.devices / max(1.0, self.pools[pool].gpus_per_worker))

    @property
    def on_policy(self) -> bool:
        """True if each iteration is one optimizer step on fresh trajectories, so that every ratio is 1."""
        one_step = self.actor.mini_batch_trajectories == self.trajectories_per_iteration
        fresh = self.data.generations is None and self.data.replay is None and self.rollout.mode == "sync"
        return self.actor.ppo_epochs == 1 and one_step and fresh

    @property
    def has_experts(self) -> bool:
        """True if experts wrote some of the answers."""
        return self.data.replay is not None and self.data.replay.files is not None

    @property
    def bypass(self) -> bool:
        """True if the rollout's log-probs serve as the old log-probs."""
        correction = self.algorithm.rollout_correction
        return correction is not None and correction.bypass

    @property
    def needs(self) -> frozenset[str]:
        """Names of the algorithms' inputs; they decide which stages an iteration has."""
        algorithm = self.algorithm
        names = {*algorithm.advantage.needs, *algorithm.kl.needs}
        experts = algorithm.experts if self.has_experts else None
        for optional in (algorithm.rollout_correction, algorithm.distillation, experts):
            names |= set(optional.needs) if optional is not None else set()
        names |= set() if self.on_policy else set(algorithm.loss.needs)
        return frozenset(names)

    @property
    def needs_critic(self) -> bool:
        return "values" in self.needs

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles whose weights an iteration commits, updated or unchanged."""
        learners = tuple(role for role in self.roles if ROLES[role].learns)
        if self.train.updates:
            return (*learners, *self.averages)
        return () if self.only_scores else ("actor",)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Roles whose weights the log records and no update changes, whether or not the run has them."""
        kept = {name: role for name, role in ROLES.items() if role.has_versions and not role.learns}
        return tuple(name for name, role in kept.items() if not role.follows(self))

    @property
    def needs_old_log_probs(self) -> bool:
        return not self.bypass and not self.needs.isdisjoint({"old_log_probs", "entropy"})

    @property
    def needs_reference(self) -> bool:
        return "ref_log_probs" in self.needs

    @property
    def needs_greedy_scores(self) -> bool:
        return "greedy_scores" in self.needs

    @property
    def needs_turn_values(self) -> bool:
        return "turn_values" in self.needs

    @property
    def solved_score(self) -> float | None:
        """The minimum score of a solved answer in a validation; None if the scores do not tell right from wrong."""
        alone = self.reward.model is None and self.rollout.partner is None
        return solved_score(self.validation.solved_score, self.reward.function, alone=alone)

    @property
    def selects(self) -> bool:
        """True if an iteration may generate more trajectories than it trains on."""
        partner = self.rollout.partner
        drops = self.reward.on_error == "drop" or (partner is not None and partner.on_error != "fail")
        return drops or self.algorithm.dynamic_sampling is not None

    @model_validator(mode="after")
    def _combinations(self, info: ValidationInfo) -> Self:
        # nothing of an observed run is computed here
        is_computed = info.context != ALLOW_INCOMPATIBLE and self.observed is None
        if is_computed and (mistakes := dict.fromkeys(incompatible(self))):
            raise ValueError("\n".join(mistakes))
        return self

    def learned_from(self) -> dict[str, Any]:
        """Returns the values that determine what the run learns from: prompts, reward, algorithm.

        A run may continue with other values only if the user says so.
        """
        return self.model_dump(mode="json", include=LEARNED, exclude=HOW_COMPUTED)

    def value(self, key: str) -> Any:
        """Returns the JSON value at a dotted key: a scalar, or a whole section."""
        value: Any = self.model_dump(mode="json")
        for part in key.split("."):
            value = None if value is None else value[part]
        return value

    def with_values(self, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
        """Replaces the values at dotted keys, applies ``a.b=c`` overrides, and validates the result."""
        return validated(RunConfig, overridden(self._with(values), overrides, RunConfig), "config")

    def as_committed(self, values: Mapping[str, Any]) -> RunConfig:
        """Returns this config with the values that a stage was committed with."""
        # combinations are not checked, because the stage has only its own keys
        return validated(RunConfig, self._with(values), "config", ALLOW_INCOMPATIBLE)

    def _with(self, values: Mapping[str, Any]) -> dict[str, Any]:
        tree = self.model_dump(mode="json")
        for key, value in values.items():
            write_out(tree, key, RunConfig)
            set_value(tree, key, value)
        return tree


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a YAML file and applies ``a.b=c`` overrides, in YAML syntax. Raises UserError, a line per mistake."""
    config = parse_config(overridden(read_yaml(path), overrides, RunConfig), str(path))
    if config.observed is not None:
        raise UserError(f"{path}: observed is set by `ratchet import` and `ratchet.observe` alone: remove it")
    return config


def parse_config(tree: Mapping[str, Any], where: str) -> RunConfig:
    """Validates a tree of plain values. Raises UserError, a line per mistake."""
    return validated(RunConfig, tree, where)


def stored_config(tree: Mapping[str, Any], where: str) -> RunConfig:
    """Reads a config that a driver stored."""
    # a run that could not be started today stays readable
    return validated(RunConfig, tree, where, ALLOW_INCOMPATIBLE)


def _generates_stale(tree: Mapping[str, Any]) -> bool:
    """Returns True if trajectories may be older than the weights that they train."""
    mode = _section(tree, "rollout").get("mode", "sync")
    return bool(mode != "sync") or _section(tree, "data").get("replay") is not None


def _generates_with_other_rounding(tree: Mapping[str, Any]) -> bool:
    """Returns True if another program than the trainer's generates, in less than float32."""
    rollout, model = _section(tree, "rollout"), _section(tree, "model")
    engine = rollout.get("engine")
    chosen = engine if isinstance(engine, Mapping) else {"type": engine}
    types = (_section(chosen, "args").get(name) for name in VLLM_ROUNDS)
    is_rounded = (
        model.get("dtype") != "float32"
        or chosen.get("quantization") is not None
        or any(of_type not in (None, "auto") for of_type in types)
    )
    kind = ENGINES.get(str(chosen.get("type")))
    return is_rounded and kind is not None and issubclass(kind, RolloutEngineConfig) and kind.own_process


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}
