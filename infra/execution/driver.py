"""A driver: the one process that advances a run. It holds the claim, the heartbeat and the workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from infra.execution.claims import begin, claim, code_digest, package_versions, run_url
from infra.execution.executors import Executors, StageHandle
from infra.execution.heartbeat import beating
from infra.execution.snapshots import Snapshots
from infra.execution.stopping import Stopping, on_signals
from infra.progress import note
from infra.store.log import Corrupt
from infra.store.object_store import ObjectStore, StoreUnavailable
from infra.store.records import RunState, Weights
from infra.store.run_store import RunStore
from infra.workers.groups import WorkerGroups
from infra.workers.ray_group import GroupLost
from rlhf.config import DataConfig, ModelConfig, RewardConfig, RunConfig, differences, stored_config, yaml_text
from rlhf.config.older import changed_since
from rlhf.data.prompts import PromptDataset
from rlhf.environments import check_environment, environment_digest
from rlhf.errors import UserError
from rlhf.models import (
    attention_of,
    check_architecture,
    check_reward_model,
    check_weights,
    files_digest,
    initial_digest,
    load_tokenizer,
    model_folder,
    tokenizer_digest,
)
from rlhf.rewards import COMPARING, check_rewards, reward_digest
from rlhf.rewards.pool import try_rewards

MANY_PROMPTS = 10_000
"""Their lengths take over two seconds to look at."""


@dataclass
class AheadRollouts:
    """What generates ahead of the open iteration, where `rollout.mode` lets it."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while a piece is generated, and while new weights are brought."""
    holds: Weights | None = None
    """What was brought; None: an iteration generates with what it begins with."""
    begun: dict[int, StageHandle] = field(default_factory=dict)
    """Generations of iterations whose turn has not come."""


Outside = Literal["dataset", "validation", "reward", "reward_model", "tokenizer", "environment"]
"""What stages read outside the store and the config; a digest tells whether it is what it was."""


@dataclass(frozen=True)
class Dependencies:
    """What the stages of a pipeline depend on, besides config and inputs."""

    stages: tuple[str, ...]
    """Their names."""
    outside: frozenset[Outside]
    versions: Mapping[str, int]
    """Of each stage's code."""


class Driver:
    """Opened with `driving`."""

    def __init__(self, config: RunConfig, store: RunStore) -> None:
        self.config = config
        self.store = store
        self.groups = WorkerGroups(config, store, self._identity)
        self.executors = Executors()
        self.rollout = AheadRollouts()
        self.snapshots = Snapshots(config, store, self.groups)
        self._digests: dict[Outside, str | None] = {}
        self.restoring = threading.RLock()
        """Held by whoever loads weights: two executors may find at once that a role does not hold what they need."""
        self.stopping = Stopping(f"`ratchet resume {config.run.name}`")

    @property
    def state(self) -> RunState:
        return self.store.state

    @property
    def term(self) -> int:
        return self.store.log.term

    def tidy(self) -> None:
        """While stages compute: a snapshot that was written in the background is committed."""
        try:
            self.snapshots.settle(wait=False)
        except (StoreUnavailable, GroupLost) as error:  # which the stages will meet too; the next snapshot will do
            note(str(error))

    def digest(self, what: Outside) -> str | None:
        """Digest of something outside the store that stages read; None: the config has no such thing."""
        if what not in self._digests:
            self._digests[what] = self._digest(what)
        return self._digests[what]

    def _identity(self) -> str:
        """Of everything outside the config that workers hold: code, packages, models, and what stages read."""
        held: tuple[Outside, ...] = ("dataset", "reward", "tokenizer", "environment", "validation")
        digests = {what: digest for what in held if (digest := self.digest(what)) is not None or what != "validation"}
        models = {role: weights.digest for role, weights in self.initial_weights.items()}
        return json.dumps([code_digest(), package_versions(), models, digests], sort_keys=True)

    def _digest(self, what: Outside) -> str | None:
        config, resources = self.config, self.groups.local.worker.resources
        model = config.reward.model
        match what:
            case "dataset":
                return resources.dataset(config.data.train).digest
            case "validation":
                return None if (held_out := config.validation.data) is None else resources.dataset((held_out,)).digest
            case "reward_model":
                if model is None:
                    return None
                return f"{files_digest(model_folder(model))} {tokenizer_digest(model, writes=False)}"
            case "environment":
                environment = config.rollout.environment
                return None if environment is None else environment_digest(environment.name)
            case "reward":
                functions = reward_digest(config.reward.functions)
                return functions if model is None else f"{functions} {self.digest('reward_model')}"
            case "tokenizer":
                return tokenizer_digest(config.model)

    @cached_property
    def initial_weights(self) -> dict[str, Weights]:
        """Where each role starts, by digest of its model's files."""
        models = {"actor": self.config.model}
        if self.config.needs_critic:
            models["critic"] = self.config.critic_model
        if self.config.needs_reference:
            models["reference"] = self.config.reference_model
        seed = self.config.run.seed
        return {role: Weights(version=0, digest=initial_digest(model, seed)) for role, model in models.items()}


