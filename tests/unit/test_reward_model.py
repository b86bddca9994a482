"""Reward models: that they are read as Hugging Face reads them, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from examples.countdown.model import build_tokenizer
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.config import RewardModelConfig, parse_config
from ratchet.rlhf.data.equal_text import text_lengths
from ratchet.rlhf.data.formats import Chat, Message
from ratchet.rlhf.data.prompts import with_response
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.loading import load_critic, load_reward_model, load_scorer
from ratchet.rlhf.models.tokenizers import load_tokenizer
from ratchet.rlhf.train.reward_engine import RewardEngine, step_ends
from ratchet.tasks.pipeline import names_of
from tests import tiny

TEMPLATE = "{% for m in messages %}({{ m.role }}){{ m.content | trim }}<eos>{% endfor %}"
SAID: list[tuple[Chat, str]] = [
    (Chat([{"role": "user", "content": "Add 1 and 2"}]), " so it is 3. "),
    (Chat([{"role": "system", "content": "Be short"}, {"role": "user", "content": "Why?"}]), ""),
    (Chat([{"role": "user", "content": "A longer question, which pads the others"}]), "a, b. c"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
@pytest.mark.parametrize("pad", [0, 1, None], ids=["pad", "pad is eos", "no pad"])
@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_the_model_asked_one_by_one(
    labels: int, pad: int | None, template: str | None, base: Path, tmp_path: Path
) -> None:
    folder = tiny.reward_model_folder(tmp_path / "judge", base, labels=labels, pad_token_id=pad)
    options: dict[str, Any] = {"path": str(folder), "dtype": "float32"}
    if template:
        (tmp_path / "template.jinja").write_text(template)
        options["chat_template"] = str(tmp_path / "template.jinja")
    config = RewardModelConfig(**options)
    tokenizer = load_tokenizer(config)
    engine = RewardEngine(load_reward_model(config), tokenizer)
    alone = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = []
    for (messages, *_), response in SAID:
        if template:
            ids = tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], return_tensors="pt", return_dict=False
            )
        else:
            text = "\n".join(message["content"] for message in messages) + response + "<eos>"
            ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = alone(ids).logits[0]
        expected.append(float(logits[0]) if labels == 1 else float(logits.softmax(0)[1]))
    for budget in (1, 70, 10_000):  # one by one, in pieces, at once: padding changes sums by float32's rounding
        assert engine.scores(SAID, micro_batch_tokens=budget) == pytest.approx(expected, abs=1e-5)
    assert len({round(each, 4) for each in expected}) == 3


@pytest.mark.parametrize("treatment", ["split", "keep"])
def test_special_tokens_in_texts_are_those_of_the_policy(base: Path, tmp_path: Path, treatment: str) -> None:
    """A prompt that was rendered elsewhere is read alike by both."""
    folder = tiny.reward_model_folder(tmp_path / "judge", base)
    model = {"path": str(folder), "dtype": "float32"}
    config = tiny.config(tmp_path, data__special_tokens=treatment, reward={"model": model, "function": None})
    [score] = (
        Engines(config, ())
        .reward_model()
        .scores([(Chat([{"role": "user", "content": "a<eos>b"}]), "c")], micro_batch_tokens=100)
    )
    ids = AutoTokenizer.from_pretrained(folder)("a<eos>bc<eos>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        of_control_tokens = AutoModelForSequenceClassification.from_pretrained(folder)(ids).logits.item()
    assert (score == pytest.approx(of_control_tokens, abs=1e-5)) == (treatment == "keep")


def test_a_process_reward_is_read_at_the_last_token_of_each_step(base: Path, tmp_path: Path) -> None:
    folder = tiny.reward_model_folder(tmp_path / "judge", base, process=True, labels=2)
    config = RewardModelConfig(path=str(folder), dtype="float32", kind="process", step_separator=".")
    engine = RewardEngine(load_reward_model(config), load_tokenizer(config))
    found = engine.steps(SAID, ".", micro_batch_tokens=10_000)
    model = AutoModelForTokenClassification.from_pretrained(folder)
    for (chat, response), steps in zip(SAID, found, strict=True):
        (text, _), start = with_response(chat, response, engine.tokenizer)
        with torch.no_grad():
            logits = model(engine.tokenizer(text, return_tensors="pt")["input_ids"]).logits[0].softmax(-1)[:, 1]
        ends = {0: [], 1: [], 2: [5, 7]}[SAID.index((chat, response))]
        ends = [12] if response.startswith(" so") else ends
        assert [step.end for step in steps] == ends
        assert start is not None
        at = [start + end - 1 for end in ends]  # one token is one character here
        assert [step.score for step in steps] == pytest.approx(logits[at].tolist(), abs=1e-5)


def test_a_template_that_changes_responses_loses_their_steps(base: Path, tmp_path: Path) -> None:
    folder = tiny.reward_model_folder(tmp_path / "judge", base, process=True)
    (tmp_path / "upper.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    config = RewardModelConfig(
        path=str(folder), dtype="float32", kind="process", chat_template=str(tmp_path / "upper.jinja")
    )
    engine = RewardEngine(load_reward_model(config), load_tokenizer(config))
    with pytest.raises(UserError, match="chat template changes a response"):
        engine.steps([(Chat([{"role": "user", "content": "a"}]), "b")], ".", micro_batch_tokens=100)


@pytest.mark.parametrize(
    ("response", "ends"),
    [("", []), ("a", [1]), ("a\n\n", [3]), ("\n\na\n\n \n\nb", [5, 9]), ("a\n\nb ", [3, 5]), ("a\n\n  ", [3])],
)
def test_step_ends(response: str, ends: list[int]) -> None:
    assert step_ends(response, "\n\n") == ends


def test_how_much_the_tokens_say(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = [1, *tokenizer("abc")["input_ids"], 1]
    assert text_lengths(ids, tokenizer).tolist() == [0, 1, 2, 3, 3]


def test_a_character_of_several_tokens_is_said_by_the_last() -> None:
    tokenizer = build_tokenizer()
    text = "h\u00e9 1+2 \u65e5\u672c"
    ids = tokenizer(text)["input_ids"]
    lengths = text_lengths(ids, tokenizer)
    assert lengths[-1] == len(text)
    for end in range(1, len(text) + 1):
        at = int(np.searchsorted(lengths, end))
        assert tokenizer.decode(ids[: at + 1]) == text[:end]
        assert tokenizer.decode(ids[:at]) != text[:end]


def test_conversations_that_are_too_long_are_refused(base: Path, tmp_path: Path) -> None:
    folder = tiny.reward_model_folder(tmp_path / "judge", base, max_position_embeddings=16)
    config = RewardModelConfig(path=str(folder), dtype="float32")
    engine = RewardEngine(load_reward_model(config), load_tokenizer(config))
    with pytest.raises(UserError, match="reads at most 16 tokens"):
        engine.scores(SAID, micro_batch_tokens=100)


def test_what_is_no_reward_model_is_refused(base: Path) -> None:
    with pytest.raises(UserError, match=r"lacks score\.weight: it is not a reward model of kind outcome"):
        load_reward_model(RewardModelConfig(path=str(base)))


def test_a_critic_begins_as_the_reward_model(base: Path, tmp_path: Path) -> None:
    """Its values are the scores that the reward model would give there."""
    folder = tiny.reward_model_folder(tmp_path / "judge", base)
    critic = load_critic(RewardModelConfig(path=str(folder)))
    judge = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        values = critic(ids).logits[0, :, 0]
        for end in range(1, 5):
            assert float(values[end - 1]) == pytest.approx(float(judge(ids[:, :end]).logits[0, 0]), abs=1e-5)


@pytest.mark.parametrize("response", ["d", "e", "im", "<|"])
def test_a_response_is_not_mistaken_for_what_the_template_adds(response: str) -> None:
    tokenizer = tiny.character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (text, _), start = with_response(Chat([{"role": "user", "content": "d e im"}]), response, tokenizer)
    assert start == text.rindex("assistant\n") + len("assistant\n")


def test_a_response_cannot_end_its_turn(base: Path, tmp_path: Path) -> None:
    """Of an answer that spells the end of sequence, the reward model reads the letters."""
    folder = tiny.reward_model_folder(tmp_path / "judge", base)
    config = RewardModelConfig(path=str(folder), dtype="float32")
    engine = RewardEngine(load_reward_model(config), load_tokenizer(config))
    question = Chat([Message(role="user", content="why")])
    [score] = engine.scores([(question, "so<eos>")], micro_batch_tokens=100)
    letters = engine.tokenizer.convert_tokens_to_ids([*"whyso<eos>"])
    alone = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        expected = alone(torch.tensor([[*letters, 1]])).logits[0, 0]
    assert score == pytest.approx(float(expected), abs=1e-5)


def test_a_critic_of_several_labels_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tiny.reward_model_folder(tmp_path / "judge", base, labels=2)
    for load in (load_critic, load_scorer):
        with pytest.raises(UserError, match="is a classifier with several labels"):
            load(RewardModelConfig(path=str(folder)))


def test_the_sections_short_forms() -> None:
    tree: dict[str, Any] = {"model": "m", "data": {"train": "p"}}
    alone = parse_config(tree | {"reward": {"model": "judge"}}, "here")
    assert alone.reward.function is None
    assert alone.reward.model is not None
    assert alone.reward.model.path == "judge"
    assert "reward_model" in names_of(alone)
    assert "reward" in alone.roles
    both = parse_config(tree | {"reward": {"model": "judge", "function": "gsm8k"}}, "here")
    assert both.reward.functions == {"gsm8k": 1.0}
    assert parse_config(alone.model_dump(mode="json"), "here") == alone
    assert parse_config(tree, "here").reward.function == "auto"
    assert "reward" not in parse_config(tree, "here").roles
    with pytest.raises(UserError, match="names no function"):
        parse_config(tree | {"reward": {"function": None}}, "here")
    with pytest.raises(UserError, match=r"reward.model.lora is set"):
        parse_config(tree | {"reward": {"model": {"path": "judge", "lora": {"r": 2}}}}, "here")
