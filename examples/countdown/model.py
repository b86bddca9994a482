"""Builds the demo's model: a tiny Llama with random weights, and a tokenizer that splits numbers into digits.

    python examples/countdown/model.py OUT [--seed 0] [--hidden 160] [--layers 3] [--experts 8]

With `--experts` it is a mixture of experts, a Qwen3 MoE, of which each token takes two. The result is an ordinary
Hugging Face model folder; nothing else in the project depends on its size.
"""

import argparse
import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from ratchet.rlhf.data import countdown_dataset
from ratchet.rlhf.models.loading import save

DIGITS_AND_OPERATORS = r"\d|(?<! )[-+*/()=](?! )|(?<=[\d(+*/-])[-+*/()=]|[-+*/()=](?=[\d(])"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE: each digit and operator is one token, and so is each fixed phrase of the prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(DIGITS_AND_OPERATORS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    prompts = [countdown_dataset.prompt(problem) for problem in countdown_dataset.problems(seed=0, count=2000)]
    pieces = [piece for prompt in prompts for piece in re.split("</?answer>", prompt) if piece]
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<answer>", "</answer>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int = 160, layers: int = 3, experts: int = 0
) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not experts:
        return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=hidden * 27 // 10))
    of_experts = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden * 27 // 40}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**shape, **of_experts, head_dim=hidden // 4, num_key_value_heads=4, norm_topk_prob=True)
    )


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0: no mixture")
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed, arguments.hidden, arguments.layers, arguments.experts)
    tokenizer.save_pretrained(arguments.out)
    save(model, arguments.out)
    kind = "mixture of experts" if arguments.experts else "Llama"
    print(f"a {kind} with {model.num_parameters() / 1e6:.2f} M parameters, random weights, in {arguments.out}")
