"""The text of a response: what rewards, environments, agents and people read of a policy's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from ratchet.infra.store.records import Weights
from ratchet.infra.workers.calls import Call, Context
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.batch import TrajectoryBatch
from ratchet.rlhf.data.countdown_dataset import solutions
from ratchet.rlhf.data.equal_text import text_lengths
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.environments.dialogues import Dialogue, content_ids
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.rollout.engine import Chunk
from ratchet.tasks.stages.generate import GENERATE, GenerateConfig
from ratchet.tasks.stages.greedy_baseline import GREEDY_BASELINE, GreedyBaselineConfig, begin
from ratchet.tasks.stages.score import SCORE, ScoreConfig
from tests import tiny
from tests.unit.test_special_tokens import TEMPLATES, chat_tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_special_tokens_are_text_unless_they_stand_around_a_turn(kind: str) -> None:
    tokenizer, ends = chat_tokenizer(kind), TEMPLATES[kind][1]
    tokenizer.add_special_tokens({"additional_special_tokens": [*TAGS, "TOOL"]}, replace_extra_special_tokens=False)
    said = "<think>so so</think>TOOL<answer>1+2</answer>"
    ids = tokenizer(said)["input_ids"]
    assert len(ids) == 5 + len("so so1+2")
    around = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, *ends])
    text = response_text([*ids, *around], tokenizer)
    assert text.rstrip() == said, "a space that ends a turn (llama-2) is a word of the policy's"
    assert text_lengths([*ids, *around], tokenizer)[-1] == len(text), "and the steps of a response are found in it"


@pytest.mark.parametrize(("kind", "assistant"), [("chatml", "assistant"), ("gemma", "model")])
def test_what_the_template_writes_between_turns_is_no_text(kind: str, assistant: str) -> None:
    tokenizer, [end] = chat_tokenizer(kind), TEMPLATES[kind][1]
    template, tokenizer.chat_template = tokenizer.chat_template, None
    assert response_text(tokenizer("a")["input_ids"], tokenizer) == "a", "the template may be set later"
    tokenizer.chat_template = template
    turn = tokenizer(f"a{end}")["input_ids"]
    heard = content_ids(Chat([{"role": "user", "content": "b"}]), turn[-1], tokenizer)
    assert response_text([*turn, *heard], tokenizer) == f"a\nuser\nb\n{assistant}\n"


def test_a_template_that_writes_tags_leaves_them_to_the_text() -> None:
    """GLM's writes an empty thought before each answer."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": TAGS}, replace_extra_special_tokens=False)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "<think></think>{{ m.content }}")
    ids = tokenizer("<think>a</think>b<|im_end|>")["input_ids"]
    assert response_text(ids, tokenizer) == "<think>a</think>b"


def test_added_tokens_that_are_not_special_are_text() -> None:
    """Whoever writes them."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens(["SEP"])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "SEP<|im_start|>")
    ids = tokenizer("aSEPb<|im_end|>")["input_ids"]
    assert response_text(ids, tokenizer) == "aSEPb"


def test_the_ends_of_the_generation_config_are_no_text(tmp_path: Path) -> None:
    """Llama 3 also ends a message with `<|eom_id|>`, which its template never writes."""
    tiny.workspace(tmp_path)
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    tokenizer.save_pretrained(folder)
    ids = tokenizer("ab<|eom_id|>")["input_ids"]
    GenerationConfig(eos_token_id=[1]).save_pretrained(folder)
    assert response_text(ids, load_tokenizer(tiny.config(tmp_path).model)) == "ab<|eom_id|>"
    GenerationConfig(eos_token_id=[1, ids[-1]]).save_pretrained(folder)
    assert response_text(ids, load_tokenizer(tiny.config(tmp_path).model)) == "ab"


def test_an_answer_between_special_tokens_is_scored(tmp_path: Path) -> None:
    """Also a greedy one."""
    tiny.workspace(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": TAGS})
    tokenizer.save_pretrained(tmp_path / "model")
    config = tiny.config(tmp_path, rollout__n=1, reward__function="countdown")
    resources, engines = Resources(config), Engines(config, ())
    call = Call(0, "generate", 0, GenerateConfig.of(config), weights=Weights(version=0, digest=""))
    context: Context[Any] = Context(call, TrajectoryBatch.of({}), engines, resources)
    assert GENERATE.begin is not None
    start = GENERATE.begin(context)
    truths = [json.loads(str(dialogue.beginning.ground_truth)) for dialogue in start.dialogues if dialogue.beginning]
    answers = [f"<answer>{solutions(**truth)[0]}</answer>" for truth in truths]

    def written(dialogues: Sequence[Dialogue]) -> Sequence[Dialogue]:
        for dialogue, answer in zip(dialogues, answers, strict=True):
            ids = tokenizer(f"{answer}<eos>")["input_ids"]
            dialogue.next_request(start.rules.sampling)
            dialogue.wrote(Chunk(tuple(ids), (-1.0,) * len(ids), "stop"), 0)
            dialogue.finish_reason = "stop"
        return dialogues

    generated = GENERATE.compute(replace(context, dialogues=written(start.dialogues))).batch
    assert generated.list("response") == answers
    greedy: Context[Any] = replace(
        context, call=Call(0, "greedy_baseline", 0, GreedyBaselineConfig.of(config)), batch=generated
    )
    baseline = GREEDY_BASELINE.compute(replace(greedy, dialogues=written(begin(greedy).dialogues))).batch
    scored = SCORE.compute(Context(Call(0, "score", 0, ScoreConfig.of(config)), generated, engines, resources)).batch
    resources.close()
    assert baseline.list("greedy_score") == scored.list("score") == [1.0] * len(answers)
