"""The driver: the one process that advances a run. It owns the claim, the heartbeat and the workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property, partial
from typing import Literal

from ratchet.infra.execution.claims import begin, claim, code_digest, package_versions, run_url
from ratchet.infra.execution.executors import Executors, StageHandle
from ratchet.infra.execution.heartbeat import beating
from ratchet.infra.execution.preflight.devices import check_devices
from ratchet.infra.execution.preflight.wandb_login import has_login
from ratchet.infra.execution.replicas import Replicas
from ratchet.infra.execution.snapshots import Snapshots
from ratchet.infra.execution.stopping import Stopping, on_signals
from ratchet.infra.execution.weight_sync import WeightSync
from ratchet.infra.progress import note
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.object_store import StoreUnavailable
from ratchet.infra.store.records import Claim, RunState, Weights
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.calls import Experience
from ratchet.infra.workers.groups import WorkerGroups
from ratchet.infra.workers.ray_group import GroupLost
from ratchet.rlhf import consent
from ratchet.rlhf.agents import agent_digest, check_agent
from ratchet.rlhf.config import (
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    differences,
    stored_config,
    yaml_text,
)
from ratchet.rlhf.config.engines import MegatronConfig, VLLMConfig
from ratchet.rlhf.config.older import changed_since
from ratchet.rlhf.data.experts import Matched
from ratchet.rlhf.data.formats import formulas_of
from ratchet.rlhf.data.prompts import Prompt, PromptDataset, check_length, render
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.data.turns import special_in
from ratchet.rlhf.environments import check_environment, environment_digest
from ratchet.rlhf.environments.calls import try_environment
from ratchet.rlhf.environments.dialogues import is_prefix_stable
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.models import (
    attention_heads,
    attention_of,
    check_architecture,
    check_embeddings,
    check_reward_model,
    check_weights,
    files_digest,
    initial_digest,
    load_tokenizer,
    longest_sequence,
    model_folder,
    text_config,
    tokenizer_digest,
)
from ratchet.rlhf.rewards import COMPARING, auto, can_be_right, check_rewards, reward_digest
from ratchet.rlhf.rewards.functions import TAIL_CHARACTERS
from ratchet.rlhf.rewards.math import boxed
from ratchet.rlhf.rewards.pool import TrialAnswer, compare_columns, try_rewards
from ratchet.rlhf.validation import reported

SOURCES = 8
"""Largest number of data sources of a file whose rewards are tried, and of mistakes that are reported at once."""
AS_THEY_ARE = "{{ messages[-1]['content'] }}"
"""The chat template that leaves a text as it is."""
USUAL_HEADS = (32, 64, 96, 128, 256)
"""Sizes of attention heads that vLLM supports everywhere: to ask it takes 10 to 25 s."""
LONGEST_MASK = 32_768
"""Largest number of tokens in a row for which each rank may build a mask of all positions: it takes 1 GiB."""
MANY_PROMPTS = 10_000
"""Measuring the lengths of more prompts takes over two seconds, so the driver says that it does."""


class Turn:
    """A lock that many may share, or one may have alone; whoever wants it alone comes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._wanted = 0
        self._taken = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._wanted += 1
            self._changed.wait_for(lambda: not self._sharing and not self._taken)
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._wanted -= 1
                self._taken = False
                self._changed.notify_all()


@dataclass
class AheadRollouts:
    """The state of generation ahead of the open iteration, if `rollout.mode` allows that."""

    turn: Turn = field(default_factory=Turn)
    """Shared by calls that generate; exclusive while new weights are loaded."""
    loaded: Weights | None = None
    """The weights that were loaded last; None: each iteration generates with its starting weights."""
    replicas: Replicas | None = None
    """The replicas of the rollout, once they generate."""
    starting: threading.Lock = field(default_factory=threading.Lock)
    """Held while `replicas` changes."""
    started: dict[int, StageHandle] = field(default_factory=dict)
    """Generate stages of later iterations, by iteration."""


Outside = Literal["dataset", "experts", "validation", "reward", "reward_model", "tokenizer", "environment"]
"""Inputs of stages outside the store and the config. Their digests show whether they have changed."""


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of a pipeline's stages, other than config and inputs."""

    stages: tuple[str, ...]
    """The stages' names."""
    outside: frozenset[Outside]
    versions: Mapping[str, int]
    """The version of each stage's code."""


