"""Estimates what takes the memory of a run's processes, phase by phase, and which settings free some of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.config.engines import DeepSpeedConfig, FSDPConfig, TorchConfig, VLLMConfig
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.config.sections import STEPS
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.activation_memory import Computation, DecoderSizes
from ratchet.rlhf.models.hf_configs import model_config
from ratchet.rlhf.rollout.device_memory import GIB, gradients, parameter_counts, resident, width
from ratchet.rlhf.weights.buckets import BUCKET_BYTES

if TYPE_CHECKING:
    from ratchet.rlhf.config import RunConfig
    from ratchet.rlhf.config.engines import TrainEngineConfig
    from ratchet.rlhf.distributed.gpus import GPUs

CUDA = 1.2 * GIB
"""Memory that CUDA takes in a process: of 79.2 GiB of an H100, a new one found 78.0."""
Held = Mapping[str, float]
"""Bytes by what they hold."""


@dataclass(frozen=True)
class Models:
    """The models of a run: their numbers of parameters, and their sizes if these are known, by role."""

    parameters: Mapping[str, int]
    sizes: Mapping[str, DecoderSizes]

    @classmethod
    def of(cls, config: RunConfig) -> Models:
        """Reads them from the models' folders."""
        sizes: dict[str, DecoderSizes] = {}
        for role, models in config.models.items():
            found = [
                DecoderSizes.of(model_config(model), is_policy=ROLES[role].head == "policy")
                for model in models.values()
            ]
            if known := [of_model for of_model in found if of_model is not None]:
                sizes[role] = max(known, key=lambda of_model: of_model.layers * of_model.hidden)
        return cls(parameter_counts(config.models), sizes)


