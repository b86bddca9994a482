"""Answers of experts: which prompts they are for, and the weights of their tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.rlhf.algorithms.experts import LUFFY
from ratchet.rlhf.data.expert_answers import ExpertAnswers
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.tokenizers import load_tokenizer
from tests import tiny


def lines(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@given(
    logits=st.lists(st.floats(-12, 12), min_size=2, max_size=6),
    gamma=st.one_of(st.none(), st.floats(1e-3, 10)),
)
def test_the_weight_gives_the_gradient_of_the_shaped_probability(logits: list[float], gamma: float | None) -> None:
    scores = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    log_probs = scores.log_softmax(-1)[:, :1]
    probs = log_probs.exp()
    shaped = probs if gamma is None else probs / (probs + gamma)
    (expected,) = torch.autograd.grad(shaped.sum(), scores, retain_graph=True)
    weights = LUFFY(gamma=gamma).weights(log_probs.detach(), torch.ones_like(log_probs))
    ratio = (log_probs - log_probs.detach()).exp()
    (gradient,) = torch.autograd.grad((weights * ratio).sum(), scores)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_answers_are_found_by_their_prompts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.config(tiny.workspace(tmp_path)).model)
    question, other = [{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "3+3?"}]
    system = [{"role": "system", "content": "Be kind."}]
    dataset = PromptDataset(
        [lines(tmp_path / "p.jsonl", *({"prompt": prompt} for prompt in (other, question, "9+9?", question)))]
    )
    files = (
        lines(
            tmp_path / "a.jsonl",
            {"prompt": question, "response": "4"},
            {"prompt": "9+9?", "completion": "18"},
            {"prompt": "7+7?", "completion": "14"},
        ),
        lines(
            tmp_path / "b.jsonl",
            {"messages": [*question, {"role": "assistant", "content": "four"}]},
            {"messages": [*question, {"role": "assistant", "content": "four, of course"}]},
            {"messages": [*system, *other, {"role": "assistant", "content": "6"}]},
        ),
    )
    experts = ExpertAnswers(files)
    matched = experts.matched(dataset, tokenizer, system_prompt=None, max_tokens=5)
    assert matched.by_row == {1: (0, 3), 2: (1,), 3: (0, 3)}, "every row of a prompt that is there twice"
    assert (matched.too_long, matched.unknown) == (1, 2)
    with_system = experts.matched(dataset, tokenizer, system_prompt="Be kind.", max_tokens=5)
    assert with_system.by_row[0] == (5,), "the prompt as the policy reads it"
    where, ids, mask, _ = experts.answer(3, tokenizer)
    assert where == f"{tmp_path}/b.jsonl, line 1"
    assert tokenizer.decode(ids) == "four<eos>" and mask == [1] * len(ids)


def test_an_answer_with_other_tools_is_to_another_prompt(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.config(tiny.workspace(tmp_path)).model)
    add, now = ([{"type": "function", "function": {"name": name}}] for name in ("add", "now"))
    asked = [{"prompt": "2+2?", "tools": tools} for tools in (add, now, None)]
    dataset = PromptDataset([lines(tmp_path / "p.jsonl", *asked)])
    offered = (json.dumps(add), now, None, "[]")
    answers = [{"prompt": "2+2?", "response": "4", "tools": tools} for tools in offered]
    experts = ExpertAnswers([lines(tmp_path / "a.jsonl", *answers)])
    matched = experts.matched(dataset, tokenizer, system_prompt=None, max_tokens=5)
    assert matched.by_row == {0: (0,), 1: (1,), 2: (2, 3)}


def test_a_malformed_answer_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.config(tiny.workspace(tmp_path)).model)
    dataset = PromptDataset([lines(tmp_path / "p.jsonl", {"prompt": "2+2?"})])
    experts = ExpertAnswers([lines(tmp_path / "a.jsonl", {"prompt": "2+2?", "response": "4"}, {"question": "2+2?"})])
    with pytest.raises(
        UserError, match=r"a.jsonl, line 2: answers of experts are rows of prompt and response .* question"
    ):
        experts.matched(dataset, tokenizer, system_prompt=None, max_tokens=5)
