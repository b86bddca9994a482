"""The sections of a run's config. The name of a size contains its unit. This module does not import torch.

The description of a number that affects learning names the recipe of its default: verl (`ppo_trainer.yaml`), TRL or
OpenRLHF; "ours" has no such recipe.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from ratchet.rlhf.algorithms import (
    GAE,
    LUFFY,
    Distillation,
    Experts,
    KLPenalty,
    OverlongPenalty,
    PPOClip,
    RolloutCorrection,
)
from ratchet.rlhf.algorithms.optimizers import AdamW, Optimizer
from ratchet.rlhf.built_in_rewards import JUDGE
from ratchet.rlhf.config.engine_args import MODEL_REFUSED, check_runtime_env, refuse
from ratchet.rlhf.config.engines import HFConfig, RolloutEngine, TorchConfig, TrainEngine
from ratchet.rlhf.config.section import NULL_IS_OFF, OneOrMore, Section, type_may_be_left_out
from ratchet.rlhf.config.user_algorithms import AnyAdvantage, AnyPolicyLoss

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
Dtype = Literal["float32", "bfloat16"]
Kernels = Literal["torch", "compile", "liger"]


def _checkpointing(value: Any) -> Any:
    if value not in (True, False, "selective", None):
        raise ValueError("should be true, false, selective or null")
    return value


CHECKPOINTING = BeforeValidator(_checkpointing)
"""Refuses other values in one line: the type is a union, of which pydantic reports each member."""


class RunSection(Section):
    name: str = Field("run", pattern=RUN_NAME, description="name of the run in the store")
    store: str = Field("file://./runs", description="folder of runs: any fsspec URL (file://, s3://, memory://)")
    project: str = Field("ratchet", min_length=1, description="project of the run in `tracking` (MLflow: experiment)")
    group: str | None = Field(None, description="group of the run in W&B, MLflow and trackio")
    tags: OneOrMore[str] = Field((), description="tags of the run in W&B and MLflow")
    seed: int = Field(0, ge=0, description="seed of all randomness in the run")
    deterministic: bool = Field(
        False,
        description="GPUs compute the same bits each time, with slower kernels, and a replayed update must give the "
        "committed weights; a CPU always does",
    )
    single_writer: bool = Field(
        False, description="allow a store that ignores create-if-absent; only safe if a single driver writes"
    )


class TrainRunSection(RunSection):
    """The keys that fine-tuning runs lack."""

    stages: OneOrMore[str] = Field(
        (), description="more stages of each iteration, in your code: package.module:STAGE or file.py:STAGE"
    )
    callbacks: OneOrMore[str] = Field(
        (), description="called after iterations and validations: package.module:Class or file.py:Class"
    )
    on_callback_error: Literal["note", "fail"] = Field(
        "note", description="when a callback raises: print a note, or stop the run"
    )


class LoRAConfig(Section):
    """Low-rank adapters, which are trained while the model is frozen (arXiv 2106.09685)."""

    r: int = Field(16, gt=0, description="rank of the adapters (TRL)")
    alpha: float = Field(32.0, gt=0, description="scale of the adapters: alpha / r (TRL)")
    target_modules: OneOrMore[str] = Field(
        ("all-linear",), min_length=1, description="names of the layers that get adapters"
    )


class ModelConfig(Section):
    alone = "path"
    path: str = Field(description="Hugging Face model: a folder, or a name on the hub")
    dtype: Dtype = Field("bfloat16", description="data type of the computation; trained weights stay float32")
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "sdpa", description="attention kernel: sdpa (PyTorch), or one that makes packing efficient, on GPUs"
    )
    kernels: Kernels = Field(
        "torch",
        description="what computes the layers in training and log-probs: torch, compile (torch.compile) or liger "
        "(extra liger, GPUs)",
    )
    lora: LoRAConfig | None = Field(None, description="train adapters (extra lora); null: train all weights")
    freeze_vision: bool = Field(
        True, description="whether the vision tower of a vision-language model, with its projector, keeps its weights"
    )
    chat_template: str | None = Field(None, description="Jinja file of the chat template; null: the tokenizer's own")
    chat_template_kwargs: dict[str, bool | int | float | str | None] = Field(
        {}, description="variables of the chat template, such as {enable_thinking: false}"
    )
    trust_remote_code: bool = Field(False, description="run Python code from the model's repository")
    args: dict[str, JsonValue] = Field(
        {},
        description="fields of the model's config.json that are replaced when it is loaded, such as {rope_parameters: "
        "{rope_type: yarn, factor: 4.0}}",
    )

    @property
    def is_served(self) -> bool:
        """True if servers compute the model, and only its config and its tokenizer are needed here."""
        return False

    @property
    def reads_text(self) -> bool:
        """True if the model reads the policy's trajectories as text, and not as the tokens that they are."""
        return False

    @model_validator(mode="after")
    def _args_may_be_set(self) -> Self:
        refuse(self.args, MODEL_REFUSED)
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a dictionary among the values has no hash


