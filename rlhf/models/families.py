"""What holds of each family of decoders that `AutoModelForCausalLM` knows, by its type in transformers.

`tests/contract/test_architectures.py` checks all of it with tiny models, and `docs/models.md` lists it. A run does not
read it: it tries a small model of its own before it starts (`support.py`).
"""

from __future__ import annotations

from functools import cache

ENCODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod reformer"""
WITH_ENCODERS = """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
whisper"""
MULTIMODAL = """emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama moshi musicgen musicgen_melody
phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp"""
NO_TEXT_DECODERS = {
    "attend in both directions unless their config says otherwise": tuple(ENCODERS.split()),
    "are the decoders of models that translate or transcribe": tuple(WITH_ENCODERS.split()),
    "read more than text; the decoders of most are families of their own": tuple(MULTIMODAL.split()),
}
"""Families that are not tested, by what they do instead."""
UNBUILT = {
    "blt": "it reads bytes, in patches that a model of its own chooses",
    "cohere_compass_text": "transformers cannot build it from its own defaults",
    "cpmant": "its prompts are whole tables",
    "dbrx": "transformers cannot build it from its own defaults",
    "gemma4_assistant": "it drafts for another model",
    "gemma4_unified_assistant": "it drafts for another model",
    "qwen4_exp_text": "transformers cannot build it from its own defaults",
}
"""Families of which the tests have no tiny model, and why."""
REFUSED = {
    "hrm_text": "cannot generate",
    "inkling_text": "log-probs would be wrong",
    "llama4_text": "cannot be trained",
    "modernbert-decoder": "log-probs would be wrong",
    "openai-gpt": "cannot generate",
    "recurrent_gemma": "log-probs would be wrong",
    "rwkv": "cannot generate",
    "xlstm": "log-probs would be wrong",
}
"""Families that are refused before the start, and a part of the message."""
STATES = """bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2
minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2 zaya"""
STATEFUL = frozenset(STATES.split())
"""Families with layers that carry a state from token to token."""
NO_CRITIC = {"hy_v4": "its hidden states need a part of the language model's head"}
"""Families that cannot be critics or reward models, and why."""
VISION = ("idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
"""Families of vision-language models that are tested. They read images and text."""
VLLM_VISION = ("idefics3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""Those that vLLM generates with. It does not take the weights of the others as transformers names or arranges them."""
WITHOUT_TORCHVISION = ("idefics3",)
"""Those of them that vLLM loads where torchvision is missing; the tests generate with them."""
VLLM_VERSION = "0.32"
VLLM_CLOSE = 1e-3
"""Largest difference of vLLM's log-probs to the trainer's; its attention on the CPU rounds more than PyTorch's."""
VLLM = (
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Families that the tests generate with in vLLM."""


@cache
def text_decoders() -> tuple[str, ...]:
    """Returns the families of text decoders of which there is a tiny model, in order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    others = {kind for kinds in NO_TEXT_DECODERS.values() for kind in kinds} | UNBUILT.keys()
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - others))


@cache
def has_own_classifier(kind: str) -> bool:
    """Returns True if a family's token classifier is one of transformers; else Ratchet builds it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    return kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
