"""What stands before a prompt and after an answer, by the post-processors and chat templates that people publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.data.examples import preferences, supervised
from ratchet.rlhf.data.prompts import Prompt, encode, end_of_turn
from ratchet.rlhf.models.tokenizers import eos_token_ids, tokenizer_digest
from tests import tiny


def template(single: str, *special: str) -> Any:
    return lambda ids: processors.TemplateProcessing(
        single=single, special_tokens=[(name, ids[name]) for name in special]
    )


def byte_level(ids: dict[str, int]) -> Any:
    return processors.ByteLevel(trim_offsets=False)


def llama_3(ids: dict[str, int]) -> Any:
    begin = template("<|begin_of_text|> $A", "<|begin_of_text|>")(ids)
    return processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])


def roberta(ids: dict[str, int]) -> Any:
    return processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]))


KINDS: dict[str, tuple[str | None, str, Any, list[str]]] = {
    "llama-2": ("<s>", "</s>", template("<s> $A", "<s>"), ["<s>"]),
    "llama-2, add_eos_token": ("<s>", "</s>", template("<s> $A </s>", "<s>", "</s>"), ["<s>"]),
    "llama-3": ("<|begin_of_text|>", "<|end_of_text|>", llama_3, ["<|begin_of_text|>"]),
    "mistral": ("<s>", "</s>", template("<s>:0 $A:0", "<s>"), ["<s>"]),
    "gemma": ("<bos>", "<eos>", template("<bos> $A", "<bos>"), ["<bos>"]),
    "deepseek": ("<begin>", "<end>", template("<begin> $A", "<begin>"), ["<begin>"]),
    "opt": ("</s>", "</s>", template("</s> $A", "</s>"), ["</s>"]),
    "roberta": ("<s>", "</s>", roberta, ["<s>"]),
    "bert": (None, "[SEP]", template("[CLS] $A [SEP]", "[CLS]", "[SEP]"), ["[CLS]"]),
    "t5": (None, "</s>", template("$A </s>", "</s>"), []),
    "qwen2": (None, "<|endoftext|>", byte_level, []),
    "gpt-2": ("<|endoftext|>", "<|endoftext|>", byte_level, []),
    "phi-3": ("<s>", "<|endoftext|>", template("$A"), []),
    "falcon": (None, "<|endoftext|>", None, []),
}
"""Beginning and end of sequence, the post-processor, and what stands before a prompt."""


def tokenizer_of(kind: str) -> Any:
    """One token a character, and the special tokens of its kind."""
    bos, eos, processor, before = KINDS[kind]
    special = list(dict.fromkeys(["<unk>", *before, *([bos] if bos else []), eos]))
    ids = {token: number for number, token in enumerate([*special, *tiny.LETTERS])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if processor is not None:
        inner.post_processor = processor(ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=bos, eos_token=eos, unk_token="<unk>", additional_special_tokens=before
    )


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_prompt_begins_as_the_models_training_texts_did_and_goes_on(kind: str) -> None:
    tokenizer, before = tokenizer_of(kind), KINDS[kind][3]
    prompt = Prompt("x", [{"role": "user", "content": "ab"}], None, False, "{}")
    text, ids = encode(prompt, tokenizer, max_tokens=10, truncation="error")
    assert text == "ab"
    assert tokenizer.convert_ids_to_tokens(ids) == [*before, "a", "b"]


@kinds
def test_a_beginning_that_the_prompt_brings_is_not_doubled(kind: str) -> None:
    bos = KINDS[kind][0]
    if bos is None:
        pytest.skip("it has none")
    prompt = Prompt("x", [{"role": "user", "content": f"{bos}ab"}], None, False, "{}")
    ids = encode(prompt, tokenizer_of(kind), max_tokens=10, truncation="error")[1]
    assert tokenizer_of(kind).convert_ids_to_tokens(ids) == [bos, "a", "b"]


@kinds
def test_supervised_examples_are_what_a_rollout_would_have_been(kind: str, tmp_path: Path) -> None:
    tokenizer, before, eos = tokenizer_of(kind), KINDS[kind][3], KINDS[kind][1]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "ab", "response": "cd"}))
    batch, *_ = supervised(str(file), tokenizer, prompt="prompt", response="response", max_tokens=10)
    assert tokenizer.convert_ids_to_tokens(batch.list("prompt_ids")[0]) == [*before, "a", "b"]
    assert tokenizer.convert_ids_to_tokens(batch.list("response_ids")[0]) == ["c", "d", eos]


@kinds
def test_a_reward_model_reads_what_the_policy_reads(kind: str, tmp_path: Path) -> None:
    tokenizer, before = tokenizer_of(kind), KINDS[kind][3]
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "ab", "chosen": "c", "rejected": "d"}))
    batch, _ = preferences(str(file), tokenizer, padding=None, max_tokens=10)
    for ids, last in zip(batch.list("prompt_ids"), "cd", strict=True):
        assert tokenizer.convert_ids_to_tokens(ids) == [*before, "a", "b", last, KINDS[kind][1]]


@kinds
@pytest.mark.parametrize(("truncation", "left"), [("left", "fg"), ("right", "ab"), ("middle", "ag")])
def test_what_is_cut_is_the_prompt_and_not_its_beginning(kind: str, truncation: str, left: str) -> None:
    tokenizer, before = tokenizer_of(kind), KINDS[kind][3]
    prompt = Prompt("x", [{"role": "user", "content": "abcdefg"}], None, False, "{}")
    ids = encode(prompt, tokenizer, max_tokens=len(before) + 2, truncation=truncation)[1]
    found = tokenizer.convert_ids_to_tokens(ids)
    assert found[: len(before)] == before
    assert len(found) == len(before) + 2
    if truncation != "middle":
        assert found[len(before) :] == list(left)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ALTERNATING = "{{ raise_exception('no') }}"

TEMPLATES: dict[str, tuple[str | None, list[str]]] = {
    "chatml": (CHATML, ["<|im_end|>"]),
    "gemma": (GEMMA, ["<end_of_turn>"]),
    "llama-2": (LLAMA_2, [" ", "</s>"]),
    "plain": (PLAIN, ["<eos>"]),
    "two tokens": ("{% for m in messages %}{{ m.content }}<|im_end|></s>{% endfor %}", ["<|im_end|>", "</s>"]),
    "unknown": ("{% for m in messages %}{{ m.content }}~{% endfor %}", ["<eos>"]),
    "refuses": (ALTERNATING, ["<eos>"]),
    "none": (None, ["<eos>"]),
}


def chat_tokenizer(kind: str) -> Any:
    special = [
        "<unk>",
        "<eos>",
        "<bos>",
        "</s>",
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<start_of_turn>",
        "<end_of_turn>",
    ]
    ids = {token: number for number, token in enumerate([*special, *tiny.LETTERS, "\n", "!", ":", "[", "]"])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>", additional_special_tokens=special[2:]
    )
    found.chat_template = TEMPLATES[kind][0]
    return found


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_turn_ends_as_the_template_ends_it(kind: str, tmp_path: Path) -> None:
    tokenizer, ends = chat_tokenizer(kind), TEMPLATES[kind][1]
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == ends
    stops = eos_token_ids(GenerationConfig(eos_token_id=0), tokenizer)
    assert set(tokenizer.convert_ids_to_tokens(stops)) == {"<unk>", "<eos>", ends[-1]}, "and a rollout ends there, too"
    if kind == "refuses":
        return
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "ab", "response": "cd"}))
    batch, *_ = supervised(str(file), tokenizer, prompt="prompt", response="response", max_tokens=99)
    assert tokenizer.convert_ids_to_tokens(batch.list("response_ids")[0]) == ["c", "d", *ends]


def test_the_digest_tells_what_stands_around_texts_and_is_that_of_the_files_otherwise(tmp_path: Path) -> None:
    digests = {}
    for name, kind in {"plain": "gpt-2", "begins": "llama-2"}.items():
        folder = tiny.model_folder(tmp_path / name)
        tokenizer_of(kind).save_pretrained(folder)
        model = ModelConfig(path=str(folder))
        digests[name] = tokenizer_digest(model) == tokenizer_digest(model, writes=False)
    assert digests == {"plain": True, "begins": False}
    folder = tiny.model_folder(tmp_path / "chat")
    chat_tokenizer("chatml").save_pretrained(folder)
    model = ModelConfig(path=str(folder))
    assert tokenizer_digest(model) != tokenizer_digest(model, writes=False)
