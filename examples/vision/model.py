"""Builds the vision demo's model: a tiny Qwen2.5-VL with random weights, its tokenizer and its image processor.

    python examples/vision/model.py OUT [--seed 0] [--hidden 128] [--layers 2]

A picture of 112 × 112 pixels is 16 tokens. The result is an ordinary Hugging Face model folder of a vision-language
model; nothing else in the project depends on its size.
"""

import argparse
from pathlib import Path

import pictures
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from ratchet.rlhf.models.loading import save

PAD, START, END, IMAGE, VIDEO = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
SPECIAL = [PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns as Qwen2.5-VL writes them, without a system message."""
PATCH, MERGE = 14, 2
SIDE = pictures.CELL * pictures.CELLS


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, for which each question is a few tokens and each answer is one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*pictures.QUESTIONS, *pictures.COLOURS, "user\n", "assistant\n"] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, VISION_START, VISION_END, IMAGE, VIDEO],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int = 128, layers: int = 2
) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(seed)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    heads = 4
    pairs = hidden // heads // 2  # of the rotary positions of a head: a quarter for time, the rest for the two axes
    scale = 0.06
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "initializer_range": scale,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8],
        },
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }
    vision = {
        "depth": 1,
        "hidden_size": hidden // 2,
        "intermediate_size": 3 * hidden // 2,
        "num_heads": heads,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": PATCH * 8,
        "fullatt_block_indexes": [0],
        "initializer_range": scale,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed, arguments.hidden, arguments.layers)
    tokenizer.save_pretrained(arguments.out)
    # the pictures have this size already: it is neither reduced nor enlarged
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE
    )
    processor.save_pretrained(arguments.out)
    save(model, arguments.out)
    print(f"a Qwen2.5-VL with {model.num_parameters() / 1e6:.2f} M parameters, random weights, in {arguments.out}")
