"""Combinations of settings that do not work together. Each error names the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratchet.rlhf.algorithms.advantages import GFPO
from ratchet.rlhf.built_in_rewards import solved_score
from ratchet.rlhf.config.engines import FSDPConfig, HFConfig, ServerConfig, VLLMConfig
from ratchet.rlhf.config.reading import listed, yaml_text
from ratchet.rlhf.config.roles import ROLES

if TYPE_CHECKING:
    from ratchet.rlhf.config.run import RunConfig
    from ratchet.rlhf.config.sections import ModelConfig, ReplayConfig, RolloutConfig, TrainerConfig


def _roles_are_placed(config: RunConfig) -> Iterator[str]:
    if not config.pools:
        if config.placement != "colocated":
            yield f"placement is {config.placement}, but there are no pools: name them in pools"
        return
    if config.placement == "colocated" and len(config.pools) > 1:
        yield (
            f"placement is colocated, but there are {len(config.pools)} pools: keep one, or map each role to a pool in "
            "placement"
        )
        return
    missing = {role: pool for role in config.roles if (pool := config.pool_of(role)) not in config.pools}
    if missing:
        places = listed([f"the {role} in {pool or 'no pool'}" for role, pool in missing.items()])
        fix = "name pools so, or map each role" if config.placement == "separate" else "map each"
        yield f"placement puts {places}: {fix} to one of the pools ({', '.join(config.pools)})"


def _rollout_teams_fit(config: RunConfig) -> Iterator[str]:
    """One vLLM spans the GPUs of one worker, or of several whole workers."""
    name, needed = config.pool_of("rollout"), config.rollout.engine.devices
    if name is None or needed == 1:
        return
    workers, gpus, size = config.pools[name].workers, config.pools[name].gpus_per_worker, config.rollout_team_size
    if 0 < gpus < 1:
        yield (
            f"rollout.engine.tensor_parallel is {needed}, but the workers of pools.{name} share GPUs (gpus_per_worker "
            f"{gpus:g}): set pools.{name}.gpus_per_worker to 1"
        )
    if size > 1 and gpus and needed % gpus:
        yield (
            f"rollout.engine.tensor_parallel is {needed}, which is not a multiple of pools.{name}.gpus_per_worker "
            f"({gpus:g}): change one of them"
        )
    if workers % size:
        yield (
            f"rollout.engine.tensor_parallel is {needed}, the GPUs of {size} workers, but pools.{name}.workers is "
            f"{workers}, which is not a multiple of {size}: change one of them"
        )


def incompatible(config: RunConfig) -> Iterator[str]:
    """Yields all incompatible combinations, one line each, which names the fix."""
    yield from _algorithms_fit(config)
    yield from _rollout_fits(config)
    yield from _groups_have_several(config)
    yield from _judge_fits(config)
    yield from _drawing_fits(config)
    if misplaced := list(_roles_are_placed(config)):
        yield from misplaced
        return  # the checks below ask for the pool of each role
    yield from _rollout_teams_fit(config)
    total = config.trajectories_per_iteration
    sizes = f"data.prompts_per_iteration {config.data.prompts_per_iteration} x rollout.n {config.rollout.n} = {total}"
    if config.needs_critic and config.critic is None:
        yield (
            f"critic is null, but algorithm.advantage {config.algorithm.advantage.type} needs values: leave critic "
            "out to get the default one, or choose an advantage without a critic (grpo)"
        )
    unsupported: dict[str, dict[str, None]] = {}
    """Owners of engine megatron that cannot have a setting, by the setting, which may concern the model of several."""
    uncompiled: dict[str, dict[str, None]] = {}
    """Settings that do not work with compiled kernels, by the model."""
    for role in config.readers:
        owner, trainer = ROLES[role].section, ROLES[role].trainer(config)
        if trainer is None:  # a mistake that is reported above
            continue
        pool = config.pool_of(role)
        workers = 1 if pool is None else config.pools[pool].workers
        engine = trainer.engine
        for key, size in engine.teams.items():
            if workers % size:
                yield (
                    f"{owner}.engine.{key} is {size}, which does not divide the number of processes that hold "
                    f"the {role} ({workers}): change one of them"
                )
        model = config.model_of(role)
        model_key = "model" if ROLES[role].own_model(config) is None else ROLES[role].model_key
        if engine.own_layers:
            for key in _beyond_own_layers(owner, trainer, model_key, model):
                unsupported.setdefault(key, {})[owner] = None
        elif model.kernels == "compile" and not engine.compiles:
            conflict = "engine.tensor_parallel" if engine.matrices_are_split else f"engine {engine.type}"
            uncompiled.setdefault(model_key, {})[f"{owner}.{conflict}"] = None
        if engine.matrices_are_split and model.lora is not None:
            yield f"{owner}.engine.tensor_parallel does not work with model.lora: remove one of them"
        if isinstance(engine, FSDPConfig) and engine.shard_size is not None and workers % engine.shard_size:
            yield (
                f"{owner}.engine.shard_size is {engine.shard_size}, which does not divide the number of processes that "
                f"hold the {role} ({workers}): change one of them"
            )
        if trainer.offload_when_idle and engine.keeps_state_on_host:
            yield (
                f"{owner}.engine.offload already keeps the state in host memory, so {owner}.offload_when_idle does "
                "nothing: set only one of them"
            )
        elif trainer.offload_when_idle and not engine.moves_state:
            yield (
                f"{owner}.offload_when_idle does not work with {owner}.engine.zero_stage 3, because DeepSpeed cannot "
                f"move its state: use {owner}.engine.offload, a lower stage, or {owner}.engine fsdp"
            )
        mini_batch = trainer.mini_batch_trajectories
        if mini_batch is not None and mini_batch > total:
            yield f"{owner}.mini_batch_trajectories is {mini_batch}, more than an iteration has ({sizes}): lower it"
        elif mini_batch is not None and total % mini_batch:
            yield (
                f"{owner}.mini_batch_trajectories is {mini_batch}, which does not divide {total} ({sizes}): change "
                "one of them"
            )
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        if trainer.micro_batch_tokens < longest:
            yield (
                f"{owner}.micro_batch_tokens is {trainer.micro_batch_tokens}, less than one trajectory may have "
                f"(data.max_prompt_tokens + rollout.max_response_tokens = {longest}): raise it"
            )
    for key, owners in unsupported.items():
        engines = listed([f"{owner}.engine" for owner in owners])
        yield f"{key} is not supported yet by engine megatron: remove it, or set {engines} to fsdp"
    for key, conflicts in uncompiled.items():
        yield f"{key}.kernels compile does not work with {listed([*conflicts])}: set {key}.kernels to torch"
    if config.critic is not None and config.critic.warmup_iterations and not config.needs_critic:
        yield (
            f"critic.warmup_iterations is set, but algorithm.advantage {config.algorithm.advantage.type} has no "
            "critic: remove it, or choose an advantage with a critic (gae)"
        )
    for role, model in config.models.items():
        if model.attention.startswith("flash") and model.dtype == "float32":
            key = "model" if ROLES[role].own_model(config) is None else ROLES[role].model_key
            yield f"{key}.attention {model.attention} computes in 16 bits: set {key}.dtype bfloat16, or use sdpa"
    if config.reference.model is not None and config.reference.model.lora is not None:
        yield "reference.model.lora is set, but the reference does not learn: remove it"
    yield from _teacher_fits(config)
    yield from _averages_fit(config)
    reuses = config.data.generations is not None and not config.train.updates and config.validation.data is None
    if config.only_scores and not reuses:
        yield (
            "data.train is []: name prompt files; only a run that scores the answers of another one needs none "
            "(data.generations, with train.updates false and validation.data null)"
        )
    if config.bypass and config.data.generations is not None and config.train.updates:
        yield (
            "data.generations uses the generations of another policy, so the old log-probs must be recomputed: set "
            "algorithm.rollout_correction.bypass: false"
        )
    off = {
        "validation.every=0": config.validation.every > 0,
        "validation.metric=null": config.validation.metric is not None,
        "validation.patience=null": config.validation.patience is not None,
        "checkpoint.keep.best=0": config.checkpoint.keep.best > 0,
    }
    needless = [setting for setting, is_set in off.items() if is_set]
    if needless and config.validation.data is None:
        keys = [setting.partition("=")[0] for setting in needless]
        verb = "is" if len(keys) == 1 else "are"
        yield f"{listed(keys)} {verb} set without validation.data: name a prompt file, or set {listed(needless)}"


def _teacher_fits(config: RunConfig) -> Iterator[str]:
    distillation, teacher = config.algorithm.distillation, config.teacher
    if distillation is not None and teacher is None:
        yield "algorithm.distillation is set without a teacher: set teacher.path"
    if teacher is not None and distillation is None:
        yield "teacher is set, but nothing learns from it: set algorithm.distillation={}, or remove it"
    if teacher is not None and teacher.lora is not None:
        yield "teacher.lora is set, but the teacher does not learn: remove it"
    if distillation is not None and distillation.in_loss and teacher is not None and not teacher.top_k:
        yield (
            f"algorithm.distillation.divergence {distillation.divergence} sums over the teacher's most likely tokens, "
            "and teacher.top_k is 0: set teacher.top_k=64"
        )
    engine = config.actor.engine
    if teacher is not None and teacher.top_k and (engine.own_layers or engine.matrices_are_split):
        key = f"actor.engine {engine.type}" if engine.own_layers else "actor.engine.tensor_parallel"
        yield (
            f"teacher.top_k is not supported yet by {key}, whose processes have a part of the vocabulary each: set "
            "teacher.top_k=0 with algorithm.distillation.divergence=sampled, or another actor.engine"
        )
    advantage = config.algorithm.advantage
    if not advantage.learns_from_reward and distillation is None and teacher is None and config.train.updates:
        yield (
            f"algorithm.advantage {advantage.type} leaves nothing to learn from: set algorithm.distillation, or "
            "another advantage"
        )


def _averages_fit(config: RunConfig) -> Iterator[str]:
    reference = config.reference
    if reference.sync_every is None and reference.mix != 1:
        yield "reference.mix is set, but the reference never changes: set reference.sync_every, too"
    if reference.sync_every is not None and not config.needs_reference:
        yield (
            "reference.sync_every is set, but nothing reads the reference: set algorithm.kl.in_loss or "
            "algorithm.kl.in_reward, or remove it"
        )
    if reference.sync_every is not None and reference.model is not None:
        yield "reference.sync_every moves the reference to the actor, so reference.model would be lost: remove one"
    if reference.sync_every is not None and config.pool_of("reference") != config.pool_of("actor"):
        yield (
            "reference.sync_every reads the actor's weights, which are in another pool: place actor and reference in "
            "the same pool"
        )
    for key, is_set in (
        ("reference.sync_every", reference.sync_every is not None),
        ("actor.ema_decay", config.actor.ema_decay is not None),
    ):
        if is_set and config.model.lora is not None:
            yield f"{key} averages whole models and does not work with model.lora: remove one of them"


def _environment_fits(config: RunConfig) -> Iterator[str]:
    rollout, reward = config.rollout, config.reward
    is_scored = reward.functions or reward.model or rollout.environment or rollout.agent
    if not is_scored and config.algorithm.advantage.learns_from_reward:
        yield (
            "reward.function names no function: set a function, several with weights, a reward.model, a "
            "rollout.environment or a rollout.agent"
        )
    if rollout.agent is not None:
        if rollout.environment is not None:
            yield "rollout.agent and rollout.environment are both set: a program has tools of its own; remove one"
        if reward.model is not None and reward.model.kind == "process":
            yield "reward.model.kind process scores the steps of one response, and rollout.agent has calls: use outcome"
    partner = rollout.partner
    if partner is None:
        return
    for key, conflict in (
        ("rollout.ignore_eos", rollout.ignore_eos),
        (f"algorithm.advantage {config.algorithm.advantage.type}", config.needs_greedy_scores),
    ):
        if conflict:
            yield f"{partner.key} does not work with {key}, which does not support turns: remove one of them"


def _comparing(config: RunConfig) -> list[str]:
    """Returns the settings that compare the trajectories of a prompt."""
    advantage, judge = config.algorithm.advantage, config.reward.judge
    comparing = {
        f"algorithm.advantage {advantage.type}": bool({"group_ids", "turn_values"} & {*advantage.needs}),
        "algorithm.advantage.drop_zero_std_groups": advantage.drop_zero_std_groups,
        "algorithm.dynamic_sampling": config.algorithm.dynamic_sampling is not None,
        f"reward.judge.mode {judge and judge.mode}": judge is not None and judge.compares,
        "data.curriculum": config.data.curriculum is not None,
    }
    return [key for key, compares in comparing.items() if compares]


def _groups_have_several(config: RunConfig) -> Iterator[str]:
    if config.rollout.n == 1 and (keys := _comparing(config)):
        compare = "compares" if len(keys) == 1 else "compare"
        yield f"{listed(keys)} {compare} the trajectories of a prompt, but rollout.n is 1: raise rollout.n"


def _judge_fits(config: RunConfig) -> Iterator[str]:
    judge = config.reward.judge
    if judge is None or not judge.compares:
        return
    compares = f"reward.judge.mode {judge.mode} compares the responses to a prompt"
    if config.validation.data is not None and config.validation.n == 1:
        yield f"{compares}, but validation.n is 1: raise validation.n, or use reward.judge.mode rubric"
    if config.needs_greedy_scores:
        yield (
            f"{compares}, but algorithm.advantage {config.algorithm.advantage.type} scores greedy answers, each of "
            "which is alone: use reward.judge.mode rubric, or another estimator (grpo)"
        )


def _workers_fit(config: RunConfig) -> Iterator[str]:
    """Rollout workers need a run whose shards any process can generate at any time."""
    rollout = config.rollout
    if not rollout.workers:
        return
    obstacles = {
        f"rollout.mode {rollout.mode} (use sync)": rollout.mode != "sync",
        f"rollout.engine {rollout.engine.type} (use hf or vllm)": rollout.engine.outlives_runs,
        "rollout.agent (remove it)": rollout.agent is not None,
        "algorithm.dynamic_sampling (remove it)": config.algorithm.dynamic_sampling is not None,
        "data.generations (remove it)": config.data.generations is not None,
        "run.single_writer (remove it)": config.run.single_writer,
    }
    if found := [key for key, is_set in obstacles.items() if is_set]:
        yield f"rollout.workers does not work with {listed(found)}"


def _rollout_fits(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    yield from _environment_fits(config)
    if rollout.partial and rollout.mode != "async":
        yield f"rollout.partial requires rollout.mode async, but rollout.mode is {rollout.mode}"
    if rollout.max_staleness != 1 and rollout.mode != "async":
        yield (
            f"rollout.max_staleness is {rollout.max_staleness}, which requires rollout.mode async, but rollout.mode is "
            f"{rollout.mode}: remove it"
        )
    yield from _workers_fit(config)
    engine = rollout.engine
    if rollout.router_replay:
        yield from _router_replay_fits(config)
    if rollout.seeds == "engine" and not engine.own_seeds:
        yield f"rollout.seeds engine is for rollout.engine vllm and server: {engine.type} always has trajectory seeds"
    if rollout.seeds == "engine" and config.run.deterministic:
        yield (
            "rollout.seeds engine draws responses that cannot be repeated, but run.deterministic is set: use "
            "rollout.seeds trajectory"
        )
    if isinstance(engine, HFConfig):
        return
    if isinstance(engine, ServerConfig):
        yield from _server_fits(engine, rollout)
    if not engine.loads_adapters and config.model.lora is not None:
        yield f"rollout.engine {engine.type} cannot load adapters: use vllm or hf with model.lora"
    temperatures = {
        "rollout.temperature": rollout.temperature,
        "validation.temperature": config.validation.temperature,
    }
    for key, temperature in temperatures.items():
        if rollout.truncated_by and temperature not in (0.0, 1.0):
            by = rollout.truncated_by[0]
            yield (
                f"rollout.engine {engine.type} gives log-probs either before {by} or at a temperature, not both: "
                f"with rollout.{by} {getattr(rollout, by)}, {key} must be 1 (or 0), but is {temperature}"
            )
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if isinstance(engine, VLLMConfig) and engine.max_model_len is not None and engine.max_model_len < longest:
        yield (
            f"rollout.engine.max_model_len is {engine.max_model_len}, less than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}: raise it, or leave it out"
        )


def _router_replay_fits(config: RunConfig) -> Iterator[str]:
    engine = config.rollout.engine
    if not engine.returns_routes:
        yield (
            f"rollout.router_replay needs the experts that the rollout chose, which rollout.engine {engine.type} does "
            "not return: use hf or vllm, or set rollout.router_replay: false"
        )
    if isinstance(engine, VLLMConfig) and not engine.prefix_caching:
        yield (
            "rollout.router_replay with rollout.engine vllm needs its prefix cache, which keeps the experts of cached "
            "tokens: remove rollout.engine.prefix_caching: false"
        )
    if config.model.kernels == "compile":
        yield "rollout.router_replay does not work with model.kernels compile: set model.kernels to torch"


def _server_fits(server: ServerConfig, rollout: RolloutConfig) -> Iterator[str]:
    if server.api == "tgi" and server.weights_folder is not None:
        yield "rollout.engine.api tgi cannot load new weights: use vllm or sglang to train"
    if server.api == "tgi" and rollout.min_p:
        yield "rollout.engine.api tgi has no min_p: remove rollout.min_p"
    if server.api == "sglang" and rollout.min_p and rollout.seeds != "engine":
        yield (
            "rollout.engine.api sglang has no min_p for requests with a seed: remove rollout.min_p, or set "
            "rollout.seeds to engine"
        )


def _drawing_fits(config: RunConfig) -> Iterator[str]:
    curriculum = config.data.curriculum
    for key, is_set in (("train.epochs", config.train.epochs is not None), ("data.curriculum", curriculum is not None)):
        if is_set and config.data.generations is not None:
            yield f"{key} is set, but data.generations draws no prompts: remove one of them"
    if config.train.epochs is not None and config.algorithm.dynamic_sampling is not None:
        yield (
            "train.epochs is set, but algorithm.dynamic_sampling draws as many prompts as it needs: set "
            "train.iterations instead"
        )
    yield from _replay_fits(config)
    if curriculum is None:
        return
    if curriculum.lag <= config.rollout.ahead:
        yield (
            f"data.curriculum.lag is {curriculum.lag}, but rollout.mode {config.rollout.mode} draws "
            f"{config.rollout.ahead} iterations ahead, before those scores are committed: set data.curriculum.lag to "
            f"{config.rollout.ahead + 1} or more"
        )
    alone = config.reward.model is None and config.rollout.partner is None
    if solved_score(curriculum.solved_score, config.reward.function, alone=alone) is None:
        yield (
            "data.curriculum needs the smallest score of a solved answer, which this reward does not tell: set "
            "data.curriculum.solved_score"
        )


def _replay_fits(config: RunConfig) -> Iterator[str]:
    if config.data.replay is None:
        return
    for key, conflict in (
        ("data.generations", config.data.generations is not None),
        ("algorithm.dynamic_sampling", config.algorithm.dynamic_sampling is not None),
        (f"rollout.mode {config.rollout.mode}", config.rollout.mode != "sync"),
        ("rollout.environment", config.rollout.environment is not None),
        ("rollout.agent", config.rollout.agent is not None),
        ("data.curriculum", config.data.curriculum is not None),
    ):
        if conflict:
            yield f"data.replay does not work with {key}: remove one of them"
    if config.data.replay.files is not None:
        yield from _experts_fit(config, config.data.replay)
    if config.bypass:
        yield (
            "data.replay draws answers of earlier policies, so the old log-probs must be recomputed: set "
            "algorithm.rollout_correction.bypass: false"
        )


def _experts_fit(config: RunConfig, replay: ReplayConfig) -> Iterator[str]:
    experts, own = config.algorithm.experts, config.rollout.n - replay.answers
    if own < 1 and (config.rollout.n > 1 or not _comparing(config)):
        yield (
            f"data.replay.answers is {replay.answers}, and rollout.n {config.rollout.n}: no answer is left to the "
            "policy: raise rollout.n, or use `ratchet sft` to learn from experts alone"
        )
    if not experts.compares and own == 1 and "group_ids" in config.algorithm.advantage.needs:
        yield (
            f"algorithm.experts {experts.type} compares the policy's own answers with each other, and there is 1 per "
            "prompt: raise rollout.n"
        )
    if not experts.compares and config.needs_critic:
        yield (
            f"algorithm.experts {experts.type} gives an expert's answers no returns that a critic could learn: set "
            "algorithm.experts=luffy, or an algorithm.advantage without a critic"
        )


def _beyond_own_layers(owner: str, trainer: TrainerConfig, model_key: str, model: ModelConfig) -> Iterator[str]:
    """Yields the settings that an engine with its own layers does not support."""
    for key, is_set in (
        (f"{model_key}.lora", model.lora is not None),
        (f"{model_key}.kernels {model.kernels}", model.kernels != "torch"),
        (f"{model_key}.attention {model.attention}", model.attention != "sdpa"),
        (f"{owner}.packing true", trainer.packing is True),
    ):
        if is_set:
            yield key


def _turn_values_fit(config: RunConfig) -> Iterator[str]:
    if not config.needs_turn_values:
        return
    advantage, judge = f"algorithm.advantage {config.algorithm.advantage.type}", config.reward.judge
    if config.rollout.agent is not None:
        yield f"{advantage} plays on from turns, which a rollout.agent cannot: use a rollout.environment, or gigpo"
    if config.algorithm.overlong_penalty is not None:
        yield f"{advantage} and algorithm.overlong_penalty, which its values leave out, are both set: remove one"
    if judge is not None and judge.compares:
        yield (
            f"reward.judge.mode {judge.mode} compares the responses to a prompt, but {advantage} scores continuations "
            "of different turns: use reward.judge.mode rubric, or another estimator (gigpo)"
        )


def _algorithms_fit(config: RunConfig) -> Iterator[str]:
    """Refuses algorithms that contradict each other."""
    algorithm = config.algorithm
    advantage, kl, sampling = algorithm.advantage, algorithm.kl, algorithm.dynamic_sampling
    if config.rollout.partner is None and "turns" in advantage.needs:
        yield (
            f"algorithm.advantage {advantage.type} is for turns, but there is no rollout.environment or rollout.agent "
            "that takes turns with the policy: set one, or choose another advantage (grpo, gae)"
        )
    yield from _turn_values_fit(config)
    correction = algorithm.rollout_correction
    is_weighted = correction is not None and correction.bypass and correction.weights is not None
    if is_weighted and "old_log_probs" in algorithm.loss.needs:
        yield (
            f"algorithm.rollout_correction has bypass and weights, but algorithm.loss {algorithm.loss.type} has the "
            "ratio to the rollout already: remove weights, or set algorithm.loss: gpg"
        )
    of_actor = {"entropy": "the entropy", "sum_pi_squared": "the squared probabilities"}
    for name, what in of_actor.items():
        if config.bypass and name in advantage.needs:
            yield (
                f"algorithm.advantage {advantage.type} needs {what}, which the old-log-prob stage computes, but "
                "algorithm.rollout_correction.bypass removes that stage: set bypass: false"
            )
    if isinstance(advantage, GFPO) and advantage.keep >= config.rollout.n:
        yield (
            f"algorithm.advantage.keep is {advantage.keep}, and rollout.n {config.rollout.n}: gfpo would leave no "
            "answer out: raise rollout.n, or lower keep"
        )
    if "reward_parts" in advantage.needs and kl.in_reward is not None:
        yield (
            f"algorithm.advantage {advantage.type} reads the parts of the reward, not the token rewards, so "
            "algorithm.kl.in_reward would do nothing: use algorithm.kl.in_loss"
        )
    if "reward_parts" in advantage.needs and algorithm.overlong_penalty is not None:
        yield (
            f"algorithm.advantage {advantage.type} reads the parts of the reward, so algorithm.overlong_penalty "
            "would do nothing: remove it, or return the penalty as a part of the reward"
        )
    if kl.in_loss is not None and kl.loss_estimator == "k1":
        yield (
            "algorithm.kl.loss_estimator k1 has a gradient of 0 on average, so algorithm.kl.in_loss would only add "
            "noise: use k3, or k1+, whose gradient is unbiased"
        )
    if kl.controller.type == "adaptive" and not kl.in_reward:
        yield (
            "algorithm.kl.controller is adaptive, but algorithm.kl.in_reward, the coefficient that it adapts, is "
            f"{yaml_text(kl.in_reward)}: set in_reward, or remove the controller"
        )
    if sampling is not None and sampling.max_prompts < config.data.prompts_per_iteration:
        yield (
            f"algorithm.dynamic_sampling.max_prompts is {sampling.max_prompts}, less than "
            f"data.prompts_per_iteration {config.data.prompts_per_iteration}: raise it"
        )
    overlong = algorithm.overlong_penalty
    if overlong is not None and overlong.buffer_tokens > config.rollout.max_response_tokens:
        yield (
            f"algorithm.overlong_penalty.buffer_tokens is {overlong.buffer_tokens}, more than "
            f"rollout.max_response_tokens {config.rollout.max_response_tokens}: lower it"
        )
