"""Summarizes a run at its start: its models and their places, tokens and memory."""

from __future__ import annotations

import json

from rich import filesize

from ratchet.infra.execution.snapshots import describe
from ratchet.infra.store.records import RunState
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.config.roles import ROLES
from ratchet.rlhf.data.prompts import PromptDataset, encode
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer
from ratchet.rlhf.errors import counted, reached
from ratchet.rlhf.models.model_folders import model_folder, parameter_count
from ratchet.rlhf.rollout.device_memory import gradients, resident
from ratchet.rlhf.rollout.memory_ledger import Held, Models, memory_of, peak, savings

SHOWN = 300
"""Largest number of characters of a prompt that are shown."""
COLUMNS = 80
SAVINGS = 3
"""Largest number of settings that are named because they free memory."""


def summary(config: RunConfig, state: RunState) -> list[str]:
    """Describes the models, the size of an iteration, and the snapshots."""
    at = f"continues after {reached(state.iteration, config.iterations)}"
    if not (state.iteration or state.stages or state.shards):
        at = f"new, {counted(config.iterations, 'iteration')}"
    elif state.iteration == config.iterations:
        has = reached(state.iteration, config.iterations)
        at = f"nothing is left to train, it has {has}: train.iterations={state.iteration + 1} or more continues it"
    lines = [f"run {config.run.name} in {config.run.store}: {at}"]
    for role, models in config.models.items():
        for model in models.values():
            parameters = parameter_count(model_folder(model))
            parts = ", ".join(f"{what} {_bytes(size)}" for what, size in _memory(config, role, parameters).items())
            lines.append(f"  {role:<10}{_model(config, role, model, parameters)} {_place(config, role)}; {parts}")
    teachers = [] if config.teacher is None or "teacher" not in config.roles else config.teacher.by_key.values()
    for teacher in teachers:
        if teacher.engine is not None:
            lines.append(f"  teacher   {teacher.path}, served by {', '.join(teacher.engine.urls)}")
    if config.only_scores:
        return [*lines, f"  scores    the answers of {config.data.generations}"]
    return [
        *lines,
        f"  rollout   {config.rollout.engine.type} {_place(config, 'rollout')}",
        f"  iteration {_iteration(config)}",
        *([f"  snapshots {describe(config).removeprefix('snapshots ')}"] if config.train.updates else []),
    ]


def ledger_lines(config: RunConfig, models: Models, gpu: float | None) -> list[str]:
    """Says what takes the memory of a process in each phase, and what would free some of the fullest.

    Args:
        gpu: memory of a GPU in bytes; None: there is none, or it is unknown.
    """
    lines = []
    for pool, process in memory_of(config, models, gpu).items():
        of = "of this process" if pool is None else f"of each process of pool {pool}"
        room = "" if process.room is None else f", which has {_bytes(process.room)}"
        lines.append(f"  memory    {of}{room}, about:")
        for phase, held in process.phases().items():
            lines.append(f"    {phase:<10}{_bytes(sum(held.values())):>9}  {_parts(held)}")
    fullest = peak(config, models, gpu)
    where = "" if fullest.pool is None else f" in pool {fullest.pool}"
    rows = savings(config, models, gpu)[:SAVINGS]
    if rows:
        lines.append(f"  settings  that make {fullest.phase}{where} smaller:")
    return [*lines, *(f"    {_bytes(size):>19}  {typed}" for typed, size in rows)]


def _parts(held: Held) -> str:
    """Names the largest parts of a memory, as many as fit a line."""
    text = ""
    for what, size in sorted(held.items(), key=lambda part: -part[1]):
        longer = f"{text}, {what} {_bytes(size)}" if text else f"{what} {_bytes(size)}"
        if round(size) == 0 or len(longer) > COLUMNS - 25:
            break
        text = longer
    return text


def _bytes(size: float) -> str:
    return filesize.decimal(round(size))


def first_prompt(config: RunConfig) -> str:
    """Describes the first prompt as the policy sees it, cut, and as JSON since the text is from outside."""
    data = config.data
    tokenizer = policy_tokenizer(config.model, config.rollout.environment, data.special_tokens)
    text, ids = encode(
        PromptDataset(data.train)[0],
        tokenizer,
        max_tokens=data.max_prompt_tokens,
        truncation="right" if data.truncation == "drop" else data.truncation,
        system_prompt=data.system_prompt,
    )
    cut = "" if len(text) <= SHOWN else f" and {len(text) - SHOWN} characters more"
    return f"  prompt    the first has {len(ids)} tokens: {json.dumps(text[:SHOWN], ensure_ascii=False)}{cut}"


def _model(config: RunConfig, role: str, model: ModelConfig, parameters: int) -> str:
    engine = f" {config.trainer_of(role).engine.type}" if ROLES[role].has_versions else ""
    adapters = "" if model.lora is None else f" with adapters of rank {model.lora.r}"
    return f"{model.path}{adapters}, {_number(parameters)} parameters in {model.dtype},{engine}"


def _place(config: RunConfig, role: str) -> str:
    name = config.pool_of(role)
    if name is None:
        return "in this process"
    pool = config.pools[name]
    gpus = f" with {_counted(pool.gpus_per_worker, 'GPU')} each" if pool.gpus_per_worker else ""
    return f"in pool {name} ({_counted(pool.workers, 'worker')}{gpus})"


def _iteration(config: RunConfig) -> str:
    data, rollout = config.data, config.rollout
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    shards = -(-data.prompts_per_iteration // rollout.prompts_per_shard)
    return (
        f"{data.prompts_per_iteration} prompts x {rollout.n} = {config.trajectories_per_iteration} trajectories in "
        f"{shards} shards, each of at most {data.max_prompt_tokens} + {rollout.max_response_tokens} tokens: "
        f"{_number(config.trajectories_per_iteration * longest)} tokens at most"
    )


def _memory(config: RunConfig, role: str, parameters: int) -> dict[str, float]:
    """Returns the bytes of one role in a process, by content."""
    name = config.pool_of(role)
    ranks = 1 if name is None else config.pools[name].workers
    held = resident(config, {role: parameters}, ranks, idle=True) | gradients(config, {role: parameters}, ranks)
    return {what.partition(" of the ")[0]: size for what, size in held.items()}


def _counted(count: float, what: str) -> str:
    return f"{count:g} {what}{'' if count == 1 else 's'}"


def _number(count: int) -> str:
    for size, name in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)