class TeacherServer(Section):
    """Servers of a teacher, which the user runs."""

    operational = frozenset(("urls", "timeout_s"))
    type: Literal["server"] = "server"
    urls: OneOrMore[str] = Field(
        min_length=1, description="addresses of `vllm serve`, such as http://127.0.0.1:8000; each has the same model"
    )
    timeout_s: float = Field(
        600.0, gt=0, description="a server that does not answer for so long, in seconds, is asked again or left out"
    )


class OneTeacher(ModelConfig):
    """A teacher."""

    engine: TeacherServer | None = Field(
        None,
        description="null: the teacher is computed as actor.engine says; {type: server, urls: [...]}: servers compute "
        "it, and path is needed for its config and tokenizer only",
    )
    align: Literal["tokens", "text"] = Field(
        "tokens",
        description="tokens: the teacher has the actor's vocabulary; text: it has its own, reads the messages by its "
        "own chat template, and is compared over spans of equal text (divergence sampled)",
    )

    @property
    def is_served(self) -> bool:
        return self.engine is not None

    @property
    def reads_text(self) -> bool:
        return self.align == "text"


class TeacherConfig(OneTeacher):
    path: str = Field("", description="Hugging Face model: a folder, or a name on the hub; empty with teacher.models")
    models: dict[str, OneTeacher] = Field(
        {},
        description="in place of path: teachers by data_source of the prompt, of which the first that fits is asked; "
        "* stands for any text, as in openai/*",
    )
    top_k: int = Field(
        0,
        ge=0,
        description="most likely tokens that are stored with their log-probs for each response token; 0: only the "
        "log-prob of the token that was drawn",
    )

    @property
    def by_source(self) -> dict[str, OneTeacher]:
        """The teachers by pattern of the data source; the first that fits is asked."""
        return self.models or {"*": self}

    @property
    def by_key(self) -> dict[str, OneTeacher]:
        """The teachers by key of the config."""
        return {f"teacher.models.{source}": model for source, model in self.models.items()} or {"teacher": self}

    def pattern_of(self, data_source: str) -> str | None:
        """Returns the key of `by_source` of the teacher for a data source; None if there is none."""
        fits = (name for name in self.by_source if name == data_source or fnmatchcase(data_source, name))
        return next(fits, None)

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if not self.path and not self.models:
            raise ValueError("path and models are both missing: set path")
        own = [name for name in OneTeacher.model_fields if getattr(self, name) != _default(type(self), name)]
        if self.models and own:
            raise ValueError(f"{own[0]} and models are both set: move {own[0]} to the models that it is for")
        return self


def _default(section: type[Section], name: str) -> object:
    return section.model_fields[name].get_default()


class CurriculumConfig(Section):
    """A curriculum: prompts that the policy always or never solved teach little, and are drawn less often."""

    weight: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="how often a prompt that was always or never solved is drawn, compared with others",
    )
    window: int = Field(100, gt=0, description="newest iterations whose scores count; older ones are forgotten")
    lag: int = Field(
        1,
        gt=0,
        description="iterations from a score to the first draw that it affects; more than 1 if rollout.mode generates "
        "ahead, because what affects a draw must be committed before it",
    )
    solved_score: float | None = Field(
        None,
        description="smallest score of a solved answer; null: 1 with a built-in reward that says right or wrong",
    )


OWN = "self"
"""Stands for the run itself among the runs of `data.replay`."""


