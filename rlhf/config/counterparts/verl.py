"""verl's settings, and ours. Its keys and defaults are those of its main branch in August 2026."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ratchet.rlhf.config.counterparts.shared import (
    LENGTH,
    known_iterations,
    loss_option,
    lr_schedule,
    run_length,
    run_name,
    services,
    sole_file,
)
from ratchet.rlhf.config.counterparts.translation import (
    Assumed,
    Conversion,
    Converted,
    Counterpart,
    NoEqual,
    Settings,
    Source,
    Value,
    computed,
    direct,
    without_equal,
)

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"

_SAME = ("gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo")
ESTIMATORS: dict[str, Value] = {
    **{name: name for name in (*_SAME, "gpg", "gdpo")},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
_SAME_LOSSES = ("gspo", "gpg", "cispo", "geo_mean", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro")
LOSSES = {"vanilla": "ppo", **{name: name for name in _SAME_LOSSES}}
KL_ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3"}


def _loss(settings: Settings) -> str:
    return LOSSES.get(str(settings[f"{ACTOR}.policy_loss.loss_mode"]), "ppo")


def _loss_option(theirs: str, ours: str) -> Counterpart:
    def convert(settings: Settings) -> Converted:
        return loss_option(_loss(settings), ours, settings[theirs])

    return computed(theirs, f"algorithm.loss.{ours}", convert)


def _clip(side: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        key = f"{ACTOR}.clip_ratio_{side}"
        value = settings[key] if settings.has(key) else settings[f"{ACTOR}.clip_ratio"]
        return loss_option(_loss(settings), f"clip_ratio_{side}", value)

    return convert


def _advantage_option(theirs: str, ours: str, *types: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        estimator = ESTIMATORS.get(str(settings["algorithm.adv_estimator"]))
        if estimator not in types:
            raise NoEqual(f"the advantage {estimator} has no {ours}")
        return {} if settings[theirs] is None else {f"algorithm.advantage.{ours}": settings[theirs]}

    return convert


def _kl_in_loss(settings: Settings) -> Converted:
    if not settings.flag(f"{ACTOR}.use_kl_loss"):
        raise NoEqual("there is no KL in the loss unless use_kl_loss is true: algorithm.kl.in_loss stays null")
    coefficient, kind = settings.number(f"{ACTOR}.kl_loss_coef"), str(settings[f"{ACTOR}.kl_loss_type"])
    plain = KL_ESTIMATORS.get(kind.removesuffix("+"))
    if plain is None:
        raise NoEqual(f"algorithm.kl.loss_estimator has no {kind}: choose one, and set algorithm.kl.in_loss")
    if kind in ("kl", "k1"):
        why = f"the gradient of {kind} in the loss is 0 on average; k1+ has the same value, and the right gradient"
        return {"algorithm.kl.in_loss": coefficient, "algorithm.kl.loss_estimator": Assumed("k1+", why)}
    estimator = plain + ("+" if kind.endswith("+") else "")
    return {"algorithm.kl.in_loss": coefficient, "algorithm.kl.loss_estimator": estimator}


def _kl_in_reward(settings: Settings) -> Converted:
    if not settings.flag("algorithm.use_kl_in_reward"):
        raise NoEqual("there is no KL in the reward unless algorithm.use_kl_in_reward is true: in_reward stays null")
    coefficient, kind = settings.number("algorithm.kl_ctrl.kl_coef"), settings["algorithm.kl_penalty"]
    why = f"k1: the others ({kind}) do not hold the policy near the reference in the reward"
    converted: dict[str, Value | Assumed] = {
        "algorithm.kl.in_reward": coefficient if kind in ("kl", "k1") else Assumed(coefficient, why)
    }
    if settings["algorithm.kl_ctrl.type"] == "adaptive":
        converted["algorithm.kl.controller.type"] = "adaptive"
        converted["algorithm.kl.controller.target"] = settings.number("algorithm.kl_ctrl.target_kl")
        converted["algorithm.kl.controller.horizon"] = settings.count("algorithm.kl_ctrl.horizon")
    return converted


def _correction(settings: Settings) -> Converted:
    prefix = "algorithm.rollout_correction"
    converted: dict[str, Value | Assumed] = {}
    if settings.flag(f"{prefix}.bypass_mode"):
        converted[f"{prefix}.bypass"] = True
    if settings.has(f"{prefix}.rollout_is"):
        bounds = _bounds(str(settings[f"{prefix}.rollout_is_threshold"]), f"{prefix}.rollout_is_threshold")
        converted[f"{prefix}.weights.level"] = settings.text(f"{prefix}.rollout_is")
        converted |= {f"{prefix}.weights.{side}": bound for side, bound in bounds.items()}
        converted[f"{prefix}.weights.normalize"] = settings.flag(f"{prefix}.rollout_is_batch_normalize")
    if settings.has(f"{prefix}.rollout_rs"):
        statistics = settings.text(f"{prefix}.rollout_rs").split(",")
        thresholds = str(settings[f"{prefix}.rollout_rs_threshold"]).split(",")
        if len(thresholds) == 1:
            thresholds *= len(statistics)
        converted[f"{prefix}.rejection"] = [
            {"statistic": statistic.strip(), **_bounds(threshold, f"{prefix}.rollout_rs_threshold")}
            for statistic, threshold in zip(statistics, thresholds, strict=False)
        ]
    if not converted:
        return {prefix: Assumed({}, "verl corrects nothing unless told; null could truncate importance weights")}
    return converted


def _bounds(threshold: str, key: str) -> dict[str, Value]:
    """Parses ``2.0`` as an upper bound, ``0.5_2.0`` as both."""
    lower, _, upper = threshold.strip().rpartition("_")
    try:
        return {"upper": float(upper), **({"lower": float(lower)} if lower else {})}
    except ValueError:
        raise NoEqual(f"{key} {threshold} is neither upper nor lower_upper") from None


def _prompts_drawn(settings: Settings) -> int:
    """Returns the prompts that verl takes from the data in one step."""
    return settings.count("data.gen_batch_size" if settings.has("data.gen_batch_size") else "data.train_batch_size")


def _dynamic_sampling(settings: Settings) -> Converted:
    if not settings.flag("algorithm.filter_groups.enable"):
        raise NoEqual("filter_groups is off, as algorithm.dynamic_sampling null is")
    prompts, batches = _prompts_drawn(settings), settings.count("algorithm.filter_groups.max_num_gen_batches")
    key = "algorithm.dynamic_sampling.max_prompts"
    if batches <= 0:
        return {key: Assumed(10 * prompts, "verl draws without limit: ten batches are assumed")}
    return {key: batches * prompts}


def _overlong(settings: Settings) -> Converted:
    if not settings.flag(f"{OVERLONG}.enable"):
        raise NoEqual("the overlong buffer is off, as algorithm.overlong_penalty null is")
    return {
        "algorithm.overlong_penalty.buffer_tokens": settings.count(f"{OVERLONG}.len"),
        "algorithm.overlong_penalty.factor": settings.number(f"{OVERLONG}.penalty_factor"),
    }


def _reward(settings: Settings) -> Converted:
    has_model = settings.flag("reward.reward_model.enable") and settings.has("reward.reward_model.model_path")
    model: Converted = {"reward.model.path": settings["reward.reward_model.model_path"]} if has_model else {}
    if settings.has("reward.custom_reward_function.path"):
        path, name = (settings.text(f"reward.custom_reward_function.{key}") for key in ("path", "name"))
        return {"reward.function": f"{path}:{name}", **model}
    if has_model:
        return {"reward.function": None, **model}
    return {"reward.function": Assumed("auto", "by data_source, as verl's default_compute_score")}


def _truncation(settings: Settings) -> Converted:
    return {"data.truncation": "drop" if settings.flag("data.filter_overlong_prompts") else settings["data.truncation"]}


def _train_files(settings: Settings) -> Converted:
    return {"data.train": settings.texts("data.train_files")} if settings.has("data.train_files") else {}


def _validation_data(settings: Settings) -> Converted:
    return {"validation.data": sole_file(settings.texts("data.val_files"))} if settings.has("data.val_files") else {}


def _validation(conversion: Conversion) -> Conversion:
    """Limits a conversion to runs that validate."""

    def convert(settings: Settings) -> Converted:
        if not settings.has("data.val_files"):
            raise NoEqual("there are no data.val_files")
        return conversion(settings)

    return convert


def _validate_every(settings: Settings) -> Converted:
    every = settings.count("trainer.test_freq")
    if every <= 0:
        return {"validation.every": Assumed(0, "verl does not validate after the last iteration then")}
    return {"validation.every": every}


def _validation_temperature(settings: Settings) -> Converted:
    samples = settings.flag(f"{ROLLOUT}.val_kwargs.do_sample")
    return {"validation.temperature": settings[f"{ROLLOUT}.val_kwargs.temperature"] if samples else 0.0}


def _engine(settings: Settings) -> Converted:
    name = settings[f"{ROLLOUT}.name"]
    if name is None:
        return {"rollout.engine": Assumed("vllm", f"{ROLLOUT}.name is not given")}
    if name in ("vllm", "hf"):
        return {"rollout.engine": name}
    return {"rollout.engine": Assumed("vllm", f"{name} does not run in Ratchet's processes; see rollout.engine server")}


def _top_k(settings: Settings) -> Converted:
    key = f"{ROLLOUT}.top_k"
    return {"rollout.top_k": max(settings.count(key), 0)} if settings.has(key) else {}


def _pool(settings: Settings) -> Converted:
    workers = settings.count("trainer.nnodes") * settings.count("trainer.n_gpus_per_node")
    if workers == 1:
        raise NoEqual("one GPU needs no pool: the driver's process uses it")
    return {"pools.all.workers": workers, "pools.all.gpus_per_worker": 1}


def _iterations(settings: Settings) -> Converted:
    if settings.has("trainer.total_training_steps"):
        return {"train.iterations": settings.count("trainer.total_training_steps")}
    names = settings.texts("data.train_files") if settings.has("data.train_files") else []
    epochs = settings.count("trainer.total_epochs")
    is_dynamic = settings.flag("algorithm.filter_groups.enable")
    return run_length(settings, names, epochs, _prompts_drawn(settings), "trainer.total_epochs", is_dynamic=is_dynamic)


def _snapshots(settings: Settings) -> Converted:
    every = settings.count("trainer.save_freq")
    if every <= 0:
        raise NoEqual("verl saves nothing; checkpoint.every null takes snapshots as often as they are cheap")
    return {"checkpoint.every": every}


def _lora(settings: Settings) -> Converted:
    if settings.count(f"{MODEL}.lora_rank") <= 0:
        raise NoEqual("rank 0 trains all weights, as model.lora null does")
    return {
        "model.lora.r": settings.count(f"{MODEL}.lora_rank"),
        "model.lora.alpha": settings.number(f"{MODEL}.lora_alpha"),
        "model.lora.target_modules": settings.texts(f"{MODEL}.target_modules"),
    }


def _mini_batch(section: str, role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        own = f"{section}.ppo_mini_batch_size"
        prompts = settings.count(own if settings.has(own) else f"{ACTOR}.ppo_mini_batch_size")
        return {f"{role}.mini_batch_trajectories": prompts * settings.count(f"{ROLLOUT}.n")}

    return convert


def _micro_batch(section: str, role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        longest = settings.count("data.max_prompt_length") + settings.count("data.max_response_length")
        size, limit = f"{section}.ppo_micro_batch_size_per_gpu", f"{section}.ppo_max_token_len_per_gpu"
        own = f"{section}.use_dynamic_bsz"
        is_dynamic = settings.flag(own if settings.has(own) else f"{ACTOR}.use_dynamic_bsz")
        tokens = settings.count(limit) if is_dynamic or not settings.has(size) else settings.count(size) * longest
        if tokens < longest:
            return {f"{role}.micro_batch_tokens": Assumed(longest, f"{tokens} is less than a trajectory may have")}
        return {f"{role}.micro_batch_tokens": tokens}

    return convert


def _strategy(keys: Iterable[str], role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        strategy = next((str(settings[key]) for key in keys if settings.has(key)), "fsdp")
        if strategy in ("fsdp", "fsdp2"):
            return {f"{role}.engine": "fsdp"}
        if strategy == "megatron":
            return {f"{role}.engine": "megatron"}
        return {f"{role}.engine": Assumed("fsdp", f"there is no {strategy}: docs/clusters.md describes large models")}

    return convert


def _offload(engine: str, role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        switches = (settings.flag(f"{engine}.{part}_offload") for part in ("param", "optimizer"))
        return {f"{role}.engine.offload": any(list(switches))}

    return convert


def _shard_size(key: str, role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        size = settings.count(key)
        if size <= 0:
            raise NoEqual(f"all processes, as {role}.engine.shard_size null does")
        return {f"{role}.engine.shard_size": size}

    return convert


def _schedule(optimizer: str, role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        steps, ratio = settings[f"{optimizer}.lr_warmup_steps"], settings[f"{optimizer}.lr_warmup_steps_ratio"]
        shape = settings[f"{optimizer}.lr_scheduler_type"] or "constant"
        warmup = steps if isinstance(steps, int) and steps > 0 else 0
        share = settings.number(f"{optimizer}.lr_warmup_steps_ratio") if ratio and not warmup else 0.0
        least, total = settings.number(f"{optimizer}.min_lr_ratio"), known_iterations(_iterations(settings))
        return lr_schedule(role, str(shape), warmup, share, least, total)

    return convert


def _trainer(role: str, section: str, engine: str, model: str) -> tuple[Counterpart, ...]:
    """Returns the rows that actor and critic share."""
    optimizer = f"{section}.optim"
    return (
        direct(f"{optimizer}.lr", f"{role}.lr"),
        direct(f"{optimizer}.weight_decay", f"{role}.optimizer.weight_decay", "verl's default is 0.01"),
        direct(f"{optimizer}.betas", f"{role}.optimizer.betas"),
        computed(
            (
                f"{optimizer}.lr_warmup_steps",
                f"{optimizer}.lr_warmup_steps_ratio",
                f"{optimizer}.lr_scheduler_type",
                f"{optimizer}.min_lr_ratio",
            ),
            f"{role}.lr_schedule",
            _schedule(optimizer, role),
            "both count iterations",
        ),
        computed(
            f"{section}.ppo_mini_batch_size",
            f"{role}.mini_batch_trajectories",
            _mini_batch(section, role),
            "trajectories of the whole run: verl counts prompts, and multiplies by n",
        ),
        computed(
            (
                f"{section}.ppo_max_token_len_per_gpu",
                f"{section}.ppo_micro_batch_size_per_gpu",
                f"{section}.use_dynamic_bsz",
            ),
            f"{role}.micro_batch_tokens",
            _micro_batch(section, role),
            "tokens; changes memory and speed, never the result",
        ),
        direct(f"{section}.ppo_epochs", f"{role}.ppo_epochs"),
        direct(f"{section}.grad_clip", f"{role}.grad_clip"),
        direct(f"{model}.enable_gradient_checkpointing", f"{role}.gradient_checkpointing"),
        computed(
            (f"{section}.strategy", f"{engine}.strategy"),
            f"{role}.engine",
            _strategy((f"{engine}.strategy", f"{section}.strategy"), role),
            "`fsdp` is FSDP2",
        ),
        computed(
            (f"{engine}.param_offload", f"{engine}.optimizer_offload"),
            f"{role}.engine.offload",
            _offload(engine, role),
            "both together",
        ),
        computed(
            f"{engine}.fsdp_size", f"{role}.engine.shard_size", _shard_size(f"{engine}.fsdp_size", role), "-1 is null"
        ),
        direct(f"{engine}.reshard_after_forward", f"{role}.engine.reshard_after_forward"),
        direct(f"{section}.ulysses_sequence_parallel_size", f"{role}.engine.sequence_parallel"),
        direct(f"{section}.megatron.tensor_model_parallel_size", f"{role}.engine.tensor_parallel"),
        direct(f"{section}.megatron.pipeline_model_parallel_size", f"{role}.engine.pipeline_parallel"),
        direct(f"{section}.megatron.context_parallel_size", f"{role}.engine.context_parallel"),
        direct(f"{section}.megatron.expert_model_parallel_size", f"{role}.engine.expert_parallel"),
        direct(f"{section}.megatron.use_distributed_optimizer", f"{role}.engine.distributed_optimizer"),
        without_equal(
            (f"{section}.megatron.virtual_pipeline_model_parallel_size",), "not supported yet by engine megatron"
        ),
        without_equal((f"{section}.megatron.expert_tensor_parallel_size",), "engine megatron keeps each expert whole"),
        without_equal(f"{section}.megatron.*", f"{role}.engine megatron chooses it"),
        without_equal(
            (f"{model}.use_remove_padding",), f"{role}.packing null concatenates sequences where that saves time"
        ),
        without_equal(
            (f"{section}.shuffle", f"{section}.data_loader_seed"), "mini-batches are always shuffled, from run.seed"
        ),
        without_equal(
            (
                f"{section}.checkpoint.*",
                f"{section}.profiler.*",
                f"{engine}.*",
                f"{section}.use_torch_compile",
                f"{section}.ppo_micro_batch_size",
                f"{section}.forward_max_token_len_per_gpu",
                f"{section}.forward_micro_batch_size_per_gpu",
            ),
            "changes no result",
        ),
    )


def _of_the_critic(row: Counterpart) -> Counterpart:
    """Limits a row to runs with a critic."""

    def convert(settings: Settings) -> Converted:
        if settings["algorithm.adv_estimator"] != "gae":
            raise NoEqual(f"algorithm.adv_estimator {settings['algorithm.adv_estimator']} has no critic")
        return row.convert(settings)

    return replace(row, convert=convert)


def _of_vllm(row: Counterpart) -> Counterpart:
    """Limits a row to runs that generate with vLLM, or a similar engine."""

    def convert(settings: Settings) -> Converted:
        if settings[f"{ROLLOUT}.name"] == "hf":
            raise NoEqual("rollout.engine hf has no such setting")
        return row.convert(settings)

    return replace(row, convert=convert)


COUNTERPARTS: tuple[Counterpart, ...] = (
    computed(
        "trainer.experiment_name",
        "run.name",
        lambda settings: (
            {"run.name": run_name(settings.text("trainer.experiment_name"))}
            if settings.has("trainer.experiment_name")
            else {}
        ),
        "other characters than letters, digits and ._- become -",
    ),
    direct("data.seed", "run.seed"),
    direct(f"{MODEL}.path", "model.path", "the default of critic and reference too"),
    direct(f"{ACTOR}.fsdp_config.dtype", "model.dtype", values={"bfloat16": "bfloat16", "float32": "float32"}),
    computed(
        (f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"),
        ("model.lora.r", "model.lora.alpha", "model.lora.target_modules"),
        _lora,
        "rank 0 is null",
    ),
    direct(f"{MODEL}.use_liger", "model.kernels", values={"True": "liger", "False": "torch"}),
    direct(f"{MODEL}.trust_remote_code", "model.trust_remote_code"),
    direct(f"{MODEL}.custom_chat_template", "model.chat_template", "a file, not the template itself"),
    computed("data.train_files", "data.train", _train_files, "the same Parquet rows"),
    direct("data.train_batch_size", "data.prompts_per_iteration", "prompts, not trajectories"),
    direct("data.max_prompt_length", "data.max_prompt_tokens"),
    computed(("data.truncation", "data.filter_overlong_prompts"), "data.truncation", _truncation, "true is `drop`"),
    direct("data.max_response_length", "rollout.max_response_tokens"),
    computed(f"{ROLLOUT}.name", "rollout.engine", _engine, "`vllm` or `hf`; SGLang can run as a server"),
    direct(f"{ROLLOUT}.n", "rollout.n"),
    direct(f"{ROLLOUT}.temperature", "rollout.temperature"),
    direct(f"{ROLLOUT}.top_p", "rollout.top_p"),
    Counterpart((f"{ROLLOUT}.top_k",), ("rollout.top_k",), "-1 is 0", _top_k, is_direct=True),
    direct(f"{ROLLOUT}.ignore_eos", "rollout.ignore_eos"),
    direct(f"{ROLLOUT}.quantization", "rollout.engine.quantization", values={"fp8": "fp8"}),
    _of_vllm(direct(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.engine.tensor_parallel")),
    _of_vllm(direct(f"{ROLLOUT}.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization")),
    _of_vllm(direct(f"{ROLLOUT}.max_model_len", "rollout.engine.max_model_len")),
    _of_vllm(direct(f"{ROLLOUT}.enforce_eager", "rollout.engine.enforce_eager")),
    _of_vllm(direct(f"{ROLLOUT}.enable_prefix_caching", "rollout.engine.prefix_caching")),
    direct(f"{ROLLOUT}.max_num_seqs", "rollout.max_in_flight"),
    computed(
        (
            "reward.custom_reward_function.path",
            "reward.custom_reward_function.name",
            "reward.reward_model.enable",
            "reward.reward_model.model_path",
        ),
        ("reward.function", "reward.model.path"),
        _reward,
        "`path.py:name`, with the same signature; `auto` chooses by data_source",
    ),
    direct("reward.num_workers", "reward.workers"),
    direct("algorithm.adv_estimator", "algorithm.advantage.type", "the same names", values=ESTIMATORS),
    computed(
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.advantage.norm_by_std",
        _advantage_option("algorithm.norm_adv_by_std_in_grpo", "norm_by_std", "grpo", "grpo_passk"),
        "`algorithm.advantage.type: dr_grpo` is grpo without it",
    ),
    computed(
        "algorithm.gamma",
        "algorithm.advantage.gamma",
        _advantage_option("algorithm.gamma", "gamma", "gae", "reinforce_plus_plus"),
    ),
    computed(
        "algorithm.lam",
        "algorithm.advantage.lam",
        _advantage_option("algorithm.lam", "lam", "gae"),
        "verl's default is 1",
    ),
    computed(
        "algorithm.gdpo_reward_keys",
        "algorithm.advantage.parts",
        _advantage_option("algorithm.gdpo_reward_keys", "parts", "gdpo"),
    ),
    computed(
        "algorithm.gdpo_reward_weights",
        "algorithm.advantage.weights",
        _advantage_option("algorithm.gdpo_reward_weights", "weights", "gdpo"),
    ),
    direct(
        f"{ACTOR}.policy_loss.loss_mode", "algorithm.loss.type", "the same names; `vanilla` is `ppo`", values={**LOSSES}
    ),
    computed(
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
        "algorithm.loss.clip_ratio_low",
        _clip("low"),
        "verl reads clip_ratio only where clip_ratio_low is null; its default is 0.2",
    ),
    computed((f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"), "algorithm.loss.clip_ratio_high", _clip("high")),
    *(
        _loss_option(f"{ACTOR}.{theirs}", ours)
        for theirs, ours in (
            ("clip_ratio_c", "clip_ratio_c"),
            ("loss_agg_mode", "aggregate"),
            ("tau_pos", "tau_pos"),
            ("tau_neg", "tau_neg"),
            ("policy_loss.clip_cov_ratio", "clip_cov_ratio"),
            ("policy_loss.clip_cov_lb", "clip_cov_lb"),
            ("policy_loss.clip_cov_ub", "clip_cov_ub"),
            ("policy_loss.kl_cov_ratio", "kl_cov_ratio"),
            ("policy_loss.ppo_kl_coef", "ppo_kl_coef"),
            ("policy_loss.dro_beta", "dro_beta"),
        )
    ),
    computed(
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        ("algorithm.kl.in_loss", "algorithm.kl.loss_estimator"),
        _kl_in_loss,
        "null: no KL in the loss; `low_var_kl` is `k3`, `low_var_kl+` is `k3+`, `mse` is `k2`",
    ),
    computed(
        (
            "algorithm.use_kl_in_reward",
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_penalty",
            "algorithm.kl_ctrl.type",
            "algorithm.kl_ctrl.target_kl",
            "algorithm.kl_ctrl.horizon",
        ),
        ("algorithm.kl.in_reward", "algorithm.kl.controller"),
        _kl_in_reward,
        "null: no KL in the reward; always `k1` (verl's `kl`), because the others have the wrong gradient there",
    ),
    direct(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef"),
    computed(
        (
            "algorithm.rollout_correction.rollout_is",
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "algorithm.rollout_correction.rollout_rs",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "algorithm.rollout_correction.bypass_mode",
        ),
        (
            "algorithm.rollout_correction.weights",
            "algorithm.rollout_correction.rejection",
            "algorithm.rollout_correction.bypass",
        ),
        _correction,
        "thresholds are `upper` and `lower`",
    ),
    computed(
        (
            "algorithm.filter_groups.enable",
            "algorithm.filter_groups.max_num_gen_batches",
            "data.gen_batch_size",
        ),
        "algorithm.dynamic_sampling.max_prompts",
        _dynamic_sampling,
        "a bound in prompts; drawn shard by shard",
    ),
    computed(
        (f"{OVERLONG}.enable", f"{OVERLONG}.len", f"{OVERLONG}.penalty_factor"),
        ("algorithm.overlong_penalty.buffer_tokens", "algorithm.overlong_penalty.factor"),
        _overlong,
        "null: none",
    ),
    *_trainer("actor", ACTOR, f"{ACTOR}.fsdp_config", MODEL),
    *(
        _of_the_critic(row)
        for row in (
            direct("critic.model.path", "critic.model.path"),
            direct("critic.cliprange_value", "critic.cliprange_value"),
            direct("trainer.critic_warmup", "critic.warmup_iterations"),
            *_trainer("critic", "critic", "critic.fsdp", "critic.model"),
        )
    ),
    computed(
        ("trainer.n_gpus_per_node", "trainer.nnodes"),
        ("pools.all.workers", "pools.all.gpus_per_worker"),
        _pool,
        "a worker per GPU, on Ray; none for a single GPU",
    ),
    computed("trainer.save_freq", "checkpoint.every", _snapshots, "iterations in between are replayed, not lost"),
    direct("trainer.max_actor_ckpt_to_keep", "checkpoint.keep.last"),
    computed("data.val_files", "validation.data", _validation_data, "one file"),
    computed("trainer.test_freq", "validation.every", _validation(_validate_every), "-1 is 0"),
    computed(
        f"{ROLLOUT}.val_kwargs.n",
        "validation.n",
        _validation(lambda settings: {"validation.n": settings[f"{ROLLOUT}.val_kwargs.n"]}),
    ),
    computed(
        (f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature"),
        "validation.temperature",
        _validation(_validation_temperature),
        "0: greedy, which is verl's default",
    ),
    computed(
        "trainer.val_before_train",
        "validation.before_train",
        _validation(lambda settings: {"validation.before_train": settings.flag("trainer.val_before_train")}),
    ),
    computed(
        "trainer.logger",
        "tracking",
        lambda settings: services(settings.texts("trainer.logger")) if settings.has("trainer.logger") else {},
        "the console is always on",
    ),
    computed(
        ("trainer.total_training_steps", "trainer.total_epochs"),
        LENGTH,
        _iterations,
        "iterations are epochs x rows / prompts, where the data can be read",
    ),
    without_equal(
        (f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.top_k"),
        "validation samples with rollout.top_p, top_k and min_p",
    ),
    without_equal(
        ("reward.reward_manager.*", "reward.reward_kwargs.max_resp_len", f"{OVERLONG}.log"),
        "rewards are functions; algorithm.overlong_penalty is what verl's dapo manager adds",
    ),
    without_equal("reward.sandbox_fusion.*", "reward.function code runs programs in a sandbox of its own"),
    without_equal("reward.reward_model.*", "the reward model's own tokenizer is used, in the models' processes"),
    without_equal("algorithm.filter_groups.metric", "groups are compared by their scores"),
    without_equal("algorithm.rollout_correction.loss_type", "the loss is algorithm.loss"),
    without_equal(("algorithm.use_pf_ppo", "algorithm.pf_ppo.*"), "there is no PF-PPO"),
    without_equal(f"{ACTOR}.loss_scale_factor", "seq-mean-token-sum-norm divides by rollout.max_response_tokens"),
    without_equal(
        f"{REFERENCE}.*", "the reference computes as the actor does: actor.micro_batch_tokens, actor.engine and so on"
    ),
    without_equal(
        (
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            f"{ROLLOUT}.log_prob_micro_batch_size",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
            f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        ),
        "log-probs are computed in actor.micro_batch_tokens",
    ),
    without_equal(f"{ROLLOUT}.mode", "vLLM always serves requests one by one; rollout.mode is something else"),
    without_equal(f"{ROLLOUT}.calculate_log_probs", "the rollout's log-probs are always stored"),
    without_equal(
        f"{ROLLOUT}.multi_turn.*", "tools are a class with `reset` and `step`: rollout.environment (docs/rewards.md)"
    ),
    without_equal(f"{ROLLOUT}.agent.*", "turns are taken by rollout.environment (docs/rewards.md)"),
    without_equal(f"{ROLLOUT}.seed", "every trajectory has a seed of its own, from run.seed"),
    without_equal(f"{ROLLOUT}.engine_kwargs.*", "arguments of vLLM's EngineArgs go into rollout.engine.args"),
    without_equal(f"{ROLLOUT}.*", "changes no result"),
    without_equal(f"{MODEL}.override_config.*", "fields of the model's config.json go into model.args"),
    without_equal(f"{MODEL}.*", "the model's own config.json decides"),
    without_equal("critic.model.*", "the model's own config.json decides"),
    without_equal(("data.prompt_key", "data.reward_fn_key"), "the columns are prompt and data_source"),
    without_equal("data.shuffle", "prompts are always shuffled, from run.seed"),
    without_equal("data.val_batch_size", "validation runs in shards, like generate"),
    without_equal("data.*", "the rows are read as they are"),
    without_equal(f"{ACTOR}.*", "there is no such setting"),
    without_equal("critic.*", "there is no such setting"),
    without_equal("actor_rollout_ref.*", "there is no such setting"),
    direct("trainer.project_name", "run.project"),
    without_equal("trainer.balance_batch", "sequences are always spread evenly over processes"),
    without_equal(
        ("trainer.default_local_dir", "trainer.default_hdfs_dir"),
        "everything is in run.store, file://./runs unless set",
    ),
    without_equal(("trainer.resume_mode", "trainer.resume_from_path"), "the same command always resumes"),
    without_equal(
        ("trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
        "every trajectory is stored: `ratchet show`",
    ),
    without_equal("trainer.*", "there is no such setting"),
    without_equal("ray_kwargs.*", "Ray is started outside; pools use it (docs/clusters.md)"),
    without_equal(("global_profiler.*", "transfer_queue.*", "skip.*"), "changes no result"),
    without_equal("distillation.*", "set teacher.path and algorithm.distillation"),
)

OLDER = {
    "custom_reward_function.*": "reward.custom_reward_function.*",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.*": f"{OVERLONG}.*",
    "reward_model.*": "reward.reward_model.*",
    "sandbox_fusion.*": "reward.sandbox_fusion.*",
    f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    "critic.optim.clip_grad": "critic.grad_clip",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config.*": "critic.fsdp.*",
}

DEFAULTS: dict[str, Value] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "reward.custom_reward_function.name": "compute_score",
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    f"{OVERLONG}.penalty_factor": 0.0,
    f"{ACTOR}.entropy_coeff": 0,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768,
    f"{ACTOR}.optim.lr": 1e-6,
    "critic.optim.lr": 1e-5,
    **{
        f"{section}.optim.{key}": value
        for section in (ACTOR, "critic")
        for key, value in (("weight_decay", 0.01), ("min_lr_ratio", 0.0))
    },
    "critic.cliprange_value": 0.5,
    f"{ACTOR}.ppo_epochs": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.total_epochs": 30,
    **{f"{engine}.fsdp_size": -1 for engine in (f"{ACTOR}.fsdp_config", "critic.fsdp")},
}

VERL = Source("verl", COUNTERPARTS, DEFAULTS, OLDER, "verl")
