"""The parts of a vision-language model: its decoder, and what turns images into the decoder's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.rlhf.models.families import VISION

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_prefix(model: PreTrainedModel) -> str | None:
    """Returns what the names of a vision-language model's decoder begin with; None if the model reads text only."""
    if model.config.model_type not in VISION:
        return None
    decoder = model.base_model.get_decoder()
    return next(f"{name}." for name, part in model.named_modules() if part is decoder)


def freeze_vision(model: PreTrainedModel) -> None:
    """Freezes the vision tower and its projector in place; does nothing to a model that reads text only."""
    prefix = decoder_prefix(model)
    inside = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        if prefix is not None and name.startswith(inside) and not name.startswith(prefix):
            parameter.requires_grad_(False)
