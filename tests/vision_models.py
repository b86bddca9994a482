"""Tiny vision-language models with processors, and pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from ratchet.rlhf.config import ModelConfig

ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["?", *(f"w{number}" for number in range(60)), "user", "assistant", "system"]
QWEN = [*ENDS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS = [
    *ENDS,
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
LLAVA = [*ENDS, "<image>"]
OF_IMAGES = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "llava": "<image>",
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,  # in heads of a size that vLLM computes without a GPU, as those of the towers
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _template(image: str) -> str:
    part = f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }} "
        f"{{% for part in message['content'] %}}{part}{{% endfor %}}<|im_end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )


def _qwen(kind: str, special: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    axes: dict[str, Any] = {"mrope_section": [4, 6, 6]}
    if "qwen3" in kind:
        axes = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **axes}}
    ids = {f"{name}_token_id": special.index(f"<|{token}|>") for name, token in _QWEN_TOKENS.items()}
    tower: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14}
    if kind == "qwen2_vl":
        tower |= {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    else:
        tower |= {"hidden_size": 64, "intermediate_size": 48, "out_hidden_size": 64}
        tower |= {"fullatt_block_indexes": [1], "window_size": 56} if kind == "qwen2_5_vl" else {}
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64} if "qwen3" in kind else {}
    if "qwen3" in kind:
        text |= {"head_dim": 32}
    if kind == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    processor = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    return {"text_config": text, "vision_config": tower, **ids}, processor, "Qwen2VLImageProcessorPil"


_QWEN_TOKENS = {
    "image": "image_pad",
    "video": "video_pad",
    "vision_start": "vision_start",
    "vision_end": "vision_end",
}


def _idefics(kind: str, special: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    tower: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2}
    tower |= {"image_size": 32, "patch_size": 8}
    text = {"model_type": "llama"} | TEXT
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    name = "SmolVLMImageProcessorPil" if kind == "smolvlm" else "Idefics3ImageProcessorPil"
    values = {"text_config": text, "vision_config": tower, "image_token_id": special.index("<image>")}
    return values | {"scale_factor": 2, "pad_token_id": 0}, sizes, name


def _llava(kind: str, special: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    tower: dict[str, Any] = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
    }
    tower |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8, "projection_dim": 32}
    values = {"text_config": {"model_type": "llama"} | TEXT, "vision_config": tower}
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return values | {"image_token_id": special.index("<image>")}, size, "CLIPImageProcessorPil"


def tiny_vision_model(folder: Path, kind: str) -> ModelConfig:
    """Writes a tiny model of a family, whose outputs depend on all its tokens and images, with its processor."""
    special = QWEN if "qwen" in kind else LLAVA if kind == "llava" else IDEFICS
    build = _qwen if "qwen" in kind else _llava if kind == "llava" else _idefics
    values, sizes, processor = build(kind, special)
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    values["text_config"] |= {"vocab_size": len(vocabulary)}
    config = AutoConfig.for_model(kind, **values, eos_token_id=2, bos_token_id=None, tie_word_embeddings=False)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=32**-0.5)
        model.save_pretrained(folder)
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
    )
    tokenizer.chat_template = _template(OF_IMAGES.get(kind, OF_IMAGES["qwen"]))
    tokenizer.save_pretrained(folder)
    get_image_processor_class_from_name(processor)(**sizes).save_pretrained(folder)
    settings: dict[str, Any] = {"idefics3": {"image_seq_len": 4}, "smolvlm": {"image_seq_len": 4}}.get(kind, {})
    if kind == "llava":
        settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if settings:
        (folder / "processor_config.json").write_text(json.dumps(settings))
    return ModelConfig(path=str(folder), dtype="float32")


def picture(seed: int, width: int = 60, height: int = 80) -> bytes:
    """Returns a picture of random blocks as PNG."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).save(written, "PNG")
    return written.getvalue()