_open_drivers: ContextVar[tuple[Driver, ...]] = ContextVar("open_drivers", default=())
"""Of this context, the innermost last: a flow that is called by another one of the same run finds its driver."""


@contextmanager
def driving(
    config: RunConfig,
    dependencies: Dependencies,
    *,
    take_over: bool = False,
    check: Callable[[Driver], None] = lambda driver: None,
) -> Iterator[Driver]:
    """Claim the run and drive it; inside an open driver of the same run, that one.

    Args:
        config: names the run.
        dependencies: what is written down when the run is claimed, and what older drivers may have left files of.
        take_over: whether a driver that is alive is fenced.
        check: may refuse before the claim, so that a config that cannot go on leaves no trace.
    """
    drivers = _open_drivers.get()
    active = next((driver for driver in drivers if driver.config.run == config.run), None)
    if active is not None:
        with on_signals(active.stopping.request):
            yield active
        return
    driver = _open(config, dependencies, take_over, check)
    with beating(driver.store.log, driver.stopping):
        token = _open_drivers.set((*drivers, driver))
        try:
            with on_signals(driver.stopping.request):
                yield driver
                driver.snapshots.settle(wait=True)
        except Corrupt:
            driver.store.log.check_claim()  # whoever took the run over deletes snapshots that it retires
            raise
        finally:
            _open_drivers.reset(token)
            driver.executors.close()
            driver.groups.close()
            driver.stopping.forget()


def check_inputs(config: RunConfig) -> None:
    """Refuse what a user got wrong outside the config file, before anything starts: packages, prompts, reward,
    models."""
    _check_packages(config)
    server = config.rollout.server
    if config.rollout.engine == "server" and server.weights_folder is None and config.train.updates:
        raise UserError(
            "rollout.server.weights_folder is null, so that the servers would go on generating with the first weights: "
            "name a folder that they see, or only evaluate"
        )
    check_rewards(config.reward.functions, config.reward.options, config.reward.allow_code)
    if config.rollout.environment is not None:
        check_environment(config.rollout.environment.name, config.rollout.environment.options)
    models = {"model": config.model, "critic.model": config.critic_model, "reference.model": config.reference_model}
    judge = {"reward.model": config.reward.model} if config.reward.model is not None else {}
    for key, each in (models | judge).items():
        check_weights(model_folder(each, key), key)
        say_attention(each)
    check_architecture(config.model, "model", is_critic=False)
    if config.needs_critic:
        check_architecture(config.critic_model, "critic.model", is_critic=True)
    load_tokenizer(config.model)
    if config.reward.model is not None:
        check_reward_model(config.reward.model)
        load_tokenizer(config.reward.model, writes=False)
    held_out = [] if config.validation.data is None else [config.validation.data]
    _check_files((*config.data.train, *held_out), config.model, config.data, config.reward.model_dump_json())


