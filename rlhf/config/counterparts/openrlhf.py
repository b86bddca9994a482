"""OpenRLHF's settings, and ours.

Its keys and defaults are those of `openrlhf.cli.train_ppo_ray` in August 2026. Older releases have flags with
underscores for the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.rlhf.config.counterparts.shared import (
    LENGTH,
    NO_DUAL_CLIP,
    data_file,
    known_iterations,
    lr_schedule,
    run_length,
    run_name,
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

ESTIMATORS: dict[str, Value] = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}


def _estimator(settings: Settings) -> str:
    return str(settings["algo.advantage.estimator"])


def _prompt_tokens(settings: Settings) -> Converted:
    longest = settings.count("data.max_len")
    if settings.has("data.prompt_max_len"):
        return {"data.max_prompt_tokens": settings.count("data.prompt_max_len")}
    if settings.has("rollout.max_new_tokens"):
        tokens = longest - settings.count("rollout.max_new_tokens")
        if tokens <= 0:
            raise UserError("rollout.max_new_tokens leaves no room for a prompt in data.max_len: lower it")
        return {"data.max_prompt_tokens": tokens}
    return {"data.max_prompt_tokens": Assumed(longest // 2, "half of data.max_len, which limits the sum")}


def _response_tokens(settings: Settings) -> Converted:
    if settings.has("rollout.max_new_tokens"):
        return {"rollout.max_response_tokens": settings.count("rollout.max_new_tokens")}
    why = "half of data.max_len, which limits the sum"
    return {"rollout.max_response_tokens": Assumed(settings.count("data.max_len") // 2, why)}


def _reward(settings: Settings) -> Converted:
    if settings.has("train.agent_func_path"):
        path = settings.text("train.agent_func_path")
        raise UserError(
            f"train.agent_func_path is {path}, a program around the policy: write it as rollout.environment or "
            "rollout.agent (docs/agents.md), and remove it"
        )
    if settings.has("reward.remote_url"):
        url = settings.text("reward.remote_url")
        if not url.endswith(".py"):
            raise UserError(f"reward.remote_url is {url}, a server: set it to a .py file with a function that asks it")
        why = "write there compute_score(data_source, solution_str, ground_truth, extra_info) -> float, of one response"
        return {"reward.function": Assumed(f"{url}:compute_score", why)}
    if settings.has("reward.model_name_or_path"):
        return {"reward.function": None, "reward.model.path": settings.text("reward.model_name_or_path")}
    return {"reward.function": Assumed("auto", "no reward is given: by data_source")}


def _advantage(key: str, ours: str, *types: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        if _estimator(settings) not in types:
            raise NoEqual(f"the advantage {ESTIMATORS.get(_estimator(settings))} has no {ours}")
        return {f"algorithm.advantage.{ours}": settings[key]}

    return convert


def _std(settings: Settings) -> Converted:
    if not settings.flag("algo.advantage.no_std_norm"):
        raise NoEqual("off, as here")
    if _estimator(settings) != "gae":
        raise NoEqual("it concerns the whitened advantages, which algorithm.advantage.whiten turns on and off")
    return {"algorithm.advantage.whiten": Assumed(False, "which does not subtract the mean either")}


def _clips(settings: Settings) -> Converted:
    low = high = settings["actor.eps_clip"]
    pair = settings["actor.eps_clip_low_high"]
    if isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2:
        low, high = pair
    clips: dict[str, Value | Assumed] = {"algorithm.loss.clip_ratio_low": low, "algorithm.loss.clip_ratio_high": high}
    if settings["actor.policy_loss_type"] == "gspo":
        return clips
    dual = settings["actor.dual_clip"]
    why = "so large that there is no dual clip: OpenRLHF has none unless told"
    clips["algorithm.loss.clip_ratio_c"] = Assumed(NO_DUAL_CLIP, why) if dual is None else dual
    return clips


def _kl(settings: Settings) -> Converted:
    coefficient, estimator = settings.number("algo.kl.init_coef"), str(settings["algo.kl.estimator"])
    if not coefficient:
        raise NoEqual("0 has no reference, as algorithm.kl without coefficients has none")
    if settings.flag("algo.kl.use_loss"):
        why = "the gradient of k1 in the loss is 0 on average; k1+ has the same value, and the right gradient"
        return {
            "algorithm.kl.in_loss": coefficient,
            "algorithm.kl.loss_estimator": Assumed("k1+", why) if estimator == "k1" else estimator,
        }
    why = f"k1: {estimator} does not hold the policy near the reference in the reward"
    converted: dict[str, Value | Assumed] = {
        "algorithm.kl.in_reward": coefficient if estimator == "k1" else Assumed(coefficient, why)
    }
    if settings.has("algo.kl.target"):
        converted["algorithm.kl.controller.type"] = "adaptive"
        converted["algorithm.kl.controller.target"] = settings.number("algo.kl.target")
        converted["algorithm.kl.controller.horizon"] = settings.count("algo.kl.horizon")
    return converted


def _correction(settings: Settings) -> Converted:
    prefix = "algorithm.rollout_correction"
    if not settings.flag("algo.advantage.is_correction_enable"):
        why = "OpenRLHF corrects nothing unless told; null could truncate importance weights"
        return {prefix: Assumed({}, why)}
    bounds, kind = settings["algo.advantage.is_correction_threshold"], settings["algo.advantage.is_correction_type"]
    low, high = bounds if isinstance(bounds, list | tuple) and len(bounds) == 2 else (None, bounds)
    if kind == "seq-mask-tis":
        statistic: Value = [{"statistic": "seq_mean_k1", "upper": high, "lower": low}]
        why = "the geometric mean of a trajectory's ratios is bounded; its tokens have no weights"
        return {f"{prefix}.rejection": Assumed(statistic, why)}
    weights: dict[str, Value | Assumed] = {f"{prefix}.weights.level": "token", f"{prefix}.weights.upper": high}
    if kind == "icepop":
        return weights | {f"{prefix}.weights.lower": low}
    weights[f"{prefix}.weights.upper"] = Assumed(high, f"weights below {low} are raised to it in OpenRLHF, not here")
    return weights


def _dynamic_sampling(settings: Settings) -> Converted:
    if not settings.flag("algo.dynamic_filtering_enable"):
        raise NoEqual("off, as algorithm.dynamic_sampling null is")
    why = "OpenRLHF draws without limit, and keeps prompts whose mean score is in dynamic_filtering_range: ten batches"
    return {"algorithm.dynamic_sampling.max_prompts": Assumed(10 * settings.count("rollout.batch_size"), why)}


def _overlong(settings: Settings) -> Converted:
    if not settings.has("reward.overlong_buffer_len"):
        raise NoEqual("off, as algorithm.overlong_penalty null is")
    return {
        "algorithm.overlong_penalty.buffer_tokens": settings.count("reward.overlong_buffer_len"),
        "algorithm.overlong_penalty.factor": settings.number("reward.overlong_penalty_factor"),
    }


def _iterations(settings: Settings) -> Converted:
    names = settings.texts("data.prompt_dataset") if settings.has("data.prompt_dataset") else []
    epochs, prompts = settings.count("train.num_episodes"), settings.count("rollout.batch_size")
    is_dynamic = settings.flag("algo.dynamic_filtering_enable")
    most = settings.count("data.max_samples") if settings.has("data.max_samples") else None
    return run_length(settings, names, epochs, prompts, "train.num_episodes", is_dynamic=is_dynamic, most=most)


def _pool(settings: Settings) -> Converted:
    workers = settings.count("actor.num_nodes") * settings.count("actor.num_gpus_per_node")
    if workers == 1:
        raise NoEqual("one GPU needs no pool: the driver's process uses it")
    together = settings.flag("train.colocate_all")
    why = "one pool for all models, which take turns; placement can separate them (docs/clusters.md)"
    return {"pools.all.workers": workers if together else Assumed(workers, why), "pools.all.gpus_per_worker": 1}


def _micro_batch(settings: Settings) -> Converted:
    longest = settings.count("data.max_len")
    tokens = longest * settings.count("train.micro_batch_size")
    if settings.flag("train.dynamic_batch_enable"):
        tokens = max(longest, settings.count("train.max_tokens_per_gpu"))
    both = {"actor.micro_batch_tokens": tokens}
    return {**both, "critic.micro_batch_tokens": tokens} if _estimator(settings) == "gae" else both


def _mini_batch(settings: Settings) -> Converted:
    size = settings.count("train.batch_size")
    both = {"actor.mini_batch_trajectories": size}
    return {**both, "critic.mini_batch_trajectories": size} if _estimator(settings) == "gae" else both


def _ema(settings: Settings) -> Converted:
    if not settings.flag("train.enable_ema"):
        raise NoEqual("off, as actor.ema_decay null is")
    trajectories = settings.count("rollout.batch_size") * settings.count("rollout.n_samples_per_prompt")
    steps = max(1, trajectories // settings.count("train.batch_size")) * settings.count("train.max_epochs")
    beta = settings.number("train.ema_beta")
    why = f"ema_beta {beta:g} for each of an iteration's {steps} optimizer steps"
    return {"actor.ema_decay": beta if steps == 1 else Assumed(beta**steps, why)}


def _both(theirs: str, ours: str, note: str = "") -> Counterpart:
    """Builds a row for a setting that OpenRLHF has for actor and critic together."""

    def convert(settings: Settings) -> Converted:
        value = settings[theirs]
        if value is None:
            return {}
        return {f"actor.{ours}": value} | ({f"critic.{ours}": value} if _estimator(settings) == "gae" else {})

    return computed(theirs, (f"actor.{ours}", f"critic.{ours}"), convert, note)


def _trainer(role: str) -> tuple[Counterpart, ...]:
    """Returns the rows that actor and critic share."""

    def of_role(conversion: Conversion) -> Conversion:
        def convert(settings: Settings) -> Converted:
            if role == "critic" and _estimator(settings) != "gae":
                raise NoEqual(f"the estimator {_estimator(settings)} has no critic")
            return conversion(settings)

        return convert

    def schedule(settings: Settings) -> Converted:
        return lr_schedule(
            role,
            str(settings[f"{role}.lr_scheduler"]),
            0,
            settings.number(f"{role}.lr_warmup_ratio"),
            settings.number(f"{role}.min_lr_ratio"),
            known_iterations(_iterations(settings)),
        )

    def copied(theirs: str, ours: str) -> Counterpart:
        def convert(settings: Settings) -> Converted:
            return {} if settings[theirs] is None else {ours: settings[theirs]}

        return Counterpart((theirs,), (ours,), "", of_role(convert), is_direct=role == "actor")

    return (
        copied(f"{role}.adam.lr", f"{role}.lr"),
        copied(f"{role}.adam.betas", f"{role}.optimizer.betas"),
        copied(f"{role}.adam.weight_decay", f"{role}.optimizer.weight_decay"),
        copied(f"{role}.max_norm", f"{role}.grad_clip"),
        copied(f"{role}.gradient_checkpointing_enable", f"{role}.gradient_checkpointing"),
        computed(
            (f"{role}.lr_scheduler", f"{role}.lr_warmup_ratio", f"{role}.min_lr_ratio"),
            f"{role}.lr_schedule",
            of_role(schedule),
            "iterations, not shares of them",
        ),
        refused(f"{role}.optim", "the optimizer is AdamW: set adam", unless=("adam",)),
        refused(f"{role}.adam.eps", "AdamW's epsilon is 1e-8: remove it", unless=(1e-8,)),
        without_equal(f"{role}.muon.*", "the optimizer is AdamW"),
    )


def _engine(settings: Settings) -> Converted:
    roles = ("actor", "critic") if _estimator(settings) == "gae" else ("actor",)
    return {f"{role}.engine": "deepspeed" for role in roles}


def _lora(settings: Settings) -> Converted:
    if settings.count("ds.lora.rank") <= 0:
        raise NoEqual("rank 0 trains all weights, as model.lora null does")
    return {
        "model.lora.r": settings.count("ds.lora.rank"),
        "model.lora.alpha": settings.number("ds.lora.alpha"),
        "model.lora.target_modules": settings.texts("ds.lora.target_modules"),
    }


def _snapshots(settings: Settings) -> Converted:
    every = settings.count("ckpt.save_steps")
    if every <= 0:
        raise NoEqual("checkpoint.every null takes snapshots as often as they are cheap")
    return {"checkpoint.every": every}


def _evaluation(theirs: str, ours: str, note: str = "") -> Counterpart:
    """Builds a row that applies only to runs that evaluate."""

    def convert(settings: Settings) -> Converted:
        if not settings.has("eval.dataset"):
            raise NoEqual("there is no eval.dataset")
        return {ours: max(0, settings.number(theirs))}

    return computed(theirs, ours, convert, note)


def _critic_path(settings: Settings) -> Converted:
    if _estimator(settings) != "gae":
        raise NoEqual(f"the estimator {_estimator(settings)} has no critic")
    if settings.has("critic.model_name_or_path"):
        return {"critic.model.path": settings["critic.model_name_or_path"]}
    if settings.has("reward.model_name_or_path") and not settings.has("reward.remote_url"):
        why = "OpenRLHF starts the critic from the reward model"
        return {"critic.model.path": Assumed(settings["reward.model_name_or_path"], why)}
    return {}


def _freeze_vision(settings: Settings) -> Converted:
    if settings.has("actor.freeze_visual_encoder"):
        return {"model.freeze_vision": settings.flag("actor.freeze_visual_encoder")}
    if settings.has("data.max_images_per_prompt") and settings.count("data.max_images_per_prompt") > 0:
        return {"model.freeze_vision": Assumed(False, "OpenRLHF trains the vision tower unless told")}
    return {}


def _template(settings: Settings) -> Converted:
    if not settings.flag("data.apply_chat_template"):
        raise UserError(
            "data.apply_chat_template is off, but prompts are always written by a chat template: set it, and "
            "model.chat_template to one that adds nothing"
        )
    raise NoEqual("the tokenizer's chat template is always used")


def _clip_rewards(settings: Settings) -> Converted:
    bounds = settings["reward.clip_range"]
    if not isinstance(bounds, list | tuple) or len(bounds) != 2 or not all(isinstance(b, int | float) for b in bounds):
        raise UserError(f"reward.clip_range is {bounds!r}: it should be two numbers")
    low, high = bounds
    if low != -high:  # type: ignore[operator]
        raise UserError(f"reward.clip_range is {low} {high}, which is not symmetric: set -x x")
    return {"algorithm.advantage.clip_rewards": high}


COUNTERPARTS: tuple[Counterpart, ...] = (
    computed(
        "ckpt.output_dir",
        "run.name",
        lambda settings: (
            {"run.name": run_name(settings.text("ckpt.output_dir"))} if settings.has("ckpt.output_dir") else {}
        ),
        "its last part; everything is in run.store",
    ),
    direct("train.seed", "run.seed"),
    direct("train.full_determinism_enable", "run.deterministic"),
    direct("actor.model_name_or_path", "model.path", "the default of critic and reference too"),
    direct("ds.param_dtype", "model.dtype", values={"bf16": "bfloat16", "fp32": "float32"}),
    direct(
        "ds.attn_implementation",
        "model.attention",
        values={
            **{name: name for name in ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")},
            "eager": "sdpa",
        },
    ),
    direct("ds.use_liger_kernel", "model.kernels", values={"True": "liger", "False": "torch"}),
    computed(
        ("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"),
        ("model.lora.r", "model.lora.alpha", "model.lora.target_modules"),
        _lora,
        "rank 0 is null",
    ),
    computed(
        ("data.prompt_dataset", "data.prompt_split"),
        "data.train",
        lambda settings: data_file(settings, "data.prompt_dataset", "data.prompt_split"),
        "files of prompts, or `owner/name:split` of the hub",
    ),
    direct("rollout.batch_size", "data.prompts_per_iteration", "prompts, not trajectories"),
    computed(("data.max_len", "data.prompt_max_len"), "data.max_prompt_tokens", _prompt_tokens, "less the response"),
    computed("rollout.max_new_tokens", "rollout.max_response_tokens", _response_tokens),
    computed((), "data.truncation", lambda settings: {"data.truncation": Assumed("drop", "prompts that are too long")}),
    direct("rollout.n_samples_per_prompt", "rollout.n"),
    direct("rollout.temperature", "rollout.temperature"),
    direct("rollout.top_p", "rollout.top_p"),
    computed((), "rollout.engine", lambda settings: {"rollout.engine": "vllm"}),
    direct("vllm.tensor_parallel_size", "rollout.engine.tensor_parallel"),
    direct("vllm.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
    direct("vllm.enforce_eager", "rollout.engine.enforce_eager"),
    direct("vllm.enable_prefix_caching", "rollout.engine.prefix_caching"),
    computed(
        "train.async_enable",
        "rollout.mode",
        lambda settings: {"rollout.mode": "async" if settings.flag("train.async_enable") else "sync"},
        "true is `async`",
    ),
    direct("train.async_queue_size", "rollout.max_staleness"),
    direct("train.partial_rollout_enable", "rollout.partial"),
    computed(
        ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path"),
        ("reward.function", "reward.model.path"),
        _reward,
        "a function of one response, with verl's signature; agents are `rollout.environment`",
    ),
    direct("algo.advantage.estimator", "algorithm.advantage.type", "`group_norm` is `grpo`", values=ESTIMATORS),
    computed(
        "algo.advantage.gamma",
        "algorithm.advantage.gamma",
        _advantage("algo.advantage.gamma", "gamma", "gae", "reinforce"),
    ),
    computed("algo.advantage.lambd", "algorithm.advantage.lam", _advantage("algo.advantage.lambd", "lam", "gae")),
    computed("algo.advantage.no_std_norm", "algorithm.advantage.whiten", _std),
    direct("actor.policy_loss_type", "algorithm.loss.type", values={"ppo": "ppo", "gspo": "gspo"}),
    computed(
        ("actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip"),
        ("algorithm.loss.clip_ratio_low", "algorithm.loss.clip_ratio_high", "algorithm.loss.clip_ratio_c"),
        _clips,
        "there is a dual clip unless `clip_ratio_c` is large",
    ),
    computed(
        ("algo.kl.init_coef", "algo.kl.use_loss", "algo.kl.estimator", "algo.kl.target", "algo.kl.horizon"),
        ("algorithm.kl.in_reward", "algorithm.kl.in_loss", "algorithm.kl.loss_estimator", "algorithm.kl.controller"),
        _kl,
        "in the loss with use_loss, else in the reward; 0 is null",
    ),
    direct("actor.entropy_coef", "algorithm.entropy_coef"),
    computed(
        (
            "algo.advantage.is_correction_enable",
            "algo.advantage.is_correction_type",
            "algo.advantage.is_correction_threshold",
        ),
        ("algorithm.rollout_correction.weights", "algorithm.rollout_correction.rejection"),
        _correction,
        "`icepop` has `lower`",
    ),
    computed(
        ("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"),
        "algorithm.dynamic_sampling.max_prompts",
        _dynamic_sampling,
        "a bound in prompts",
    ),
    computed(
        ("reward.overlong_buffer_len", "reward.overlong_penalty_factor"),
        ("algorithm.overlong_penalty.buffer_tokens", "algorithm.overlong_penalty.factor"),
        _overlong,
    ),
    *_trainer("actor"),
    computed("critic.model_name_or_path", "critic.model.path", _critic_path),
    *_trainer("critic"),
    _both("train.max_epochs", "ppo_epochs", "passes over an iteration's trajectories, not over the data"),
    computed(
        "train.batch_size",
        ("actor.mini_batch_trajectories", "critic.mini_batch_trajectories"),
        _mini_batch,
        "trajectories of the whole run",
    ),
    computed(
        ("train.micro_batch_size", "train.dynamic_batch_enable", "train.max_tokens_per_gpu"),
        ("actor.micro_batch_tokens", "critic.micro_batch_tokens"),
        _micro_batch,
        "tokens; changes memory and speed, never the result",
    ),
    _both("ds.zero_stage", "engine.zero_stage"),
    _both("ds.adam_offload", "engine.offload"),
    _both("ds.ring_attn_size", "engine.sequence_parallel", "Ulysses, not a ring"),
    computed((), ("actor.engine", "critic.engine"), _engine),
    computed(
        "critic.value_clip",
        "critic.cliprange_value",
        lambda settings: (
            {"critic.cliprange_value": settings["critic.value_clip"]} if _estimator(settings) == "gae" else {}
        ),
    ),
    computed(
        ("actor.num_nodes", "actor.num_gpus_per_node", "train.colocate_all"),
        ("pools.all.workers", "pools.all.gpus_per_worker"),
        _pool,
        "a worker per GPU, on Ray; none for a single GPU",
    ),
    computed(
        "ckpt.save_steps",
        "checkpoint.every",
        _snapshots,
        "iterations in between are replayed, not lost",
    ),
    direct("ckpt.max_num", "checkpoint.keep.last"),
    computed(
        "eval.dataset",
        "validation.data",
        lambda settings: {"validation.data": settings["eval.dataset"]} if settings.has("eval.dataset") else {},
        "a prompt file",
    ),
    _evaluation("eval.n_samples_per_prompt", "validation.n"),
    _evaluation("eval.temperature", "validation.temperature"),
    _evaluation("eval.steps", "validation.every", "-1 is 0"),
    computed(
        "logger.wandb.key",
        "tracking",
        lambda settings: {"tracking": ["wandb"]} if settings.has("logger.wandb.key") else {},
        "the key is in the environment: WANDB_API_KEY",
    ),
    computed(
        "logger.tensorboard_dir",
        "tracking",
        lambda settings: {"tracking": ["tensorboard"]} if settings.has("logger.tensorboard_dir") else {},
        "the folder is the run's",
    ),
    computed(
        ("train.num_episodes", "data.max_samples"),
        LENGTH,
        _iterations,
        "iterations are epochs x rows / prompts, where the data can be read or max_samples is given",
    ),
    without_equal(
        ("data.input_key", "data.label_key"), "the columns are prompt and reward_model: `ratchet data prompts`"
    ),
    computed("data.apply_chat_template", (), _template, "the tokenizer's chat template is always used"),
    refused("data.input_template", "prompts are written by the chat template: remove it; see model.chat_template"),
    refused("data.prompt_probs", "weights of data.train's files are data.weights: set it, and remove this", unless=()),
    refused("reward.normalize_enable", "a reward model's score is used as it is; see reward.model.weight: remove it"),
    computed("reward.clip_range", "algorithm.advantage.clip_rewards", _clip_rewards, "symmetric"),
    refused("reward.stop_properly_penalty_coef", "see algorithm.overlong_penalty: remove it", unless=(1, 1.0)),
    refused(
        "critic.freezing_steps",
        "it counts optimizer steps: remove it, and set critic.warmup_iterations, in iterations",
        unless=(-1, 0),
    ),
    refused(
        "actor.aux_loss_coef",
        "it is router_aux_loss_coef in the model's config.json, with output_router_logits: set it there, and remove it",
        unless=(0, 0.0),
    ),
    without_equal("data.max_images_per_prompt", "a prompt has the images of its row"),
    refused("data.image_key", "the column is images, or image: rename it", unless=("images", "image")),
    computed(
        "actor.freeze_visual_encoder",
        "model.freeze_vision",
        _freeze_vision,
        "false if data.max_images_per_prompt is set, as OpenRLHF's",
    ),
    refused("ds.load_in_4bit", "weights are not quantized in training: remove it"),
    refused("ds.lora.dropout", "adapters have no dropout: set 0", unless=(0, 0.0)),
    without_equal("ds.packing_samples", "actor.packing null concatenates sequences where that saves time"),
    without_equal(("vllm.enable_sleep", "ds.enable_sleep"), "models of one pool take turns: actor.offload_when_idle"),
    without_equal(
        ("rollout.micro_batch_size", "rollout.max_tokens_per_gpu"), "log-probs are computed in actor.micro_batch_tokens"
    ),
    without_equal("rollout.vllm_generate_batch_size", "vLLM takes rollout.max_in_flight trajectories"),
    without_equal(
        (
            *(f"{role}.{name}" for role in ("ref", "reward", "critic") for name in ("num_nodes", "num_gpus_per_node")),
            *("ref.offload", "reward.offload", "vllm.num_engines"),
            *("train.colocate_actor_ref", "train.colocate_critic_reward"),
        ),
        "one pool serves all roles; see placement (docs/clusters.md)",
    ),
    without_equal(
        ("ckpt.*", "critic.save_value_network"), "everything is in run.store, and the same command always resumes"
    ),
    without_equal("eval.split", "`ratchet data` writes each split to a file"),
    without_equal(
        (
            *(f"vllm.{name}" for name in ("sync_backend", "sync_with_ray")),
            *(f"ds.{name}" for name in ("deepcompile", "zpg", "experts_implementation", "grad_accum_dtype")),
            *(f"ds.{name}" for name in ("overlap_comm", "use_universal_ckpt", "value_head_prefix")),
            *(f"ds.{name}" for name in ("tensor_parallel_size", "ring_attn_head_stride")),
            *("actor.gradient_checkpointing_reentrant", "critic.gradient_checkpointing_reentrant"),
            *("data.disable_fast_tokenizer", "data.dataloader_num_workers", "logger.*", "local_rank", "perf", "use_ms"),
        ),
        "changes memory and speed only",
    ),
    computed(("train.enable_ema", "train.ema_beta"), "actor.ema_decay", _ema, "over iterations, not optimizer steps"),
)

OLDER = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "param_dtype": "ds.param_dtype",
    "attn_implementation": "ds.attn_implementation",
    "use_liger_kernel": "ds.use_liger_kernel",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "prompt_data": "data.prompt_dataset",
    "prompt_max_len": "data.prompt_max_len",
    "max_len": "data.max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "max_samples": "data.max_samples",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "rollout_batch_size": "rollout.batch_size",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "policy_loss_type": "actor.policy_loss_type",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "entropy_loss_coef": "actor.entropy_coef",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "freezing_actor_steps": "critic.freezing_steps",
    "zero_stage": "ds.zero_stage",
    "adam_offload": "ds.adam_offload",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "packing_samples": "ds.packing_samples",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    **{
        f"{role}_{key}": f"{role}.{key}"
        for role in ("actor", "critic", "ref", "reward")
        for key in ("num_nodes", "num_gpus_per_node")
    },
    "eval_dataset": "eval.dataset",
    "eval_steps": "eval.steps",
    "eval_split": "eval.split",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "logging_steps": "logger.logging_steps",
}

DEFAULTS: dict[str, Value] = {
    "reward.clip_range": [-10, 10],
    "train.seed": 42,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "data.max_len": 2048,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.target_modules": "all-linear",
    "vllm.gpu_memory_utilization": 0.95,
    "train.async_queue_size": 1,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.is_correction_type": "tis",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "actor.policy_loss_type": "ppo",
    "actor.eps_clip": 0.2,
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.horizon": 10000,
    "reward.overlong_penalty_factor": 1.0,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 16192,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.ema_beta": 0.992,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "critic.value_clip": 0.5,
    "ckpt.save_steps": -1,
    "eval.steps": -1,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    **{f"{role}.adam.betas": [0.9, 0.95] for role in ("actor", "critic")},
    **{f"{role}.adam.weight_decay": 0.0 for role in ("actor", "critic")},
    **{f"{role}.lr_scheduler": "cosine_with_min_lr" for role in ("actor", "critic")},
    **{f"{role}.lr_warmup_ratio": 0.03 for role in ("actor", "critic")},
    **{f"{role}.min_lr_ratio": 0.1 for role in ("actor", "critic")},
    **{f"{role}.max_norm": 1.0 for role in ("actor", "critic")},
}

OPENRLHF = Source("OpenRLHF", COUNTERPARTS, DEFAULTS, OLDER, "openrlhf")
