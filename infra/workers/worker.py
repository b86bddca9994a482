"""A worker: the models of some roles in one process, and the only place where stages compute.

A call carries references and config, never rows or weights: the worker reads what the stage reads, computes, and
writes what the stage writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from infra.log import Fenced
from infra.manifest import Checkpoint, File
from infra.progress import report
from infra.records import ObjectRef, ShardRef, Weights
from infra.store import RunStore
from rlhf.batch import TrajectoryBatch
from rlhf.config import RunConfig
from rlhf.config_view import ConfigView
from rlhf.data.prompts import PromptDataset, encode
from rlhf.engines import ranks
from rlhf.engines.base import Sampling
from rlhf.engines.generation import Interruptible
from rlhf.environments import Environment, load_environment
from rlhf.errors import EngineLost, NotFinite
from rlhf.models import load_actor, load_critic, load_reward_model, load_tokenizer
from rlhf.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.engines.base import Generation, Request, RolloutEngine, TrainEngine
    from rlhf.engines.server_rollout import ServerRollout


T = TypeVar("T")
WEIGHTS_OF = {"rollout": "actor"}
"""The rollout generates with the actor's weights: with the very same tensors, or with a copy of its own."""


Input = tuple[tuple[ShardRef, ...], tuple[str, ...]]
"""Of a stage that is read: its shards, and the columns. With no column, it says which trajectories to work on."""


@dataclass(frozen=True)
class Call:
    """One shard of a stage, or one update."""

    epoch: int
    stage: str
    iteration: int
    shard: int
    attempt: int
    config: ConfigView
    inputs: tuple[Input, ...]
    writes: tuple[str, ...] = ()
    role: str | None = None
    weights: Weights | None = None
    """What the role's weights are: the call is refused by a worker that holds others."""
    cursor: int = 0
    controllers: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Context:
    """What a stage's compute function is given."""

    call: Call
    batch: TrajectoryBatch
    worker: Worker
    outputs: dict[str, Any] = field(default_factory=dict)
    """Small results besides rows: metrics, the next cursor, the next coefficients."""
    learns: bool = False
    earlier_s: float = 0.0
    """Seconds that earlier pieces of an interrupted generation took."""

    @property
    def config(self) -> ConfigView:
        return self.call.config

    @property
    def iteration(self) -> int:
        return self.call.iteration

    @property
    def shard(self) -> int:
        return self.call.shard

    @property
    def engine(self) -> Any:
        assert self.call.role is not None, "a stage without a role has no engine"
        return self.worker.engine(self.call.role, learns=self.learns)

    @property
    def version(self) -> int:
        assert self.call.weights is not None
        return self.call.weights.version

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.worker.tokenizer

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> tuple[list[Generation], list[list[int]]]:
        """Responses, and the version of the policy that drew each of their tokens. Raises `Interrupted` where new
        weights may come before all are complete; asked again, it goes on."""
        piece = sampling.max_tokens
        if self.call.stage == "generate" and self.config.rollout.partial:
            piece = self.config.rollout.partial_tokens
        place = self.call.stage, self.iteration, self.shard
        begun = self.worker.begun.setdefault(place, Interruptible(requests))
        started = time.perf_counter()
        try:
            complete = begun.go_on(self.engine, sampling, piece, self.version)
        except BaseException:
            del self.worker.begun[place]
            raise
        if not complete:
            begun.seconds += time.perf_counter() - started
            raise Interrupted(place)
        del self.worker.begun[place]
        self.earlier_s = begun.seconds
        return begun.generations, begun.versions


Compute = Callable[[Context], TrajectoryBatch]
Update = Callable[[Context], dict[str, float]]


@dataclass(frozen=True)
class Rows:
    shard: ShardRef | None
    """What was written, by the rank that writes."""
    outputs: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Updated:
    before: Weights
    weights: Weights
    metrics: dict[str, float]
    seconds: float
    device: str
    """What computed it: cpu or cuda."""


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    folder: str
    weights: Weights
    written: Future[dict[str, File]]