class Driver:
    """A driver of one run; open it with `driving`."""

    def __init__(self, config: RunConfig, store: RunStore) -> None:
        self.config = config
        self.store = store
        self.groups = WorkerGroups(config, store, self._identity)
        self.executors = Executors()
        self.rollout = AheadRollouts()
        self.snapshots = Snapshots(config, store, self.groups)
        self.weight_sync = WeightSync(config)
        self._digests: dict[Outside, str | None] = {}
        self.restoring = threading.RLock()
        """Held while weights are loaded: two executors may find at the same time that a role needs other weights."""
        self.has_said_that_replays_differ = False
        self.solve_rates: dict[int, dict[int, float]] = {}
        """Solve rates of prompts, by closed iteration and row of the dataset, as far as they were read."""
        self.experience: dict[tuple[str, int], list[Experience]] = {}
        """Prompts that can be drawn with their answers, by run and closed iteration, as far as they were read."""
        self.expert_answers: Matched | None = None
        """The answers of `data.replay.files` by prompt, once they were read."""
        self.experience_runs: dict[str, RunStore] = {}
        """The other runs of `data.replay`, as they were when they were read first."""
        self.stopping = Stopping(f"`ratchet resume {config.run.name}`")

    @property
    def state(self) -> RunState:
        return self.store.state

    @property
    def term(self) -> int:
        return self.store.log.term

    def tidy(self) -> None:
        """Commit a snapshot that was written in the background. Called while stages compute."""
        try:
            self.snapshots.settle(wait=False)
        except (StoreUnavailable, GroupLost) as error:  # the stages will meet the same error; a snapshot can wait
            note(str(error))

    def digest(self, name: Outside) -> str | None:
        """The digest of an outside input of stages; None if the config does not use it."""
        if name not in self._digests:
            self._digests[name] = self._digest(name)
        return self._digests[name]

    def _identity(self) -> str:
        """Identifies everything outside the config that workers hold: code, packages, models and stages' inputs."""
        inputs: tuple[Outside, ...] = ("dataset", "reward", "tokenizer", "environment", "validation")
        digests = {name: digest for name in inputs if (digest := self.digest(name)) is not None or name != "validation"}
        models = {role: weights.digest for role, weights in self.initial_weights.items()}
        return json.dumps([code_digest(), package_versions(), models, digests], sort_keys=True)

    def _digest(self, name: Outside) -> str | None:
        config, resources = self.config, self.groups.local.worker.resources
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

    @cached_property
    def initial_weights(self) -> dict[str, Weights]:
        """Each role's initial weights, by digest of its model's files."""
        models = {"actor": self.config.model}
        if self.config.needs_critic:
            models["critic"] = self.config.critic_model
        models |= self.config.frozen_models
        if "ema" in self.config.averages:
            models["ema"] = self.config.model
        seed = self.config.run.seed
        return {role: Weights(version=0, digest=initial_digest(model, seed)) for role, model in models.items()}


_open_drivers: ContextVar[tuple[Driver, ...]] = ContextVar("open_drivers", default=())
"""Open drivers of this context, innermost last: a flow that another flow of the same run calls shares its driver."""


@contextmanager
def driving(
    config: RunConfig,
    dependencies: Dependencies,
    *,
    take_over: bool = False,
    accept_changes: bool = False,
    check: Callable[[Driver], None] = lambda driver: None,
) -> Iterator[Driver]:
    """Claim the run and drive it; within an open driver of the same run, reuse that driver.

    Args:
        config: names the run.
        dependencies: recorded in the claim; leftover files of its stages are deleted.
        take_over: fence another driver even if it is alive.
        accept_changes: continue a run that has iterations with other data, another reward or another algorithm.
        check: may reject the driver before the claim, so that a config that cannot continue changes nothing.

    Yields:
        The driver.

    Raises:
        UserError: the config, the store or the inputs are wrong.
        Fenced: another driver is alive, or has taken over the run.
    """
    drivers = _open_drivers.get()
    active = next((driver for driver in drivers if driver.config.run == config.run), None)
    if active is not None:
        with on_signals(active.stopping.request):
            yield active
        return
    driver = _open(config, dependencies, take_over, accept_changes, check)
    with driver.stopping.watching(), beating(driver.store.log, driver.stopping):
        token = _open_drivers.set((*drivers, driver))
        try:
            yield driver
            driver.snapshots.settle(wait=True)
        except Corrupt:
            driver.store.log.check_claim()  # after a takeover the new driver may have deleted the snapshot
            raise
        finally:
            _open_drivers.reset(token)
            driver.executors.close()
            if driver.rollout.replicas is not None:
                driver.rollout.replicas.close()
            driver.groups.close()


