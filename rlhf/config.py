"""The configuration of a run: one frozen tree, the same for YAML files, overrides and Prefect's forms.

Every size says its unit in its name. Reading and validating a config imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from rlhf.algorithms import (
    GAE,
    Advantage,
    KLPenalty,
    OverlongPenalty,
    PolicyLoss,
    PPOClip,
    RolloutCorrection,
)
from rlhf.errors import UserError

STAGES = (
    "generate",
    "score",
    "select",
    "greedy_baseline",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "update_critic",
    "update_actor",
)
"""Every stage that an iteration may have, in order."""

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
Beta = Annotated[float, Field(ge=0, lt=1)]


ANYTHING_FITS = "anything fits"
"""Validation context in which impossible combinations are not refused."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
OneOrMore = Annotated[tuple[T, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""A list of names; one alone may stand without the brackets."""


def _type_may_be_left_out(default: str) -> BeforeValidator:
    """`grpo` alone stands for {type: grpo}, and without a type, options are those of the default."""

    def complete(value: Any) -> Any:
        if isinstance(value, str):
            return {"type": value}
        return {"type": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(complete)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Run(Section):
    name: str = Field("run", pattern=RUN_NAME, description="the run's name in the store")
    store: str = Field("file://./runs", description="folder of runs: any fsspec URL (file://, s3://, memory://)")
    seed: int = Field(0, ge=0, description="all randomness of the run derives from it")
    single_writer: bool = Field(
        False, description="you promise that one driver writes: allows a store that ignores create-if-absent"
    )


class LoRA(Section):
    """Low-rank adapters learn, and the model stays as it is (arXiv 2106.09685)."""

    r: int = Field(16, gt=0, description="rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="adapters are scaled by alpha / r")
    target_modules: OneOrMore[str] = Field(
        ("all-linear",), min_length=1, description="names of the layers that get adapters"
    )


class Model(Section):
    path: str = Field(description="a Hugging Face model: a folder, or a name on the hub")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="type of the weights and the computation")
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "sdpa", description="the attention kernel: PyTorch's, or one that packed sequences pay with, on GPUs"
    )
    lora: LoRA | None = Field(None, description="train adapters (extra lora); null: train all weights")
    trust_remote_code: bool = Field(False, description="run Python code that the model's repository brings")


class Data(Section):
    train: OneOrMore[str] = Field(min_length=1, description="prompt files (Parquet or JSON lines), in order")
    prompts_per_iteration: int = Field(64, gt=0, description="prompts each iteration draws")
    max_prompt_tokens: int = Field(512, gt=0, description="longest prompt, in tokens, chat template included")
    generations: str | None = Field(
        None, description="a run (its URL) whose generations are taken instead of new ones; null: generate"
    )
    truncation: Literal["error", "left", "right", "middle", "drop"] = Field(
        "error", description="a longer prompt: is refused, loses tokens at its left, right or middle, or is not drawn"
    )
    system_prompt: str | None = Field(None, description="a system message before prompts that have none")


class VLLM(Section):
    """How vLLM runs; none of it changes what is computed, but for rounding."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that it takes")
    tensor_parallel: int = Field(1, gt=0, description="GPUs that share the model")
    max_model_len: int | None = Field(
        None, gt=0, description="longest prompt and response together; null: what data and rollout allow"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs: starts faster, generates slower")
    prefix_caching: bool = Field(True, description="compute a prompt once for all its trajectories")
    cpu_cache_gib: int = Field(1, gt=0, description="without a GPU: memory for keys and values, in GiB")
    timeout_s: float = Field(600.0, gt=0, description="a shard that takes longer: vLLM is taken for hung, begun anew")


class Server(Section):
    """Servers that generate (rollout.engine: server); started by others."""

    urls: OneOrMore[str] = Field((), description="where they listen, such as http://127.0.0.1:8000")
    api: Literal["vllm", "sglang", "tgi"] = Field(
        "vllm", description="what they are: vllm serve, SGLang, or Text Generation Inference (only to evaluate)"
    )
    weights_folder: str | None = Field(
        None, description="a folder that servers see by the same name, for new weights; null: only evaluate"
    )
    timeout_s: float = Field(600.0, gt=0, description="a response that takes longer is asked for again")


class Rollout(Section):
    engine: Literal["hf", "vllm", "server"] = Field(
        "hf", description="what generates: hf (transformers, in this process), vllm (extra vllm), server (over HTTP)"
    )
    n: int = Field(4, gt=0, description="trajectories per prompt")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs everywhere are scaled by it")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: smallest set of tokens of this probability")
    max_response_tokens: int = Field(512, gt=0, description="longest response, in tokens")
    ignore_eos: bool = Field(False, description="never stop at end-of-sequence (for benchmarks)")
    stop: OneOrMore[str] = Field((), description="texts that end a response, which keeps them")
    quantization: Literal["fp8"] | None = Field(None, description="vllm: weights are generated with in 8 bits")
    vllm: VLLM = Field(VLLM(), description="how vLLM runs")
    server: Server = Field(Server(), description="servers that generate")
    prompts_per_shard: int = Field(16, gt=0, description="prompts a shard holds: what a crash can lose at most")
    mode: Literal["sync", "one_step_off", "async"] = Field(
        "sync",
        description="sync: an iteration generates with the newest weights; one_step_off: it generates while the one "
        "before it trains; async: up to max_staleness iterations ahead",
    )
    max_staleness: int = Field(1, gt=0, description="async: updates that a trajectory's weights may lack, at most")
    partial: bool = Field(
        False, description="async: new weights interrupt a generation, which goes on with them from its tokens"
    )
    partial_tokens: int = Field(256, gt=0, description="partial: tokens between two moments for new weights")

    @property
    def ahead(self) -> int:
        """So many iterations may be generated before their turn."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]


class Reward(Section):
    function: str | dict[str, float] = Field(
        "countdown",
        description="a built-in reward, package.module:function or file.py:function; or several, with their weights",
    )
    options: dict[str, dict[str, Any]] = Field({}, description="keyword arguments of the functions, by their names")
    timeout_s: float = Field(30.0, gt=0, description="a response that takes its reward longer has none")
    on_error: Literal["fail", "zero", "drop"] = Field(
        "fail",
        description="a reward that raises, hangs, or is not a number: stop the run, score 0, or leave the trajectory "
        "out; recorded in reward_error",
    )
    workers: int = Field(2, gt=0, description="processes that compute rewards")
    allow_code: bool = Field(False, description="run programs that the model wrote (reward.function code)")

    @model_validator(mode="after")
    def _has_functions(self) -> Self:
        if not self.function:
            raise ValueError("reward.function names no function: name one, or several with weights")
        names = {self.function} if isinstance(self.function, str) else set(self.function)
        if "code" in names and not self.allow_code:
            raise ValueError(
                "reward.function code runs programs that the model wrote: read docs/security.md, and set "
                "reward.allow_code: true"
            )
        unknown = set(self.options) - names
        if unknown:
            raise ValueError(f"reward.options has {min(unknown)}, which is not in reward.function")
        return self


class DynamicSampling(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476): prompts whose trajectories all score the same teach nothing, so more
    are drawn until `data.prompts_per_iteration` differ; if not enough do, the batch is filled with others."""

    max_prompts: int = Field(gt=0, description="most prompts an iteration draws")


class Algorithm(Section):
    advantage: Annotated[Advantage, _type_may_be_left_out("gae")] = Field(GAE(), description="the advantage estimator")
    loss: Annotated[PolicyLoss, _type_may_be_left_out("ppo")] = Field(PPOClip(), description="the policy loss")
    kl: KLPenalty = Field(KLPenalty(), description="the KL term against the reference")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus in the actor's loss")
    rollout_correction: RolloutCorrection | None = Field(
        None,
        description="between the rollout's log-probs and the trainer's; null: none with rollout.mode sync, and "
        "{weights: {}} with the others; {}: none with any",
    )
    dynamic_sampling: DynamicSampling | None = Field(None, description="draw until enough prompts teach; null: no")
    overlong_penalty: OverlongPenalty | None = Field(None, description="punish responses near the limit; null: no")


class LRSchedule(Section):
    type: Literal["constant", "linear", "cosine"] = Field("constant", description="how the rate decays after warm-up")
    warmup_iterations: int = Field(0, ge=0, description="iterations over which the rate rises from 0")
    decay_iterations: int | None = Field(
        None, gt=0, description="iterations from the end of warm-up to the smallest rate"
    )
    min_ratio: float = Field(0.0, ge=0, le=1, description="smallest rate, as a share of lr")

    @model_validator(mode="after")
    def _decay_has_a_length(self) -> Self:
        if self.type != "constant" and self.decay_iterations is None:
            raise ValueError(f"a {self.type} schedule needs decay_iterations")
        return self


class Trainer(Section):
    """How a model is updated; sizes are of the whole run, not of one device."""

    engine: Literal["torch", "fsdp", "deepspeed"] = Field(
        "torch", description="what trains: torch (each process has it all), fsdp (FSDP2) or deepspeed (ZeRO)"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="deepspeed: processes share out the optimizer's state (1), gradients (2), parameters (3)"
    )
    offload: bool = Field(
        False,
        description="fsdp, deepspeed: optimizer state, and parameters where they are shared out, stay in host memory",
    )
    by_turns: bool = Field(
        False,
        description="while another model of the same processes computes, parameters and optimizer state lie in host "
        "memory",
    )
    lr: float = Field(gt=0, description="learning rate of AdamW")
    lr_schedule: LRSchedule = Field(LRSchedule(), description="learning rate over the iterations")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's betas")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    ppo_epochs: int = Field(1, gt=0, description="passes over an iteration's trajectories")
    mini_batch_trajectories: int = Field(64, gt=0, description="trajectories an optimizer step learns from")
    micro_batch_tokens: int = Field(16384, gt=0, description="tokens computed at once by a process, padding included")
    packing: bool = Field(
        False, description="sequences one after the other, without padding; for attention that skips what lies between"
    )
    sequence_parallel: int = Field(
        1, gt=0, description="processes that hold a share of each sequence's positions (Ulysses), for long ones"
    )
    tensor_parallel: int = Field(
        1, gt=0, description="fsdp: processes that hold a share of each layer's matrices, for large models"
    )
    grad_clip: float | None = Field(1.0, gt=0, description="largest norm of the gradient; null: not limited")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")


class Actor(Trainer):
    lr: float = Field(1e-6, gt=0, description="learning rate of AdamW")


class Critic(Trainer):
    model: Model | None = Field(None, description="the backbone the critic starts from; null: the actor's model")
    lr: float = Field(1e-5, gt=0, description="learning rate of AdamW")
    warmup_iterations: int = Field(0, ge=0, description="first iterations in which only the critic learns")
    cliprange_value: float | None = Field(0.5, gt=0, description="how far a value may move; null: not limited")


class Reference(Section):
    model: Model | None = Field(None, description="the frozen reference; null: the actor's first weights")


class Keep(Section):
    last: int = Field(3, ge=1, description="newest snapshots that are kept")
    every: int | None = Field(10, gt=0, description="snapshots of every so many iterations are kept too; null: none")


class Checkpoint(Section):
    every: int = Field(1, gt=0, description="iterations between snapshots; the updates in between are replayed")
    background: bool = Field(
        False, description="write snapshots while the next iteration generates; a crash before one is durable replays"
    )
    keep: Keep = Field(Keep(), description="which snapshots stay")
    on_replay_mismatch: Literal["auto", "stop", "continue"] = Field(
        "auto", description="a replayed update whose weights differ: auto stops on CPU and goes on elsewhere"
    )


class Validation(Section):
    data: str | None = Field(None, description="prompt file to validate on; null: no validation")
    every: int = Field(
        0, ge=0, description="iterations between validations; 0: only before the first and after the last"
    )
    n: int = Field(1, gt=0, description="trajectories per prompt")
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0: greedy")
    before_train: bool = Field(True, description="validate before the first iteration")


class Train(Section):
    iterations: int = Field(30, gt=0, description="iterations in all; raise it to go on with a finished run")
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="a reward, loss or gradient that is not finite: stop the run, or go on without the iteration's "
        "updates that depend on it (a validation's always stops)",
    )
    updates: bool = Field(True, description="false: responses are only scored, and the actor passes through unchanged")