class ReplayConfig(Section):
    """Replay of other answers: those that a share of the prompts got before, or an expert's."""

    share: float = Field(
        0.25, gt=0, le=1, description="share of an iteration's prompts that are drawn with their answers"
    )
    runs: OneOrMore[str] | None = Field(
        None,
        min_length=1,
        description="runs to draw from, by URL; self: earlier iterations of this run; null: self, unless there are "
        "files",
    )
    window: int | None = Field(
        8,
        gt=0,
        description="newest iterations of each run to draw from, before this one in the case of self; null: all",
    )
    files: OneOrMore[str] | None = Field(
        None,
        min_length=1,
        description="files of experts' answers to draw from instead: rows of prompt and response (or completion), or "
        "of messages, with prompts of data.train",
    )
    answers: int = Field(
        1,
        gt=0,
        description="with files: how many of a prompt's rollout.n answers are experts'; the policy draws the rest",
    )

    @model_validator(mode="after")
    def _draws_from_one_kind(self) -> Self:
        if self.files is not None and self.runs is not None:
            raise ValueError("runs and files are both set: remove one of them")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The runs to draw from."""
        return self.runs or (() if self.files is not None else (OWN,))


SpecialTokens = Literal["split", "keep"]
"""Treatment of special tokens in texts that the chat template did not write."""


ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".arrow")
"""Endings of the names of data files."""


class PromptConfig(Section):
    """How a row of the dataset becomes a prompt."""

    max_prompt_tokens: int = Field(
        512, gt=0, description="longest prompt in tokens, including the chat template (verl)"
    )
    truncation: Literal["error", "left", "right", "middle", "drop"] = Field(
        "error",
        description="prompts that are too long: stop with an error, cut the left, right or middle, or drop them",
    )
    system_prompt: str | None = Field(None, description="system message for prompts that have none")
    special_tokens: SpecialTokens = Field(
        "split",
        description="special tokens that prompts, environments and agents spell, such as the end of a turn: text like "
        "any other (split), or control tokens like the chat template's (keep)",
    )


class DrawingConfig(Section):
    """Which prompts an iteration draws."""

    operational = frozenset(("train",))  # the dataset's digest covers the content of the files

    train: OneOrMore[str] = Field(
        description="prompt files (Parquet, Arrow, JSON or CSV, any fsspec URL), local folders of datasets "
        "(folder:split), or datasets of the hub (owner/name@revision:config/split), in order",
    )
    shuffle: bool = Field(
        True, description="each epoch in another random order (verl); false: rows in the order of the files"
    )
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None,
        description="weights of data.train's files in the mixture, to a thousandth; null: every prompt counts the same",
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="draw prompts that were always or never solved less often; null: off"
    )
    replay: ReplayConfig | None = Field(
        None,
        description="draw some prompts together with answers of earlier iterations, other runs or experts; null: off",
    )
    prompts_per_iteration: int = Field(
        64, gt=0, description="prompts per iteration (ours: for one GPU; verl and OpenRLHF have 1,024)"
    )


class DataConfig(PromptConfig, DrawingConfig):
    generations: str | None = Field(
        None, description="URL of a run whose generations are used instead of new ones; null: generate"
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.weights is None:
            return self
        if len(self.weights) != len(self.train):
            raise ValueError(
                f"weights has {len(self.weights)} numbers, but train has {len(self.train)} files: give one for each"
            )
        if min(self.weights) < sum(self.weights) / 1000:
            raise ValueError(
                f"weights has {min(self.weights):g}, less than a thousandth of their sum, so its file would not be "
                "drawn: raise it, or remove the file"
            )
        return self


PACKAGES = ("verifiers", "openenv")
"""Packages whose environments are run by a built-in program, as agents."""
GYMNASIUM = "gymnasium"
"""The environment that plays those of the package gymnasium."""
TOOLS = "tools"
"""The environment that calls `rollout.tools` and `rollout.mcp`."""


OnError = Literal["retry", "drop", "fail"]


class FallibleConfig(Section):
    """Code that a run calls for each trajectory, and that may fail or hang."""

    timeout_s: float = Field(gt=0)
    max_error_share: float = Field(
        0.5, ge=0, le=1, description="stop the run if more than this share of a shard's trajectories fails"
    )


class PartnerConfig(FallibleConfig):
    """The party that the policy takes turns with while it responds."""

    alone = "name"
    operational = frozenset(("max_error_share", "timeout_s", "concurrency", "host"))
    key: ClassVar[str]
    """The section's key."""
    noun: ClassVar[str]
    """Its name in errors."""
    name: str
    on_error: OnError = Field(
        "drop",
        description="if it raises, hangs or does not fit the run: leave the trajectory out (drop), start the "
        "trajectory again, up to twice, before it is left out (retry), or stop the run (fail); the error is in "
        "rollout_error",
    )

    @property
    @abstractmethod
    def most_turns(self) -> int:
        """Maximum number of turns of the policy in a trajectory."""


