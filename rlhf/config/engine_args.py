"""Arguments of other programs that a config passes on, under `args`: which of them the user may not set, and why.

All others are passed on as they are. They count as changing the result, unless they are among those that change only
speed, memory and rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from pydantic import JsonValue


def refuse(args: Iterable[str], refused: Mapping[str, str], key: str = "args") -> None:
    """Raises ValueError if there are arguments that are refused; `refused` has the reason of each."""
    if reasons := [f"{key}.{name} cannot be set: {refused[name]}" for name in args if name in refused]:
        raise ValueError("; ".join(reasons))


def unknown(key: str, args: Iterable[str], known: Iterable[str], owner: str) -> list[str]:
    """Describes arguments that `owner` does not have, each with the most similar one that it has."""
    names, mistakes = sorted(known), []
    for name in args:
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.6)
            fix = f"write {near[0]}" if near else "remove it"
            mistakes.append(f"{key}.{name} is no argument of {owner}: {fix}")
    return mistakes


_DRAWING = "the trainer could not compute the probabilities of tokens that are drawn with it"
_MODEL = "the trainer computes model.path with model.args, and vLLM must compute the same"
_OLD_WEIGHTS = "it keeps what older weights computed, and log-probs would be those of several policies"
_GPUS = "set rollout.engine.tensor_parallel for larger engines, and workers of the rollout's pool for more engines"
_OWN = "Ratchet starts vLLM's processes and sends them new weights"
VLLM_REFUSED = {
    **dict.fromkeys(("model", "tokenizer"), "set model.path"),
    "dtype": "set model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
    **{
        name: f"set rollout.engine.{key}"
        for name, key in {
            "max_model_len": "max_model_len",
            "gpu_memory_utilization": "gpu_memory_utilization",
            "tensor_parallel_size": "tensor_parallel",
            "quantization": "quantization",
            "enforce_eager": "enforce_eager",
            "enable_prefix_caching": "prefix_caching",
        }.items()
    },
    "seed": "set run.seed, or rollout.seeds",
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "set rollout.router_replay"),
    "enable_lora": "set model.lora",
    "max_lora_rank": "set model.lora.r",
    "lora_target_modules": "set model.lora.target_modules",
    "enable_sleep_mode": "set actor.offload_when_idle",
    **dict.fromkeys(("generation_config", "override_generation_config"), "set rollout.temperature, top_p, top_k"),
    "logprobs_mode": "log-probs must be those at rollout.temperature, before truncation",
    **dict.fromkeys(("logits_processors", "watermark_config", "diffusion_config"), _DRAWING),
    **dict.fromkeys(
        (
            "code_revision",
            "config_format",
            "hf_config_path",
            "hf_overrides",
            "load_format",
            "model_class_overrides",
            "model_weights",
            "revision",
            "tokenizer_revision",
        ),
        _MODEL,
    ),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"), _OLD_WEIGHTS),
    "enable_eplb": "it moves experts between GPUs, and new weights would be loaded into the wrong ones",
    **dict.fromkeys(
        (
            "data_parallel_size",
            "device_ids",
            "nnodes",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
        ),
        _GPUS,
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "weight_transfer_config", "worker_cls", "worker_extension_cls"), _OWN
    ),
    "hf_token": "the run's record would contain it; set the environment variable HF_TOKEN",
}
"""Fields of vLLM's `EngineArgs` that Ratchet sets, or that would make log-probs untrue."""
VLLM_SPEED = frozenset(
    (
        "all2all_backend",
        "async_scheduling",
        "compilation_config",
        "cpu_offload_gb",
        "cudagraph_capture_sizes",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "fully_sharded_loras",
        "kv_cache_memory_bytes",
        "max_cpu_loras",
        "max_cudagraph_capture_size",
        "max_loras",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "optimization_level",
        "performance_mode",
    )
)
"""Those that change only speed, memory and rounding."""
VLLM_ROUNDS = ("kv_cache_dtype", "lora_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "quantization_config")
"""Those with which vLLM computes in another type than `model.dtype`: the rollout's policy is not quite the trainer's,
so importance ratios are corrected by default."""

MODEL_REFUSED = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), "set model.attention"),
    **dict.fromkeys(("dtype", "torch_dtype"), "set model.dtype"),
    "trust_remote_code": "set model.trust_remote_code",
    **dict.fromkeys(("revision", "code_revision", "model_type", "architectures"), "name another model in model.path"),
    "quantization_config": "updates are smaller than the steps of quantized weights",
    "num_labels": "a value model has one",
}
"""Fields of a model's config that Ratchet sets, or that a trained model cannot have."""


