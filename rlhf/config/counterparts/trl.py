"""TRL's settings, and ours.

Its keys and defaults are those of GRPOConfig and PPOConfig in July 2026, with what they inherit from TrainingArguments,
and of the ModelConfig and ScriptArguments of its scripts.
"""

from __future__ import annotations

from ratchet.rlhf.config.counterparts.shared import (
    LENGTH,
    NO_DUAL_CLIP,
    data_file,
    known_iterations,
    loss_option,
    lr_schedule,
    python_reward,
    run_length,
    run_name,
    services,
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

ATTENTION: dict[str, Value] = {
    **{name: name for name in ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")},
    "eager": "sdpa",
    "kernels-community/flash-attn2": "flash_attention_2",
    "kernels-community/flash-attn3": "flash_attention_3",
}
REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math", "think_format_reward": "format"}
LOSSES = {
    "grpo": ("ppo", "seq-mean-token-mean"),
    "dr_grpo": ("ppo", "seq-mean-token-sum-norm"),
    "dapo": ("ppo", "token-mean"),
    "bnpo": ("ppo", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", None),
    "vespo": ("vespo", "token-mean"),
}
"""Our loss and reduction, by `loss_type`."""


def _processes(settings: Settings) -> int:
    return settings.count("num_processes") if settings.has("num_processes") else 1


def _sized(settings: Settings, size: int) -> Value | Assumed:
    """Returns a size that depends on the number of processes."""
    return (
        size if settings.has("num_processes") else Assumed(size, "one process is assumed: num_processes is not given")
    )


def _step(settings: Settings) -> int:
    """Returns the completions of an optimizer step in GRPO, and of an iteration in PPO."""
    per_device = settings.count("per_device_train_batch_size")
    return per_device * settings.count("gradient_accumulation_steps") * _processes(settings)


def _schedule(settings: Settings, total: int | None, steps: float) -> Converted:
    """Converts the schedule of the learning rate; TRL counts optimizer steps."""
    shape, ratio = str(settings["lr_scheduler_type"]), 0.0
    warmup = settings.number("warmup_steps") if settings.has("warmup_steps") else 0
    if settings.has("warmup_ratio"):
        ratio = settings.number("warmup_ratio")
    if 0 < warmup < 1:  # TrainingArguments takes a share there, too
        warmup, ratio = 0, warmup
    least = 0.1 if shape.endswith("with_min_lr") else 0.0
    return lr_schedule("actor", shape, int(warmup / steps), ratio, least, total)


# GRPO


def _batch(settings: Settings) -> int:
    """Returns the completions that are generated at a time."""
    if settings.has("generation_batch_size"):
        return settings.count("generation_batch_size")
    key = "steps_per_generation" if settings.has("steps_per_generation") else "gradient_accumulation_steps"
    return settings.count("per_device_train_batch_size") * settings.count(key) * _processes(settings)


def _prompts(settings: Settings) -> int:
    return max(1, _batch(settings) // settings.count("num_generations"))


def _steps(settings: Settings) -> float:
    """Returns the optimizer steps of an iteration."""
    return max(1, _batch(settings) / _step(settings)) * settings.count("num_iterations")


def _grpo_iterations(settings: Settings) -> Converted:
    if settings.has("max_steps") and settings.count("max_steps") > 0:
        return {"train.iterations": max(1, int(settings.count("max_steps") / _steps(settings)))}
    epochs = settings.number("num_train_epochs")
    return run_length(settings, _files(settings), epochs, _prompts(settings), "num_train_epochs")


def _files(settings: Settings) -> list[str]:
    return [settings.text("dataset_name")] if settings.has("dataset_name") else []


def _grpo_schedule(settings: Settings) -> Converted:
    return _schedule(settings, known_iterations(_grpo_iterations(settings)), _steps(settings))


def _advantage(settings: Settings) -> Converted:
    if settings["multi_objective_aggregation"] == "normalize_then_sum":
        raise UserError(
            "multi_objective_aggregation is normalize_then_sum, which is algorithm.advantage gdpo: remove it, and set "
            "algorithm.advantage with the names of the reward's parts"
        )
    scale = str(settings["scale_rewards"]).lower()
    if scale in ("group", "true"):
        return {"algorithm.advantage.type": "grpo"}
    if scale in ("none", "false"):
        return {"algorithm.advantage.type": "dr_grpo"}
    why = "the batch's standard deviation is taken over tokens, and the mean is subtracted again"
    return {"algorithm.advantage.type": "dr_grpo", "algorithm.advantage.whiten": Assumed(True, why)}


def _loss(settings: Settings) -> str:
    if settings["importance_sampling_level"] == "sequence":
        return "gspo"
    return LOSSES.get(str(settings["loss_type"]), ("ppo", None))[0]


def _loss_option(theirs: str, ours: str) -> Counterpart:
    def convert(settings: Settings) -> Converted:
        return loss_option(_loss(settings), ours, settings[theirs])

    return computed(theirs, f"algorithm.loss.{ours}", convert)


def _losses(settings: Settings) -> Converted:
    kind, loss = str(settings["loss_type"]), _loss(settings)
    if kind not in LOSSES:
        raise UserError(f"loss_type is {kind}, which algorithm.loss does not have: choose one of {', '.join(LOSSES)}")
    how = LOSSES[kind][1]
    if loss in ("gspo", "sapo") or how is None:
        return {"algorithm.loss.type": loss}
    why = "the mean is over the mini-batch, not the micro-batch"
    return {"algorithm.loss.type": loss, "algorithm.loss.aggregate": Assumed(how, why) if kind == "bnpo" else how}


def _clips(settings: Settings) -> Converted:
    loss, low = _loss(settings), settings.number("epsilon")
    high = settings.number("epsilon_high") if settings.has("epsilon_high") else low
    if loss in ("sapo", "vespo"):
        raise NoEqual(f"the loss {loss} does not clip")
    if loss == "cispo":
        return {
            "algorithm.loss.clip_ratio_high": Assumed(high - 1, f"the largest weight is {high:g} in TRL, 1 + this here")
        }
    clips: dict[str, Value | Assumed] = {
        "algorithm.loss.clip_ratio_low": low,
        "algorithm.loss.clip_ratio_high": high,
    }
    if loss == "ppo":
        why = "so large that there is no dual clip: TRL has none without delta"
        delta = settings["delta"]
        clips["algorithm.loss.clip_ratio_c"] = Assumed(NO_DUAL_CLIP, why) if delta is None else delta
    return clips


def _kl(settings: Settings) -> Converted:
    coefficient = settings.number("beta")
    if not coefficient:
        raise NoEqual("0 has no reference, as algorithm.kl.in_loss null has none")
    return {"algorithm.kl.in_loss": coefficient, "algorithm.kl.loss_estimator": "k3"}


def _correction(settings: Settings) -> Converted:
    prefix = "algorithm.rollout_correction"
    if not settings.flag("use_vllm"):
        raise NoEqual("without use_vllm there is nothing to correct")
    if not settings.flag("vllm_importance_sampling_correction"):
        return {prefix: {}}
    if _loss(settings) == "vespo":
        return {f"{prefix}.bypass": Assumed(True, "the ratio is that to the rollout; TRL truncates a part of it")}
    level, _, kind = str(settings["vllm_importance_sampling_mode"]).partition("_")
    largest, least = settings["vllm_importance_sampling_clip_max"], settings["vllm_importance_sampling_clip_min"]
    weights: dict[str, Value | Assumed] = {
        f"{prefix}.weights.level": level,
        f"{prefix}.weights.upper": NO_DUAL_CLIP if largest is None else largest,
    }
    if kind == "mask":
        why = "so small that only weights above upper become 0: TRL has no lower bound unless told"
        weights[f"{prefix}.weights.lower"] = Assumed(1e-6, why) if least is None else least
    return weights


def _reward(settings: Settings) -> Converted:
    model = settings["reward_model_name_or_path"]
    scores: dict[str, Value | Assumed] = {} if model is None else {"reward.model.path": model}
    if not settings.has("reward_funcs"):
        why = "TRL's reward functions are in the Python script: name yours"
        return {"reward.function": None, **scores} if scores else {"reward.function": Assumed("auto", why)}
    names = settings.texts("reward_funcs")
    given = settings["reward_weights"]
    weights = list(given) if isinstance(given, list | tuple) else [1.0] * len(names)
    functions: dict[str, Value] = {
        REWARDS.get(name) or python_reward(name): weight for name, weight in zip(names, weights, strict=False)
    }
    why = "write yours as functions (data_source, solution_str, ground_truth, extra_info) -> float, of one response"
    value: Value = next(iter(functions)) if len(functions) == 1 else functions
    known = all(name in REWARDS for name in names)
    return {"reward.function": value if known else Assumed(value, why), **scores}


def _every(key: str, ours: str, strategy: str) -> Counterpart:
    """Builds a row for an interval; TRL counts optimizer steps."""

    def convert(settings: Settings) -> Converted:
        if settings[strategy] in ("no", "epoch") or not settings.has(key):
            raise NoEqual(f"{ours} counts iterations: set it")
        return {ours: max(1, round(settings.number(key) / _steps(settings)))}

    return computed((key, strategy), ours, convert, "iterations, not optimizer steps")


def _moving_reference(settings: Settings) -> Converted:
    if not settings.flag("sync_ref_model"):
        raise NoEqual("off, as reference.sync_every null is")
    if not settings.number("beta"):
        raise NoEqual("beta is 0, so nothing reads the reference")
    steps, exact = settings.count("ref_model_sync_steps"), settings.count("ref_model_sync_steps") / _steps(settings)
    every = max(1, round(exact))
    why = f"ref_model_sync_steps {steps} / {_steps(settings):g} optimizer steps of an iteration"
    return {
        "reference.sync_every": every if every == exact == steps else Assumed(every, why),
        "reference.mix": settings.number("ref_model_mixup_alpha"),
    }


def _engine(settings: Settings) -> Converted:
    if not settings.flag("use_vllm"):
        return {"rollout.engine": "hf"}
    if settings["vllm_mode"] == "server":
        return {"rollout.engine": Assumed("vllm", "TRL's own server cannot be used; see rollout.engine server")}
    return {"rollout.engine": "vllm"}


def _with_vllm(theirs: str, ours: str) -> Counterpart:
    def convert(settings: Settings) -> Converted:
        if not settings.flag("use_vllm"):
            raise NoEqual("without use_vllm it does nothing")
        return {} if settings[theirs] is None else {ours: settings[theirs]}

    return computed(theirs, ours, convert)


def _lora(settings: Settings) -> Converted:
    if not settings.flag("use_peft"):
        raise NoEqual("without use_peft all weights are trained, as model.lora null does")
    rank = settings.count("lora_r")
    dropout = 0.05 if settings["lora_dropout"] is None else settings.number("lora_dropout")
    return {
        "model.lora.r": Assumed(rank, f"adapters have no dropout, where TRL's have {dropout:g}") if dropout else rank,
        "model.lora.alpha": settings.number("lora_alpha"),
        "model.lora.target_modules": settings.texts("lora_target_modules"),
    }


def _pool(settings: Settings) -> Converted:
    if _processes(settings) == 1:
        raise NoEqual("one process needs no pool: the driver's own is used")
    return {"pools.all.workers": _processes(settings), "pools.all.gpus_per_worker": 1}


def _chat_template(settings: Settings) -> Converted:
    prefix = "chat_template_kwargs."
    variables = {key.removeprefix(prefix): value for key, value in settings.given.items() if key.startswith(prefix)}
    return {"model.chat_template_kwargs": variables} if variables else {}


MODEL_ROWS: tuple[Counterpart, ...] = (
    computed(
        "output_dir",
        "run.name",
        lambda settings: {"run.name": run_name(settings.text("output_dir"))} if settings.has("output_dir") else {},
        "its last part; everything is in run.store",
    ),
    direct("seed", "run.seed"),
    direct("bf16", "model.dtype", values={"True": "bfloat16", "False": "float32"}),
    direct("dtype", "model.dtype", values={"bfloat16": "bfloat16", "float32": "float32"}),
    direct("attn_implementation", "model.attention", values=ATTENTION),
    direct("use_liger_kernel", "model.kernels", values={"True": "liger", "False": "torch"}),
    direct("trust_remote_code", "model.trust_remote_code"),
    computed(
        ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
        ("model.lora.r", "model.lora.alpha", "model.lora.target_modules"),
        _lora,
    ),
    computed(
        ("dataset_name", "dataset_config", "dataset_train_split"),
        "data.train",
        lambda settings: data_file(settings, "dataset_name", "dataset_train_split", "dataset_config"),
        "files of prompts, or `owner/name:config/split` of the hub",
    ),
    direct("temperature", "rollout.temperature"),
)

TRAINER_ROWS: tuple[Counterpart, ...] = (
    direct("weight_decay", "actor.optimizer.weight_decay"),
    computed(
        ("adam_beta1", "adam_beta2"),
        "actor.optimizer.betas",
        lambda settings: {"actor.optimizer.betas": [settings.number("adam_beta1"), settings.number("adam_beta2")]},
    ),
    direct("max_grad_norm", "actor.grad_clip"),
    direct("gradient_checkpointing", "actor.gradient_checkpointing"),
    computed("num_processes", ("pools.all.workers", "pools.all.gpus_per_worker"), _pool, "of accelerate; on Ray here"),
    direct("save_total_limit", "checkpoint.keep.last"),
    computed(
        "report_to",
        "tracking",
        lambda settings: services(settings.texts("report_to")) if settings.has("report_to") else {},
    ),
    refused(
        "eval_strategy", "validation needs a file of prompts: set no, and then validation.data", unless=("no", False)
    ),
    without_equal(
        (
            *("eval_steps", "eval_on_start", "eval_delay", "num_generations_eval", "per_device_eval_batch_size"),
            *("dataset_test_split", "num_sample_generations"),
        ),
        "only eval_strategy reads it",
    ),
    without_equal(
        ("dataset_num_proc", "dataset_streaming", "datasets"),
        "`ratchet data` writes each split to a file",
    ),
    refused(
        ("repetition_penalty", "generation_kwargs", "generation_kwargs.*"),
        "the trainer's log-probs know no penalties; rollouts sample by temperature, top_p, top_k and min_p: remove it",
        unless=(1, 1.0, {}),
    ),
    computed("chat_template_kwargs.*", "model.chat_template_kwargs", _chat_template),
    refused(
        ("mask_truncated_completions",),
        "truncated responses are learned from: set false, and see algorithm.overlong_penalty",
    ),
    refused("shuffle_dataset", "prompts are always shuffled, from run.seed: set true", unless=(True,)),
    refused("optim", "the optimizer is AdamW: set adamw_torch", unless=("adamw_torch", "adamw_torch_fused")),
    refused(("adam_epsilon",), "AdamW's epsilon is 1e-8: remove it", unless=(1e-8,)),
    refused(
        ("lr_scheduler_kwargs", "lr_scheduler_kwargs.*"),
        "actor.lr_schedule has no such options: remove it",
        unless=({},),
    ),
    refused("fp16", "model.dtype is bfloat16 or float32: set bf16"),
    refused(
        ("load_in_8bit", "load_in_4bit", "use_dora", "use_rslora", "lora_modules_to_save", "lora_target_parameters"),
        "adapters are plain, on weights that are not quantized: remove it",
    ),
    refused("model_revision", "model.path names a model, without a revision: remove it", unless=("main",)),
    refused(("model_init_kwargs", "model_init_kwargs.*"), "the model is that in model.path: remove it", unless=({},)),
    refused(
        ("top_entropy_quantile", "off_policy_mask_threshold", "use_bias_correction_kl", "use_adaptive_entropy"),
        "no loss here has it: remove it",
        unless=(1, 1.0, False),
    ),
    refused("router_aux_loss_coef", "it is in the model's config.json: set it there, and remove it", unless=(0, 0.0)),
    refused(
        "vllm_structured_outputs_regex", "responses are drawn from all tokens: remove it; see rollout.stop", unless=()
    ),
    refused("max_tool_calling_iterations", "see rollout.tools and rollout.environment.max_turns: remove it", unless=()),
    without_equal(
        tuple(f"entropy_{name}" for name in ("coef_min", "coef_max", "coef_delta", "target")),
        "only use_adaptive_entropy reads it",
    ),
    without_equal(
        (
            "log_completions",
            "num_completions_to_print",
            "log_unique_prompts",
            "log_multimodal",
            "log_completions_hub_repo",
        ),
        "every trajectory is stored: `ratchet show`",
    ),
    without_equal(
        ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_token"),
        "`ratchet push RUN REPO` uploads a snapshot afterwards",
    ),
    without_equal(
        ("deepspeed", "fsdp", "fsdp_config", "fsdp_config.*", "ddp_timeout", "ds3_gather_for_generation"),
        "see actor.engine, and docs/clusters.md",
    ),
    without_equal(
        ("save_only_model", "overwrite_output_dir", "resume_from_checkpoint", "save_safetensors"),
        "everything is in run.store, and the same command always resumes",
    ),
    without_equal("disable_dropout", "there is no dropout in training"),
    without_equal(
        (
            *("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "run_name", "project"),
            *("dataloader_num_workers", "dataloader_pin_memory", "remove_unused_columns", "torch_empty_cache_steps"),
            *("tf32", "local_rollout_forward_batch_size", "config", "gradient_checkpointing_kwargs.*"),
            *("pad_to_multiple_of", "cache_implementation", "cast_lm_head_to_fp32", "torch_compile"),
            *("use_transformers_continuous_batching", "transformers_continuous_batching_config.*"),
            *("use_transformers_paged", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
            *("lora_task_type", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url"),
            *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "config_file"),
        ),
        "changes memory, speed or rounding only",
    ),
)

COMMON: dict[str, Value] = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "seed": 42,
    "num_train_epochs": 3.0,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": "all-linear",
}

GRPO = Source(
    "TRL (GRPO)",
    (
        *MODEL_ROWS,
        direct("model_name_or_path", "model.path"),
        direct("max_prompt_length", "data.max_prompt_tokens", "older releases only"),
        computed(
            ("per_device_train_batch_size", "steps_per_generation", "generation_batch_size", "num_generations"),
            "data.prompts_per_iteration",
            lambda settings: {"data.prompts_per_iteration": _sized(settings, _prompts(settings))},
            "prompts: TRL counts completions, of all processes and accumulated steps",
        ),
        computed(
            ("per_device_train_batch_size", "gradient_accumulation_steps"),
            "actor.mini_batch_trajectories",
            lambda settings: {
                "actor.mini_batch_trajectories": _sized(settings, min(_step(settings), _batch(settings)))
            },
            "completions of all processes and accumulated steps",
        ),
        direct("num_generations", "rollout.n"),
        direct("top_p", "rollout.top_p"),
        direct("top_k", "rollout.top_k"),
        direct("min_p", "rollout.min_p"),
        direct("max_completion_length", "rollout.max_response_tokens"),
        computed(("use_vllm", "vllm_mode"), "rollout.engine", _engine, "`vllm` or `hf`"),
        _with_vllm("vllm_gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
        _with_vllm("vllm_tensor_parallel_size", "rollout.engine.tensor_parallel"),
        _with_vllm("vllm_max_model_length", "rollout.engine.max_model_len"),
        computed(
            ("reward_funcs", "reward_weights", "reward_model_name_or_path"),
            ("reward.function", "reward.model.path"),
            _reward,
            "functions with TRL's signature run unchanged, and so do verl's",
        ),
        computed(
            ("scale_rewards", "multi_objective_aggregation"),
            "algorithm.advantage.type",
            _advantage,
            "`group` is `grpo`, `none` is `dr_grpo`",
        ),
        computed(
            ("loss_type", "importance_sampling_level"),
            ("algorithm.loss.type", "algorithm.loss.aggregate"),
            _losses,
            "`grpo`, `dr_grpo` and `dapo` are reductions of the loss `ppo`; `sequence` is `gspo`",
        ),
        computed(
            ("epsilon", "epsilon_high", "delta"),
            ("algorithm.loss.clip_ratio_low", "algorithm.loss.clip_ratio_high", "algorithm.loss.clip_ratio_c"),
            _clips,
            "there is a dual clip unless `clip_ratio_c` is large",
        ),
        _loss_option("sapo_temperature_pos", "tau_pos"),
        _loss_option("sapo_temperature_neg", "tau_neg"),
        *(_loss_option(f"vespo_{name}", name) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
        computed("beta", ("algorithm.kl.in_loss", "algorithm.kl.loss_estimator"), _kl, "0 is null; always `k3`"),
        computed(
            ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
            ("reference.sync_every", "reference.mix"),
            _moving_reference,
            "iterations, not optimizer steps",
        ),
        direct("entropy_coef", "algorithm.entropy_coef"),
        computed(
            (
                "vllm_importance_sampling_correction",
                "vllm_importance_sampling_mode",
                "vllm_importance_sampling_clip_max",
                "vllm_importance_sampling_clip_min",
            ),
            ("algorithm.rollout_correction.weights", "algorithm.rollout_correction.bypass"),
            _correction,
            "`truncate` has no `lower`",
        ),
        direct("learning_rate", "actor.lr"),
        computed(
            ("lr_scheduler_type", "warmup_ratio", "warmup_steps"),
            "actor.lr_schedule",
            _grpo_schedule,
            "iterations, not optimizer steps",
        ),
        direct("num_iterations", "actor.ppo_epochs"),
        *TRAINER_ROWS,
        _every("save_steps", "checkpoint.every", "save_strategy"),
        computed(
            ("max_steps", "num_train_epochs"),
            LENGTH,
            _grpo_iterations,
            "iterations, not optimizer steps; they are epochs x rows / prompts, where the data can be read",
        ),
    ),
    COMMON
    | {
        "num_generations": 8,
        "max_completion_length": 512,
        "temperature": 1.0,
        "top_p": 1.0,
        "vllm_gpu_memory_utilization": 0.3,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "entropy_coef": 0.0,
        "ref_model_sync_steps": 512,
        "ref_model_mixup_alpha": 0.6,
    },
    {"torch_dtype": "dtype", "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"},
    "trl",
)

# PPO


def _ppo_iterations(settings: Settings) -> Converted:
    if settings.has("total_episodes"):
        return {"train.iterations": -(-settings.count("total_episodes") // _step(settings))}
    return run_length(
        settings, _files(settings), settings.number("num_train_epochs"), _step(settings), "num_train_epochs"
    )


def _ppo_model(settings: Settings) -> Converted:
    key = "sft_model_path" if settings.has("sft_model_path") else "model_name_or_path"
    return {"model.path": settings[key]} if settings.has(key) else {}


def _ppo_mini_batch(role: str) -> Conversion:
    def convert(settings: Settings) -> Converted:
        size = _step(settings) // settings.count("num_mini_batches")
        return {f"{role}.mini_batch_trajectories": _sized(settings, size)}

    return convert


def _ppo_schedule(settings: Settings) -> Converted:
    schedule = _schedule(settings, known_iterations(_ppo_iterations(settings)), 1)
    return {**schedule, **{key.replace("actor.", "critic.", 1): value for key, value in schedule.items()}}


def _both(theirs: str, ours: str) -> Counterpart:
    """Builds a row for a setting that TRL has for the policy and the value model together."""

    def convert(settings: Settings) -> Converted:
        value = settings[theirs]
        return {} if value is None else {f"actor.{ours}": value, f"critic.{ours}": value}

    return computed(theirs, (f"actor.{ours}", f"critic.{ours}"), convert)


def _reward_model(settings: Settings) -> Converted:
    model = settings["reward_model_path"]
    if model is None:
        return {"reward.function": Assumed("auto", "TRL's PPO has a reward model: name it in reward.model")}
    return {"reward.function": None, "reward.model.path": model, "critic.model.path": model}


def _ppo_kl(settings: Settings) -> Converted:
    coefficient, estimator = settings.number("kl_coef"), settings["kl_estimator"]
    why = f"k1: {estimator} does not hold the policy near the reference in the reward"
    return {"algorithm.kl.in_reward": coefficient if estimator in (None, "k1") else Assumed(coefficient, why)}


def _ppo_clip(settings: Settings) -> Converted:
    clip = settings.number("cliprange")
    return {
        "algorithm.loss.clip_ratio_low": clip,
        "algorithm.loss.clip_ratio_high": clip,
        "algorithm.loss.clip_ratio_c": Assumed(NO_DUAL_CLIP, "so large that there is no dual clip, as in TRL"),
    }


PPO = Source(
    "TRL (PPO)",
    (
        *MODEL_ROWS,
        computed(("sft_model_path", "model_name_or_path"), "model.path", _ppo_model, "policy and reference"),
        computed(
            ("per_device_train_batch_size", "gradient_accumulation_steps"),
            "data.prompts_per_iteration",
            lambda settings: {"data.prompts_per_iteration": _sized(settings, _step(settings))},
            "prompts of all processes and accumulated steps; one completion each",
        ),
        direct("response_length", "rollout.max_response_tokens"),
        computed((), "rollout.n", lambda settings: {"rollout.n": 1}),
        computed(
            "reward_model_path",
            ("reward.model.path", "critic.model.path"),
            _reward_model,
            "TRL's examples start the value model from it, too",
        ),
        direct("gamma", "algorithm.advantage.gamma"),
        direct("lam", "algorithm.advantage.lam"),
        computed(
            "cliprange",
            ("algorithm.loss.clip_ratio_low", "algorithm.loss.clip_ratio_high"),
            _ppo_clip,
            "there is a dual clip unless `clip_ratio_c` is large",
        ),
        computed(("kl_coef", "kl_estimator"), "algorithm.kl.in_reward", _ppo_kl, "always `k1`"),
        _both("learning_rate", "lr"),
        computed(
            ("lr_scheduler_type", "warmup_ratio", "warmup_steps"),
            ("actor.lr_schedule", "critic.lr_schedule"),
            _ppo_schedule,
        ),
        _both("num_ppo_epochs", "ppo_epochs"),
        *(
            computed(
                "num_mini_batches",
                f"{role}.mini_batch_trajectories",
                _ppo_mini_batch(role),
                "trajectories of the whole run, not the number of mini-batches",
            )
            for role in ("actor", "critic")
        ),
        *TRAINER_ROWS,
        direct("cliprange_value", "critic.cliprange_value"),
        computed(
            ("total_episodes", "num_train_epochs"),
            LENGTH,
            _ppo_iterations,
            "iterations are episodes / prompts, rounded up; or epochs x rows / prompts, where the data can be read",
        ),
        without_equal("vf_coef", "the critic has an optimizer and a learning rate of its own: critic.lr"),
        refused("whiten_rewards", "advantages are whitened, rewards are not: set false"),
        refused("missing_eos_penalty", "see algorithm.overlong_penalty: remove it", unless=(0, 0.0)),
        refused(("stop_token", "stop_token_id"), "see rollout.stop: remove it", unless=("eos",)),
        without_equal(
            ("save_steps", "save_strategy"), "checkpoint.every counts iterations; null is as often as is cheap"
        ),
    ),
    COMMON
    | {
        "learning_rate": 3e-6,
        "response_length": 53,
        "temperature": 0.7,
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
    },
    {"torch_dtype": "dtype"},
    "trl",
)
