"""Builds rollout engines from the config, importing an engine's packages only when it is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.rlhf.config.engines import ServerConfig, VLLMConfig
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.models import lora
from ratchet.rlhf.models.hf_configs import generation_config
from ratchet.rlhf.models.model_folders import model_folder
from ratchet.rlhf.models.tokenizers import eos_token_ids, image_processor, load_tokenizer
from ratchet.rlhf.models.vision import vision_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ratchet.rlhf.config import RunConfig
    from ratchet.rlhf.rollout.engine import RolloutEngine
    from ratchet.rlhf.rollout.rollout_team import RolloutTeam
    from ratchet.rlhf.rollout.server_engine import ServerRollout
    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout


def rollout_engine(
    config: RunConfig,
    actor: PreTrainedModel | None,
    team: RolloutTeam,
    image: Callable[[str], bytes] | None = None,
) -> RolloutEngine:
    """Builds the engine that `rollout.engine` names; `LentDevices` on ranks that do not lead their rollout team.

    Args:
        actor: the model whose tensors the engine `hf` uses; None: it loads the model itself.
        image: reads an image of the run by its digest; None: there is no run.
    """
    from ratchet.rlhf.models.loading import load_actor
    from ratchet.rlhf.rollout.rollout_team import LentDevices

    if not team.leads:
        return LentDevices()
    tokenizer = load_tokenizer(config.model)
    if isinstance(config.rollout.engine, VLLMConfig):
        return vllm_rollout(config, config.rollout.engine, tokenizer, team.devices)
    if isinstance(config.rollout.engine, ServerConfig):
        return server_rollout(config, config.rollout.engine, tokenizer)
    from ratchet.rlhf.rollout.hf_engine import HFRollout

    model = actor
    if model is None:
        model = load_actor(config.model, config.run.seed, trainable=False).to(accelerator.device())
    eos = eos_token_ids(model.generation_config, tokenizer)
    return HFRollout(
        model,
        eos_token_ids=eos,
        dtype=config.model.dtype,
        tokenizer=tokenizer,
        records_routes=config.rollout.router_replay,
        vision=None if (vision := vision_of(config.model, image)) is None else vision(model),
    )


def vllm_rollout(
    config: RunConfig, vllm: VLLMConfig, tokenizer: PreTrainedTokenizerBase, devices: tuple[str, ...] = ()
) -> VLLMRollout:
    """Builds the vLLM rollout engine, whose first call starts vLLM.

    Args:
        devices: the GPUs that vLLM uses, by number or UUID; empty: those that this process sees.
    """
    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout

    rollout, model = config.rollout, config.model
    on_gpu = accelerator.has_cuda()
    return VLLMRollout(
        model_folder(model).resolve(),
        eos_token_ids=eos_token_ids(generation_config(model), tokenizer),
        dtype=model.dtype,
        max_model_len=vllm.max_model_len or config.data.max_prompt_tokens + rollout.max_response_tokens,
        # vLLM's processed log-probs are those after truncation, over the tokens that are left
        logprobs_mode="raw_logprobs" if rollout.truncated_by else "processed_logprobs",
        timeout_s=vllm.timeout_s,
        on_gpu=on_gpu,
        deterministic=config.run.deterministic,
        lora_rank=None if model.lora is None else lora.served_rank(model.lora.r),
        cpu_cache_gib=vllm.cpu_cache_gib,
        tensor_parallel=vllm.tensor_parallel,
        devices=devices,
        # on the CPU vLLM would claim this share of the host's memory; `VLLM_CPU_KVCACHE_SPACE` sizes its cache there
        gpu_memory_utilization=vllm.gpu_memory_utilization if on_gpu else 0.1,
        enforce_eager=vllm.enforce_eager or not on_gpu,
        enable_prefix_caching=vllm.prefix_caching,
        quantization=vllm.quantization,
        enable_sleep_mode=config.actor.offload_when_idle and on_gpu,
        records_routes=rollout.router_replay,
        images=image_processor(model),
        trust_remote_code=model.trust_remote_code,
        hf_overrides=model.args,
        **vllm.args,
    )


def server_rollout(config: RunConfig, server: ServerConfig, tokenizer: PreTrainedTokenizerBase) -> ServerRollout:
    """Builds the rollout engine that uses running servers."""
    from ratchet.rlhf.rollout.server_engine import ServerRollout

    model = config.model
    return ServerRollout(
        server.urls,
        api=server.api,
        eos_token_ids=eos_token_ids(generation_config(model), tokenizer),
        timeout_s=server.timeout_s,
        weights_folder=None if server.weights_folder is None else Path(server.weights_folder),
        dtype=model.dtype,
        model_folder=model_folder(model),
        tokenizer=tokenizer,
        images=image_processor(model),
    )
