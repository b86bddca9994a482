"""The sections of a run's config. Every size says its unit in its name. Importing them imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rlhf.algorithms import (
    GAE,
    Advantage,
    KLPenalty,
    OverlongPenalty,
    PolicyLoss,
    PPOClip,
    RolloutCorrection,
)
from rlhf.engines.optimizers import AdamW, Optimizer

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
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
    alone: ClassVar[str | None] = None
    """The key whose value alone may stand for the section, where that is a text."""

    @model_validator(mode="before")
    @classmethod
    def _value_alone(cls, value: Any) -> Any:
        return {cls.alone: value} if cls.alone is not None and isinstance(value, str) else value


class RunSection(Section):
    name: str = Field("run", pattern=RUN_NAME, description="the run's name in the store")
    store: str = Field("file://./runs", description="folder of runs: any fsspec URL (file://, s3://, memory://)")
    seed: int = Field(0, ge=0, description="all randomness of the run derives from it")
    single_writer: bool = Field(
        False, description="you promise that one driver writes: allows a store that ignores create-if-absent"
    )


class LoRAConfig(Section):
    """Low-rank adapters learn, and the model stays as it is (arXiv 2106.09685)."""

    r: int = Field(16, gt=0, description="rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="adapters are scaled by alpha / r")
    target_modules: OneOrMore[str] = Field(
        ("all-linear",), min_length=1, description="names of the layers that get adapters"
    )


class ModelConfig(Section):
    alone = "path"
    path: str = Field(description="a Hugging Face model: a folder, or a name on the hub")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="type of the weights and the computation")
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "sdpa", description="the attention kernel: PyTorch's, or one that packed sequences pay with, on GPUs"
    )
    lora: LoRAConfig | None = Field(None, description="train adapters (extra lora); null: train all weights")
    chat_template: str | None = Field(None, description="a Jinja file: the chat template; null: the tokenizer's own")
    trust_remote_code: bool = Field(False, description="run Python code that the model's repository brings")


class DataConfig(Section):
    train: OneOrMore[str] = Field(
        min_length=1, description="prompt files (Parquet or JSON lines, any fsspec URL), in order"
    )
    prompts_per_iteration: int = Field(64, gt=0, description="prompts each iteration draws")
    max_prompt_tokens: int = Field(512, gt=0, description="longest prompt, in tokens, chat template included")
    generations: str | None = Field(
        None, description="a run (its URL) whose generations are taken instead of new ones; null: generate"
    )
    truncation: Literal["error", "left", "right", "middle", "drop"] = Field(
        "error", description="a longer prompt: is refused, loses tokens at its left, right or middle, or is not drawn"
    )
    system_prompt: str | None = Field(None, description="a system message before prompts that have none")


class VLLMConfig(Section):
    """How vLLM runs; none of it changes what is computed, but for rounding."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that it takes")
    tensor_parallel: int = Field(1, gt=0, description="GPUs that share the model")
    max_model_len: int | None = Field(
        None, gt=0, description="longest prompt and response together; null: what data and rollout allow"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs: starts faster, generates slower")
    prefix_caching: bool = Field(True, description="compute a prompt once for all its trajectories")
    cpu_cache_gib: int = Field(1, gt=0, description="without a GPU: memory for keys and values, in GiB")
    timeout_s: float = Field(
        600.0, gt=0, description="a shard that takes longer: vLLM is considered hung, and restarted"
    )


class ServerConfig(Section):
    """Servers that generate (rollout.engine: server); started by others."""

    urls: OneOrMore[str] = Field((), description="where they listen, such as http://127.0.0.1:8000")
    api: Literal["vllm", "sglang", "tgi"] = Field(
        "vllm", description="what they are: vllm serve, SGLang, or Text Generation Inference (only to evaluate)"
    )
    weights_folder: str | None = Field(
        None, description="a folder that servers see by the same name, for new weights; null: only evaluate"
    )
    timeout_s: float = Field(600.0, gt=0, description="a response that takes longer is asked for again")


class EnvironmentConfig(Section):
    """What the policy talks to while it responds."""

    alone = "name"
    name: str = Field(description="a built-in (calculator), package.module:Class or file.py:Class")
    options: dict[str, Any] = Field({}, description="keyword arguments of the class")
    max_turns: int = Field(8, gt=0, description="most turns of the policy in a trajectory")
    timeout_s: float = Field(60.0, gt=0, description="an answer that takes longer fails its shard, and stops the run")


class RolloutConfig(Section):
    engine: Literal["hf", "vllm", "server"] = Field(
        "hf", description="what generates: hf (transformers, in this process), vllm (extra vllm), server (over HTTP)"
    )
    n: int = Field(4, gt=0, description="trajectories per prompt")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs everywhere are scaled by it")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: smallest set of tokens of this probability")
    max_response_tokens: int = Field(512, gt=0, description="longest response, in tokens")
    ignore_eos: bool = Field(False, description="never stop at end-of-sequence (for benchmarks)")
    stop: OneOrMore[str] = Field((), description="texts that end a response, which keeps them")
    environment: EnvironmentConfig | None = Field(
        None, description="tools, or another side, that answers the policy within a response; null: none"
    )
    quantization: Literal["fp8"] | None = Field(None, description="vllm: weights are generated with in 8 bits")
    vllm: VLLMConfig = Field(VLLMConfig(), description="how vLLM runs")
    server: ServerConfig = Field(ServerConfig(), description="servers that generate")
    prompts_per_shard: int = Field(16, gt=0, description="prompts a shard holds: what a crash can lose at most")
    mode: Literal["sync", "one_step_off", "async"] = Field(
        "sync",
        description="sync: an iteration generates with the newest weights; one_step_off: it generates while the one "
        "before it trains; async: up to max_staleness iterations ahead",
    )
    max_staleness: int = Field(1, gt=0, description="async: updates that a trajectory's weights may lack, at most")
    partial: bool = Field(
        False,
        description="async: new weights interrupt a generation, which continues with them after the tokens it has",
    )
    partial_tokens: int = Field(256, gt=0, description="partial: tokens between two moments for new weights")

    @property
    def ahead(self) -> int:
        """So many iterations may be generated before their turn."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]


class RewardModelConfig(ModelConfig):
    """A classifier that says what a response is worth."""

    kind: Literal["outcome", "process"] = Field(
        "outcome",
        description="outcome: a sequence classifier scores the response; process: a token classifier scores each of "
        "its steps, at the step's last token",
    )
    weight: float = Field(1.0, description="the model's part of the score")
    step_separator: str = Field("\n\n", min_length=1, description="process: what ends a step")
    micro_batch_tokens: int = Field(16384, gt=0, description="tokens computed at once by a process, padding included")

    @model_validator(mode="after")
    def _does_not_learn(self) -> Self:
        if self.lora is not None:
            raise ValueError("reward.model.lora is set, but the reward model does not learn: remove it")
        return self


class RewardConfig(Section):
    function: str | dict[str, float] | None = Field(
        "countdown",
        description="a built-in reward, package.module:function or file.py:function; or several, with their weights; "
        "null: the model alone (the default where there is one), or the environment",
    )
    model: RewardModelConfig | None = Field(
        None, description="a reward model, alone or besides the function; null: none"
    )
    options: dict[str, dict[str, Any]] = Field(
        {}, description="keyword arguments of the function; of several, by their names"
    )
    timeout_s: float = Field(30.0, gt=0, description="a response that takes its reward longer has none")
    on_error: Literal["fail", "zero", "drop"] = Field(
        "fail",
        description="a reward that raises, hangs, or is not a number: stop the run, score 0, or leave the trajectory "
        "out; recorded in reward_error",
    )
    workers: int = Field(2, gt=0, description="processes that compute rewards")
    allow_code: bool = Field(False, description="run programs that the model wrote (reward.function code)")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, tree: Any) -> Any:
        """A model alone has no function; options of one function need not say whose they are."""
        if not isinstance(tree, Mapping):
            return tree
        if tree.get("model") is not None and "function" not in tree:
            tree = {**tree, "function": None}
        function, options = tree.get("function", cls.model_fields["function"].default), tree.get("options")
        if isinstance(function, str) and isinstance(options, Mapping) and options and function not in options:
            tree = {**tree, "options": {function: options}}
        return tree

    @property
    def functions(self) -> dict[str, float]:
        """Their weights, by name."""
        return {self.function: 1.0} if isinstance(self.function, str) else self.function or {}

    @model_validator(mode="after")
    def _has_functions(self) -> Self:
        unknown = set(self.options) - self.functions.keys()
        if unknown:
            raise ValueError(f"reward.options has {min(unknown)}, which is not in reward.function")
        return self


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476): prompts whose trajectories all score the same teach nothing, so more
    are drawn until `data.prompts_per_iteration` differ; if not enough do, the batch is filled with others."""

    max_prompts: int = Field(gt=0, description="most prompts an iteration draws")


