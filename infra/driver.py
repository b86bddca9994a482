"""A driver: the one process that advances a run. It holds the claim, the heartbeat and the workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from infra.claims import begin, claim, code_digest, package_versions, run_url
from infra.heartbeat import beating
from infra.lanes import Lanes, Output
from infra.log import Corrupt
from infra.objects import Objects, StoreUnavailable
from infra.progress import report
from infra.records import RunState, Weights
from infra.snapshots import Snapshots
from infra.stopping import Stopping, on_signals
from infra.store import ROW_STAGES, RunStore
from infra.workers.groups import Groups
from infra.workers.ray_group import GroupLost
from rlhf.config import Data, Model, Reward, RunConfig, differences, stored_config, yaml_text
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
class Rollout:
    """What generates ahead of the open iteration, where `rollout.mode` lets it."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while a piece is generated, and while new weights are brought."""
    holds: Weights | None = None
    """What was brought; None: an iteration generates with what it begins with."""
    begun: dict[int, Output] = field(default_factory=dict)
    """Generations of iterations whose turn has not come."""


class Driver:
    """Opened with `driving`; there is at most one in a process."""

    _active: Driver | None = None

    def __init__(self, config: RunConfig, store: RunStore) -> None:
        self.config = config
        self.store = store
        self.groups = Groups(config, store, self._identity)
        self.lanes = Lanes()
        self.rollout = Rollout()
        self.snapshots = Snapshots(config, store, self.groups)
        self.digests: dict[str, str | None] = {}
        self.restoring = threading.RLock()
        """Held by whoever loads weights: two lanes may find at once that a role does not hold what they need."""
        self.stopping = Stopping(f"`ratchet resume {config.run.name}`")

    @classmethod
    def current(cls) -> Driver:
        assert cls._active is not None, "stages run inside `driving(config)`"
        return cls._active

    @property
    def state(self) -> RunState:
        return self.store.state

    @property
    def epoch(self) -> int:
        return self.store.log.epoch

    def tidy(self) -> None:
        """While stages compute: a snapshot that was written in the background is committed."""
        try:
            self.snapshots.settle(wait=False)
        except (StoreUnavailable, GroupLost) as error:  # which the stages will meet too; the next snapshot will do
            report("note", text=str(error))

    def digest(self, what: str) -> str | None:
        """Digest of something outside the store that stages read (dataset, validation, reward, reward_model, tokenizer,
        environment); None: the config has no such thing."""
        if what not in self.digests:
            self.digests[what] = self._digest(what)
        return self.digests[what]

    def _identity(self) -> str:
        """Of everything outside the config that workers hold: code, packages, models, and what stages read."""
        validation = ["validation"] if self.config.validation.data is not None else []
        data = ["dataset", "reward", "tokenizer", "environment", *validation]
        digests = {what: self.digest(what) for what in data}
        models = {role: weights.digest for role, weights in self.initial_weights.items()}
        return json.dumps([code_digest(), package_versions(), models, digests], sort_keys=True)

    def _digest(self, what: str) -> str | None:
        config, worker = self.config, self.groups.local.worker
        if what == "dataset":
            return worker.dataset(config.data.train).digest
        if what == "validation":
            assert config.validation.data is not None
            return worker.dataset((config.validation.data,)).digest
        model = config.reward.model
        if what == "reward_model":
            assert model is not None
            return f"{files_digest(model_folder(model))} {tokenizer_digest(model, writes=False)}"
        if what == "environment":
            environment = config.rollout.environment
            return None if environment is None else environment_digest(environment.name)
        if what == "reward":
            functions = reward_digest(config.reward.functions)
            return functions if model is None else f"{functions} {self.digest('reward_model')}"
        assert what == "tokenizer"
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

    @property
    def most_shards(self) -> int:
        config = self.config
        prompts = config.most_prompts
        if config.validation.data is not None:
            prompts = max(prompts, len(self.groups.local.worker.dataset((config.validation.data,))))
        return -(-prompts // config.rollout.prompts_per_shard)


@contextmanager
def driving(
    config: RunConfig, *, take_over: bool = False, check: Callable[[Driver], None] = lambda driver: None
) -> Iterator[Driver]:
    """Claim the run and drive it; inside an open driver of the same run, that one. `check` may refuse before the
    claim, so that a config that cannot go on leaves no trace."""
    active = Driver._active
    if active is not None and active.config.run == config.run:
        with on_signals(active.stopping.request):
            yield active
        return
    driver = _open(config, take_over, check)
    with beating(driver.store.log, driver.stopping):
        Driver._active = driver
        try:
            with on_signals(driver.stopping.request):
                yield driver
                driver.snapshots.settle(wait=True)
        except Corrupt:
            driver.store.log.check_claim()  # whoever took the run over deletes snapshots that it retires
            raise
        finally:
            driver.lanes.close()
            driver.groups.close()
            driver.stopping.forget()
            Driver._active = None


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
def say_attention(model: Model) -> None:
    """Once a process: models have it in common, and the command line looks before the driver does."""
    attention, reason = attention_of(model)
    if reason is not None:
        report("note", text=f"{model.path} is computed with {attention} attention, not {model.attention}: {reason}")


@cache  # the command line looks before it starts Prefect, and the driver before it claims
def _check_files(paths: tuple[str, ...], model: Model, data: Data, reward: str) -> None:
    check_prompts(PromptDataset(paths), model, data, Reward.model_validate_json(reward))


def check_prompts(dataset: PromptDataset, model: Model, data: Data, reward: Reward) -> None:
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
        report("note", text=failure)
    if data.truncation != "error":
        return
    if len(dataset) > MANY_PROMPTS:
        report("note", text=f"looking at the lengths of {len(dataset)} prompts")
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


def _open(config: RunConfig, take_over: bool, check: Callable[[Driver], None]) -> Driver:
    """Check everything that a user may have got wrong, then claim. No model is loaded yet."""
    store = RunStore(Objects(run_url(config.run.store, config.run.name)))
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
        shards=driver.most_shards,
        ahead=config.rollout.ahead,
    )
    store.sweep((*ROW_STAGES, "validate"))
    return driver


def _say_what_changed(stored: Mapping[str, Any], config: RunConfig) -> None:
    """A run may go on with other settings, but not unnoticed."""
    before = stored_config(stored, "the claim")
    plain, now = (each.model_dump(mode="json", exclude={"run": {"name", "store"}}) for each in (before, config))
    if changed := differences(plain, now) + changed_since(stored):
        report("note", text=f"goes on with other settings: {'; '.join(changed)}")