def with_iterations(config: RunConfig) -> RunConfig:
    """Convert `train.epochs` into `train.iterations`, the number that a run stores.

    Args:
        config: the config of a run.

    Returns:
        The config; unchanged if it has no epochs.

    Raises:
        UserError: the prompts cannot be read.
    """
    epochs, per_iteration = config.train.epochs, config.data.prompts_per_iteration
    if epochs is None:
        return config
    environment = config.rollout.environment
    prompts = _size_of(config.model, config.data, None if environment is None else environment.model_dump_json())
    iterations = max(1, math.ceil(epochs * prompts / per_iteration))
    total = f"{counted(iterations, 'iteration')} of {counted(per_iteration, 'prompt')}"
    note(f"train.epochs {epochs:g} of {counted(prompts, 'prompt')}: {total}")
    return config.with_values({"train.iterations": iterations, "train.epochs": None})


@cache  # called by the command line and by the flow
def _size_of(model: ModelConfig, data: DataConfig, environment: str | None) -> int:
    dataset = PromptDataset(data.train)
    if data.truncation == "drop":
        of_environment = None if environment is None else EnvironmentConfig.model_validate_json(environment)
        tokenizer = policy_tokenizer(model, of_environment, data.special_tokens)
        dataset = dataset.without_overlong(tokenizer, data.max_prompt_tokens, data.system_prompt)
    return len(dataset)


def check_inputs(config: RunConfig) -> None:
    """Check the config's packages, prompts, reward and models before anything starts.

    Raises:
        UserError: some of them are missing or unsuitable; a line for each. Prompts are tried once the rest is right.
    """
    held_out = [] if config.validation.data is None else [config.validation.data]
    paths = (*config.data.train, *held_out)
    greedy = config.algorithm.advantage.type if config.needs_greedy_scores else None
    environment, agent = config.rollout.environment, config.rollout.agent
    check_all(
        partial(check_packages, config),
        partial(_check_server, config),
        partial(check_rewards, config.reward, greedy),
        *([] if environment is None else [partial(check_environment, environment.name, environment.options)]),
        *([] if agent is None else [partial(check_agent, agent.name, agent.options)]),
        partial(_check_models, config),
        *(partial(PromptDataset, (path,)) for path in paths),
    )
    tokenizer = policy_tokenizer(config.model, environment)
    if (environment is not None or agent is not None) and not is_prefix_stable(tokenizer):
        note(
            f"the chat template of {config.model.path} renders earlier messages differently when others follow (it may "
            "leave out reasoning): the policy sees and learns from what it wrote"
        )
    if config.reward.model is not None:
        check_reward_model(config.reward.model)
        load_tokenizer(config.reward.model, writes=False)
    _check_files(
        paths,
        config.model,
        config.data,
        config.reward.model_dump_json(),
        None if environment is None else environment.model_dump_json(),
    )
    _check_metric(config)


def _check_metric(config: RunConfig) -> None:
    """Refuse a `validation.metric` that no validation will report."""
    validation = config.validation
    if validation.metric is None or validation.data is None:
        return
    solves = config.solved_score is not None
    sources = (prompt.data_source for prompt in PromptDataset((validation.data,)))
    names = [name for name in reported(sources, validation.n) if solves or "/acc/" not in name]
    if validation.metric not in names:
        shown = get_close_matches(validation.metric, names, SOURCES, 0) if len(names) > SOURCES else names
        more = f", and {len(names) - len(shown)} others" if len(names) > len(shown) else ""
        raise UserError(
            f"validation.metric {validation.metric} is not a metric of this validation, which has {', '.join(shown)}"
            f"{more}: choose one of them, or set validation.metric=null for the mean score of the first data source"
        )