@cache
def say_attention(model: ModelConfig) -> None:
    """Once a process: models have it in common, and the command line looks before the driver does."""
    attention, reason = attention_of(model)
    if reason is not None:
        note(f"{model.path} is computed with {attention} attention, not {model.attention}: {reason}")


@cache  # the command line looks before it starts Prefect, and the driver before it claims
def _check_files(paths: tuple[str, ...], model: ModelConfig, data: DataConfig, reward: str) -> None:
    check_prompts(PromptDataset(paths), model, data, RewardConfig.model_validate_json(reward))


def check_prompts(dataset: PromptDataset, model: ModelConfig, data: DataConfig, reward: RewardConfig) -> None:
    """Refuse prompts that are too long, that lack what a built-in reward compares with, or that no reward can score."""
    if comparing := [name for name in reward.functions if name in COMPARING]:
        for prompt in dataset.prompts:
            if prompt.ground_truth is None:
                raise UserError(
                    f"{prompt.where}: reward_model.ground_truth is missing, with which reward.function "
                    f"{comparing[0]} compares"
                )
    for failure in try_rewards(reward, dataset.prompts):
        if reward.on_error == "fail":
            raise UserError(failure)
        note(failure)
    if data.truncation != "error":
        return
    if len(dataset) > MANY_PROMPTS:
        note(f"looking at the lengths of {len(dataset)} prompts")
    dataset.check_lengths(load_tokenizer(model), data.max_prompt_tokens, data.system_prompt)


def _check_packages(config: RunConfig) -> None:
    trains = any(trainer.engine == "deepspeed" for trainer in config.trainers.values())
    adapts = config.model.lora is not None or config.critic_model.lora is not None
    for key, asked, package, extra in (
        ("engine: deepspeed", trains, "deepspeed", "deepspeed"),
        ("pools", bool(config.pools), "ray", "ray"),
        ("model.lora", adapts, "peft", "lora"),
        ("rollout.engine: vllm", config.rollout.engine == "vllm", "vllm", "vllm"),
        ("tracking", bool(config.tracking), "accelerate", "tracking"),
    ):
        if asked and importlib.util.find_spec(package) is None:
            raise UserError(f'{key} needs the package {package}: pip install "ratchet-rlhf[{extra}]"')


def _open(config: RunConfig, dependencies: Dependencies, take_over: bool, check: Callable[[Driver], None]) -> Driver:
    """Check everything that a user may have got wrong, then claim. No model is loaded yet."""
    store = RunStore(ObjectStore(run_url(config.run.store, config.run.name)))
    driver = Driver(config, store)
    check_inputs(config)
    state = begin(store, config, take_over)
    for role, weights in driver.initial_weights.items():
        first = state.initial.get(role)
        if first is not None and first.digest != weights.digest:
            raise UserError(
                f"the {role}'s model is not the one that run {config.run.name} began with (model.path "
                f"{config.model.path}, model.lora {yaml_text(config.model.lora)}): choose another run.name, or give "
                "the first model back"
            )
    check(driver)
    if state.claim is not None:
        _say_what_changed(state.claim.config, config)
    claim(
        store,
        config,
        initial=driver.initial_weights,
        ahead=config.rollout.ahead,
        outside={what: digest for what in dependencies.outside if (digest := driver.digest(what)) is not None},
        versions=dependencies.versions,
    )
    store.sweep(dependencies.stages)
    return driver


def _say_what_changed(stored: Mapping[str, Any], config: RunConfig) -> None:
    """A run may go on with other settings, but not unnoticed."""
    before = stored_config(stored, "the claim")
    plain, now = (each.model_dump(mode="json", exclude={"run": {"name", "store"}}) for each in (before, config))
    if changed := differences(plain, now) + changed_since(stored):
        note(f"goes on with other settings: {'; '.join(changed)}")