class Interrupted(Exception):
    """A generation is not complete: new weights may come, and whoever asks again goes on with it."""


class Stale(Exception):
    """The worker does not hold the weights that a call asks for: load the newest snapshot and replay."""


class Worker:
    """Builds each role's engine when first asked, and keeps it."""

    def __init__(self, config: RunConfig, store: RunStore, roles: Iterable[str] | None = None) -> None:
        self.config = config
        self.store = store
        self.roles = frozenset(config.roles if roles is None else roles)
        self.epoch = 0
        self._engines: dict[str, Any] = {}
        self._weights: dict[str, Weights | None] = {}
        """What each trainable role holds; None: dirty, in the middle of an update."""
        self._updated: dict[str, Updated] = {}
        self._rollout_has: Weights | None = None
        """What the rollout's own copy of the actor's weights is, where it needs one."""
        self._server_checked = False
        self._saving: dict[str, Saving] = {}
        self._datasets: dict[tuple[str, ...], PromptDataset] = {}
        self._environments: dict[str, Callable[..., Environment]] = {}
        self.begun: dict[tuple[str, int, int], Interruptible] = {}
        """Generations that go on when they are asked for again, by stage, iteration and shard."""
        self._rewards: tuple[tuple[Any, ...], RewardPool] | None = None
        self._lock = threading.RLock()
        """Of what engines there are, and whose weights they have: stages of different roles may compute at once."""

    def rows(self, call: Call, compute: Compute) -> Rows | None:
        """Compute one shard and write it; nothing is committed. None: there is more to do, ask again."""
        try:
            batch, outputs, seconds = self.computed(call, compute)
        except Interrupted:
            return None
        shard = None
        if ranks.rank() == 0:  # the others hold the same rows
            shard = self.store.write_shard(call.iteration, call.stage, call.attempt, call.shard, batch.table)
        return Rows(shard, outputs, seconds)

    def computed(self, call: Call, compute: Compute) -> tuple[TrajectoryBatch, dict[str, Any], float]:
        """One shard's rows, its small outputs, and the seconds it took; nothing is written."""
        self.admit(call.epoch)
        try:
            if call.role is not None and call.weights is not None and not self._comes_to_hold(call.role, call.weights):
                raise Stale(call.role)
            batch = self._read(call)
            started = time.perf_counter()
            context = Context(call, batch, self)
            found = compute(context)
        except EngineLost:  # a new one holds nothing yet
            self._end_rollout()
            raise
        seconds = time.perf_counter() - started + context.earlier_s
        expected = ("trajectory_id", *call.writes)
        assert tuple(found.columns) == expected, f"{call.stage} wrote {found.columns}, its spec says {expected}"
        _check_finite(found, call.stage)
        return found, context.outputs, seconds

    def update(self, call: Call, update: Update) -> Updated:
        """Move a role from `call.weights` to the next version, once: asked again, the finished result is returned."""
        self.admit(call.epoch)
        assert call.role in self.roles and call.weights is not None
        done = self._updated.get(call.role)
        if done is not None and self._weights[call.role] == done.weights and done.before == call.weights:
            return done
        if self._weights.get(call.role) != call.weights:
            raise Stale(call.role)
        batch = self._read(call)
        started = time.perf_counter()
        with self._lock:  # nobody copies them any more
            self._weights[call.role] = None
        metrics = update(Context(call, batch, self, learns=True))
        engine = self.engine(call.role, learns=True)
        weights = Weights(version=call.weights.version + 1, digest=engine.digest())
        self._weights[call.role] = weights
        seconds = time.perf_counter() - started
        self._updated[call.role] = Updated(call.weights, weights, metrics, seconds, ranks.device().type)
        return self._updated[call.role]

    def holds(self, role: str, weights: Weights | None) -> bool:
        copy = role == "rollout" and not self.rollout_is_actor()
        return weights is not None and weights == (self._rollout_has if copy else self._weights.get(_whose(role)))

    def rollout_is_actor(self) -> bool:
        """Whether the rollout generates with the actor's very tensors."""
        return self._owner("rollout") == "actor"

    def copy_to_rollout(self, weights: Weights) -> bool:
        """Give the actor's weights to the rollout; False if the actor, here, does not hold these."""
        with self._lock:
            if "actor" not in self.roles or self._weights.get("actor") != weights:
                return False
            actor = self.engine("actor", learns=True)
            rollout = self.engine("rollout")  # the last, so that it is awake where they take turns
            self._rollout_has = None
            rollout.load_weights(actor.weights(), actor.adapter_config)
            if self.config.rollout.engine == "server":
                self._check_server(rollout, self.engine("actor"))
            self._rollout_has = weights
            return True

    def _check_server(self, rollout: ServerRollout, actor: TrainEngine) -> None:
        """Once: a server's answer is compared with what the actor says of it, whose weights it has just loaded."""
        if self._server_checked:
            return
        from rlhf.engines.server_rollout import check_log_probs

        data, rollout_config = self.config.data, self.config.rollout
        [row] = self.dataset(data.train).draw(self.config.run.seed, 0, 1)
        prompt = self.dataset(data.train).prompts[row]
        _, ids = encode(
            prompt,
            self.tokenizer,
            max_tokens=data.max_prompt_tokens,
            truncation=data.truncation,
            system_prompt=data.system_prompt,
        )
        sampling = Sampling(
            temperature=rollout_config.temperature,
            top_p=rollout_config.top_p,
            max_tokens=rollout_config.max_response_tokens,
            seed=self.config.run.seed,
        )
        check_log_probs(rollout, actor, ids, sampling)
        self._server_checked = True

    def _comes_to_hold(self, role: str, weights: Weights) -> bool:
        if self.holds(role, weights):
            return True
        copies = role == "rollout" and not self.rollout_is_actor()
        return copies and self.copy_to_rollout(weights)

    def load(self, role: str, weights: Weights, checkpoint: ObjectRef | None) -> None:
        """Load a role's snapshot; without one, the weights it starts from."""
        found = None if checkpoint is None else self.store.checkpoint(checkpoint)
        if role == "rollout":
            self._rollout_has = None
            self._load_rollout(found)
            self._rollout_has = weights
            return
        self._weights[role] = None
        if found is None:
            with self._lock:
                for other in [other for other in self._engines if self._owner(other) == role]:
                    del self._engines[other]
            self.engine(role)
        else:
            self.engine(role, learns=True).load_state(self.store.read_checkpoint(found))
        self._weights[role] = weights

    def _load_rollout(self, checkpoint: Checkpoint | None) -> None:
        """The actor's weights alone, for a rollout whose actor is elsewhere."""
        from rlhf.engines.model_engine import copy_weights, is_weights, weights_of

        serves, config = self.config.rollout.engine == "server", "adapter_config.json"
        files: dict[str, bytes] = {}
        if checkpoint is not None:
            names = [name for name in checkpoint.files if is_weights(name) or name == config]
            files = self.store.read_checkpoint(checkpoint, names)
        if serves and not self._server_checked:  # of a pool of its own, which holds no other model
            from rlhf.engines.torch_engine import TorchEngine

            rollout, model = self.engine("rollout"), load_actor(self.config.model)
            copy_weights(weights_of(files), model)
            rollout.load_weights(model.named_parameters())
            actor = TorchEngine(model, "policy", dtype=self.config.model.dtype, trainable=False)
            self._check_server(rollout, actor)
        elif checkpoint is not None:
            self.engine("rollout").load_weights(weights_of(files), files.get(config))
        elif serves:  # it may have other weights
            self.engine("rollout").load_weights(load_actor(self.config.model).named_parameters())
        else:
            self._end_rollout()

    def rewards(self, *settings: Any) -> RewardPool:
        """The processes that compute rewards."""
        with self._lock:
            if self._rewards is None or self._rewards[0] != settings:
                self._end_rewards()
                self._rewards = settings, RewardPool(*settings)
            return self._rewards[1]

    def close(self) -> None:
        self._end_rollout()
        self._end_rewards()

    def _end_rewards(self) -> None:
        if self._rewards is not None:
            self._rewards[1].close()
            self._rewards = None

    def _end_rollout(self) -> None:
        with self._lock:
            self._rollout_has = None
            if (rollout := self._engines.pop("rollout", None)) is not None:
                rollout.close()

    def pass_through(self, role: str, weights: Weights) -> None:
        """The role's tensors count as `weights` from here on: an update was skipped, or replayed with other bits."""
        self._weights[role] = weights

    def begin_save(self, role: str) -> None:
        """Copy a role's full state, and write this rank's share while other calls go on."""
        weights = self._weights[role]
        assert weights is not None, "a role in the middle of an update has no state to save"
        folder, files = self.store.checkpoint_folder(role, weights), self.engine(role, learns=True).state()
        written = in_background(lambda: self.store.write_checkpoint_files(folder, files))
        self._saving[role] = Saving(folder, weights, written)

    def is_saved(self, role: str) -> bool:
        return role not in self._saving or self._saving[role].written.done()

    def finish_save(self, role: str) -> ObjectRef | None:
        """Wait for what was begun, by all ranks: a checkpoint, which exists once a snapshot record names it. None: it
        was begun by another process, which is gone."""
        saving = self._saving.pop(role, None)
        mine = None if saving is None else saving.written.result()
        shares = ranks.gathered(mine)
        if saving is None or None in shares:
            return None
        files = {name: file for share in shares for name, file in share.items()}
        checkpoint = Checkpoint(role=role, weights=saving.weights, files=files)
        return self.store.write_checkpoint_manifest(saving.folder, checkpoint) if ranks.rank() == 0 else None

    def engine(self, role: str, *, learns: bool = False) -> Any:
        """The role's engine, ready to compute; or to learn, to be saved or loaded. Those that give way make room."""
        owner = self._owner(role)
        with self._lock:
            self._make_room(owner)
            if role not in self._engines:
                self._engines[role] = self._build(role)
            if self._gives_way(owner):
                self._engines[owner].place(model=True, optimizer=learns)
            return self._engines[role]

    def _make_room(self, owner: str) -> None:
        for other, engine in self._engines.items():
            if other != owner and self._owner(other) == other and self._gives_way(other):
                engine.place(model=False, optimizer=False)

    def _owner(self, role: str) -> str:
        """Whose tensors a role computes with: a rollout's may be the actor's own, and a LoRA actor's reference is its
        base."""
        config = self.config
        actor = config.actor
        plain = config.rollout.engine == "hf" and actor.engine == "torch" and actor.sequence_parallel == 1
        own_base = config.model.lora is not None and config.reference.model is None
        shares = {"rollout": plain, "reference": own_base}
        return "actor" if "actor" in self.roles and shares.get(role) else role

    def _gives_way(self, role: str) -> bool:
        trainer = self.config.critic if role == "critic" else self.config.actor
        return trainer is not None and trainer.by_turns

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model)

    def environment(self, name: str) -> Callable[..., Environment]:
        """Loaded once, so that a change of the file does not come in the middle of a run."""
        if name not in self._environments:
            self._environments[name] = load_environment(name)
        return self._environments[name]

    def dataset(self, paths: Sequence[str]) -> PromptDataset:
        key = tuple(paths)
        if key not in self._datasets:
            dataset, data = PromptDataset(key), self.config.data
            if data.truncation == "drop":
                kept = dataset.without_overlong(self.tokenizer, data.max_prompt_tokens, data.system_prompt)
                left = len(dataset) - len(kept)
                report(
                    "note", text=f"{left} of {len(dataset)} prompts are longer than data.max_prompt_tokens: left out"
                )
                dataset = kept
            self._datasets[key] = dataset
        return self._datasets[key]

    def _build(self, role: str) -> Any:
        from rlhf.engines.build import train_engine
        from rlhf.engines.model_engine import WithoutAdapters

        config, seed = self.config, self.config.run.seed
        if role == "rollout":
            return self._build_rollout()
        if role == "critic":
            assert config.critic is not None
            chosen = config.critic_model
            return train_engine(config.critic, load_critic(chosen, seed), "value", dtype=chosen.dtype)
        if role == "reward":
            from rlhf.engines.reward_engine import RewardEngine

            assert config.reward.model is not None
            return RewardEngine(
                load_reward_model(config.reward.model), load_tokenizer(config.reward.model, writes=False)
            )
        if role == "reference" and self._owner(role) == "actor":
            return WithoutAdapters(self.engine("actor"))
        chosen = config.model if role == "actor" else config.reference_model
        trainable = role == "actor"
        return train_engine(config.actor, load_actor(chosen, seed), "policy", dtype=chosen.dtype, trainable=trainable)

    def _build_rollout(self) -> RolloutEngine:
        from rlhf.engines.build import server_rollout, vllm_rollout
        from rlhf.engines.hf_rollout import HFRollout
        from rlhf.models import eos_token_ids

        config = self.config
        model = config.model
        if config.rollout.engine == "vllm":
            return vllm_rollout(config, self.tokenizer)
        if config.rollout.engine == "server":
            return server_rollout(config, self.tokenizer)
        shared = self._owner("rollout") == "actor"
        loaded = self.engine("actor").model if shared else load_actor(model, config.run.seed).to(ranks.device())
        eos = eos_token_ids(loaded.generation_config, self.tokenizer)
        return HFRollout(loaded, eos_token_ids=eos, dtype=model.dtype, tokenizer=self.tokenizer)

    def admit(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced(f"a worker refused a call of epoch {epoch}: it serves epoch {self.epoch}")
        self.epoch = epoch

    def _read(self, call: Call) -> TrajectoryBatch:
        stages = [self._read_stage(*columns) for columns in call.inputs if columns[1]]
        for chosen in (self._read_stage(*columns) for columns in call.inputs if not columns[1]):
            stages = [stage.only(chosen.array("trajectory_id")) for stage in stages]
        return TrajectoryBatch.join(stages) if stages else TrajectoryBatch(pa.table({}))

    def _read_stage(self, shards: tuple[ShardRef, ...], columns: tuple[str, ...]) -> TrajectoryBatch:
        names = ("trajectory_id", *columns)
        return TrajectoryBatch(pa.concat_tables([self.store.read_shard(shard, names) for shard in shards]))


def _whose(role: str) -> str:
    return WEIGHTS_OF.get(role, role)


def in_background(work: Callable[[], T]) -> Future[T]:
    """A thread that does not outlive the process: what it writes counts only when a record says so."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _check_finite(batch: TrajectoryBatch, stage: str) -> None:
    for name in batch.columns:
        kind = batch.table.schema.field(name).type
        is_list = pa.types.is_list(kind)
        if pa.types.is_floating(kind.value_type if is_list else kind):
            values = batch.flat(name) if is_list else batch.array(name).fill_null(0).to_numpy()
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                starts = np.cumsum(batch.lengths(name)) if is_list else np.arange(1, len(batch) + 1)
                row = int(np.searchsorted(starts, bad[0], side="right"))
                where = batch.list("trajectory_id")[row]
                raise NotFinite(f"{stage} computed {values[bad[0]]} in column {name} of {where}; nothing is committed")
