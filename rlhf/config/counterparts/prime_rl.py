"""prime-rl's settings, and ours. Its keys and defaults are those of its main branch in August 2026."""

from __future__ import annotations

import re

from ratchet.rlhf.config.counterparts.shared import lr_schedule, run_name, vllm_args
from ratchet.rlhf.config.counterparts.translation import (
    Assumed,
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

MODEL, OPTIMIZER, LOSS, VLLM = "trainer.model", "trainer.optim", "trainer.loss", "inference.vllm"
TRAIN, EVAL = "orchestrator.train", "orchestrator.eval"
NO_TRUNCATION = 1e6
"""A bound that no ratio reaches: the loss then truncates none."""


def _model(settings: Settings) -> Converted:
    own, rollouts = f"{MODEL}.name", ("orchestrator.model.name", f"{VLLM}.model")
    name = settings.text(own if settings.has(own) else "model.name")
    if others := [key for key in rollouts if settings.has(key) and settings[key] != name]:
        raise UserError(
            f"{others[0]} is {settings[others[0]]}, another model than {name}, which is trained: the rollout has the "
            "trained weights; remove it, and see rollout.engine.quantization"
        )
    return {"model.path": name}


VLM = ("model.vlm", f"{MODEL}.vlm", "orchestrator.model.vlm")


def _freeze_vision(settings: Settings) -> Converted:
    given = [f"{section}.freeze_vision_encoder" for section in VLM]
    key = next((key for key in given if settings.has(key)), None)
    return {} if key is None else {"model.freeze_vision": settings.flag(key)}


def _sources(settings: Settings, section: str) -> dict[str, dict[str, Value]]:
    """Returns the settings of the environments in a section, by their position."""
    prefix = f"{section}.source."
    sources: dict[str, dict[str, Value]] = {}
    for key, value in settings.given.items():
        if key.startswith(prefix):
            number, _, name = key.removeprefix(prefix).partition(".")
            sources.setdefault(number, {})[name] = value
    return sources


TASKSET = "env.taskset."
GATE = re.compile(r"curriculum\.gates\.\w+\.type")


def _is_gate(name: str, value: Value) -> bool:
    """Returns True for a gate that leaves out responses with an advantage of 0."""
    return GATE.fullmatch(name) is not None and value == "advantage_range"


def _environment(settings: Settings) -> Converted:
    sources = _sources(settings, TRAIN)
    if len(sources) != 1:
        names = ", ".join(str(source.get("name", source.get(f"{TASKSET}id"))) for source in sources.values())
        raise UserError(f"{TRAIN}.source has {len(sources)} environments ({names}): a run has one; keep one")
    [source] = sources.values()
    where, mistakes, taskset = f"{TRAIN}.source", [], source.get(f"{TASKSET}id")
    if not isinstance(taskset, str):
        mistakes.append(f"{where}.{TASKSET}id is missing: rollout.environment is its name")
    agents = sorted({name.split(".")[1] for name in source if name.startswith("env.") and TASKSET not in name})
    if len(agents) != 1:
        mistakes.append(f"{where}.env has {len(agents)} agents ({', '.join(agents)}): the policy is the only one here")
    for agent in agents:
        harness, runtime = (source.get(f"env.{agent}.{name}") for name in ("harness.id", "runtime.type"))
        known = {f"env.{agent}.harness.id", f"env.{agent}.runtime.type"}
        others = [name for name in source if name.startswith(f"env.{agent}.") and name not in known]
        if harness != "null":
            what = harness or "the default"
            mistakes.append(
                f"{where}.env.{agent}.harness is {what}, a program around the policy: write a rollout.agent"
            )
        elif runtime != "subprocess":
            mistakes.append(f"{where}.env.{agent}.runtime is {runtime}: environments run in the workers' processes")
        elif others:
            mistakes += [f"{where}.{name} has no counterpart: remove it" for name in others]
    others = [name for name in source if not name.startswith("env.") and name not in ("name", "ratio", "group_size")]
    mistakes += [f"{where}.{name} has no counterpart: remove it" for name in others if not _is_gate(name, source[name])]
    if mistakes:
        raise UserError("\n".join(mistakes))
    options: dict[str, Value] = {}
    for name, value in source.items():
        if name.startswith(TASKSET) and name != f"{TASKSET}id":
            section = options
            *parents, last = name.removeprefix(TASKSET).split(".")
            for parent in parents:
                section = section.setdefault(parent, {})  # type: ignore[assignment]
            section[last] = value
    why = "verifiers imports the taskset by this name: check that it is installed"
    return {
        "rollout.environment.name": Assumed(f"verifiers:{taskset}", why),
        **({"rollout.environment.options": {"taskset": options}} if options else {}),
        "reward.function": None,
        "data.train": Assumed([f"data/{taskset}/train.parquet"], f"write it with `ratchet data verifiers {taskset}`"),
    }


def _dynamic_sampling(settings: Settings) -> Converted:
    sources = _sources(settings, TRAIN).values()
    if not any(_is_gate(name, value) for source in sources for name, value in source.items()):
        return {}
    prompts = settings.count("orchestrator.batch_size") // _group(settings)
    why = "prime-rl draws without limit where a gate rejects advantages of 0: ten batches are assumed"
    return {"algorithm.dynamic_sampling.max_prompts": Assumed(10 * prompts, why)}


def _evaluation(settings: Settings) -> Converted:
    names = [source.get("name", source.get(f"{TASKSET}id")) for source in _sources(settings, EVAL).values()]
    if names:
        raise UserError(
            f"{EVAL} has {', '.join(map(str, names))}: validation runs in the training's environment, on a file of "
            "prompts; remove it, and set validation.data"
        )
    raise NoEqual("there is no environment to validate in")


def _lengths(settings: Settings) -> Converted:
    own = "orchestrator.seq_len"
    total = settings.count(own if settings.has(own) else "seq_len")
    key = f"{TRAIN}.sampling.max_completion_tokens"
    response, why = 3 * total // 4, f"three quarters of seq_len, {total}, which bounds prompt and response together"
    if settings.has(key) and settings.count(key) < total:
        response = settings.count(key)
        why = "of all turns together, where max_completion_tokens is of each: raise it if there are several"
    rest = Assumed(total - response, f"what seq_len, {total}, leaves")
    return {"rollout.max_response_tokens": Assumed(response, why), "data.max_prompt_tokens": rest}


def _group(settings: Settings) -> int:
    sizes = [source["group_size"] for source in _sources(settings, TRAIN).values() if "group_size" in source]
    size = sizes[0] if len(sizes) == 1 else settings["orchestrator.group_size"]
    if not isinstance(size, int):
        raise UserError(f"group_size is {size!r}: it should be a whole number")
    return size


def _batch(settings: Settings) -> Converted:
    if settings.has("orchestrator.token_batch_size"):
        raise UserError("orchestrator.token_batch_size counts tokens: set orchestrator.batch_size, of responses")
    size, group = settings.count("orchestrator.batch_size"), _group(settings)
    if size % group:
        raise UserError(f"orchestrator.batch_size is {size}, which is not a multiple of group_size {group}")
    return {
        "data.prompts_per_iteration": size // group,
        "rollout.n": group,
        "actor.mini_batch_trajectories": size,
    }


def _staleness(settings: Settings) -> Converted:
    steps = settings.count("orchestrator.max_off_policy_steps")
    if steps == 0:
        return {"rollout.mode": "sync"}
    return {"rollout.mode": "async", "rollout.max_staleness": steps, "rollout.partial": True}


def _loss(settings: Settings) -> Converted:
    kind = settings.text(f"{LOSS}.type")
    if kind != "default":
        raise UserError(f"{LOSS}.type is {kind}, which algorithm.loss does not have: set default, which is dppo_tv")
    return {
        "algorithm.loss.type": "dppo_tv",
        "algorithm.loss.clip_ratio_low": settings.number(f"{LOSS}.dppo_mask_low"),
        "algorithm.loss.clip_ratio_high": settings.number(f"{LOSS}.dppo_mask_high"),
        "algorithm.loss.clip_ratio_c": NO_TRUNCATION,
        "algorithm.loss.kl_coef": settings.number(f"{LOSS}.kl_tau"),
        "algorithm.rollout_correction.bypass": True,
    }


def _schedule(settings: Settings) -> Converted:
    prefix, total = "trainer.scheduler", settings.count("max_steps") if settings.has("max_steps") else None
    shape = settings.text(f"{prefix}.type")
    if shape == "constant":
        return {}
    warmup, lowest = settings.count(f"{prefix}.warmup_steps"), settings.number(f"{prefix}.min_lr")
    if shape == "linear" and (total is None or settings.count(f"{prefix}.decay_steps") != total - warmup):
        raise UserError(f"{prefix}.decay_steps: a linear schedule decays from the end of warm-up here: set it so")
    return lr_schedule("actor", shape, warmup, 0.0, lowest / settings.number(f"{OPTIMIZER}.lr"), total)


def _lora(settings: Settings) -> Converted:
    if not any(key.startswith(f"{MODEL}.lora") and value is not None for key, value in settings.given.items()):
        raise NoEqual("without it all weights are trained, as model.lora null does")
    targets = f"{MODEL}.lora.target_modules"
    return {
        "model.lora.r": settings.count(f"{MODEL}.lora.rank"),
        "model.lora.alpha": settings.number(f"{MODEL}.lora.alpha"),
        "model.lora.target_modules": settings.texts(targets) if settings.has(targets) else "all-linear",
    }


def _pools(settings: Settings) -> Converted:
    is_single, per_node = settings["deployment.type"] == "single_node", settings.count("deployment.gpus_per_node")
    if is_single:
        trainers, servers = (settings.count(f"deployment.num_{part}_gpus") for part in ("train", "infer"))
    else:
        replicas = settings.count("deployment.num_infer_replicas")
        own = "deployment.num_infer_nodes"
        trainers = settings.count("deployment.num_train_nodes") * per_node
        servers = (settings.count(own) if settings.has(own) else 1) * replicas * per_node
    return {
        "pools.actor.workers": trainers,
        "pools.actor.gpus_per_worker": 1,
        "pools.rollout.workers": servers,
        "pools.rollout.gpus_per_worker": 1,
        "placement": "separate",
    }


def _tracking(settings: Settings) -> Converted:
    if any(key.startswith("monitors.wandb") and value is not None for key, value in settings.given.items()):
        return {"tracking": ["wandb"]}
    return {}


def _checkpoint(settings: Settings) -> Converted:
    if not settings.has("ckpt.interval"):
        raise NoEqual("checkpoint.every null takes snapshots as often as they are cheap")
    return {"checkpoint.every": settings.count("ckpt.interval")}


def _run(settings: Settings) -> Converted:
    keys = ("run.name", "monitors.wandb.name", "slurm.job_name")
    name = next((settings.text(key) for key in keys if settings.has(key)), None)
    return {"run.name": run_name(name)} if name is not None else {}


def _attention(settings: Settings) -> Converted:
    kernel = settings[f"{MODEL}.attn"]
    if kernel not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        raise NoEqual("model.attention sdpa computes the same")
    return {"model.attention": kernel}


def _context(settings: Settings) -> Converted:
    return {"actor.engine": "fsdp", "actor.engine.sequence_parallel": settings.count(f"{MODEL}.cp")}


def _sampling(settings: Settings) -> Converted:
    prefix = f"{TRAIN}.sampling.extra_body."
    template = f"{prefix}chat_template_kwargs."
    extra = {key: value for key, value in settings.given.items() if key.startswith(prefix)}
    others = [key for key in extra if not key.startswith(template)]
    if others:
        raise UserError("\n".join(f"{key} is not sent to vLLM: see rollout.top_p, top_k and min_p" for key in others))
    return (
        {"model.chat_template_kwargs": {key.removeprefix(template): value for key, value in extra.items()}}
        if extra
        else {}
    )


COUNTERPARTS: tuple[Counterpart, ...] = (
    computed(("run.name", "monitors.wandb.name", "slurm.job_name"), "run.name", _run, "the first that is given"),
    direct("monitors.wandb.project", "run.project"),
    direct("monitors.wandb.group", "run.group"),
    direct("monitors.wandb.tags", "run.tags"),
    computed(("monitors.wandb", "monitors.wandb.*"), "tracking", _tracking),
    computed(
        ("model.name", f"{MODEL}.name", "orchestrator.model.name", f"{VLLM}.model"),
        "model.path",
        _model,
        "the rollout has the trained weights",
    ),
    direct("model.trust_remote_code", "model.trust_remote_code"),
    computed(f"{MODEL}.attn", "model.attention", _attention),
    computed(
        (f"{MODEL}.lora", f"{MODEL}.lora.rank", f"{MODEL}.lora.alpha", f"{MODEL}.lora.target_modules"),
        ("model.lora.r", "model.lora.alpha", "model.lora.target_modules"),
        _lora,
    ),
    refused(
        (f"{MODEL}.lora.dropout", f"{MODEL}.lora.modules_to_save"),
        "adapters alone are trained, without dropout: remove it",
        unless=(0, 0.0, []),
    ),
    computed(
        ("seq_len", "orchestrator.seq_len", f"{TRAIN}.sampling.max_completion_tokens"),
        ("rollout.max_response_tokens", "data.max_prompt_tokens"),
        _lengths,
        "prime-rl bounds the sum, and each turn",
    ),
    computed(
        f"{TRAIN}.source.*",
        ("rollout.environment.name", "rollout.environment.options", "reward.function", "data.train"),
        _environment,
        "one taskset of verifiers, played by a chat with its tools (harness null)",
    ),
    computed(
        ("orchestrator.batch_size", "orchestrator.token_batch_size", "orchestrator.group_size"),
        ("data.prompts_per_iteration", "rollout.n", "actor.mini_batch_trajectories"),
        _batch,
        "prime-rl counts responses, all in one optimizer step",
    ),
    computed((), "algorithm.dynamic_sampling.max_prompts", _dynamic_sampling, "a gate that rejects advantages of 0"),
    direct(f"{TRAIN}.sampling.temperature", "rollout.temperature"),
    computed(f"{TRAIN}.sampling.extra_body.*", "model.chat_template_kwargs", _sampling),
    computed(
        "orchestrator.max_off_policy_steps",
        ("rollout.mode", "rollout.max_staleness", "rollout.partial"),
        _staleness,
        "prime-rl drops older responses; here fewer are generated ahead",
    ),
    direct("orchestrator.concurrency.max_inflight", "rollout.max_in_flight", "of each replica"),
    direct(f"{VLLM}.tensor_parallel_size", "rollout.engine.tensor_parallel"),
    direct(f"{VLLM}.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
    direct(f"{VLLM}.enforce_eager", "rollout.engine.enforce_eager"),
    direct(f"{VLLM}.enable_prefix_caching", "rollout.engine.prefix_caching"),
    direct(f"{VLLM}.quantization", "rollout.engine.quantization", values={"fp8": "fp8"}),
    vllm_args(VLLM),
    computed("inference", "rollout.engine", lambda settings: {"rollout.engine": "vllm"}),
    direct(
        "orchestrator.algo.type",
        "algorithm.advantage.type",
        "without the standard deviation",
        values={"grpo": "dr_grpo", "max_rl": "max_rl"},
    ),
    direct(f"{TRAIN}.filter_zero_advantages", "algorithm.advantage.drop_zero_std_groups"),
    computed(
        (f"{LOSS}.type", f"{LOSS}.dppo_mask_low", f"{LOSS}.dppo_mask_high", f"{LOSS}.kl_tau"),
        (
            "algorithm.loss.type",
            "algorithm.loss.clip_ratio_low",
            "algorithm.loss.clip_ratio_high",
            "algorithm.loss.clip_ratio_c",
            "algorithm.loss.kl_coef",
            "algorithm.rollout_correction.bypass",
        ),
        _loss,
        "the ratio is to the log-probs of the rollout, and is not truncated",
    ),
    refused(f"{LOSS}.adv_tau", "it scales the advantages: set 1", unless=(1, 1.0)),
    direct(f"{OPTIMIZER}.lr", "actor.lr"),
    refused(f"{OPTIMIZER}.type", "the optimizer is AdamW: set adamw", unless=("adamw",)),
    direct(f"{OPTIMIZER}.weight_decay", "actor.optimizer.weight_decay", "prime-rl's default is 0.01"),
    computed(
        (f"{OPTIMIZER}.betas1", f"{OPTIMIZER}.betas2"),
        "actor.optimizer.betas",
        lambda settings: {
            "actor.optimizer.betas": [settings.number(f"{OPTIMIZER}.betas1"), settings.number(f"{OPTIMIZER}.betas2")]
        },
    ),
    direct(f"{OPTIMIZER}.max_norm", "actor.grad_clip"),
    computed(
        tuple(f"trainer.scheduler.{name}" for name in ("type", "warmup_steps", "decay_steps", "min_lr")),
        "actor.lr_schedule",
        _schedule,
    ),
    computed(f"{MODEL}.cp", ("actor.engine", "actor.engine.sequence_parallel"), _context, "FSDP2; Ulysses, not a ring"),
    direct(f"{MODEL}.fsdp_cpu_offload", "actor.engine.offload"),
    direct(f"{MODEL}.reshard_after_forward", "actor.engine.reshard_after_forward"),
    computed(
        (
            "deployment.type",
            *(f"deployment.num_{name}" for name in ("train_gpus", "infer_gpus", "train_nodes", "infer_nodes")),
            "deployment.num_infer_replicas",
            "deployment.gpus_per_node",
        ),
        (
            *(f"pools.{role}.{name}" for role in ("actor", "rollout") for name in ("workers", "gpus_per_worker")),
            "placement",
        ),
        _pools,
        "a worker per GPU, on Ray",
    ),
    computed(("ckpt.interval",), "checkpoint.every", _checkpoint, "iterations in between are replayed, not lost"),
    direct("ckpt.keep_last", "checkpoint.keep.last"),
    direct("ckpt.keep_interval", "checkpoint.keep.every"),
    direct("max_steps", "train.iterations"),
    computed((EVAL, f"{EVAL}.*"), (), _evaluation, "validation runs in the training's environment, on another file"),
    refused(
        ("orchestrator.algo.length_penalty", "orchestrator.algo.length_penalty.*"),
        "there is no penalty in proportion to the group's longest response: remove it; see algorithm.overlong_penalty",
        unless=(),
    ),
    refused(
        (
            *(f"orchestrator.algo.{name}" for name in ("teacher.*", "sampling.*", "roles.*", "filter.*")),
            *(
                f"orchestrator.algo.{name}"
                for name in ("decay", "episode_agents", "demo_key", "template", "renderer.*")
            ),
        ),
        "it belongs to another algorithm than grpo: remove it",
        unless=(),
    ),
    direct("trainer.enable_router_replay", "rollout.router_replay"),
    without_equal(f"{VLLM}.enable_return_routed_experts", "vLLM returns routes if the trainer repeats them"),
    refused(
        (f"{MODEL}.quantization", f"{MODEL}.quantization.*"),
        "matrices are not multiplied in 8 bits in training: remove it",
    ),
    refused(
        (f"{MODEL}.freeze_moe_router", f"{MODEL}.debug.random_init", f"{MODEL}.debug.force_balanced_routing"),
        "all weights of model.path are trained: set false",
    ),
    refused(
        (f"{MODEL}.debug.num_layers", f"{MODEL}.index_cache.*", f"{VLLM}.rope_scaling", f"{VLLM}.rope_scaling.*"),
        "the model is that in model.path, with its config.json: remove it",
    ),
    computed([f"{section}.freeze_vision_encoder" for section in VLM], "model.freeze_vision", _freeze_vision),
    without_equal(
        (*VLM, *(f"{section}.{part}_attr" for section in VLM for part in ("vision_encoder", "language_model"))),
        "the parts of a model that sees images are known by its class",
    ),
    refused(
        ("tokenizer.*", "trainer.tokenizer.*", "orchestrator.tokenizer.*", f"{VLLM}.chat_template"),
        "the tokenizer is that in model.path: remove it; see model.chat_template",
    ),
    refused(
        (f"{VLLM}.tool_call_parser", f"{VLLM}.reasoning_parser"),
        "calls of tools are read in the formats of Hermes and Qwen, Llama 3 and Mistral (docs/agents.md): remove it",
        unless=("auto", "hermes", "llama3_json", "mistral"),
    ),
    refused(f"{VLLM}.dtype", "vLLM generates in model.dtype: remove it", unless=("auto", "bfloat16")),
    refused("weight_broadcast.quantize_in_weight_transfer", "weights are sent in model.dtype: set false"),
    refused(("trainer.data.fake", "trainer.data.fake.*"), "rows are real: remove it", unless=()),
    without_equal("orchestrator.renderer.*", "the tokenizer's chat template writes the messages"),
    without_equal(
        (
            "trainer",
            "ckpt",
            "resume",
            "resume.*",
            "ckpt.*",
            "trainer.ckpt.*",
            "trainer.resume.*",
            "orchestrator.ckpt.*",
            "clean",
            "output_dir",
            "run.dir",
            "run.*",
        ),
        "everything is in run.store, and the same command always resumes",
    ),
    without_equal(
        (
            *(f"{MODEL}.{name}" for name in ("ac", "ac.*", "ac_offloading", "ac_offloading.*", "compile", "compile.*")),
            *(f"{MODEL}.{name}" for name in ("conversion_dir", "seq_len", "optim_cpu_offload", "full_offload")),
            *(f"{MODEL}.{name}" for name in ("full_offload.*", "dp_replicate", "ep", "ep_comm_backend", "cp_style")),
            *(f"{MODEL}.{name}" for name in ("deepep_num_sms", "deepep_token_chunk_size", "impl", "reduce_dtype")),
            *(f"{MODEL}.{name}" for name in ("optimization_dtype", "moe_router_dtype", "moe_use_grouped_mm")),
            *(f"{MODEL}.{name}" for name in ("moe_fused_kernel", "fused_lm_head_token_chunk_size")),
        ),
        "changes memory, speed or rounding only; trained weights are float32",
    ),
    without_equal(
        (
            *(f"trainer.{name}" for name in ("matmul_precision", "memory_profiler_path", "trace_path", "gc", "gc.*")),
            *(f"trainer.{name}" for name in ("dist_timeout_seconds", "heartbeat.*", "metrics_server.*", "log.*")),
            *(f"trainer.{name}" for name in ("enable_token_export", "env_vars.*", "monitors.*", "output_dir")),
            *(f"trainer.{name}" for name in ("weight_broadcast.*", "rollout_transport.*")),
            *(f"orchestrator.{name}" for name in ("log.*", "env_vars.*", "monitors.*", "heartbeat.*", "output_dir")),
            *(f"orchestrator.{name}" for name in ("collect_inference_metrics", "inference_metrics_roles")),
            *(f"orchestrator.{name}" for name in ("tasks_per_minute", "env_server_base_port", "num_train_workers")),
            *(f"orchestrator.{name}" for name in ("pad_to_multiple_of", "weight_broadcast.*", "rollout_transport.*")),
            *(f"orchestrator.concurrency.{name}" for name in ("initial_inflight", "min_inflight")),
            *("orchestrator.model.client.*", "orchestrator.model.lora.*", "rollout_transport.*", "weight_broadcast.*"),
            *("log.*", "env_vars.*", "monitors.prime", "monitors.prime.*", "monitors.file", "monitors.file.*"),
            *("slurm.*", "dry_run", "deployment.*"),
        ),
        "changes no result",
    ),
    without_equal(
        (
            *(
                f"inference.{name}"
                for name in ("server.*", "router", "router.*", "backend_port", "log.*", "env_vars.*")
            ),
            *(f"inference.{name}" for name in ("use_deep_gemm", "weight_broadcast.*", "kv_cache_offload.*", "slurm.*")),
            *(f"inference.{name}" for name in ("use_pd_kv_transfer", "enable_fp32_lm_head", "deployment.*")),
            *(f"inference.{name}" for name in ("enable_fp32_router_logits", "output_dir", "dry_run")),
            *(f"{VLLM}.{name}" for name in ("max_model_len", "trust_remote_code", "data_parallel_size")),
            *(f"{VLLM}.{name}" for name in ("data_parallel_size_local", "data_parallel_rpc_port", "api_server_count")),
            *(f"{VLLM}.{name}" for name in ("seed", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank")),
            *(f"{VLLM}.{name}" for name in ("lora_target_modules", "enable_expert_parallel", "all2all_backend")),
            *(f"{VLLM}.{name}" for name in ("enable_eplb", "enable_dbo", "enable_ep_weight_filter")),
            f"{VLLM}.safetensors_load_strategy",
        ),
        "changes memory, speed or rounding of generation only",
    ),
)

DEFAULTS: dict[str, Value] = {
    "model.name": "Qwen/Qwen3-0.6B",
    f"{MODEL}.lora.rank": 16,
    f"{MODEL}.lora.alpha": 32.0,
    f"{MODEL}.cp": 1,
    "seq_len": 2048,
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.concurrency.max_inflight": 1024,
    "orchestrator.algo.type": "grpo",
    f"{TRAIN}.filter_zero_advantages": True,
    f"{TRAIN}.sampling.temperature": 1.0,
    f"{VLLM}.gpu_memory_utilization": 0.9,
    f"{LOSS}.type": "default",
    f"{LOSS}.dppo_mask_low": 0.2,
    f"{LOSS}.dppo_mask_high": 0.2,
    f"{LOSS}.kl_tau": 1e-3,
    f"{OPTIMIZER}.lr": 1e-6,
    f"{OPTIMIZER}.weight_decay": 0.01,
    f"{OPTIMIZER}.betas1": 0.9,
    f"{OPTIMIZER}.betas2": 0.999,
    f"{OPTIMIZER}.max_norm": 1.0,
    "trainer.scheduler.type": "constant",
    "trainer.scheduler.warmup_steps": 10,
    "trainer.scheduler.decay_steps": 10,
    "trainer.scheduler.min_lr": 0.0,
    "deployment.type": "single_node",
    "deployment.gpus_per_node": 8,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "deployment.num_infer_replicas": 1,
}

PRIME_RL = Source("prime-rl", COUNTERPARTS, DEFAULTS, {}, "prime-rl")