class AlgorithmConfig(Section):
    advantage: Annotated[Advantage, _type_may_be_left_out("gae")] = Field(GAE(), description="the advantage estimator")
    loss: Annotated[PolicyLoss, _type_may_be_left_out("ppo")] = Field(PPOClip(), description="the policy loss")
    kl: KLPenalty = Field(KLPenalty(), description="the KL term against the reference")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus in the actor's loss")
    rollout_correction: RolloutCorrection | None = Field(
        None,
        description="between the rollout's log-probs and the trainer's; null: none with rollout.mode sync, and "
        "{weights: {}} with the others; {}: none with any",
    )
    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="draw until enough prompts teach; null: no"
    )
    overlong_penalty: OverlongPenalty | None = Field(None, description="punish responses near the limit; null: no")


class LRScheduleConfig(Section):
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


class TrainerConfig(Section):
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
    offload_when_idle: bool = Field(
        False,
        description="while another model of the same processes computes, parameters and optimizer state lie in host "
        "memory",
    )
    lr: float = Field(gt=0, description="learning rate")
    lr_schedule: LRScheduleConfig = Field(LRScheduleConfig(), description="learning rate over the iterations")
    optimizer: Annotated[Optimizer, _type_may_be_left_out("adamw")] = Field(AdamW(), description="the optimizer")
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