class ProcessMemory:
    """The memory of each process of a pool, or of this process if a run has no pools."""

    def __init__(self, config: RunConfig, models: Models, pool: str | None, gpu: float | None) -> None:
        """Describes a process.

        Args:
            gpu: memory of a GPU in bytes; None: unknown, or there is none.
        """
        self.config, self.models, self.pool = config, models, pool
        self.roles = tuple(role for role in config.roles if config.pool_of(role) == pool)
        self.ranks = 1 if pool is None else config.pools[pool].workers
        gpus = (0.0 if gpu is None else 1.0) if pool is None else config.pools[pool].gpus_per_worker
        self.on_gpu = gpus > 0
        self.room = None if gpu is None or not gpus else gpu * min(gpus, 1.0)
        """Bytes of a GPU for the process; None: unknown, or it has none."""
        self.own = {role: count for role, count in models.parameters.items() if role in self.roles}
        self.shares_actor = "actor" in self.roles and ROLES["rollout"].shares_actor(config)

    def phases(self) -> dict[str, Held]:
        """Estimates what the process holds at most in the phases that it has, if sequences are as long as allowed."""
        found = {
            "generate": self._generate(),
            "log-probs": self._largest(self._log_probs(role) for role in self.own if self._infers(role)),
            "update": self._largest(self._update(role) for role in self._learners),
            "snapshot": self._snapshot(),
            "sync": self._sync(),
        }
        return {name: held for name, held in found.items() if held}

    @property
    def _learners(self) -> list[str]:
        return [role for role in self.config.trainers if role in self.own and self.config.train.updates]

    def _infers(self, role: str) -> bool:
        """Returns True if a role computes with tensors of its own."""
        return ROLES[role].computes and not ("actor" in self.own and ROLES[role].shares_actor(self.config))

    def _largest(self, candidates: Iterator[dict[str, float]]) -> dict[str, float]:
        return max(candidates, key=lambda held: sum(held.values()), default={})

    def _generate(self) -> dict[str, float]:
        config = self.config
        if "rollout" not in self.roles:
            return {}
        held = self._held("actor" if self.shares_actor else "rollout")
        sizes = self.models.sizes.get("actor")
        if config.rollout.engine.type == "hf" and sizes is not None:
            rows = -(-config.rollout.prompts_per_shard * config.rollout.n // self.ranks)
            cached = 2 * sizes.keys * sizes.layers * rows * self._longest
            held["key-value cache"] = width(config.model) * cached
        return held

    def _log_probs(self, role: str) -> dict[str, float]:
        engine = self._computation(role)
        return self._held(role) | ({} if engine is None else engine.log_probs(self._micro_batch(role)[0]))

    def _update(self, role: str) -> dict[str, float]:
        engine = self._computation(role)
        of_all = sum(gradients(self.config, {role: self.own[role]}, self.ranks).values())
        held = self._held(role, learns=True)
        if engine is None:
            return held | {"gradients": of_all}
        tokens, several = self._micro_batch(role)
        return held | engine.update(tokens, of_all, several=several)

    def _snapshot(self) -> dict[str, float]:
        engines = [self._computation(role) for role in self._learners]
        gathered = [engine.whole_tensor() for engine in engines if engine is not None and engine.engine.gathers_layers]
        return self._held(None) | {"a whole tensor": max(gathered, default=0.0)} if engines else {}

    def _sync(self) -> dict[str, float]:
        if self.shares_actor or not self.config.train.updates or not {"actor", "rollout"} & {*self.roles}:
            return {}
        held, rollout = self._held(None), self.config.rollout.engine
        if "rollout" in self.roles and "vLLM" not in held:  # only its weights wake
            held["weights of the rollout"] = self._copy / rollout.devices
        engine = self._computation("actor") if "actor" in self.own else None
        held["tensors on their way"] = BUCKET_BYTES["gpu" if self.on_gpu else "cpu"]
        if engine is not None:
            held["tensors on their way"] += engine.whole_tensor()
        return held

    def _held(self, active: str | None, *, learns: bool = False) -> dict[str, float]:
        """Returns what stays, and a role that computes; with its optimizer state, if it learns."""
        config, rollout = self.config, self.config.rollout.engine
        held = resident(config, self.own, self.ranks, idle=not self.on_gpu)  # else they move to host memory
        if active in self.own:
            own = resident(config, {active: self.own[active]}, self.ranks, idle=True)
            held |= {what: size for what, size in own.items() if learns or not what.startswith("optimizer")}
        turns = config.trainer_of("rollout").offload_when_idle
        if "rollout" in self.roles and not self.shares_actor and (active == "rollout" or not turns):
            if not rollout.own_process:
                held["weights of the rollout"] = self._copy
            elif isinstance(rollout, VLLMConfig) and self.room is not None:
                held["vLLM"] = rollout.gpu_memory_utilization * self.room
        if self.room is not None:
            held["CUDA"] = CUDA
        return held

    @property
    def _copy(self) -> float:
        """Bytes of the rollout's own weights."""
        return width(self.config.model) * self.models.parameters.get("actor", 0)

    def _computation(self, role: str) -> Computation | None:
        """Returns how a role is computed; None if its architecture is unknown."""
        if role not in self.models.sizes:
            return None
        trainer, model = self.config.trainer_of(role), self.config.model_of(role)
        asked = trainer.gradient_checkpointing
        return Computation(
            self.models.sizes[role],
            trainer.engine if ROLES[role].has_versions else TorchConfig(),
            width(model),
            checkpointing=("selective" if self.on_gpu else False) if asked is None else asked,
            fused=model.kernels != "torch",
            compiled=model.kernels == "compile",
            shards=self._shards(trainer.engine),
            kind="gpu" if self.on_gpu else "cpu",
        )

    def _shards(self, engine: TrainEngineConfig) -> int:
        shards = engine.shard_size if isinstance(engine, FSDPConfig) else None
        return max(1, (shards or self.ranks) // engine.matrix_split)

    def _micro_batch(self, role: str) -> tuple[int, bool]:
        """Returns the tokens of a micro-batch, and whether a process has several of them in a mini-batch."""
        config, trainer = self.config, self.config.trainer_of(role)
        engine, budget = trainer.engine, trainer.micro_batch_tokens
        if role == "reward" and config.reward.model is not None:
            budget = config.reward.model.micro_batch_tokens
        teams = max(1, self.ranks // (engine.matrix_split * engine.token_split * engine.layer_split))
        mini_batch = trainer.mini_batch_trajectories or -(-config.trajectories_per_iteration // STEPS)
        tokens = -(-mini_batch // teams) * self._longest
        micro_batch = max(self._longest, min(budget, tokens))
        return micro_batch, tokens > micro_batch

    @property
    def _longest(self) -> int:
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens


@dataclass(frozen=True)
class Peak:
    """The phase of a run that takes the most of a process's memory."""

    pool: str | None
    phase: str
    held: Held
    room: float | None

    @property
    def size(self) -> float:
        """Bytes of the process."""
        return sum(self.held.values())

    @property
    def where(self) -> str:
        """Describes the process."""
        return "this process" if self.pool is None else f"a process of pool {self.pool}"


def memory_of(config: RunConfig, models: Models, gpu: float | None) -> dict[str | None, ProcessMemory]:
    """Returns the processes of a run by pool, None for this process; see `ProcessMemory`."""
    pools = dict.fromkeys(config.pool_of(role) for role in config.roles)
    return {pool: ProcessMemory(config, models, pool, gpu) for pool in pools}


def peak(config: RunConfig, models: Models, gpu: float | None) -> Peak:
    """Returns the fullest phase of all processes; of those with a GPU, if any has one."""
    peaks = [
        Peak(pool, phase, held, process.room)
        for pool, process in memory_of(config, models, gpu).items()
        for phase, held in process.phases().items()
    ]
    return max(peaks, key=lambda found: (found.room is not None, found.size - (found.room or 0)))


def savings(config: RunConfig, models: Models, gpu: float | None) -> list[tuple[str, float]]:
    """Returns settings, as `key=value`, that make the fullest phase smaller, and the bytes that it then takes."""
    fullest = peak(config, models, gpu)
    found: list[tuple[str, float]] = []
    for changes in _candidates(config, fullest):
        if (changed := _with(config, changes)) is None:
            continue
        held = ProcessMemory(changed, models, fullest.pool, gpu).phases().get(fullest.phase, {})
        if (size := sum(held.values())) < 0.99 * fullest.size:
            found.append((_typed(changes), size))
    return sorted(found, key=lambda row: row[1])


def check_fits_gpu(config: RunConfig, models: Models, gpus: GPUs) -> None:
    """Raises UserError if a phase takes more memory than a GPU has; names settings with which all fit, if there are."""
    fullest = peak(config, models, gpus.memory)
    if fullest.room is None:
        raise UserError(f"--gpu {gpus}: no pool has GPUs: set pools.NAME.gpus_per_worker to 1")
    if fullest.size <= fullest.room:
        return
    says = (
        f"{fullest.phase} takes {fullest.size / 1e9:.1f} GB in {fullest.where}, but {gpus.name} has "
        f"{fullest.room / 1e9:.1f} GB"
    )
    changes: dict[str, Any] = {}
    while True:
        now = peak(changed := _applied(config, changes), models, gpus.memory)
        if now.room is not None and now.size <= now.room:
            raise UserError(f"{says}: set {_typed(changes)}, which leaves {(now.room - now.size) / 1e9:.1f} GB free")
        tried = [
            ({**changes, **more}, peak(with_it, models, gpus.memory))
            for more in _candidates(changed, now)
            if (with_it := _with(changed, more)) is not None
        ]
        over = {_typed(more): after.size - (after.room or 0) for more, after in tried}
        best = min(tried, key=lambda row: over[_typed(row[0])], default=None)
        if best is None or over[_typed(best[0])] >= now.size - (now.room or 0):
            with_all = f" even with {_typed(changes)}" if changes else ""
            raise UserError(f"{says}, and no setting makes it fit{with_all}: ask for more or larger GPUs")
        changes = best[0]


def _candidates(config: RunConfig, fullest: Peak) -> Iterator[dict[str, Any]]:
    """Yields settings that may free memory in a phase and change no result but rounding, in the order of their cost."""
    process = ProcessMemory(config, Models({}, {}), fullest.pool, fullest.room)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if isinstance(config.rollout.engine, VLLMConfig) and "vLLM" in fullest.held and fullest.room is not None:
        others = fullest.size - fullest.held["vLLM"]
        share = math.floor(100 * (1 - others / fullest.room)) / 100
        if 0 < share < config.rollout.engine.gpu_memory_utilization:
            yield {"rollout.engine.gpu_memory_utilization": share}
    if "key-value cache" in fullest.held and config.rollout.prompts_per_shard > process.ranks:
        yield {"rollout.prompts_per_shard": config.rollout.prompts_per_shard // 2}
    for role, trainer in config.trainers.items():
        if role not in process.roles:
            continue
        section, engine = ROLES[role].section, trainer.engine
        if trainer.micro_batch_tokens > longest:
            yield {f"{section}.micro_batch_tokens": max(longest, trainer.micro_batch_tokens // 2)}
        if trainer.gradient_checkpointing is not True:
            yield {f"{section}.gradient_checkpointing": True}
        if process.on_gpu and not trainer.offload_when_idle and len(process.roles) > 1 and engine.moves_state:
            yield {f"{section}.offload_when_idle": True}
        if isinstance(engine, TorchConfig) and process.ranks > 1:
            yield {f"{section}.engine": "fsdp"}
        if isinstance(engine, DeepSpeedConfig) and engine.zero_stage < 3:
            yield {f"{section}.engine.zero_stage": engine.zero_stage + 1}
        if isinstance(engine, FSDPConfig):
            if not engine.reshard_after_forward:
                yield {f"{section}.engine.reshard_after_forward": True}
            if engine.shard_size is not None:
                yield {f"{section}.engine.shard_size": None}
        if process.on_gpu and isinstance(engine, FSDPConfig | DeepSpeedConfig) and not engine.offload:
            yield {f"{section}.engine.offload": True}


def _applied(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    return config.with_values(changes) if changes else config


def _with(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Applies changes; None if the config does not allow them."""
    try:
        return _applied(config, changes)
    except UserError:
        return None


def _typed(changes: Mapping[str, Any]) -> str:
    """Writes changes as the command line takes them."""
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items())