class EnvironmentConfig(PartnerConfig):
    """The environment that the policy talks to while it responds."""

    key: ClassVar[str] = "rollout.environment"
    noun: ClassVar[str] = "the environment"
    name: str = Field(
        description="a built-in (calculator, harbor), gymnasium:ID, package.module:Class or file.py:Class; "
        "verifiers:NAME and openenv:URL run environments of these packages as rollout.agent"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the class")
    max_turns: int = Field(8, gt=0, description="largest number of policy turns in a trajectory")
    timeout_s: float = Field(
        60.0, gt=0, description="time limit of each call of an environment, in seconds; see on_error"
    )
    concurrency: int = Field(
        64, gt=0, description="largest number of environment calls that run at the same time, per worker"
    )

    @property
    def most_turns(self) -> int:
        return self.max_turns


class AgentConfig(PartnerConfig):
    """The user's program that calls the policy over an OpenAI-compatible endpoint; see docs/agents.md."""

    key: ClassVar[str] = "rollout.agent"
    noun: ClassVar[str] = "the agent"
    name: str = Field(
        description="package.module:function or file.py:function, run(task, base_url, api_key, model); verifiers "
        "and openenv run environments of these packages"
    )
    options: dict[str, Any] = Field({}, description="more keyword arguments of the function")
    host: str = Field("127.0.0.1", min_length=1, description="address on which the endpoint listens")
    max_calls: int = Field(64, gt=0, description="largest number of calls in a trajectory")
    timeout_s: float = Field(
        300.0, gt=0, description="longest time that a program may take between two calls, in seconds; see on_error"
    )

    @property
    def most_turns(self) -> int:
        return self.max_calls


class ResponseConfig(Section):
    """The tokens that a response may have, and their number."""

    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling: draw from the likeliest tokens with this total probability"
    )
    top_k: Annotated[int, BeforeValidator(lambda value: 0 if value == -1 else value)] = Field(
        0, ge=0, description="draw from this many likeliest tokens; 0, or -1 as in vLLM: from all"
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="draw from tokens with at least this share of the likeliest one's probability"
    )
    max_response_tokens: int = Field(
        512,
        gt=0,
        description="longest response in tokens (verl); with an environment, tools or an agent, the budget of the "
        "whole conversation after its prompt: all turns of the policy, and what it is answered",
    )
    stop: OneOrMore[str] = Field((), description="texts that end a response; the response keeps them")


class SamplingConfig(ResponseConfig):
    """Sampling of responses."""

    temperature: float = Field(
        1.0, gt=0, description="sampling temperature; all log-probs are computed at it (verl, TRL, OpenRLHF)"
    )
    seeds: Literal["trajectory", "engine"] = Field(
        "trajectory",
        description="trajectory: each draws with a seed of its own, which a resumed run uses again; engine: with the "
        "engine's own seed, which saves vLLM some time per step, and no response can be repeated",
    )
    ignore_eos: bool = Field(False, description="do not stop at end-of-sequence (for benchmarks)")


class RolloutConfig(SamplingConfig):
    engine: RolloutEngine = Field(
        HFConfig(),
        description="generation engine: hf (transformers, in the same process), vllm (extra vllm) or server (over "
        "HTTP)",
    )
    n: int = Field(4, gt=0, description="trajectories per prompt (ours: verl's examples have 5, TRL has 8)")
    environment: EnvironmentConfig | None = Field(
        None, description="tools, or another party, that the policy talks to within a response; null: none"
    )
    tools: OneOrMore[str] = Field(
        (),
        description="Python functions that the policy may call, as package.module:function or file.py:function; the "
        "environment is then `tools`",
    )
    mcp: OneOrMore[str] = Field(
        (), description="MCP servers whose tools the policy may call (extra mcp): URLs, or commands that start one"
    )
    agent: AgentConfig | None = Field(
        None, description="a program of yours that calls the policy like any chat endpoint; null: none"
    )
    continuations: int = Field(
        8,
        gt=0,
        description="trajectories that are played on from each turn to estimate its value, for estimators that need "
        "turn_values (vine_ppo)",
    )
    prompts_per_shard: int = Field(
        16, gt=0, description="prompts per shard: a shard is committed when all of its trajectories are complete"
    )
    mode: Literal["sync", "one_step_off", "async"] = Field(
        "sync",
        description="sync: generate with the newest weights; one_step_off: generate while the previous iteration "
        "trains; async: generate up to max_staleness iterations ahead",
    )
    max_staleness: int = Field(
        1, gt=0, description="async: largest number of updates by which a trajectory's weights may lag"
    )
    partial: bool = Field(
        False, description="async: new weights interrupt a generation, which then continues with the new weights"
    )
    journal_s: float | None = Field(
        30.0,
        gt=0,
        description="seconds between two journals of what is being generated; after a crash, generation continues from "
        "the newest; null: a crash loses the responses of incomplete shards",
    )
    canary: Literal["stop", "note", "off"] = Field(
        "stop",
        description="after each transfer of weights, the engine and the trainer score 8 fixed texts; if they differ by "
        "more than rounding: stop the run, or note it; off: no check. An engine that shares the actor's weights is not "
        "checked",
    )
    workers: bool = Field(
        False,
        description="other processes may generate beside the driver: `ratchet rollout-worker` starts one, which may "
        "come and go at any time",
    )
    router_replay: bool = Field(
        False,
        description="with a mixture of experts: store the experts that the rollout chose for each token, and compute "
        "old log-probs and the actor's update with them (R3); the router then still learns the weights of the experts",
    )
    max_in_flight: int = Field(
        512, gt=0, description="largest number of trajectories that a replica of the engine generates at the same time"
    )

    @model_validator(mode="before")
    @classmethod
    def _environments_of_other_packages(cls, tree: Any) -> Any:
        """Runs ``verifiers:NAME`` or ``openenv:URL`` by the built-in program of the package, and ``gymnasium:ID`` by
        the built-in environment."""
        environment = tree.get("environment") if isinstance(tree, Mapping) else None
        section = {"name": environment} if isinstance(environment, str) else environment
        if not isinstance(section, Mapping) or not isinstance(name := section.get("name"), str):
            return tree
        package, colon, chosen = name.partition(":")
        if colon and package == GYMNASIUM:
            made = {"environment": chosen, "arguments": section.get("options") or {}}
            return {**tree, "environment": {**section, "name": package, "options": made}}
        if not colon or package not in PACKAGES or tree.get("agent"):
            return tree
        agent = {key: value for key, value in section.items() if key not in ("name", "options", "max_turns")}
        calls = {"max_calls": section["max_turns"]} if "max_turns" in section else {}
        options = {"environment": chosen, "arguments": section.get("options") or {}}
        return {**tree, "environment": None, "agent": {**agent, **calls, "name": package, "options": options}}

    @model_validator(mode="before")
    @classmethod
    def _tools_are_an_environment(cls, tree: Any) -> Any:
        """Sets the environment that calls the tools, with the tools as options."""
        if not isinstance(tree, Mapping) or not (tree.get("tools") or tree.get("mcp")):
            return tree
        environment = tree.get("environment") or {}
        if isinstance(environment, EnvironmentConfig):
            environment = environment.model_dump()
        if not isinstance(environment, Mapping) or environment.get("name", TOOLS) != TOOLS:
            return tree
        sources = {"functions": tree.get("tools") or [], "mcp": tree.get("mcp") or []}
        options = {name: [value] if isinstance(value, str) else list(value) for name, value in sources.items()}
        return {**tree, "environment": {**environment, "name": TOOLS, "options": options}}

    @model_validator(mode="after")
    def _tools_are_called(self) -> Self:
        is_called = self.environment is not None and self.environment.name == TOOLS
        if (self.tools or self.mcp) and not is_called:
            key = "tools" if self.tools else "mcp"
            raise ValueError(
                f"rollout.{key} is set, but rollout.environment is {self.environment and self.environment.name}, which "
                f"would not call them: remove one of them"
            )
        if is_called and not (self.tools or self.mcp):
            raise ValueError("rollout.environment is tools, but there are none: set rollout.tools or rollout.mcp")
        return self

    @property
    def partner(self) -> EnvironmentConfig | AgentConfig | None:
        """The party that the policy takes turns with; None: it answers alone."""
        return self.environment or self.agent

    @property
    def truncated_by(self) -> tuple[str, ...]:
        """The keys that exclude some tokens from being drawn."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)

    @property
    def ahead(self) -> int:
        """Number of iterations that may be generated before their turn."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]