class ActorConfig(TrainerConfig):
    lr: float = Field(1e-6, gt=0, description="learning rate")


class CriticConfig(TrainerConfig):
    model: ModelConfig | None = Field(None, description="the backbone the critic starts from; null: the actor's model")
    lr: float = Field(1e-5, gt=0, description="learning rate")
    warmup_iterations: int = Field(0, ge=0, description="first iterations in which only the critic learns")
    cliprange_value: float | None = Field(0.5, gt=0, description="how far a value may move; null: not limited")


class ReferenceConfig(Section):
    model: ModelConfig | None = Field(None, description="the frozen reference; null: the actor's first weights")


class KeepConfig(Section):
    last: int = Field(3, ge=1, description="newest snapshots that are kept")
    every: int | None = Field(10, gt=0, description="snapshots of every so many iterations are kept too; null: none")


class CheckpointConfig(Section):
    every: int = Field(1, gt=0, description="iterations between snapshots; the updates in between are replayed")
    background: bool = Field(
        False, description="write snapshots while the next iteration generates; a crash before one is durable replays"
    )
    keep: KeepConfig = Field(KeepConfig(), description="which snapshots stay")
    on_replay_mismatch: Literal["auto", "stop", "continue"] = Field(
        "auto", description="a replayed update whose weights differ: auto stops on CPU and goes on elsewhere"
    )


class ValidationConfig(Section):
    data: str | None = Field(None, description="prompt file to validate on; null: no validation")
    every: int = Field(
        0, ge=0, description="iterations between validations; 0: only before the first and after the last"
    )
    n: int = Field(1, gt=0, description="trajectories per prompt")
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0: greedy")
    before_train: bool = Field(True, description="validate before the first iteration")
    solved_score: float | None = Field(
        None,
        description="the score from which on an answer counts as solved, for pass@1; null: 1 with a built-in reward "
        "that says right or wrong, and no pass@1 with others, whose scores need not mean that",
    )


class TrainConfig(Section):
    iterations: int = Field(30, gt=0, description="iterations in all; raise it to go on with a finished run")
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="a reward, loss or gradient that is not finite: stop the run, or go on without the iteration's "
        "updates that depend on it (a validation's always stops)",
    )
    updates: bool = Field(True, description="false: responses are only scored, and the actor passes through unchanged")


class PoolConfig(Section):
    """Processes with devices of their own, which hold the models of some roles between them."""

    workers: int = Field(1, gt=0, description="processes")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs of each")
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores of each")
    idle_minutes: float = Field(30, gt=0, description="after so long without a call, its processes end")


Role = Literal["actor", "critic", "reference", "reward", "rollout"]