class Pool(Section):
    """Processes with devices of their own, which hold the models of some roles between them."""

    workers: int = Field(1, gt=0, description="processes")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs of each")
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores of each")
    idle_minutes: float = Field(30, gt=0, description="after so long without a call, its processes end")


Role = Literal["actor", "critic", "reference", "rollout"]


class RunConfig(Section):
    """Everything a run is made of."""

    run: Run = Field(Run(), description="the run's name, place and seed")
    model: Model = Field(description="the actor's model; critic and reference default to it")
    data: Data = Field(description="the prompts")
    rollout: Rollout = Field(Rollout(), description="how responses are generated")
    reward: Reward = Field(Reward(), description="how responses are scored")
    algorithm: Algorithm = Field(Algorithm(), description="advantages, loss and KL")
    actor: Actor = Field(Actor(), description="how the actor is updated")
    critic: Critic | None = Field(Critic(), description="how the critic is updated; null: no critic")
    reference: Reference = Field(Reference(), description="the reference model")
    pools: dict[str, Pool] = Field({}, description="worker groups on Ray, by name; none: everything in this process")
    placement: Literal["colocated", "separate"] | dict[Role, str] = Field(
        "colocated",
        description="roles by pool: all in the one pool, each in the pool of its name, or as a mapping says",
    )
    checkpoint: Checkpoint = Field(Checkpoint(), description="snapshots")
    validation: Validation = Field(Validation(), description="held-out prompts")
    tracking: OneOrMore[Literal["tensorboard", "wandb"]] = Field((), description="where metrics go besides the store")
    train: Train = Field(Train(), description="how long")

    @model_validator(mode="before")
    @classmethod
    def _stale_rollouts_are_corrected(cls, tree: Any, info: ValidationInfo) -> Any:
        """Unless the correction is {}, which corrects nothing."""
        if info.context == ANYTHING_FITS:
            return tree
        if isinstance(tree, dict) and isinstance(rollout := tree.get("rollout"), dict):
            algorithm = tree.get("algorithm") or {}
            sync = rollout.get("mode", "sync") == "sync"
            if not sync and isinstance(algorithm, dict) and algorithm.get("rollout_correction") is None:
                return {**tree, "algorithm": {**algorithm, "rollout_correction": {"weights": {}}}}
        return tree

    @property
    def trajectories_per_iteration(self) -> int:
        return self.data.prompts_per_iteration * self.rollout.n

    @property
    def most_prompts(self) -> int:
        """Prompts that an iteration draws, at most."""
        sampling = self.algorithm.dynamic_sampling
        return self.data.prompts_per_iteration if sampling is None else sampling.max_prompts

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles that have a model."""
        critic: tuple[Role, ...] = ("critic",) if self.needs_critic else ()
        reference: tuple[Role, ...] = ("reference",) if self.needs_reference else ()
        return ("actor", *critic, *reference, "rollout")

    @property
    def trainers(self) -> dict[str, Trainer]:
        """How each role that learns is updated."""
        critic = {"critic": self.critic} if self.needs_critic and self.critic is not None else {}
        return {"actor": self.actor, **critic}

    @property
    def critic_model(self) -> Model:
        return self.model if self.critic is None or self.critic.model is None else self.critic.model

    @property
    def reference_model(self) -> Model:
        """The actor's first weights are those of its model: a LoRA actor's adapters start at zero."""
        return self.reference.model or self.model.model_copy(update={"lora": None})

    def pool_of(self, role: str) -> str | None:
        """The pool that serves a role; None: the driver's own process."""
        if not self.pools:
            return None
        if isinstance(self.placement, dict):
            return self.placement.get(role)  # type: ignore[call-overload, no-any-return]
        return role if self.placement == "separate" else next(iter(self.pools))

    @property
    def on_policy(self) -> bool:
        """One pass over one mini-batch: the actor that learns is the one that generated, and every ratio is 1."""
        one_step = self.actor.mini_batch_trajectories == self.trajectories_per_iteration
        fresh = self.data.generations is None and self.rollout.mode == "sync"
        return self.actor.ppo_epochs == 1 and one_step and fresh

    @property
    def bypass(self) -> bool:
        """The rollout's log-probs serve as the old ones."""
        correction = self.algorithm.rollout_correction
        return correction is not None and correction.bypass

    @property
    def needs(self) -> frozenset[str]:
        """What the algorithms ask for, by name: it decides which stages an iteration has."""
        algorithm = self.algorithm
        asked = {*algorithm.advantage.needs, *algorithm.kl.needs}
        asked |= set(algorithm.rollout_correction.needs) if algorithm.rollout_correction is not None else set()
        asked |= set() if self.on_policy else set(algorithm.loss.needs)
        return frozenset(asked)

    @property
    def needs_critic(self) -> bool:
        return "values" in self.needs

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles whose weights every iteration moves, or records as passed through."""
        return ("actor", "critic") if self.needs_critic and self.train.updates else ("actor",)

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
    def selects(self) -> bool:
        """Whether more may be generated than is learned from."""
        return self.algorithm.dynamic_sampling is not None or self.reward.on_error == "drop"

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that every iteration has, in order; validations come besides."""
        optional = {
            "select": self.selects,
            "greedy_baseline": self.needs_greedy_scores,
            "old_log_probs": self.needs_old_log_probs,
            "ref_log_probs": self.needs_reference,
            "values": self.needs_critic,
            "update_critic": self.needs_critic,
        }
        if not self.train.updates:
            return ("generate", "score", "update_actor")
        return tuple(name for name in STAGES if optional.get(name, True))

    def validates_before(self, iteration: int) -> bool:
        """Whether held-out prompts are answered before this iteration; the end of the run always is validated."""
        if self.validation.data is None:
            return False
        if iteration == 0:
            return self.validation.before_train
        return self.validation.every > 0 and iteration % self.validation.every == 0

    def warms_up(self, iteration: int) -> bool:
        """Whether only the critic learns in this iteration."""
        return self.needs_critic and self.critic is not None and iteration < self.critic.warmup_iterations

    def _roles_are_placed(self) -> None:
        if not self.pools:
            if self.placement != "colocated":
                raise ValueError(f"placement is {self.placement}, but there are no pools: name them in pools")
            return
        if self.placement == "colocated" and len(self.pools) > 1:
            raise ValueError(
                f"placement is colocated, but there are {len(self.pools)} pools: leave one, or say in placement which "
                "role is where"
            )
        for role in self.roles:
            pool = self.pool_of(role)
            if pool not in self.pools:
                there = ", ".join(self.pools)
                raise ValueError(f"placement puts the {role} in {pool or 'no pool'}: name one of the pools ({there})")
        if self.pool_of("rollout") != self.pool_of("actor") and self.checkpoint.every != 1:
            raise ValueError(
                f"checkpoint.every is {self.checkpoint.every}, but the rollout is not in the actor's pool and takes "
                "its weights from the snapshot of every iteration: set it to 1"
            )

    @model_validator(mode="after")
    def _combinations(self, info: ValidationInfo) -> Self:
        if info.context == ANYTHING_FITS:
            return self
        self._algorithms_fit()
        self._rollout_fits()
        self._roles_are_placed()
        total = self.trajectories_per_iteration
        sizes = f"data.prompts_per_iteration {self.data.prompts_per_iteration} x rollout.n {self.rollout.n} = {total}"
        if self.needs_critic and self.critic is None:
            raise ValueError(
                f"critic is null, but algorithm.advantage {self.algorithm.advantage.type} needs values: leave critic "
                "out to get the default one, or choose an advantage without a critic (grpo)"
            )
        shared = {"reference": self.actor} if self.needs_reference else {}
        for role, trainer in (self.trainers | shared).items():
            pool = self.pool_of(role)
            workers = 1 if pool is None else self.pools[pool].workers
            for key, size in (("sequence", trainer.sequence_parallel), ("tensor", trainer.tensor_parallel)):
                if workers % size:
                    raise ValueError(
                        f"{role}.{key}_parallel is {size}, which does not divide the number of processes that hold "
                        f"the {role} ({workers}): change one of them"
                    )
            if trainer.tensor_parallel > 1:
                self._tensor_parallel_fits(role, trainer)
            if trainer.by_turns and trainer.offload:
                raise ValueError(
                    f"{role}.by_turns moves to host memory what {role}.offload keeps there all the time: choose one"
                )
            if trainer.by_turns and trainer.engine == "deepspeed" and trainer.zero_stage == 3:
                raise ValueError(
                    f"{role}.by_turns does not go with {role}.zero_stage 3, whose state DeepSpeed does not move: use "
                    f"{role}.offload, a lower stage, or {role}.engine fsdp"
                )
            size = trainer.mini_batch_trajectories
            if size > total:
                raise ValueError(
                    f"{role}.mini_batch_trajectories is {size}, more than an iteration has ({sizes}): lower it"
                )
            if total % size:
                raise ValueError(f"{role}.mini_batch_trajectories is {size}, which does not divide {total} ({sizes})")
            longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
            if trainer.micro_batch_tokens < longest:
                raise ValueError(
                    f"{role}.micro_batch_tokens is {trainer.micro_batch_tokens}, less than one trajectory may have "
                    f"(data.max_prompt_tokens + rollout.max_response_tokens = {longest}): raise it"
                )
        if self.critic is not None and self.critic.warmup_iterations and not self.needs_critic:
            raise ValueError(
                f"critic.warmup_iterations is set, but algorithm.advantage {self.algorithm.advantage.type} has no "
                "critic: remove it, or choose an advantage with a critic (gae)"
            )
        for model in (self.model, self.critic_model, self.reference_model):
            if model.attention.startswith("flash") and model.dtype == "float32":
                raise ValueError(
                    f"model.attention {model.attention} computes in 16 bits: set model.dtype bfloat16, or use sdpa"
                )
        if self.reference.model is not None and self.reference.model.lora is not None:
            raise ValueError("reference.model.lora is set, but the reference does not learn: remove it")
        if self.bypass and self.data.generations is not None:
            raise ValueError(
                "data.generations takes what another policy generated, so old log-probs have to be recomputed: set "
                "algorithm.rollout_correction.bypass: false"
            )
        if self.validation.every and self.validation.data is None:
            raise ValueError("validation.every is set without validation.data: name a prompt file, or remove it")
        return self

    def _rollout_fits(self) -> None:
        rollout = self.rollout
        if rollout.mode != "sync" and self.checkpoint.every != 1:
            raise ValueError(
                f"checkpoint.every is {self.checkpoint.every}, but with rollout.mode {rollout.mode} the rollout takes "
                "its weights from the snapshot of every iteration: set it to 1"
            )
        if rollout.partial and rollout.mode != "async":
            raise ValueError(f"rollout.partial is for rollout.mode async, and that is {rollout.mode}")
        if rollout.partial and rollout.stop:
            raise ValueError("rollout.partial may cut a stop text in two: remove rollout.stop, or set partial: false")
        if rollout.engine != "vllm" and rollout.quantization is not None:
            raise ValueError(f"rollout.quantization {rollout.quantization} is for rollout.engine vllm: remove it")
        if rollout.engine == "hf":
            return
        if rollout.engine == "server" and not rollout.server.urls:
            raise ValueError("rollout.engine is server, and rollout.server.urls names none: name them")
        if rollout.engine == "server" and rollout.server.api == "tgi" and rollout.server.weights_folder is not None:
            raise ValueError("rollout.server.api tgi takes no new weights: use vllm or sglang to train")
        if rollout.engine == "server" and self.model.lora is not None:
            raise ValueError("rollout.engine server takes no adapters: use vllm or hf with model.lora")
        temperatures = {
            "rollout.temperature": rollout.temperature,
            "validation.temperature": self.validation.temperature,
        }
        for key, temperature in temperatures.items():
            if rollout.top_p < 1 and temperature not in (0.0, 1.0):
                raise ValueError(
                    f"rollout.engine {rollout.engine} gives log-probs either before top_p or at a temperature: with "
                    f"rollout.top_p {rollout.top_p}, {key} has to be 1 (or 0), and is {temperature}"
                )
        longest = self.data.max_prompt_tokens + rollout.max_response_tokens
        if rollout.vllm.max_model_len is not None and rollout.vllm.max_model_len < longest:
            raise ValueError(
                f"rollout.vllm.max_model_len is {rollout.vllm.max_model_len}, less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}: raise it, or leave it out"
            )

    def _tensor_parallel_fits(self, role: str, trainer: Trainer) -> None:
        model = self.critic_model if role == "critic" else self.model
        for key, other in (
            (f"{role}.engine {trainer.engine}", trainer.engine != "fsdp"),
            (f"{role}.sequence_parallel", trainer.sequence_parallel > 1),
            ("model.lora", model.lora is not None),
        ):
            if other:
                raise ValueError(f"{role}.tensor_parallel is for engine fsdp, alone: not with {key}")

    def _algorithms_fit(self) -> None:
        """Combinations of algorithms that contradict each other."""
        algorithm = self.algorithm
        advantage, kl, sampling = algorithm.advantage, algorithm.kl, algorithm.dynamic_sampling
        if self.rollout.n == 1:
            for key, compares in (
                (f"algorithm.advantage {advantage.type}", "group_ids" in advantage.needs),
                ("algorithm.advantage.drop_flat_groups", advantage.drop_flat_groups),
                ("algorithm.dynamic_sampling", sampling is not None),
            ):
                if compares:
                    raise ValueError(
                        f"{key} compares the trajectories of a prompt, but rollout.n is 1: raise rollout.n"
                    )
        if self.bypass and "entropy" in advantage.needs:
            raise ValueError(
                f"algorithm.advantage {advantage.type} needs the entropy, which the old-log-prob stage computes, but "
                "algorithm.rollout_correction.bypass leaves that stage out: set bypass: false"
            )
        if "reward_parts" in advantage.needs and kl.in_reward is not None:
            raise ValueError(
                f"algorithm.advantage {advantage.type} reads the parts of the reward, not the token rewards, so "
                "algorithm.kl.in_reward would do nothing: use algorithm.kl.in_loss"
            )
        if "reward_parts" in advantage.needs and algorithm.overlong_penalty is not None:
            raise ValueError(
                f"algorithm.advantage {advantage.type} reads the parts of the reward, so algorithm.overlong_penalty "
                "would do nothing: remove it, or let the reward have such a part"
            )
        if kl.controller.type == "adaptive" and not kl.in_reward:
            raise ValueError(
                "algorithm.kl.controller is adaptive, but algorithm.kl.in_reward, the coefficient that it moves, is "
                f"{yaml_text(kl.in_reward)}: set in_reward, or remove the controller"
            )
        if sampling is not None and sampling.max_prompts < self.data.prompts_per_iteration:
            raise ValueError(
                f"algorithm.dynamic_sampling.max_prompts is {sampling.max_prompts}, less than "
                f"data.prompts_per_iteration {self.data.prompts_per_iteration}: raise it"
            )
        overlong = algorithm.overlong_penalty
        if overlong is not None and overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong_penalty.buffer_tokens is {overlong.buffer_tokens}, more than "
                f"rollout.max_response_tokens {self.rollout.max_response_tokens}: lower it"
            )

    def value(self, key: str) -> Any:
        """The JSON value at a dotted key: a scalar, or a whole section."""
        found: Any = self.model_dump(mode="json")
        for part in key.split("."):
            found = None if found is None else found[part]
        return found

    def with_values(self, values: Mapping[str, Any], *, fit: bool = True) -> RunConfig:
        """This config with the values at some dotted keys replaced, validated again; but for combinations, if they
        need not `fit` together, because each stage only looks at some of them."""
        tree = self.model_dump(mode="json")
        for key, value in values.items():
            _set(tree, key, value)
        return validated(RunConfig, tree, "config", None if fit else ANYTHING_FITS)

    def overridden(self, overrides: Iterable[str]) -> RunConfig:
        """This config with ``a.b=c`` overrides, validated again."""
        return parse_config(_overridden(self.model_dump(mode="json"), overrides), "config")


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``a.b=c`` overrides (values in YAML's syntax).

    Raises `UserError`, one line naming the key and the mend, for anything that is wrong.
    """
    try:
        tree = _yaml(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} should hold sections such as `model:` and `data:`")
    return parse_config(_overridden(tree, overrides), str(path))


def _overridden(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"{override!r} is not an override: write key.subkey=value, such as actor.lr=1e-5")
        try:
            value = _yaml(text)
        except yaml.YAMLError:
            raise UserError(f"{override!r}: {text!r} is not a YAML value") from None
        _set(tree, key, value)
    return tree


def parse_config(tree: Mapping[str, Any], where: str) -> RunConfig:
    """Validate a tree of plain values; raises `UserError` with one line about its first problem."""
    return validated(RunConfig, tree, where)


def validated(model: type[M], tree: Mapping[str, Any], where: str, context: object = None) -> M:
    """Validate against any model of the project, in the same words."""
    try:
        return model.model_validate(tree, context=context)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error, tree)}") from None


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Every key of the config as (key, type, default, meaning), in order."""
    rows: list[tuple[str, str, str, str]] = []
    for name, field in model.model_fields.items():
        key, annotation = prefix + name, field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += keys(annotation, f"{key}.")
            continue
        default = "required" if field.is_required() else yaml_text(field.get_default())
        rows.append((key, _type_name(annotation), default, field.description or ""))
        options = models_in(annotation)
        shared = _shared_base(options)
        common = keys(shared, "") if shared is not None else []
        rows += [(f"{key}.{name}", *rest) for name, *rest in common]  # type: ignore[misc]
        for option in options:
            tag = option.model_fields.get("type")
            shown = f"{key}[{tag.get_default()}]." if tag is not None else f"{key}."
            rows += [(shown + row[0], *row[1:]) for row in keys(option) if row[0] != "type" and row not in common]
    return rows


def _shared_base(options: Sequence[type[BaseModel]]) -> type[BaseModel] | None:
    """The nearest class from which several choices come: its options are those of each of them."""
    if len(options) < 2:
        return None
    bases = (base for base in options[0].__mro__ if issubclass(base, BaseModel) and base is not BaseModel)
    return next((base for base in bases if all(issubclass(option, base) for option in options)), None)


def yaml_text(value: Any) -> str:
    """A value as one would write it in the YAML file, on one line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        inner = tree.get(part)
        if inner is None:
            inner = tree[part] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{key}: {part} is a value, not a section")
        tree = inner
    before = tree.get(last)
    if isinstance(before, dict) and "type" in before and isinstance(value, dict) and "type" not in value:
        value = before | value  # options alone keep the algorithm
    tree[last] = value


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as the number that people mean, as YAML 1.2 does; for YAML 1.1 it is text (it wants 1.0e-5)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _explain(error: ValidationError, tree: Mapping[str, Any]) -> str:
    problem = error.errors()[0]
    key = _key(problem["loc"], tree)
    message, given = problem["msg"], problem["input"]
    if problem["type"] == "union_tag_not_found":
        return f"{key}.type is missing: set it"
    if problem["type"] == "union_tag_invalid":
        return f"{key}.type is {problem['ctx']['tag']!r}: input should be one of {problem['ctx']['expected_tags']}"
    if problem["type"] == "extra_forbidden":
        return f"{key} is not a key of the config{_near(key)}; `ratchet train --help` lists them"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return f"{key} is {given!r}: it should be a section, such as {{key: value}}"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{key} is {given!r}: it should be a list, such as [a, b]"
    if problem["type"] == "missing":
        return f"{key} is missing: set it"
    message = message.removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key} is {given!r}: {message[0].lower()}{message[1:]}"


def _near(key: str) -> str:
    """The keys that look most like this one."""
    known = {re.sub(r"\[.*?\]", "", name) for name, *_ in keys()}
    found = get_close_matches(key, known, n=2, cutoff=0.8)
    return f" (is it {' or '.join(found)}?)" if found else ""


def _key(location: Sequence[str | int], tree: Any) -> str:
    """The dotted key of a place in the tree; pydantic's location also holds the type of each algorithm it enters."""
    parts = []
    for depth, part in enumerate(location, 1):
        if part == tree:
            continue  # the type alone stands for the section
        if isinstance(tree, Mapping) and part not in tree and (depth < len(location) or tree.get("type") == part):
            continue
        parts.append(str(part))
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            tree = None
    return ".".join(parts)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a type annotation names."""
    from typing import get_args

    found: list[type[BaseModel]] = []
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            found.append(part)
        else:
            found += models_in(part)
    return found


def _type_name(annotation: Any) -> str:
    from typing import get_args, get_origin

    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if origin is not None and args:
        names = [_type_name(arg) for arg in args if isinstance(arg, type) or get_origin(arg) is not None]
        return " or ".join(names)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        tag = annotation.model_fields.get("type")
        return str(tag.get_default()) if tag is not None else "section"
    return str(getattr(annotation, "__name__", annotation))