class ClassifierConfig(ModelConfig):
    """A classifier that scores responses."""

    # files are compared by their content
    operational = frozenset(ModelConfig.model_fields.keys() - {"dtype", "args"} | {"micro_batch_tokens"})

    kind: Literal["outcome", "process"] = Field(
        "outcome",
        description="outcome: a sequence classifier scores the response; process: a token classifier scores each step "
        "at its last token",
    )
    step_separator: str = Field("\n\n", min_length=1, description="process: text that ends a step")
    micro_batch_tokens: int = Field(
        16384, gt=0, description="tokens that a process computes at once, including padding"
    )

    @model_validator(mode="after")
    def _does_not_learn(self) -> Self:
        if self.lora is not None:
            raise ValueError("reward.model.lora is set, but the reward model does not learn: remove it")
        if self.kernels != "torch":
            raise ValueError("reward.model.kernels is set, but it is for actor, critic and reference: remove it")
        return self


class RewardModelConfig(ClassifierConfig):
    """A classifier among the rewards."""

    weight: float = Field(1.0, description="weight of the model's score in the reward")


class JudgeConfig(Section):
    """A language model on an OpenAI-compatible server that scores responses; see docs/rewards.md."""

    operational = frozenset(("url", "retries", "api_key_env"))

    url: str = Field(description="base URL of the server, such as http://127.0.0.1:8000/v1")
    model: str = Field(description="name of the model on the server")
    mode: Literal["rubric", "pairwise", "ranking"] = Field(
        "rubric",
        description="rubric: each response by itself, from 0 to 1; pairwise: the share of comparisons that it wins "
        "against the other responses to the prompt; ranking: all responses to the prompt in one question, from 0 to 1",
    )
    rubric: str = Field(
        "A good answer does what the prompt asks for, correctly and completely, and says nothing that is false or "
        "beside the point.",
        min_length=1,
        description="what a good response is, in words",
    )
    retries: int = Field(
        5, ge=0, description="how often a question is repeated if the server is busy, fails or gives no usable answer"
    )
    api_key_env: str = Field(
        "OPENAI_API_KEY", min_length=1, description="name of the environment variable that holds the server's key"
    )

    @property
    def compares(self) -> bool:
        """True if a score depends on the other responses to the prompt."""
        return self.mode != "rubric"

    @model_validator(mode="after")
    def _url_is_one(self) -> Self:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(
                f"reward.judge.url {self.url} is not the URL of a server, such as http://127.0.0.1:8000/v1"
            )
        if address.username is not None or address.query or address.fragment:
            raise ValueError(
                "reward.judge.url has more than a server and a path, and what is in it is stored: put the key into an "
                "environment variable, and its name into reward.judge.api_key_env"
            )
        return self