def check_all(*checks: Callable[[], object]) -> None:
    """Make some checks, and report the mistakes that all of them find.

    Args:
        checks: each raises `UserError` if something is wrong.

    Raises:
        UserError: the mistakes, a line for each.
    """
    mistakes: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except UserError as error:
            mistakes |= dict.fromkeys(str(error).splitlines())
    if mistakes:
        raise UserError("\n".join(mistakes))


def _check_server(config: RunConfig) -> None:
    if config.train.updates and not config.rollout.engine.takes_weights:
        raise UserError(
            "rollout.engine.weights_folder is null, so the servers would keep generating with the first weights: "
            "name a folder that they can read, or only evaluate"
        )


def _check_models(config: RunConfig) -> None:
    """Check the files of the models, their architectures, and that they can read the trajectories."""
    models = {"model": config.model, "critic.model": config.critic_model, "reference.model": config.reference_model}
    others = {"reward.model": config.reward.model, "teacher": config.teacher}
    for key, model in (models | {key: model for key, model in others.items() if model is not None}).items():
        check_weights(model_folder(model, key), key)
        say_attention(model)
    check_all(
        partial(check_architecture, config.model, "model", is_critic=False),
        partial(_check_heads, config),
        partial(_check_heads_of_vllm, config),
        *(partial(_check_megatron, config, role) for role in (*config.trainers, *config.frozen_models)),
        *(partial(_check_packing, config, owner) for owner in config.trainers),
        partial(_check_vocabulary, config),
        partial(check_lengths, config),
        partial(check_embeddings, config.model, *_readers(config)),
        *([] if config.reward.model is None else [partial(check_embeddings, config.reward.model, config.reward.model)]),
        *([partial(check_architecture, config.critic_model, "critic.model", is_critic=True)] * config.needs_critic),
    )


def _check_heads(config: RunConfig) -> None:
    devices = config.rollout.engine.devices
    if devices > 1 and (heads := attention_heads(config.model)) % devices:
        raise UserError(
            f"rollout.engine.tensor_parallel is {devices}, which does not divide the model's {heads} attention heads: "
            "change it"
        )


def _check_heads_of_vllm(config: RunConfig) -> None:
    """Refuse a model whose attention heads have a size that vLLM cannot compute without a GPU."""
    import torch

    pool = config.pool_of("rollout")
    has_gpu = torch.cuda.is_available() if pool is None else config.pools[pool].gpus_per_worker > 0
    if not isinstance(config.rollout.engine, VLLMConfig) or has_gpu or not _is_installed("vllm"):
        return
    decoder = text_config(config.model)
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    if size not in USUAL_HEADS and not vllm_supports_heads(size):
        raise UserError(
            f"rollout.engine vllm cannot compute {config.model.path} without a GPU: its attention heads have {size} "
            "dimensions (head_dim): choose another model, or rollout.engine: hf"
        )


@cache
def vllm_supports_heads(size: int) -> bool:
    """Ask the installed vLLM, without starting it, whether its attention on the CPU supports heads of a size. An answer
    that cannot be read is yes: its start will say."""
    ask = (
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as backend\n"
        f"print(backend.supports_head_size({size}))"
    )
    note(f"asking vLLM whether it supports attention heads of {size} dimensions (10 to 25 s)")
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return asked.stdout.split()[-1:] != ["False"]


def _check_packing(config: RunConfig, owner: str) -> None:
    """Refuse long rows of several sequences where transformers needs a mask of all their positions."""
    from ratchet.rlhf.models.prefix_sharing import attention_kinds

    trainer = config.trainers[owner]
    if trainer.packing is not True or trainer.micro_batch_tokens <= LONGEST_MASK:
        return
    frozen = config.frozen_models if owner == "actor" else {}  # which are computed as the actor says
    models = {owner: config.model_of(owner)} | {role: config.model_of(role) for role in frozen}
    masked = [
        role
        for role, model in models.items()
        if attention_of(model)[0] == "eager"
        or (model.attention == "sdpa" and attention_kinds(text_config(model)) != {"full_attention"})
    ]
    if masked:
        size, longest = trainer.micro_batch_tokens, config.data.max_prompt_tokens + config.rollout.max_response_tokens
        lower = f"lower {owner}.micro_batch_tokens to {LONGEST_MASK}, or " if longest <= LONGEST_MASK else ""
        raise UserError(
            f"{owner}.packing true makes rows of {owner}.micro_batch_tokens = {size} tokens, for which the layers of "
            f"the {' and the '.join(masked)} need a mask of {size} x {size} positions: {lower}set {owner}.packing false"
        )