def check_vllm(args: Mapping[str, JsonValue]) -> None:
    """Raises ValueError for arguments of vLLM that cannot be set."""
    refuse(args, VLLM_REFUSED)
    speculation = args.get("speculative_config")
    if isinstance(speculation, dict) and speculation.get("rejection_sample_method") == "synthetic":
        raise ValueError(
            "args.speculative_config.rejection_sample_method is synthetic, which draws tokens with other "
            "probabilities than the model's: remove it"
        )


DEEPSPEED_REFUSED = {
    **dict.fromkeys(("bf16", "fp16", "amp", "data_types"), "set model.dtype"),
    **dict.fromkeys(("optimizer", "zero_force_ds_cpu_optimizer"), "set optimizer, beside engine"),
    "scheduler": "set lr_schedule, beside engine",
    "gradient_clipping": "set grad_clip, beside engine",
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "set mini_batch_trajectories and micro_batch_tokens, beside engine",
    ),
    "activation_checkpointing": "set gradient_checkpointing, beside engine",
    "steps_per_print": "Ratchet reports the metrics",
    "zero_optimization.stage": "set zero_stage, beside args",
    **dict.fromkeys(
        (
            "zero_optimization.offload_optimizer",
            "zero_optimization.offload_param",
            "zero_optimization.cpu_offload",
            "zero_optimization.cpu_offload_param",
        ),
        "set offload, beside args",
    ),
    **dict.fromkeys(
        ("zero_optimization.zero_hpz_partition_size", "zero_optimization.zenflow"),
        "Ratchet could not read the weights",
    ),
    **dict.fromkeys(
        ("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_nontrainable_weights"),
        "log-probs would be those of other weights than the stored ones",
    ),
}
"""Keys of DeepSpeed's config that Ratchet sets, or that do not work with it."""
DEEPSPEED_SPEED = frozenset(
    (
        "comms_logger",
        "dump_state",
        "flops_profiler",
        "memory_breakdown",
        "wall_clock_breakdown",
        *(
            f"zero_optimization.{name}"
            for name in (
                "allgather_bucket_size",
                "contiguous_gradients",
                "overlap_comm",
                "reduce_bucket_size",
                "reduce_scatter",
                "round_robin_gradients",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_param_persistence_threshold",
                "stage3_prefetch_bucket_size",
                "sub_group_size",
            )
        ),
    )
)
"""Those that change only speed, memory and rounding."""
DEEPSPEED_KEYS = ("communication_data_type", "zero_optimization")
"""Other keys that are passed on. DeepSpeed does not refuse a misspelt key outside `zero_optimization`."""


def check_deepspeed(args: Mapping[str, JsonValue]) -> None:
    """Raises ValueError for keys of DeepSpeed's config that cannot be set."""
    zero = args.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f"args.zero_optimization is {zero!r}: it should be a section, such as {{key: value}}")
    refuse([*args, *(f"zero_optimization.{name}" for name in zero)], DEEPSPEED_REFUSED)
    known = (*DEEPSPEED_KEYS, *(name for name in DEEPSPEED_SPEED if "." not in name))
    if mistakes := unknown("args", args, known, "DeepSpeed that Ratchet passes on"):
        raise ValueError("; ".join(mistakes))


RUNTIME_ENV = ("conda", "config", "container", "env_vars", "image_uri", "pip", "py_executable", "py_modules", "uv")
"""Keys of Ray's runtime environment that an actor may have."""
ENVIRONMENT_REFUSED = {
    "working_dir": "Ray takes it only for whole jobs; set py_modules, or PYTHONPATH in env_vars",
    "env_vars.CUDA_VISIBLE_DEVICES": "set gpus_per_worker",
    "env_vars.LOCAL_RANK": "Ratchet sets it",
}


def check_runtime_env(environment: Mapping[str, JsonValue]) -> None:
    """Raises ValueError for keys of a runtime environment that Ray does not have, or that Ratchet sets."""
    variables = environment.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise ValueError("runtime_env.env_vars should map names to texts: quote numbers")
    refuse([*environment, *(f"env_vars.{name}" for name in variables)], ENVIRONMENT_REFUSED, "runtime_env")
    if mistakes := unknown("runtime_env", environment, RUNTIME_ENV, "Ray's runtime environment"):
        raise ValueError("; ".join(mistakes))
