"""Refuses decoders that would generate or train wrongly, by trials with small models, before a run starts."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models import lora
from ratchet.rlhf.models.decoding import Decoding, cannot_cache
from ratchet.rlhf.models.hf_configs import attention_of, model_config, policy_class, without_noise
from ratchet.rlhf.models.prefix_sharing import agree
from ratchet.rlhf.models.token_outputs import TokenOutputs
from ratchet.rlhf.models.truncated import small_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ratchet.rlhf.config import ModelConfig

LARGEST = 300_000_000
"""Maximum number of parameters of a model that is tried before the start; they take 1.2 GB."""


def small_decoder(model: ModelConfig, key: str = "model") -> PreTrainedModel | None:
    """Builds a small model of the architecture that a config names; returns None if none is small enough."""
    whole = _without_weights(model, key)
    small = small_model(whole, attention=_plain_attention(model), at_most=LARGEST)
    for module in small.modules() if small is not None else ():  # the engines have none, either
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return small


def _without_weights(model: ModelConfig, key: str) -> PreTrainedModel:
    config = model_config(model, key)
    without_noise(config)
    with torch.device("meta"):
        whole: PreTrainedModel = policy_class(config).from_config(
            config, attn_implementation=_plain_attention(model), trust_remote_code=model.trust_remote_code
        )
    return whole


def _plain_attention(model: ModelConfig) -> str:
    attention = attention_of(model)[0]
    return attention if attention in ("sdpa", "eager") else "sdpa"


def check_decoder(small: PreTrainedModel, named: str, *, generates: bool) -> Decoding | None:
    """Raises UserError if a decoder would train or generate wrongly.

    Args:
        small: a model of the architecture.
        named: the key and path of the model, for the message.
        generates: whether `rollout.engine: hf` generates with it.

    Returns:
        What its cache allows; None unless `generates`.
    """
    model_type = small.config.model_type
    try:
        TokenOutputs(small, "policy")
    except Exception as error:  # models fail in their own ways
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, UserError):
            reason = "its log-probs would be wrong, because it changes hidden states or logits in an unknown way"
        raise UserError(
            f"{named}: {model_type} cannot be trained ({reason}): choose a model of another architecture"
        ) from None
    if not agree(_logits(small, training=True), _logits(small, training=False)):
        raise UserError(
            f"{named}: {model_type} cannot be trained, because it computes something else in training than in "
            "generation: choose a model of another architecture"
        )
    if not generates:
        return None
    decoding = Decoding.of(small)
    if decoding is None:
        raise UserError(f"{named}: rollout.engine hf {cannot_cache(model_type)}")
    return decoding


@torch.no_grad()
def _logits(small: PreTrainedModel, *, training: bool) -> Tensor:
    small.train(training)
    with torch.random.fork_rng(devices=[]):
        logits: Tensor = small(input_ids=torch.arange(8)[None], use_cache=False).logits
    small.eval()
    return logits


def check_adapters(model: ModelConfig, small: PreTrainedModel, key: str = "model") -> None:
    """Raises UserError if a model cannot have its adapters, or computes something else with them than with them merged.

    The small model has adapters afterwards.
    """
    assert model.lora is not None
    lora.add(_without_weights(model, key), model.lora, seed=0)
    merged = deepcopy(small)
    try:
        lora.add(small, model.lora, seed=0)
    except UserError:  # it has fewer layers, and may lack those that the settings name
        return
    with torch.random.fork_rng(devices=[]):  # a new B is zero
        for name, parameter in small.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    try:
        merged.load_state_dict(lora.merged(small), strict=False)  # tied weights have one name
        agrees = agree(_logits(small, training=False), _logits(merged, training=False))
    except Exception:  # layers fail in their own ways
        agrees = False
    if not agrees:
        raise UserError(
            f"{key}.lora: {small.config.model_type} computes something else with adapters than with the adapters "
            f"merged: name other layers in {key}.lora.target_modules, or remove {key}.lora to train all weights"
        )


def check_packing(small: PreTrainedModel, key: str) -> None:
    """Raises UserError if a decoder does not tell apart the sequences of a row."""
    # transformers' name for models whose cache is a state, which sequences in a row would share
    is_stateful = getattr(type(small), "_is_stateful", False)
    try:
        if not is_stateful:
            TokenOutputs(small, "policy", packing=True)
            return
    except UserError:
        pass
    raise UserError(
        f"{key} true: {small.config.model_type} does not tell packed sequences apart, because its layers carry more "
        f"from token to token than attention does, or have no positions: remove {key}"
    )