def _check_megatron(config: RunConfig, role: str) -> None:
    """Check that Megatron can split a model as the trainer whose engine it has says."""
    from ratchet.rlhf.models.megatron_layout import Place, refusal

    owner = "critic" if role == "critic" else "actor"
    engine = config.trainers[owner].engine
    if isinstance(engine, MegatronConfig):
        place = Place(tensors=engine.tensor_parallel, stages=engine.pipeline_parallel, experts=engine.expert_parallel)
        if reason := refusal(text_config(config.model_of(role)), place):
            raise UserError(f"{owner}.engine megatron cannot compute the {role}: {reason}")


def _check_vocabulary(config: RunConfig) -> None:
    """Check that the teacher reads the policy's tokens as what they are."""
    if config.teacher is None:
        return
    own, other = (load_tokenizer(model).get_vocab() for model in (config.model, config.teacher))
    if differs := next((token for token in own if other.get(token) != own[token]), None):
        raise UserError(
            f"teacher {config.teacher.path} has another vocabulary than {config.model.path}: the token {differs!r:.40} "
            f"is {other.get(differs, 'none')} there, and {own[differs]} here: choose a teacher of the same family"
        )


def _readers(config: RunConfig) -> list[ModelConfig]:
    """The models that read the policy's tokens."""
    return [config.model, *([config.critic_model] * config.needs_critic), *config.frozen_models.values()]