class RewardConfig(FallibleConfig):
    operational = frozenset(("max_error_share", "workers", "concurrency", "allow_code"))

    function: str | dict[str, float] | None = Field(
        "auto",
        description="a built-in (auto: chosen by each row's data_source), package.module:function or file.py:function; "
        "or several, mapped to their weights; "
        "null: only reward.model (the default if it is set) or the environment",
    )
    model: RewardModelConfig | None = Field(
        None, description="reward model, alone or in addition to the function; null: none"
    )
    judge: JudgeConfig | None = Field(
        None, description="settings of reward.function judge (the default if they are set); null: none"
    )
    options: dict[str, dict[str, Any]] = Field(
        {}, description="keyword arguments of the function; with several functions, by function name"
    )
    timeout_s: float = Field(
        30.0, gt=0, description="time limit of one response's reward, or of one request to the judge; see on_error"
    )
    on_error: Literal["fail", "zero", "drop"] = Field(
        "fail",
        description="a reward that raises, hangs or is not a number: stop the run (fail), score 0 (zero) or leave the "
        "trajectory out (drop); the error is in reward_error",
    )
    workers: int = Field(2, gt=0, description="processes that compute rewards")
    concurrency: int = Field(
        32,
        gt=0,
        description="largest number of calls of async rewards, and of questions to the judge, at the same time",
    )
    allow_code: bool = Field(False, description="run programs that the model wrote (reward.function code)")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, tree: Any) -> Any:
        """Completes short forms: of the function if only a judge or a model is given, and of a single function's
        options."""
        if not isinstance(tree, Mapping):
            return tree
        if "function" not in tree and (tree.get("judge") is not None or tree.get("model") is not None):
            tree = {**tree, "function": None if tree.get("judge") is None else JUDGE}
        function, options = tree.get("function", cls.model_fields["function"].default), tree.get("options")
        if isinstance(function, str) and isinstance(options, Mapping) and options and function not in options:
            tree = {**tree, "options": {function: options}}
        return tree

    @property
    def functions(self) -> dict[str, float]:
        """Weights of the reward functions, by name."""
        return {self.function: 1.0} if isinstance(self.function, str) else self.function or {}

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Options of the reward functions, by name, with the judge's settings."""
        return self.options if self.judge is None else {**self.options, JUDGE: self.judge.model_dump()}

    @model_validator(mode="after")
    def _has_functions(self) -> Self:
        if JUDGE in self.options:
            raise ValueError("reward.options has judge, whose settings are reward.judge: move them there")
        if self.judge is None and JUDGE in self.functions:
            raise ValueError("reward.function judge needs reward.judge: {url: ..., model: ...}")
        if self.judge is not None and JUDGE not in self.functions:
            raise ValueError(
                "reward.judge is set, but reward.function does not name judge: add it, with a weight for each "
                "function, such as {gsm8k: 1.0, judge: 0.5}, or remove reward.judge"
            )
        unknown = set(self.options) - self.functions.keys()
        if unknown:
            raise ValueError(f"reward.options has {min(unknown)}, which is not in reward.function")
        return self


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476). Prompts whose trajectories all have the same score teach nothing, so
    more prompts are drawn until `data.prompts_per_iteration` have different scores; if too few have, prompts with equal
    scores fill the batch."""

    max_prompts: int = Field(gt=0, description="largest number of prompts that an iteration draws")


class AlgorithmConfig(Section):
    advantage: Annotated[AnyAdvantage, type_may_be_left_out("gae")] = Field(
        GAE(), description="advantage estimator: a built-in, package.module:Class or file.py:Class"
    )
    loss: Annotated[AnyPolicyLoss, type_may_be_left_out("ppo")] = Field(
        PPOClip(), description="policy loss: a built-in, package.module:Class or file.py:Class"
    )
    kl: Annotated[KLPenalty, NULL_IS_OFF] = Field(KLPenalty(), description="KL term against the reference")
    distillation: Distillation | None = Field(
        None, description="learn from the teacher's log-probs of what the policy wrote; null: off"
    )
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus in the actor's loss (verl)")
    rollout_correction: RolloutCorrection | None = Field(
        None,
        description="correct the difference between the rollout's and the trainer's log-probs; null: {weights: {}} if "
        "rollout.mode is not sync, or if vllm or server generates in bfloat16 or quantized, otherwise off; {}: off",
    )
    experts: Annotated[Experts, type_may_be_left_out("luffy")] = Field(
        LUFFY(), description="how the answers of data.replay.files are learned from"
    )
    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="draw prompts until enough have trajectories with different scores; null: off"
    )
    overlong_penalty: OverlongPenalty | None = Field(
        None, description="penalty for responses close to the length limit; null: none"
    )


class LRScheduleConfig(Section):
    type: Literal["constant", "linear", "cosine"] = Field("constant", description="shape of the decay after warm-up")
    warmup_iterations: int = Field(0, ge=0, description="iterations over which the learning rate rises from 0 (verl)")
    decay_iterations: int | None = Field(
        None, gt=0, description="iterations from the end of warm-up to the smallest learning rate"
    )
    min_ratio: float = Field(0.0, ge=0, le=1, description="smallest learning rate, as a share of lr")

    @model_validator(mode="after")
    def _decay_has_a_length(self) -> Self:
        if self.type != "constant" and self.decay_iterations is None:
            raise ValueError(f"a {self.type} schedule needs decay_iterations")
        return self


STEPS = 4
"""Optimizer steps of a pass over an iteration, if `mini_batch_trajectories` is null."""


class UpdateConfig(Section):
    """The optimizer steps of an update."""

    operational = frozenset(("micro_batch_tokens",))

    lr: float = Field(gt=0, description="learning rate")
    lr_schedule: Annotated[LRScheduleConfig, NULL_IS_OFF] = Field(
        LRScheduleConfig(), description="learning rate over the iterations"
    )
    optimizer: Annotated[Optimizer, type_may_be_left_out("adamw")] = Field(AdamW(), description="optimizer")
    ppo_epochs: int = Field(1, gt=0, description="passes over an iteration's trajectories (verl, OpenRLHF)")
    mini_batch_trajectories: int | None = Field(
        None,
        gt=0,
        description="trajectories per optimizer step; null: a quarter of the iteration's (verl's examples: 1,024 "
        "prompts in steps of 256)",
    )
    micro_batch_tokens: int = Field(
        16384, gt=0, description="tokens that a process computes at once, including padding"
    )
    grad_clip: float | None = Field(
        1.0, gt=0, description="largest norm of the gradient (verl, TRL, OpenRLHF); null: no limit"
    )


class ComputeConfig(Section):
    """How a model is computed."""

    engine: TrainEngine = Field(
        TorchConfig(),
        description="training engine: torch (every process holds the whole model), fsdp (FSDP2), deepspeed (ZeRO) or "
        "megatron (Megatron-Core, on GPUs)",
    )
    offload_when_idle: bool = Field(
        False,
        description="move parameters and optimizer state to host memory while another model of the same processes "
        "computes",
    )
    share_prompts: bool = Field(
        True,
        description="compute a prompt once for all its trajectories in a micro-batch, and concatenate sequences "
        "instead of padding them, where that saves work; needs full attention by sdpa",
    )
    packing: bool | None = Field(
        None,
        description="concatenate sequences instead of padding them; null: on a GPU with bfloat16, attention sdpa and "
        "full attention in every layer, where PyTorch has a kernel for it; elsewhere it is fast only with shared "
        "prompts, or a flash or flex attention",
    )
    gradient_checkpointing: Annotated[bool | Literal["selective"] | None, CHECKPOINTING] = Field(
        None,
        description="recompute activations in the backward pass, which saves memory and takes time: true (all within a "
        "layer), selective (every second matrix product, and never attention), false (none), or null: selective on a "
        "GPU, none on a CPU",
    )


class TrainerConfig(UpdateConfig, ComputeConfig):
    """The update of a model. Sizes are totals over all devices unless they say otherwise."""


class ActorConfig(TrainerConfig):
    lr: float = Field(1e-6, gt=0, description="learning rate (verl, TRL, OpenRLHF)")
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="keep a moving average of the actor's weights over the iterations, with this decay, in snapshots "
        "(`ratchet export --role ema`); null: none",
    )


class CriticConfig(TrainerConfig):
    model: ModelConfig | None = Field(None, description="backbone of the critic; null: the actor's model")
    lr: float = Field(1e-5, gt=0, description="learning rate (verl)")
    warmup_iterations: int = Field(
        0, ge=0, description="iterations at the start in which only the critic learns (verl)"
    )
    cliprange_value: float | None = Field(
        0.5,
        gt=0,
        description="value loss: how far a value may move from its old one (verl, OpenRLHF); null: no limit",
    )


class ReferenceConfig(Section):
    model: ModelConfig | None = Field(None, description="frozen reference; null: the actor's initial weights")
    sync_every: int | None = Field(
        None, gt=0, description="iterations after which the reference follows the actor; null: it never changes"
    )
    mix: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the actor's weights in the new reference, the rest being the old one's; 1: a copy",
    )


class KeepConfig(Section):
    last: int = Field(3, ge=1, description="number of newest snapshots to keep")
    every: int | None = Field(10, gt=0, description="iterations between snapshots that are kept for good; null: none")
    best: int = Field(
        0, ge=0, description="number of snapshots with the best validation to keep; each validation then has a snapshot"
    )


class CheckpointConfig(Section):
    every: int | None = Field(
        None,
        gt=0,
        description="iterations between snapshots; a resume replays later updates; null: as often as max_share allows, "
        "after max_replay iterations, and whenever keep.every says",
    )
    max_share: float = Field(
        0.05, gt=0, le=1, description="if every is null: largest share of the run's time spent waiting for snapshots"
    )
    max_replay: int = Field(
        10, gt=0, description="if every is null: take a snapshot after this many iterations, whatever it costs"
    )
    background: bool = Field(
        True, description="write a snapshot while the next iterations compute; a crash meanwhile replays the updates"
    )
    keep: KeepConfig = Field(KeepConfig(), description="which snapshots are kept")
    on_replay_mismatch: Literal["auto", "stop", "continue"] = Field(
        "auto",
        description="a replayed update gives other weights: stop, continue, or auto: stop on a CPU, and with "
        "run.deterministic on a GPU",
    )


class ValidationConfig(Section):
    data: str | None = Field(None, description="prompt file for validation; null: no validation")
    every: int = Field(
        0, ge=0, description="iterations between validations; 0: only before the first iteration and after the last"
    )
    n: int = Field(1, gt=0, description="trajectories per prompt")
    temperature: float = Field(
        1.0, ge=0, description="sampling temperature; 0: greedy, as in verl (ours: the training's)"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="as rollout.top_p, for validation; null: the same")
    top_k: int | None = Field(None, ge=0, description="as rollout.top_k, for validation; null: the same")
    before_train: bool = Field(True, description="validate before the first iteration")
    metric: str | None = Field(
        None,
        description="metric that says which weights are best, the larger the better; null: the mean score of the first "
        "data source",
    )
    patience: int | None = Field(
        None, gt=0, description="end the run after this many validations in a row without a new best one; null: never"
    )
    solved_score: float | None = Field(
        None,
        description="smallest score of a solved answer, for pass@1; null: 1 with a built-in reward that says right or "
        "wrong, no pass@1 with others",
    )


class TrainConfig(Section):
    iterations: int | None = Field(
        30, gt=0, description="total number of iterations; raise it to continue a finished run; null: by epochs"
    )
    epochs: float | None = Field(
        None, gt=0, description="instead of iterations: how often the prompts of data.train are drawn"
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="a reward, loss or gradient is not finite: stop the run, or skip the updates that depend on it "
        "(validation always stops)",
    )
    updates: bool = Field(True, description="false: only generate and score; the actor does not change")

    @model_validator(mode="before")
    @classmethod
    def _iterations_or_epochs(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or tree.get("epochs") is None:
            return tree
        if tree.get("iterations") is not None:
            raise ValueError("iterations and epochs are both set: remove one, or set it to null")
        return {**tree, "iterations": None}

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if self.iterations is None and self.epochs is None:
            raise ValueError("iterations and epochs are both null: set one")
        return self


UNKNOWN_MODEL = "another-trainers-model"
"""`model.path` of a run whose model is unknown, because another trainer computes it."""


class ObservedConfig(Section):
    """Another trainer computes the run."""

    trainer: str = Field(description="its name, such as trl")
    config: dict[str, JsonValue] = Field({}, description="its own config, without secrets")
    iterations: int | None = Field(None, description="number of steps that it will make; null: unknown")


class PoolConfig(Section):
    """Worker processes, with their own devices, that hold the models of some roles."""

    workers: int = Field(1, gt=0, description="number of worker processes")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs per worker")
    accelerator_type: str | None = Field(
        None, description="type of the GPUs, by Ray's name (A100, H100, H200, ...); null: any"
    )
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores per worker")
    timeout_s: float = Field(
        1800, gt=0, description="seconds after which workers that wait for another worker's part fail, and all restart"
    )
    idle_minutes: float = Field(30, gt=0, description="minutes without a call after which the workers end")
    runtime_env: dict[str, JsonValue] = Field(
        {}, description="Ray's runtime environment of the workers, such as {env_vars: {NCCL_DEBUG: INFO}}"
    )

    @model_validator(mode="after")
    def _environment_may_be_set(self) -> Self:
        check_runtime_env(self.runtime_env)
        return self


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
