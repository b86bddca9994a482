"""Checks the models that a config names: their files, and that this machine's engines can compute them."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial

from ratchet.infra.execution.preflight.mistakes import check_all, refuse
from ratchet.infra.execution.preflight.packages import is_installed
from ratchet.infra.execution.preflight.teachers import check_teachers
from ratchet.infra.progress import note
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.config.engines import FSDPConfig, HFConfig, MegatronConfig, ServerConfig, TorchConfig, VLLMConfig
from ratchet.rlhf.config.roles import ROLES, is_critic
from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.families import VLLM_VERSION, VLLM_VISION, WITHOUT_TORCHVISION
from ratchet.rlhf.models.hf_configs import (
    attention_heads,
    attention_of,
    check_architecture,
    check_unquantized,
    longest_sequence,
    model_config,
    text_config,
)
from ratchet.rlhf.models.image_processor import sees_images
from ratchet.rlhf.models.model_folders import check_weights, model_folder
from ratchet.rlhf.models.tokenizers import check_embeddings

USUAL_HEADS = (32, 64, 96, 128, 256)
"""Sizes of attention heads that vLLM supports everywhere; asking it takes 10 to 25 s."""
LONGEST_MASK = 32_768
"""Largest number of tokens in a row for which each rank may build a mask of all positions: it takes 1 GiB."""


def check_models(config: RunConfig) -> None:
    """Checks the files and architectures of the models, and that they can read the trajectories."""
    for key, model in config.named_models.items():
        folder = model_folder(model, key)
        if not model.is_served:
            check_weights(folder, key)
            say_attention(model)
    readers = [model for role in config.readers for model in config.models_of(role).values()]
    critics = [role for role in config.readers if is_critic(role)]
    check_all(
        partial(_check_policy, config),
        *(partial(check_unquantized, config.model_of(role)) for role in config.readers if ROLES[role].learns),
        partial(_check_heads, config),
        partial(_check_heads_of_vllm, config),
        partial(_check_vision, config),
        partial(_check_routes_of_vllm, config),
        *(partial(_check_megatron, config, role) for role in config.readers),
        *(partial(_check_packing, config, owner) for owner in config.trainers),
        *(partial(_check_sequence_parallel, config, role) for role in config.readers),
        *([] if config.teacher is None else [partial(check_teachers, config.model, config.teacher)]),
        partial(check_lengths, config),
        partial(check_embeddings, config.model, *(model for model in readers if not model.reads_text)),
        *([] if config.reward.model is None else [partial(check_embeddings, config.reward.model, config.reward.model)]),
        *(
            partial(check_architecture, config.model_of(role), ROLES[role].model_key, is_critic=True)
            for role in critics
        ),
    )


def _check_policy(config: RunConfig) -> None:
    """Refuses a policy that would train or generate wrongly, and says how one generates that cannot be padded."""
    from ratchet.rlhf.models.routes import Routers, number_of_experts
    from ratchet.rlhf.models.support import check_adapters, check_decoder, check_packing, small_decoder

    check_architecture(config.model, "model", is_critic=False)
    if config.rollout.router_replay:
        number_of_experts(text_config(config.model))
    if isinstance(config.actor.engine, MegatronConfig):  # it has layers of its own
        return
    small = small_decoder(config.model)
    if small is None:  # the workers try a larger one
        return
    named = f"model.path {config.model.path}"
    decoding = check_decoder(small, named, generates=isinstance(config.rollout.engine, HFConfig))
    if config.actor.packing is True:
        check_packing(small, "actor.packing")
    if config.model.lora is not None and is_installed("peft"):
        check_adapters(config.model, small)
    if config.rollout.router_replay:
        Routers.of(small, small)
    if decoding is not None and not (decoding.pads and decoding.selects):
        note(f"{named}: {decoding.said(small.config.model_type)}")


def _check_vision(config: RunConfig) -> None:
    """Refuses what cannot compute, or generate with, a policy that sees images."""
    if not sees_images(config.model):
        return
    named, rollout, mistakes = f"model.path {config.model.path} sees images", config.rollout, list[str]()
    if (reason := _blindness(config)) is not None:
        mistakes.append(f"{named}, and {reason}")
    if rollout.router_replay:
        mistakes.append(f"{named}, which rollout.router_replay cannot follow: set rollout.router_replay: false")
    if rollout.agent is not None and rollout.agent.name == "openenv":
        mistakes.append(f"{named}, and rollout.agent openenv exchanges texts: remove rollout.agent")
    for owner, trainer in config.trainers.items():
        engine = trainer.engine
        if not isinstance(engine, TorchConfig | FSDPConfig) or any(size > 1 for size in engine.teams.values()):
            mistakes.append(
                f"{named}, which {owner}.engine cannot split or compute: set {owner}.engine to torch or fsdp, without "
                "sequence_parallel and tensor_parallel"
            )
    for key, model in config.named_models.items():
        if model.kernels != "torch":
            mistakes.append(f"{named}, and {key}.kernels {model.kernels} cannot compute them: set {key}.kernels: torch")
    for role in config.readers:
        for model in config.models_of(role).values():
            if not sees_images(model):
                mistakes.append(f"{named}, and the {role} {model.path} does not: name a model of its family")
    refuse(mistakes)


def _blindness(config: RunConfig) -> str | None:
    """Returns why the rollout cannot show images to the policy, and a fix; None if it can."""
    engine, kind = config.rollout.engine, model_config(config.model).model_type
    if isinstance(engine, HFConfig):
        return None
    if isinstance(engine, ServerConfig) and engine.api != "vllm":
        return (
            f"rollout.engine.api {engine.api} cannot be sent any: set rollout.engine.api: vllm, or rollout.engine: hf"
        )
    if kind not in VLLM_VISION:
        return f"vLLM {VLLM_VERSION} cannot load the weights of {kind} as they are trained: set rollout.engine: hf"
    # workers in pools may have other packages than this machine
    lacks = config.pool_of("rollout") is None and not is_installed("torchvision")
    if isinstance(engine, VLLMConfig) and kind not in WITHOUT_TORCHVISION and lacks:
        return (
            f"vLLM reads the images of {kind} with torchvision, which is not installed: install the torchvision that "
            "belongs to this torch, or set rollout.engine: hf"
        )
    return None


def _check_sequence_parallel(config: RunConfig, role: str) -> None:
    """Refuses to split the sequences of a model whose layers are not all full attention."""
    from ratchet.rlhf.models.sequence_parallel import refusal

    owner, engine = ROLES[role].section, config.trainer_of(role).engine
    size = engine.teams.get("sequence_parallel", 1)
    for model in config.models_of(role).values() if size > 1 else ():
        if reason := refusal(text_config(model), size):
            raise UserError(f"{owner}.engine: sequence_parallel {reason}: remove {owner}.engine.sequence_parallel")


def _check_heads(config: RunConfig) -> None:
    devices = config.rollout.engine.devices
    if devices > 1 and (heads := attention_heads(config.model)) % devices:
        raise UserError(
            f"rollout.engine.tensor_parallel is {devices}, which does not divide the model's {heads} attention heads: "
            "change it"
        )


def _check_heads_of_vllm(config: RunConfig) -> None:
    """Refuses a model whose attention heads have a size that vLLM cannot compute without a GPU."""
    if not isinstance(config.rollout.engine, VLLMConfig) or _rollout_has_gpu(config) or not is_installed("vllm"):
        return
    decoder = text_config(config.model)
    size = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    if size not in USUAL_HEADS and not vllm_supports_heads(size):
        raise UserError(
            f"rollout.engine vllm cannot compute {config.model.path} without a GPU: its attention heads have {size} "
            "dimensions (head_dim): choose another model, or rollout.engine: hf"
        )


def _check_routes_of_vllm(config: RunConfig) -> None:
    if config.rollout.router_replay and isinstance(config.rollout.engine, VLLMConfig) and not _rollout_has_gpu(config):
        raise UserError(
            "rollout.router_replay needs the experts that the rollout chose, and vLLM tells them on a GPU only: "
            "set rollout.engine: hf, or rollout.router_replay: false"
        )


def _rollout_has_gpu(config: RunConfig) -> bool:
    pool = config.pool_of("rollout")
    return accelerator.has_cuda() if pool is None else config.pools[pool].gpus_per_worker > 0


@cache
def vllm_supports_heads(size: int) -> bool:
    """Asks the installed vLLM, in another process, whether its attention on the CPU supports heads of a size."""
    ask = (
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as backend\n"
        f"print(backend.supports_head_size({size}))"
    )
    note(f"asking vLLM whether it supports attention heads of {size} dimensions (10 to 25 s)")
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    # an unreadable answer counts as yes: vLLM's start will tell
    return asked.stdout.split()[-1:] != ["False"]


def _check_packing(config: RunConfig, owner: str) -> None:
    """Refuses long rows of several sequences where transformers needs a mask of all their positions."""
    from ratchet.rlhf.models.prefix_sharing import attention_kinds

    trainer = config.trainers[owner]
    if trainer.packing is not True or trainer.micro_batch_tokens <= LONGEST_MASK:
        return
    masked = [
        role
        for role in config.readers
        if ROLES[role].section == owner
        and any(
            attention_of(model)[0] == "eager"
            or (model.attention == "sdpa" and attention_kinds(text_config(model)) != {"full_attention"})
            for model in config.models_of(role).values()
        )
    ]
    if masked:
        size, longest = trainer.micro_batch_tokens, config.data.max_prompt_tokens + config.rollout.max_response_tokens
        lower = f"lower {owner}.micro_batch_tokens to {LONGEST_MASK}, or " if longest <= LONGEST_MASK else ""
        raise UserError(
            f"{owner}.packing true makes rows of {owner}.micro_batch_tokens = {size} tokens, for which the layers of "
            f"the {' and the '.join(masked)} need a mask of {size} x {size} positions: {lower}set {owner}.packing false"
        )


def _check_megatron(config: RunConfig, role: str) -> None:
    """Checks that Megatron can split a model in the way that its trainer's engine asks for."""
    from ratchet.rlhf.models.megatron_layout import Place, refusal

    owner, engine = ROLES[role].section, config.trainer_of(role).engine
    if isinstance(engine, MegatronConfig):
        place = Place(tensors=engine.tensor_parallel, stages=engine.pipeline_parallel, experts=engine.expert_parallel)
        for model in config.models_of(role).values():
            if reason := refusal(text_config(model), place):
                raise UserError(f"{owner}.engine megatron cannot compute the {role}: {reason}")


def check_lengths(config: RunConfig) -> None:
    """Raises `UserError` if a model cannot read a longest prompt with its longest response."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    roles = (role for role in config.roles if ROLES[role].has_versions and ROLES[role].computes)
    models = [model for role in roles for model in config.all_models_of(role).values() if not model.reads_text]
    limits = {model.path: longest_sequence(model) for model in models}
    refuse(
        f"data.max_prompt_tokens {prompt} + rollout.max_response_tokens {response} is {prompt + response}, but "
        f"{path} reads at most {limit} tokens (max_position_embeddings in its config.json): lower one of them"
        for path, limit in limits.items()
        if limit is not None and limit < prompt + response
    )


@cache
def say_attention(model: ModelConfig) -> None:
    """Reports an attention implementation that differs from the config, once per process."""
    attention, reason = attention_of(model)
    if reason is not None:
        note(f"{model.path} is computed with {attention} attention, not {model.attention}: {reason}")