def check_lengths(config: RunConfig) -> None:
    """Check that the models can read a longest prompt with its longest response.

    Raises:
        UserError: one cannot; a line for each model.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    limits: dict[str, int] = {}
    for model in _readers(config):
        if (limit := longest_sequence(model)) is not None and limit < prompt + response:
            limits[model.path] = limit
    if limits:
        raise UserError(
            "\n".join(
                f"data.max_prompt_tokens {prompt} + rollout.max_response_tokens {response} is {prompt + response}, but "
                f"{path} reads at most {limit} tokens (max_position_embeddings in its config.json): lower one of them"
                for path, limit in limits.items()
            )
        )


@cache
def say_attention(model: ModelConfig) -> None:
    """Report an attention implementation that differs from the config. Cached: once per process is enough."""
    attention, reason = attention_of(model)
    if reason is not None:
        note(f"{model.path} is computed with {attention} attention, not {model.attention}: {reason}")


@cache  # called twice: by the command line before it starts Prefect, and by the driver before it claims
def _check_files(
    paths: tuple[str, ...], model: ModelConfig, data: DataConfig, reward: str, environment: str | None
) -> None:
    section = None if environment is None else EnvironmentConfig.model_validate_json(environment)
    check_prompts(PromptDataset(paths), model, data, RewardConfig.model_validate_json(reward), section)


def check_prompts(
    dataset: PromptDataset,
    model: ModelConfig,
    data: DataConfig,
    reward: RewardConfig,
    environment: EnvironmentConfig | None,
) -> None:
    """Check the prompts' lengths and ground truths, and try reward and environment on a row of each file.

    Raises:
        UserError: prompts are too long, lack the ground truth for a built-in reward, have a data source that `auto` has
            no reward for, cannot be scored, or make the environment fail; a line for each.
    """
    firsts: dict[str, dict[str, Prompt]] = {}
    """The first prompt of each data source, by file."""
    doubtful: dict[str, Prompt] = {}
    """The first prompt of each data source that no response is right for, if its file begins with others."""
    problems: dict[str, str] = {}
    """The first problem of each kind and data source."""
    comparing = next((name for name in reward.functions if name in COMPARING), None)
    tokenizer, refuses_long = policy_tokenizer(model, environment, data.special_tokens), data.truncation == "error"
    readers = [tokenizer, *([] if reward.model is None else [load_tokenizer(reward.model, writes=False)])]
    if len(dataset) > MANY_PROMPTS:
        note(f"checking {len(dataset)} prompts")
    texts = spelling = 0
    first_spelling, special = "", dict[str, None]()
    """The first prompt that spells special tokens, and the tokens that some spell."""
    accepted, refused = set[tuple[str, ...]](), set[tuple[str, ...]]()
    """The roles of conversations that templates render, or refuse: they look at little else."""
    for prompt in dataset:
        texts += prompt.is_text
        sources = firsts.setdefault(prompt.where.rpartition(",")[0], {})
        if prompt.data_source not in sources and len(sources) < SOURCES:
            sources[prompt.data_source] = prompt
        if "auto" in reward.functions and (problem := auto.problem_of(prompt.data_source, prompt.style)) is not None:
            problems.setdefault(f"source {prompt.data_source}", f"{prompt.where}: {problem}")
        elif comparing is not None and prompt.ground_truth is None:
            problems.setdefault(
                "truth",
                f"{prompt.where}: reward.function {comparing} needs reward_model.ground_truth (or a column "
                "ground_truth, answer or solution), which is missing",
            )
        elif not can_be_right(reward.functions, prompt):
            first = sources.get(prompt.data_source)
            if first is None or can_be_right(reward.functions, first):  # it is tried, too
                doubtful.setdefault(prompt.data_source, prompt)
        elif "math" in built_ins_of(prompt, reward) and is_worked(prompt.ground_truth):
            problems.setdefault(
                "formulas",
                f"{prompt.where}: the ground truth is a text of several formulas ({prompt.ground_truth!r:.60}...), and "
                "reward.function math would compare with one of them: put the answer into a column answer, or into "
                "\\boxed{} in this text",
            )
        messages = prompt.after(data.system_prompt)
        if spelled := special_in(messages, tokenizer):
            spelling, first_spelling = spelling + 1, first_spelling or prompt.where
            special |= dict.fromkeys(sorted(spelled))
        roles = tuple(message["role"] for message in messages)
        if prompt.has_calls or roles not in accepted | refused:
            try:
                for reader in readers:
                    render(messages, reader, prompt.where, add_generation_prompt=True)
            except UserError as error:
                added = len(messages) > len(prompt.messages)
                fix = " (data.system_prompt puts a system message in front: set it to null)" if added else ""
                problems.setdefault("template", f"{error}{fix}")
                refused.add(roles)
            else:
                accepted.add(roles)
        if roles in refused:
            continue
        if refuses_long and "length" not in problems:
            try:
                check_length(prompt, tokenizer, data.max_prompt_tokens, data.system_prompt)
            except UserError as error:
                problems["length"] = str(error)

    def write(prompt: Prompt, answer: str) -> TrialAnswer:
        text = render(prompt.after(data.system_prompt), tokenizer, prompt.where, add_generation_prompt=True)
        ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
        return TrialAnswer(text[-TAIL_CHARACTERS:], ids, response_text(ids, tokenizer))

    tried = [prompt for sources in firsts.values() for prompt in sources.values()]
    if environment is not None:
        failures = try_environment(environment, tried, data.system_prompt)
        problems |= {failure: failure for failure in failures}
    if not problems:
        for failure in try_rewards(reward, [*tried, *doubtful.values()], write, note):
            if reward.on_error == "fail":
                problems[failure] = failure
            else:
                note(failure)
        for line in compare_columns(reward, tried, write):
            note(line)
    if problems:
        raise UserError("\n".join(list(problems.values())[:SOURCES]))
    if spelling:
        kept = data.special_tokens == "keep"
        are = (
            "control tokens, as data.special_tokens: keep says" if kept else "text, unless data.special_tokens is keep"
        )
        which = f"{spelling} of {counted(len(dataset), 'prompt')} spell special tokens"
        note(f"{which} ({', '.join(list(special)[:SOURCES])}), the first in {first_spelling}: they are {are}")
    if texts and tokenizer.chat_template:
        which = "the prompts are texts" if texts == len(dataset) else f"{texts} of {len(dataset)} prompts are texts"
        note(
            f"{which}: the chat template of {model.path} renders each as a message of the user. To keep them as they "
            f"are, set model.chat_template to a file that has only {AS_THEY_ARE}"
        )


def built_ins_of(prompt: Prompt, reward: RewardConfig) -> set[str | None]:
    """The names of the rewards of a prompt, with what `auto` chooses for it."""
    chosen = {auto.reward_of(prompt.data_source, prompt.style)} if "auto" in reward.functions else set()
    return {*reward.functions, *chosen}


def is_worked(ground_truth: str | None) -> bool:
    """Whether a ground truth is the way to an answer that it does not mark: it has several formulas and no box."""
    return ground_truth is not None and boxed(ground_truth) is None and len(formulas_of(ground_truth)) > 1


def check_packages(config: RunConfig) -> None:
    """Check that what the config asks for is installed, has the GPUs that it needs, and is logged in.

    Raises:
        UserError: something is missing; a line for each package.
    """
    engines = {engine.type: engine for engine in (trainer.engine for trainer in config.trainers.values())}
    models = (config.model, config.critic_model, config.reference_model, *config.frozen_models.values())
    rollout = config.rollout.engine
    adapts = config.model.lora is not None or config.critic_model.lora is not None
    mistakes = [mistake for _, mistake in _without_gpu(config)]
    needless = {package for package, _ in _without_gpu(config)}
    for key, asked, package, extra in (
        *((f"engine: {name}", True, engine.package, engine.extra) for name, engine in engines.items()),
        ("pools", bool(config.pools), "ray", "ray"),
        ("model.lora", adapts, "peft", "lora"),
        ("model.kernels: liger", any(model.kernels == "liger" for model in models), "liger_kernel", "liger"),
        (f"rollout.engine: {rollout.type}", True, rollout.package, rollout.extra),
        *((f"tracking: {name}", True, name, "tracking" if name == "tensorboard" else name) for name in config.tracking),
        ("tracking", bool(config.tracking), "accelerate", "tracking"),
    ):
        if key == "tracking" and any(mistake.startswith("tracking: ") for mistake in mistakes):
            continue  # whose extras have it
        if asked and package is not None and package not in needless and not _is_installed(package):
            mistakes.append(f'{key} needs the package {package}: pip install "ratchet-rlhf[{extra}]"')
    if "wandb" in config.tracking and _is_installed("wandb") and not has_login():
        mistakes.append(
            "tracking: wandb is not logged in: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))


def _without_gpu(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The packages of which a process that has no GPU can make no use, and what to do instead. For megatron, the
    workers of pools say so themselves."""
    import torch

    for role, trainer in config.trainers.items():
        engine = trainer.engine
        if engine.needs_gpu and engine.package and not config.pools and not torch.cuda.is_available():
            fix = f"{role}.engine {engine.type} needs a GPU, and there is none: set {role}.engine to fsdp"
            yield engine.package, fix
    models = (config.model, config.critic_model, config.reference_model, *config.frozen_models.values())
    if any(model.kernels == "liger" for model in models) and not _has_gpus(config):
        yield (
            "liger_kernel",
            "model.kernels is liger, which needs GPUs, but the trainers have none: set it to torch or compile",
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _has_gpus(config: RunConfig) -> bool:
    """Whether the processes that train have GPUs."""
    import torch

    pools = [config.pool_of(role) for role in config.trainers]
    if not config.pools:
        return torch.cuda.is_available()
    return all(pool is not None and config.pools[pool].gpus_per_worker > 0 for pool in pools)


def check_start(
    config: RunConfig, *, take_over: bool, accept_changes: bool, check: Callable[[Driver], None] = lambda driver: None
) -> RunState:
    """Check everything that `driving` refuses, without a claim: nothing is written, and no model is loaded.

    Args:
        config: names the run.
        take_over: whether another driver may be alive.
        accept_changes: whether the run may continue with other data, another reward or another algorithm.
        check: may reject the driver.

    Returns:
        The run's state; its slot is -1 if the run does not exist.

    Raises:
        UserError: the config, the store or the inputs are wrong, or do not fit the run.
        Fenced: another driver is alive.
    """
    store = RunStore.at(run_url(config.run.store, config.run.name))
    state = _check(Driver(config, store), take_over, accept_changes, check)
    if state.slot < 0:
        store.objects.delete_empty_folders()  # left by the check of the store
    return state


def _check(driver: Driver, take_over: bool, accept_changes: bool, check: Callable[[Driver], None]) -> RunState:
    """Check everything that may be wrong on the user's side; returns the run's state, slot -1 if there is no run."""
    config, store = driver.config, driver.store
    check_all(partial(check_inputs, config), partial(check_devices, config))
    state = begin(store, config, take_over)
    mistakes = [
        f"the {role}'s model is not the one that run {config.run.name} started with (model.path {config.model.path}, "
        f"model.lora {yaml_text(config.model.lora)}): choose another run.name, or restore the first model"
        for role, weights in driver.initial_weights.items()
        if (first := state.initial.get(role)) is not None and first.digest != weights.digest
    ]
    if state.claim is not None:
        mistakes += other_averages(stored_config(state.claim.config, "the claim"), config, state.iteration)
    committed = []
    try:
        check(driver)
    except UserError as error:
        committed = [str(error)]
    if state.claim is not None and state.iteration > 0 and not accept_changes:
        mistakes += _other_run(driver, state.claim, can_continue=not committed)
    if mistakes := mistakes + committed:
        raise UserError("\n".join(mistakes))
    return state


def other_averages(before: RunConfig, config: RunConfig, iteration: int) -> list[str]:
    """The refusal of a config in which other weights follow the actor than in the iterations that a run has.

    Args:
        before: the run's config.
        config: the new config.
        iteration: number of iterations that both share.
    """
    keys = {"reference": "reference.sync_every", "ema": "actor.ema_decay"}
    return [
        f"{keys[role]} can be set or removed only before the first iteration, because the average begins there: start "
        "a new run, or `ratchet fork RUN --at 0 --run NEW`"
        for role in keys
        if iteration and (role in before.averages) != (role in config.averages)
    ]


def _other_run(driver: Driver, claim: Claim, can_continue: bool) -> list[str]:
    """The refusal of a config that learns from something else than the run did; empty if it does not.

    Args:
        driver: the driver.
        claim: the claim of the driver before.
        can_continue: whether the open iteration can continue with the config.
    """
    before, config = stored_config(claim.config, "the claim"), driver.config
    changed = differences(before.learned_from(), config.learned_from())
    if claim.outside.get("dataset") == driver.digest("dataset"):  # other paths, the same prompts
        changed = [change for change in changed if not change.startswith("data.train ")]
    if not changed:
        return []
    run = config.run.name
    remedies = f"choose another run.name, or continue with the run's own settings (`ratchet resume {run}`)"
    return [
        f"run {run} has {counted(driver.state.iteration, 'iteration')} with other settings ({'; '.join(changed)}): "
        + remedies
        + (", or add --accept-changes" if can_continue else "")
    ]


def _open(
    config: RunConfig,
    dependencies: Dependencies,
    take_over: bool,
    accept_changes: bool,
    check: Callable[[Driver], None],
) -> Driver:
    """Check everything that may be wrong on the user's side, then claim the run. Loads no model."""
    store = RunStore.at(run_url(config.run.store, config.run.name))
    driver = Driver(config, store)
    state = _check(driver, take_over, accept_changes, check)
    checked = store.state.slot
    say_what_changed(state, config)
    consent.give(config)
    claim(
        store,
        config,
        initial=driver.initial_weights,
        ahead=config.rollout.ahead,
        outside={name: digest for name in dependencies.outside if (digest := driver.digest(name)) is not None},
        versions=dependencies.versions,
    )
    if store.state.slot > checked + 1:  # another driver committed more in the meantime
        check(driver)
    store.sweep(dependencies.stages)
    return driver


def say_what_changed(state: RunState, config: RunConfig) -> None:
    """Report changed settings: a run may continue with them, but the user should notice.

    Args:
        state: the run's state, before it is claimed with `config`.
        config: the config that it continues with.
    """
    if state.claim is None:
        return
    before = stored_config(state.claim.config, "the claim")
    old, new = (settings.model_dump(mode="json", exclude={"run": {"name", "store"}}) for settings in (before, config))
    if changed := differences(old, new) + changed_since(state.claim.config):
        note(f"continues with different settings from iteration {state.iteration} on: {'; '.join(changed)}")
