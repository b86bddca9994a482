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
    vllm_args,
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
    refused,
    without_equal,
)
from ratchet.rlhf.errors import UserError

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
NO_VIDEO = "models see texts and images only here: use data without them"
COLUMNS_OF_IMAGES = "the column is images, or image: rename it"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"

_SAME = ("gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo")
ESTIMATORS: dict[str, Value] = {
    **{name: name for name in (*_SAME, "gpg", "gdpo")},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
_SAME_LOSSES = ("gspo", "gpg", "cispo", "geo_mean", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro")
LOSSES = {"vanilla": "ppo", **{name: name for name in _SAME_LOSSES}}
KL_ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3"}


DISTILLATION = "distillation.distillation_loss"
IMAGE_DATA = ("geo3k", "geometry3k", "pokemon", "openr1mm")
"""Parts of the names of verl's data sets with images (examples/data_preprocess)."""
VISUAL = ".*visual.*"
"""What verl's scripts leave out of adapters: the vision tower."""
VIDEO_DATA = ("tinyllava-video",)
"""Parts of the names of those with videos."""


def _distills_alone(settings: Settings) -> bool:
    """Returns True if the policy learns from a teacher only."""
    return settings.flag("distillation.enabled") and not settings.flag(f"{DISTILLATION}.use_task_rewards")


def _estimator(settings: Settings) -> Value:
    return "none" if _distills_alone(settings) else ESTIMATORS.get(str(settings["algorithm.adv_estimator"]))


def _advantage(settings: Settings) -> Converted:
    if _distills_alone(settings):
        return {"algorithm.advantage.type": Assumed("none", "the teacher alone: use_task_rewards is false")}
    return _ADVANTAGE.convert(settings)


_ADVANTAGE = direct("algorithm.adv_estimator", "algorithm.advantage.type", "the same names", values=ESTIMATORS)


def _distillation(settings: Settings) -> Converted:
    if not settings.flag("distillation.enabled"):
        raise NoEqual("distillation is off, as algorithm.distillation null is")
    mode, prefix = str(settings[f"{DISTILLATION}.loss_mode"]), "distillation.teacher_models."
    if mode not in ("kl", "k1"):
        raise UserError(
            f"{DISTILLATION}.loss_mode is {mode}: algorithm.distillation learns from the log-probs of drawn tokens "
            "unless divergence is set, which is k1: use it, with use_policy_gradient true"
        )
    if not settings.flag(f"{DISTILLATION}.use_policy_gradient"):
        raise UserError(
            f"{DISTILLATION}.use_policy_gradient is false: algorithm.distillation is an advantage; set true"
        )
    models = {key: str(value) for key, value in settings.given.items() if key.startswith(prefix) and value is not None}
    paths = {key.rpartition(".")[0]: path for key, path in models.items() if key.endswith(".model_path")}
    if not paths:
        raise UserError("distillation.teacher_models has no model_path: set it")
    if without := [name for name in paths if f"{name}.key" not in models] if len(paths) > 1 else []:
        raise UserError(
            f"{without[0]} has no key, and there are {len(paths)} models: set the data_source that it is for"
        )
    if len(paths) == 1:
        converted: dict[str, Value | Assumed] = {"teacher.path": next(iter(paths.values()))}
    else:
        converted = {"teacher.models": {models[f"{name}.key"]: {"path": path} for name, path in paths.items()}}
    if _distills_alone(settings):
        converted["algorithm.distillation.coef"] = 1.0
    else:
        coefficient, why = (
            settings.number(f"{DISTILLATION}.distillation_loss_coef"),
            "one loss of the summed advantages",
        )
        converted["algorithm.distillation.coef"] = Assumed(coefficient, why)
    if settings.has(f"{DISTILLATION}.loss_max_clamp"):
        converted["algorithm.distillation.clamp"] = settings.number(f"{DISTILLATION}.loss_max_clamp")
    return converted


def _is_reinforce(settings: Settings) -> bool:
    """Returns True if the loss has no ratio, only weights against the rollout."""
    prefix = "algorithm.rollout_correction"
    return settings.flag(f"{prefix}.bypass_mode") and settings[f"{prefix}.loss_type"] == "reinforce"


def _reinforce(settings: Settings) -> Converted:
    if not _is_reinforce(settings):
        raise NoEqual("the loss has a ratio, as algorithm.loss ppo")
    return {"algorithm.loss.type": "gpg"}


def _loss(settings: Settings) -> str:
    if _distills_alone(settings):
        return "ppo"
    if _is_reinforce(settings):
        return "gpg"
    return LOSSES.get(str(settings[f"{ACTOR}.policy_loss.loss_mode"]), "ppo")


def _loss_option(theirs: str, ours: str) -> Counterpart:
    def convert(settings: Settings) -> Converted:
        return loss_option(_loss(settings), ours, settings[theirs])

    return computed(theirs, f"algorithm.loss.{ours}", convert)


def _clip(side: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        section = DISTILLATION if _distills_alone(settings) else ACTOR
        key = f"{section}.clip_ratio_{side}"
        value = settings[key] if settings.has(key) else settings[f"{section}.clip_ratio"]
        return loss_option(_loss(settings), f"clip_ratio_{side}", value)

    return convert


def _advantage_option(theirs: str, ours: str, *types: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        estimator = _estimator(settings)
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
        raise UserError(f"{ACTOR}.kl_loss_type is {kind}: choose one of {', '.join(KL_ESTIMATORS)}")
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
    bypass = settings.flag(f"{prefix}.bypass_mode")
    if bypass:
        if settings[f"{prefix}.loss_type"] not in ("ppo_clip", "reinforce"):
            raise UserError(
                f"{prefix}.loss_type is {settings[f'{prefix}.loss_type']}: set ppo_clip, reinforce, or "
                "bypass_mode=false"
            )
        converted[f"{prefix}.bypass"] = True
    # with ppo_clip, whose ratio is that to the rollout, verl reads no weights
    if settings.has(f"{prefix}.rollout_is") and (not bypass or _is_reinforce(settings)):
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
        raise UserError(f"{key} is {threshold}, which is neither upper nor lower_upper") from None


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
    if not settings.has("data.train_files"):
        return {}
    names = settings.texts("data.train_files")
    if videos := [name for name in names if any(part in name.lower() for part in VIDEO_DATA)]:
        raise UserError(f"data.train_files has {', '.join(videos)}, whose rows have videos: {NO_VIDEO}")
    return {"data.train": names}


def _freeze_vision(settings: Settings) -> Converted:
    key = f"{ACTOR}.freeze_vision_tower"
    if settings.has(key):
        return {"model.freeze_vision": settings.flag(key)}
    if settings[f"{MODEL}.exclude_modules"] == VISUAL:  # no adapters there
        return {}
    files = settings.texts("data.train_files") if settings.has("data.train_files") else []
    if settings.has("data.image_key") or any(part in name.lower() for name in files for part in IMAGE_DATA):
        return {"model.freeze_vision": Assumed(False, "verl trains the vision tower unless told")}
    return {}


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


def _validation_draws(name: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        own, training = settings[f"{ROLLOUT}.val_kwargs.{name}"], settings[f"{ROLLOUT}.{name}"]
        if own == training:
            raise NoEqual(f"validation samples with rollout.{name} unless told")
        return {f"validation.{name}": max(settings.number(f"{ROLLOUT}.val_kwargs.{name}"), 0)}

    return convert


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


def _chat_template(settings: Settings) -> Converted:
    prefix = "data.apply_chat_template_kwargs."
    variables = {key.removeprefix(prefix): value for key, value in settings.given.items() if key.startswith(prefix)}
    return {"model.chat_template_kwargs": variables} if variables else {}


def _response_length(settings: Settings) -> Converted:
    own = f"{ROLLOUT}.response_length"
    return {"rollout.max_response_tokens": settings[own if settings.has(own) else "data.max_response_length"]}


def _reward_options(settings: Settings) -> Converted:
    prefix = "reward.custom_reward_function.reward_kwargs."
    options = {key.removeprefix(prefix): value for key, value in settings.given.items() if key.startswith(prefix)}
    return {"reward.options": options} if options else {}


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


ENGINES = {"fsdp": "fsdp", "fsdp2": "fsdp", "dp": "fsdp", "megatron": "megatron"}
SIMILAR = ("veomni", "torchtitan", "automodel", "fsdp_turbo")
"""Engines that compute the same as FSDP, with their own kernels and ways to split a model."""


def _strategy(keys: Iterable[str], role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        key = next((key for key in ("model_engine", *keys) if settings.has(key)), None)
        if key is None:
            return {f"{role}.engine": "fsdp"}
        strategy = settings.text(key)
        if strategy in SIMILAR:
            why = f"there is no {strategy}, which computes the same: docs/clusters.md describes large models"
            return {f"{role}.engine": Assumed("fsdp", why)}
        if strategy not in ENGINES:
            raise UserError(f"{key} is {strategy}: choose one of {', '.join((*ENGINES, *SIMILAR))}")
        return {f"{role}.engine": ENGINES[strategy]}

    return convert


def _offload(switches: Iterable[str], ours: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        return {ours: any(settings.flag(switch) for switch in switches)}

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
        is_veomni = settings["model_engine"] == "veomni"
        styles = (f"{optimizer}.lr_scheduler_type", f"{optimizer}.lr_decay_style")
        shape = next((settings[key] for key in styles if settings.has(key)), "cosine" if is_veomni else "constant")
        warmup = steps if isinstance(steps, int) and steps > 0 else 0
        share = settings.number(f"{optimizer}.lr_warmup_steps_ratio") if ratio and not warmup else 0.0
        least, total = settings.number(f"{optimizer}.min_lr_ratio"), known_iterations(_iterations(settings))
        lowest = next((key for key in (f"{optimizer}.min_lr", f"{optimizer}.lr_min") if settings.has(key)), None)
        if lowest is not None:  # not a share
            least = settings.number(lowest) / settings.number(f"{optimizer}.lr")
        if settings.has(f"{optimizer}.lr_decay_steps"):
            total = settings.count(f"{optimizer}.lr_decay_steps")
        return lr_schedule(role, str(shape), warmup, share, least, total)

    return convert


def _trainer(role: str, section: str, engine: str, model: str) -> tuple[Counterpart, ...]:
    """Returns the rows that actor and critic share."""
    optimizer, megatron, veomni = f"{section}.optim", f"{section}.megatron", f"{section}.veomni"
    offload = tuple(f"{library}.{part}_offload" for library in (engine, veomni) for part in ("param", "optimizer"))
    between = tuple(f"{megatron}.{part}_offload" for part in ("param", "optimizer", "grad"))
    return (
        direct(f"{optimizer}.lr", f"{role}.lr"),
        direct(f"{optimizer}.weight_decay", f"{role}.optimizer.weight_decay", "verl's default is 0.01"),
        direct(f"{optimizer}.betas", f"{role}.optimizer.betas"),
        computed(
            (
                f"{optimizer}.lr_warmup_steps",
                f"{optimizer}.lr_warmup_steps_ratio",
                f"{optimizer}.lr_scheduler_type",
                f"{optimizer}.lr_decay_style",
                f"{optimizer}.lr_decay_steps",
                f"{optimizer}.min_lr_ratio",
                f"{optimizer}.min_lr",
                f"{optimizer}.lr_min",
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
            (f"{section}.strategy", f"{engine}.strategy", "model_engine"),
            f"{role}.engine",
            _strategy((f"{engine}.strategy", f"{section}.strategy"), role),
            "`fsdp` is FSDP2",
        ),
        computed(
            offload,
            f"{role}.engine.offload",
            _offload(offload, f"{role}.engine.offload"),
            "both together",
        ),
        computed(
            between,
            f"{role}.offload_when_idle",
            _offload(between, f"{role}.offload_when_idle"),
            "all together",
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
        direct(f"{veomni}.ulysses_parallel_size", f"{role}.engine.sequence_parallel"),
        *_optimizer(optimizer),
        *_megatron(megatron, role),
        *_fsdp(engine),
        *_router_replay((f"{section}.router_replay", f"{megatron}.router_replay", f"{veomni}.router_replay"), role),
        refused(
            (f"{section}.qat.enable", f"{engine}.qat.enable", f"{megatron}.qat.enable"),
            "weights are not rounded in training: remove it",
        ),
        without_equal((f"{section}.qat.*", f"{megatron}.qat.*"), "weights are not rounded in training"),
        refused(
            (f"{veomni}.load_checkpoint_path",), "training starts from model.path: name a Hugging Face model there"
        ),
        without_equal((f"{veomni}.*",), f"there is no veomni: {role}.engine fsdp computes the same"),
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
                *(f"{section}.{name}" for name in COMPUTING),
                f"{section}.ppo_micro_batch_size",
                f"{section}.forward_max_token_len_per_gpu",
                f"{section}.forward_micro_batch_size",
                f"{section}.forward_micro_batch_size_per_gpu",
                f"{section}.use_fused_kernels",
                f"{section}.use_prefix_grouper",
                f"{section}.use_remove_padding",
                f"{section}.rollout_n",
            ),
            "changes memory and speed only",
        ),
    )


COMPUTING = (
    "use_torch_compile",
    "entropy_checkpointing",
    "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size",
    "pad_to_length",
    "pad_to_length_bucket",
)
"""Switches of each of verl's engines that change how it computes, and not what."""


def _optimizer(optimizer: str) -> tuple[Counterpart, ...]:
    override = f"{optimizer}.override_optimizer_config"
    return (
        refused(f"{optimizer}.optimizer", "the optimizer is AdamW: remove it", unless=("AdamW", "adamw", "adam")),
        refused(f"{optimizer}.optimizer_impl", "the optimizer is PyTorch's AdamW: remove it", unless=("torch.optim",)),
        refused((f"{optimizer}.num_cycles",), "a cosine falls once: remove it", unless=(0.5,)),
        refused(
            (f"{optimizer}.lr_warmup_init", f"{optimizer}.lr_start"), "warm-up begins at 0: remove it", unless=(0, 0.0)
        ),
        refused(
            f"{optimizer}.weight_decay_incr_style", "the weight decay is constant: remove it", unless=("constant",)
        ),
        refused(
            f"{optimizer}.lr_decay_ratio", "a learning rate decays until the last iteration: remove it", unless=(1, 1.0)
        ),
        without_equal(
            tuple(
                f"{optimizer}.{name}"
                for name in (
                    "total_training_steps",
                    "zero_indexed_step",
                    "lr_wsd_decay_style",
                    "lr_wsd_decay_steps",
                    "use_checkpoint_opt_param_scheduler",
                    "use_precision_aware_optimizer",
                    "main_grads_dtype",
                    "exp_avg_dtype",
                    "exp_avg_sq_dtype",
                )
            ),
            "the run's length is train.iterations; the optimizer's state is float32",
        ),
        without_equal(
            tuple(
                f"{override}.{name}"
                for name in (
                    "optimizer_cpu_offload",
                    "optimizer_offload_fraction",
                    "overlap_cpu_optimizer_d2h_h2d",
                    "use_precision_aware_optimizer",
                )
            ),
            "changes where the optimizer's state is, and not what it computes",
        ),
    )


MODEL_SHAPE = ("normalization", "swiglu", "num_moe_experts", "moe_router_topk", "persist_layer_norm")
"""Settings of Megatron's transformer that the model's own config.json decides."""
HOW_MEGATRON_COMPUTES = (
    *(
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
    ),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "deallocate_pipeline_outputs"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("attention_backend", "use_flash_attn", "apply_rope_fusion", "apply_dsa_kernel_fusion", "masked_softmax_fusion"),
    *("bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion"),
    *("use_fused_rmsnorm", "use_fused_swiglu", "use_fused_mhc", "use_naive_l2norm", "context_parallel_algo"),
    *("context_parallel_size", "sequence_parallel", "use_distributed_optimizer", "tp_comm_overlap"),
    *("moe_enable_deepep", "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap"),
    *("moe_token_dispatcher_type", "moe_router_dtype", "dsa_indexer_use_sparse_loss"),
)
"""Settings of Megatron's transformer that change its speed, its memory or its rounding."""


def _megatron(megatron: str, role: str) -> tuple[Counterpart, ...]:
    transformer = f"{megatron}.override_transformer_config"
    return (
        direct(f"{megatron}.dtype", "model.dtype", values={"bfloat16": "bfloat16", "float32": "float32"}),
        refused(
            (f"{transformer}.moe_aux_loss_coeff", f"{transformer}.moe_z_loss_coeff"),
            f"{role}.engine megatron has no load-balancing loss: remove it, or set {role}.engine fsdp and "
            "router_aux_loss_coef in the model's config.json",
            unless=(0, 0.0),
        ),
        refused(
            f"{transformer}.moe_router_load_balancing_type",
            f"{role}.engine megatron has no load-balancing loss: set none",
            unless=("none",),
        ),
        refused(
            f"{transformer}.moe_router_bias_update_rate", "the router's bias is not updated: set 0", unless=(0, 0.0)
        ),
        without_equal(f"{transformer}.moe_router_enable_expert_bias", "the model's own config.json decides"),
        refused(
            (f"{transformer}.attention_dropout", f"{transformer}.hidden_dropout"),
            "there is no dropout in training: remove it",
            unless=(0, 0.0),
        ),
        refused(f"{transformer}.dsa_indexer_loss_coeff", "there is no loss of the indexer: set 0", unless=(0, 0.0)),
        without_equal(tuple(f"{transformer}.{name}" for name in MODEL_SHAPE), "the model's own config.json decides"),
        without_equal(
            tuple(f"{transformer}.{name}" for name in HOW_MEGATRON_COMPUTES), "changes memory, speed or rounding only"
        ),
        without_equal(
            (
                *(f"{megatron}.{name}" for name in COMPUTING),
                *(
                    f"{megatron}.{name}"
                    for name in (
                        "virtual_pipeline_model_parallel_size",
                        "expert_tensor_parallel_size",
                        "sequence_parallel",
                        "dynamic_context_parallel",
                        "max_seqlen_per_dp_cp_rank",
                        "use_remove_padding",
                        "pad_bshd_to_minibatch_max",
                        "use_megatron_fsdp",
                        "seed",
                        "override_ddp_config.*",
                    )
                ),
            ),
            f"changes memory and speed only; {role}.engine megatron splits layers and experts its own way",
        ),
        without_equal(
            tuple(
                f"{megatron}.{name}"
                for name in (
                    "use_mbridge",
                    "vanilla_mbridge",
                    "use_dist_checkpointing",
                    "dist_checkpointing_path",
                    "dist_checkpointing_prefix",
                    "dist_ckpt_optim_fully_reshardable",
                    "distrib_optim_fully_reshardable_mem_efficient",
                )
            ),
            "weights are those of model.path, a Hugging Face model",
        ),
    )


def _fsdp(engine: str) -> tuple[Counterpart, ...]:
    return (
        without_equal(
            (f"{engine}.model_dtype", f"{engine}.mixed_precision.*"),
            "trained weights and summed gradients are float32; model.dtype computes",
        ),
        without_equal(f"{engine}.full_determinism", "see run.deterministic"),
        without_equal(
            (
                *(f"{engine}.{name}" for name in COMPUTING),
                *(
                    f"{engine}.{name}"
                    for name in (
                        "wrap_policy.*",
                        "offload_policy",
                        "forward_prefetch",
                        "use_orig_params",
                        "forward_only",
                        "seed",
                        "qat.*",
                        "turbo_config.*",
                    )
                ),
            ),
            "changes memory and speed only",
        ),
    )


def _router_replay(sections: Iterable[str], role: str) -> tuple[Counterpart, ...]:
    names = tuple(sections)
    modes = tuple(f"{name}.mode" for name in names)

    def convert(settings: Settings) -> Converted:
        given = {name: settings[name] for name in modes if settings.has(name)}
        for name, mode in given.items():
            if mode not in (None, "disabled", "R3"):
                raise UserError(f"{name} is {mode}: only the rollout's routes are repeated: set R3, or disabled")
        return {"rollout.router_replay": True} if "R3" in given.values() else {}

    return (
        computed(modes, "rollout.router_replay", convert, "R3 is true, disabled is false")
        if role == "actor"
        else refused(modes, "only the actor repeats the rollout's routes: set disabled", unless=("disabled",)),
        without_equal(
            tuple(f"{name}.{file}" for name in names for file in ("record_file", "replay_file")),
            "only router_replay.mode record and replay read it",
        ),
    )


def _critic_loss(settings: Settings) -> Converted:
    key = "critic.loss_agg_mode" if settings.has("critic.loss_agg_mode") else f"{ACTOR}.loss_agg_mode"
    if settings[key] != "token-mean":
        raise UserError(f"{key} is {settings[key]}, and the critic's loss is token-mean: set critic.loss_agg_mode so")
    raise NoEqual("the critic's loss is token-mean")


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


SERVING = (
    *("nnodes", "n_gpus_per_node", "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"),
    *("moe_tensor_parallel_size", "cudagraph_capture_sizes", "free_cache_engine", "max_num_batched_tokens"),
    *("enable_chunked_prefill", "scheduling_policy", "load_format", "layered_summon", "disable_log_stats"),
    *("multi_stage_wake_up", "logprobs_mode", "agent.num_workers", "checkpoint_engine.*", "trace.*", "prometheus.*"),
    *("skip_tokenizer_init", "moe_load_balance_metrics_interval", "profiler.*", "disaggregation.*", "mtp.*", "qat.*"),
)
"""Settings of verl's inference engines that change their speed and memory."""

LOG_PROB_SIZES = ("micro_batch_size_per_gpu", "micro_batch_size", "max_token_len_per_gpu", "use_dynamic_bsz")

OVERRIDES = (
    *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "num_hidden_layers"),
    *("rope_scaling", "rope_scaling.*", "rope_theta", "moe_config.freeze_moe_router", "output_router_logits"),
)
"""Keys of a model's config.json that change what it computes."""

_REFUSED = (
    refused("data.image_key", COLUMNS_OF_IMAGES, unless=("images", "image")),
    refused(("data.video_key", "data.audio_key"), f"the rows have videos or sounds: {NO_VIDEO}"),
    without_equal("data.image_patch_size", "the model's processor knows its patches"),
    refused(
        "data.mm_processor_kwargs.*",
        "images are processed as preprocessor_config.json says: set it there, and remove it",
    ),
    computed(
        f"{ACTOR}.freeze_vision_tower",
        "model.freeze_vision",
        _freeze_vision,
        "false if the rows have images, as verl's",
    ),
    direct("data.shuffle", "data.shuffle"),
    refused("data.prompt_key", "the column is prompt: rename it", unless=("prompt",)),
    refused("data.reward_fn_key", "the column is data_source: rename it", unless=("data_source",)),
    refused(
        ("data.custom_cls.path", "data.sampler.class_path"), "prompts are read and drawn as data.train says: remove it"
    ),
    refused(
        ("data.train_max_samples", "data.val_max_samples"), "files are read whole: write a shorter one", unless=(-1,)
    ),
    refused(
        ("data.tokenizer", f"{MODEL}.tokenizer_path", f"{MODEL}.hf_config_path"),
        "tokenizer and config are those in model.path: remove it",
    ),
    refused(
        (
            "data.tool_config_path",
            "data.function_tool_path",
            f"{ROLLOUT}.multi_turn.enable",
            f"{ROLLOUT}.multi_turn.tool_config_path",
            f"{ROLLOUT}.multi_turn.function_tool_path",
            f"{ROLLOUT}.multi_turn.interaction_config_path",
        ),
        "turns and tools are Python here: set rollout.tools or rollout.environment (docs/rewards.md), and remove it",
    ),
    refused(
        f"{ROLLOUT}.agent.default_agent_loop",
        "turns are taken by rollout.environment or rollout.agent (docs/agents.md): set one, and remove it",
        unless=("single_turn_agent",),
    ),
    refused(
        (
            f"{ROLLOUT}.agent.agent_loop_config_path",
            f"{ROLLOUT}.agent.custom_async_server.*",
            f"{ROLLOUT}.agent.agent_loop_manager_class",
        ),
        "turns are taken by rollout.environment or rollout.agent (docs/agents.md): set one, and remove it",
    ),
    without_equal(f"{ROLLOUT}.enable_rollout_routing_replay", "the rollout returns routes if the actor repeats them"),
    vllm_args(f"{ROLLOUT}.engine_kwargs.vllm"),
    refused(f"{ROLLOUT}.quantization_config_file", "see rollout.engine.quantization: remove it"),
    refused(f"{ROLLOUT}.dtype", "vLLM generates in model.dtype: remove it", unless=("bfloat16", "auto")),
    refused(f"{ROLLOUT}.do_sample", "responses are always sampled: remove it", unless=(True,)),
    refused(f"{ROLLOUT}.over_sample_rate", "every trajectory is finished: set 0", unless=(0, 0.0)),
    without_equal(f"{ROLLOUT}.limit_images", "a prompt has the images of its row"),
    refused((f"{MODEL}.mtp.enable_train",), "layers that predict several tokens are not trained: set false"),
    refused(
        (f"{MODEL}.lora.rank",),
        f"engine megatron has no adapters: remove it, or set model_engine=dp and {MODEL}.lora_rank",
        unless=(0,),
    ),
    refused(
        (f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path"),
        "adapters begin untrained: merge them into the model at model.path, and remove it",
    ),
    refused(
        f"{MODEL}.exclude_modules",
        "model.lora.target_modules names the layers that get adapters: remove it",
        unless=(VISUAL,),
    ),
    refused(
        (
            *(f"{model}.override_config.{name}" for model in (MODEL, "critic.model") for name in OVERRIDES),
            f"{MODEL}.external_lib",
            "critic.model.external_lib",
        ),
        "the model is that in model.path, with its config.json: change it there",
    ),
    refused(
        (
            "critic.model.tokenizer_path",
            "critic.model.hf_config_path",
            "critic.model.lora_adapter_path",
            "critic.model.lora.*",
        ),
        "the critic is critic.model, with its own tokenizer and config: remove it",
    ),
    refused(
        "critic.model.lora_rank", "the critic's adapters are critic.model.lora: set it, and remove this", unless=(0,)
    ),
    refused(f"{ACTOR}.loss_scale_factor", "seq-mean-token-sum-norm divides by rollout.max_response_tokens: remove it"),
    without_equal(f"{ACTOR}.calculate_sum_pi_squared", "computed where algorithm.advantage needs it"),
    refused(
        "reward.reward_manager.name",
        "rewards are functions of single responses, or of all to a prompt (docs/rewards.md): set naive",
        unless=("naive", "dapo", "gdpo", "rate_limited"),
    ),
    refused(
        ("reward.reward_manager.source",), "rewards are functions (docs/rewards.md): remove it", unless=("register",)
    ),
    refused(("reward.reward_manager.module.path",), "rewards are functions (docs/rewards.md): remove it"),
    refused(
        "reward.sandbox_fusion.url", "reward.function code runs programs on the workers (docs/security.md): remove it"
    ),
    refused("algorithm.use_pf_ppo", "there is no PF-PPO: set false"),
    refused(
        "algorithm.filter_groups.metric",
        "groups are compared by their scores: set score",
        unless=("score", "acc", "seq_reward", "seq_final_reward"),
    ),
    refused("critic.enable", "algorithm.adv_estimator decides: remove it"),
    refused(f"{DISTILLATION}.policy_loss_mode", "the loss is ppo: set vanilla", unless=("vanilla",)),
    refused("distillation.teacher_key", "teacher.models go by data_source: set it", unless=("data_source",)),
    refused("trainer.val_only", "this converts trainings: `ratchet evaluate` only measures"),
    refused("trainer.v1.trainer_mode", "see rollout.mode, and set sync", unless=("sync",)),
    refused("trainer.v1.sampler.custom_sampler.*", "prompts are drawn as data.train says: remove it"),
    refused(
        ("async_training.*", "rollout.*"),
        "the fully asynchronous trainer has no iterations: use main_ppo, and set rollout.mode async",
        unless=(),
    ),
    refused(
        "actor_rollout_ref.hybrid_engine",
        "rollout and trainer share their GPUs: set true, or use placement",
        unless=(True,),
    ),
    refused("skip.rollout.enable", "responses of another run are data.generations: set false"),
    refused(
        ("skip.rollout_tq.enable", "skip.async_rollout.enable"),
        "responses of another run are data.generations: set false",
    ),
)
"""Settings that change the result and have no counterpart."""

_NOT_NEEDED = (
    without_equal("data.validation_shuffle", "validation reads every prompt"),
    without_equal(("data.val_batch_size",), "validation runs in shards, like generate"),
    without_equal(
        tuple(
            f"data.{name}"
            for name in (
                "custom_cls.name",
                "return_raw_chat",
                "return_raw_input_ids",
                "return_full_prompt",
                "return_multi_modal_inputs",
                "trust_remote_code",
                "use_shm",
                "dataloader_num_workers",
                "filter_overlong_prompts_workers",
            )
        ),
        "the rows are read as they are",
    ),
    without_equal(
        (
            f"{OVERLONG}.log",
            "reward.reward_kwargs.max_resp_len",
            "reward.reward_manager.module.name",
            "reward.reward_manager.max_concurrent",
        ),
        "algorithm.overlong_penalty is what verl's dapo manager adds",
    ),
    without_equal(
        ("reward.sandbox_fusion.max_concurrent", "reward.sandbox_fusion.memory_limit_mb"),
        "reward.function code has limits of its own",
    ),
    without_equal(
        (
            "reward.reward_model.rollout.*",
            "reward.reward_model.enable_resource_pool",
            "reward.reward_model.n_gpus_per_node",
            "reward.reward_model.nnodes",
            "reward.reward_model.model.trust_remote_code",
        ),
        "the reward model is computed in the models' processes",
    ),
    without_equal("algorithm.filter_groups.max_inflight_gen_batches", "changes speed only"),
    without_equal("algorithm.pf_ppo.*", "only use_pf_ppo reads it"),
    without_equal(
        (
            f"{DISTILLATION}.topk",
            f"{DISTILLATION}.log_prob_min_clamp",
            f"{DISTILLATION}.use_chunked_topk",
            f"{DISTILLATION}.chunked_topk_chunk_size",
        ),
        "only verl's forward_kl_topk reads it",
    ),
    without_equal(
        ("distillation.n_gpus_per_node", "distillation.nnodes"),
        "one pool serves all roles; see placement (docs/clusters.md)",
    ),
    without_equal(
        (
            *(
                f"{REFERENCE}.{name}"
                for name in (*COMPUTING, "strategy", "rollout_n", "ulysses_sequence_parallel_size")
            ),
            *(f"{REFERENCE}.log_prob_{name}" for name in LOG_PROB_SIZES),
            *(f"{REFERENCE}.{name}.*" for name in ("fsdp_config", "megatron", "veomni", "profiler", "router_replay")),
        ),
        "the reference computes as the actor does: actor.micro_batch_tokens, actor.engine and so on",
    ),
    without_equal(
        tuple(f"{ROLLOUT}.log_prob_{name}" for name in LOG_PROB_SIZES),
        "log-probs are computed in actor.micro_batch_tokens",
    ),
    without_equal(f"{ROLLOUT}.mode", "vLLM always serves requests one by one; rollout.mode is something else"),
    without_equal(f"{ROLLOUT}.calculate_log_probs", "the rollout's log-probs are always stored"),
    without_equal(f"{ROLLOUT}.prompt_length", "prompts have at most data.max_prompt_tokens"),
    without_equal(
        tuple(
            f"{ROLLOUT}.multi_turn.{name}"
            for name in (
                "max_assistant_turns",
                "max_user_turns",
                "max_parallel_calls",
                "max_tool_response_length",
                "tool_response_truncate_side",
                "use_inference_chat_template",
                "tokenization_sanity_check_mode",
                "format",
                "num_repeat_rollouts",
            )
        ),
        "only multi_turn.enable reads it",
    ),
    without_equal(
        (f"{ROLLOUT}.seed", f"{ROLLOUT}.full_determinism"), "every trajectory has a seed of its own, from run.seed"
    ),
    without_equal(
        (
            *(f"{ROLLOUT}.{name}" for name in SERVING),
            *(
                f"{ROLLOUT}.engine_kwargs.vllm.{name}"
                for name in (
                    "additional_config.*",
                    "max_model_len",
                    "mm_processor_cache_gb",
                    "attention_backend",
                    "disable_mm_preprocessor_cache",
                )
            ),
            *(
                f"{ROLLOUT}.engine_kwargs.sglang.{name}"
                for name in ("attention_backend", "chunked_prefill_size", "enable_dp_attention", "mem_fraction_static")
            ),
        ),
        "changes memory and speed of generation only",
    ),
    without_equal(
        tuple(
            f"{model}.{name}"
            for model in (MODEL, "critic.model")
            for name in (
                "use_shm",
                "use_fused_kernels",
                "fused_kernel_options.*",
                "enable_activation_offload",
                "tiled_mlp.*",
            )
        ),
        "changes memory and speed only",
    ),
    without_equal(
        tuple(
            f"{model}.override_config.{name}"
            for model in (MODEL, "critic.model")
            for name in ("max_position_embeddings", "model_config.max_position_embeddings", "attn_implementation")
        ),
        "the model's own config.json decides; see model.attention",
    ),
    without_equal(
        f"{MODEL}.mtp.*", "layers that predict several tokens are not trained, and do not speed up generation"
    ),
    without_equal(f"{MODEL}.lora.*", "only lora.rank turns Megatron's adapters on"),
    without_equal(
        (
            "critic.model.lora_alpha",
            "critic.model.target_modules",
            "critic.model.exclude_modules",
            "critic.model.trust_remote_code",
            "critic.model.custom_chat_template",
            "critic.model.use_liger",
            "critic.model.mtp.*",
        ),
        "critic.model is a model of its own",
    ),
    without_equal(("actor_rollout_ref.nccl_timeout", "critic.nccl_timeout"), "see pools.all.timeout_s"),
    without_equal((f"{ACTOR}.calculate_entropy",), "the entropy is always measured"),
    direct("trainer.project_name", "run.project"),
    without_equal("trainer.balance_batch", "sequences are always spread evenly over processes"),
    without_equal(
        ("trainer.default_local_dir", "trainer.default_hdfs_dir", "data.output_path"),
        "everything is in run.store, file://./runs unless set",
    ),
    without_equal(("trainer.resume_mode", "trainer.resume_from_path"), "the same command always resumes"),
    without_equal(
        ("trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
        "every trajectory is stored: `ratchet show`",
    ),
    without_equal(
        tuple(
            f"trainer.{name}"
            for name in (
                "device",
                "max_critic_ckpt_to_keep",
                "del_local_ckpt_after_load",
                "esi_redundant_time",
                "ray_wait_register_center_timeout",
                "use_v1",
                "use_legacy_worker_impl",
                "v1.*",
            )
        ),
        "changes no result",
    ),
    without_equal("ray_kwargs.*", "Ray is started outside; pools use it (docs/clusters.md)"),
    without_equal(("global_profiler.*", "transfer_queue.*", "skip.*"), "changes no result"),
)
"""Settings without a counterpart that change no result."""

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
    refused(f"{MODEL}.custom_chat_template", "model.chat_template is a file: write the template into one"),
    computed("data.apply_chat_template_kwargs.*", "model.chat_template_kwargs", _chat_template),
    computed("data.train_files", "data.train", _train_files, "the same Parquet rows"),
    direct("data.train_batch_size", "data.prompts_per_iteration", "prompts, not trajectories"),
    direct("data.max_prompt_length", "data.max_prompt_tokens"),
    computed(("data.truncation", "data.filter_overlong_prompts"), "data.truncation", _truncation, "true is `drop`"),
    computed(
        ("data.max_response_length", f"{ROLLOUT}.response_length"), "rollout.max_response_tokens", _response_length
    ),
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
    computed("reward.custom_reward_function.reward_kwargs.*", "reward.options", _reward_options),
    direct("reward.num_workers", "reward.workers"),
    replace(_ADVANTAGE, convert=_advantage),
    computed(
        (
            "distillation.enabled",
            "distillation.teacher_models.*",
            *(
                f"{DISTILLATION}.{name}"
                for name in (
                    "loss_mode",
                    "use_task_rewards",
                    "use_policy_gradient",
                    "distillation_loss_coef",
                    "loss_max_clamp",
                )
            ),
        ),
        ("teacher.path", "teacher.models", "algorithm.distillation.coef", "algorithm.distillation.clamp"),
        _distillation,
        "several teachers by their `key`; `k1` with the policy gradient",
    ),
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
    computed(
        "algorithm.rollout_correction.loss_type",
        "algorithm.loss.type",
        _reinforce,
        "in bypass_mode, `reinforce` is `gpg`",
    ),
    direct(
        f"{ACTOR}.policy_loss.loss_mode", "algorithm.loss.type", "the same names; `vanilla` is `ppo`", values={**LOSSES}
    ),
    computed(
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio", f"{DISTILLATION}.clip_ratio_low"),
        "algorithm.loss.clip_ratio_low",
        _clip("low"),
        "verl reads clip_ratio only where clip_ratio_low is null; its default is 0.2",
    ),
    computed(
        (f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio", f"{DISTILLATION}.clip_ratio_high"),
        "algorithm.loss.clip_ratio_high",
        _clip("high"),
    ),
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
            "algorithm.rollout_correction.loss_type",
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
            computed("critic.loss_agg_mode", (), _critic_loss, "the critic's loss is token-mean"),
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
    *(
        computed(f"{ROLLOUT}.val_kwargs.{name}", f"validation.{name}", _validation(_validation_draws(name)), note)
        for name, note in (("top_p", ""), ("top_k", "-1 is 0"))
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
    *_REFUSED,
    *_NOT_NEEDED,
)

OLDER = {
    "custom_reward_function.*": "reward.custom_reward_function.*",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.*": f"{OVERLONG}.*",
    "reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    "reward.reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    f"{ACTOR}.model_engine": "model_engine",
    f"{ACTOR}.policy_loss.tau_pos": f"{ACTOR}.tau_pos",
    f"{ACTOR}.policy_loss.tau_neg": f"{ACTOR}.tau_neg",
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
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
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
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    f"{DISTILLATION}.loss_mode": "k3",
    f"{DISTILLATION}.use_task_rewards": True,
    f"{DISTILLATION}.use_policy_gradient": False,
    f"{DISTILLATION}.distillation_loss_coef": 1.0,
    f"{DISTILLATION}.clip_ratio_low": 0.2,
    f"{DISTILLATION}.clip_ratio_high": 0.2,
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
