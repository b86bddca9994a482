"""Classifiers of decoders that transformers has only as language models: the decoder with a linear head on top.

They have the form of transformers' own generic classifiers and are registered with its Auto classes, so that they load
what it saved, and it loads what Ratchet saves once they are registered in that process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput

from ratchet.rlhf.models.hf_configs import policy_class


class _Headed:
    """Fits the head to the last hidden states, which some decoders project, such as the OPT of 350 M."""

    score: torch.nn.Linear

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the generic classifier, which comes after this class
        size = getattr(config.get_text_config(), "word_embed_proj_dim", self.score.in_features)
        if size != self.score.in_features:
            self.score = torch.nn.Linear(size, self.score.out_features, bias=self.score.bias is not None)


class TokenClassifier(_Headed, GenericForTokenClassification):  # type: ignore[misc]
    """Scores every token. Reads nothing but the last hidden states: recurrent decoders have no attentions to return."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> TokenClassifierOutput:
        hidden = self.base_model(input_ids=input_ids, **inputs).last_hidden_state
        return TokenClassifierOutput(logits=self.score(self.dropout(hidden)))


class SequenceClassifier(_Headed, GenericForSequenceClassification):  # type: ignore[misc]
    """Scores the last token that is not padding."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        hidden = self.base_model(input_ids=input_ids, **inputs).last_hidden_state
        pad = self.config.get_text_config().pad_token_id
        is_token = torch.ones_like(input_ids) if pad is None else input_ids != pad
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (positions * is_token).argmax(-1)
        return SequenceClassifierOutput(logits=self.score(hidden)[torch.arange(len(last), device=last.device), last])


def register(config: PreTrainedConfig) -> bool:
    """Registers a token classifier and a sequence classifier of a decoder, where transformers has none.

    Returns:
        True if transformers has no token classifier of its own for this decoder, but there is one now.
    """
    kind = type(config)
    language_models = policy_class(config)._model_mapping
    is_language_model = kind in language_models and kind in MODEL_MAPPING
    if is_language_model and not config.is_encoder_decoder:
        language_model = language_models[kind]
        # transformers overlooks a class for one of its own configs without exist_ok
        if kind not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
            built = _classifier(config, language_model, TokenClassifier)
            AutoModelForTokenClassification.register(kind, built, exist_ok=True)
        if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            built = _classifier(config, language_model, SequenceClassifier)
            AutoModelForSequenceClassification.register(kind, built, exist_ok=True)
    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    return kind in known and issubclass(known[kind], TokenClassifier)


def _classifier(config: PreTrainedConfig, language_model: type[PreTrainedModel], generic: type) -> type:
    """Returns a class such as `Qwen3NextTokenClassifier`, from the base class of the family."""
    family = next(base for base in language_model.__mro__ if PreTrainedModel in base.__bases__)
    family_name = language_model.__name__
    for ending in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"):
        family_name = family_name.removesuffix(ending)
    name = f"{family_name}{generic.__name__}"
    # the prefix of the language model, so that its weights have the same names here
    members = {"config_class": type(config), "base_model_prefix": language_model.base_model_prefix}
    renamed = get_checkpoint_conversion_mapping(language_model.__name__)
    if renamed is not None:  # the files have other names than the modules, which transformers looks up by class
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (generic, family), members)
