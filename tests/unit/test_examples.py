"""What models are fitted to, in the spellings that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from ratchet.rlhf.data.examples import preferences, supervised
from ratchet.rlhf.errors import UserError
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
USER, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "ask"), ("assistant", "good"), ("assistant", "bad"))
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.model_folder(tmp_path_factory.mktemp("model")))


def write(path: Path, *rows: dict[str, Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(url: str, tokenizer: Any, **columns: str) -> list[tuple[str, str]]:
    names = {"prompt": "prompt", "response": "response"} | columns
    batch, left_out, _ = supervised(url, tokenizer, max_tokens=50, **names)
    assert left_out == 0
    assert batch.list("loss_mask") == [[1] * len(ids) for ids in batch.list("response_ids")]
    pairs = zip(batch.list("prompt_ids"), batch.list("response_ids"), strict=True)
    return [(tokenizer.decode(prompt), tokenizer.decode(response)) for prompt, response in pairs]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "ask", "response": "good"}, {}),
        ({"prompt": [USER], "response": "good"}, {}),
        ({"prompt": [USER], "completion": [ANSWER]}, {}),
        ({"prompt": "ask", "completion": "good"}, {}),
        (
            {
                "prompt": "a",
                "completion": [{"role": "assistant", "content": "s"}, {"role": "user", "content": "k"}, ANSWER],
            },
            {},
        ),
        ({"messages": [USER, ANSWER]}, {}),
        ({"prompt": "ask", "prompt_id": "1", "messages": [USER, ANSWER]}, {}),
        ({"question": "ask", "answer": "good"}, {"prompt": "question", "response": "answer"}),
    ],
)
def test_supervised_examples_in_every_spelling(
    row: dict[str, Any], columns: dict[str, str], name: str, tokenizer: Any, tmp_path: Path
) -> None:
    found = read(write(tmp_path / name, row, row), tokenizer, **columns)
    assert [(prompt.replace("<unk>", ""), response) for prompt, response in found] == [("ask", "good<eos>")] * 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "ask"}, "line 1 has no response: supervised examples are rows of prompt and response"),
        ({"response": "ask"}, "line 1 has no prompt"),
        ({"prompt": "ask", "response": None}, "line 1: response should be a text or a list of messages, and is null"),
        ({"prompt": 7, "response": "good"}, "line 1: prompt should be a list of messages"),
        (
            {"messages": [USER]},
            "line 1: messages should end with a message of the assistant, after others",
        ),
        (
            {"messages": [USER, {**ANSWER, "content": None, "tool_calls": [{"name": "add"}]}]},
            "line 1: messages ends with a call of a tool, and only texts are learned",
        ),
        (
            {"messages": [USER, {**ANSWER, "reasoning_content": "why"}]},
            "line 1: messages ends with a message with reasoning_content, and only contents are learned: write it into",
        ),
        ({"prompt": "ask", "response": "good", "images": ["a.png"]}, "line 1: image 1 does not exist"),
        (
            {"messages": [USER, ANSWER], "tools": [{"name": "add"}]},
            "line 1: the prompt has tools, and the model has no chat template: set model.chat_template, choose",
        ),
        ({"prompt": "ask", "response": "good", "documents": ["a"]}, "line 1 has documents, which would be left out"),
        ({"prompt": "ask", "response": "good", "system": "Be good."}, "line 1 has system, which would be left out"),
        ({"messages": [ANSWER]}, "line 1: messages should end with a message of the assistant"),
        ({"prompt": "a" * 46, "response": "good"}, "up to max_tokens 50, has no examples"),
        ({"prompt": "", "response": "good"}, "line 1: the prompt is empty"),
    ],
)
def test_what_is_no_example_is_named(row: dict[str, Any], says: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        read(write(tmp_path / "rows.jsonl", row), tokenizer)
    with pytest.raises(UserError, match="has no examples"):
        read(write(tmp_path / "none.jsonl"), tokenizer)


def test_what_adds_nothing_to_a_prompt_is_passed_over(tokenizer: Any, tmp_path: Path) -> None:
    empty: dict[str, Any] = {"tools": [], "documents": None, "images": [], "topic": "metadata"}
    rows: list[dict[str, Any]] = [
        {"prompt": "ask", "response": "good", **empty},
        {"messages": [{"role": "system", "content": "ask"}, ANSWER], "system": "ask"},
        {"conversations": [{"from": "human", "value": "sk"}, {"from": "gpt", "value": "good"}], "system": "a"},
    ]
    found = read(write(tmp_path / "rows.jsonl", *rows), tokenizer)
    assert [prompt.replace("<unk>", "") for prompt, _ in found] == ["ask"] * 3
    # a column of these names may be the prompt
    other = write(tmp_path / "other.jsonl", {"documents": "ask", "reasoning_content": "good"})
    assert read(other, tokenizer, prompt="documents", response="reasoning_content") == [("ask", "good<eos>")]


PAIRS: list[dict[str, Any]] = [
    {"prompt": "ask", "chosen": "good", "rejected": "bad"},
    {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
    {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    {"prompt": "ask", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
]
"""As in TRL, UltraFeedback, and HH."""


@pytest.mark.parametrize("row", PAIRS)
def test_preferences_in_every_spelling(row: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    for template, good, bad in (
        (None, "askgood<eos>", "askbad<eos>"),
        (TEMPLATE, *(f"(user)ask<eos>(assistant){text}<eos>" for text in ("good", "bad"))),
    ):
        own = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template=template)
        batch, left_out = preferences(write(tmp_path / "p.jsonl", row), own, padding=0, max_tokens=50)
        assert [own.decode(ids) for ids in batch.list("prompt_ids")] == [good, bad]
        assert batch.list("response_ids") == [[0], [0]]
        assert left_out == 0
        # a classifier whose padding is the end of sequence reads its score before it
        batch, _ = preferences(write(tmp_path / "p.jsonl", row), own, padding=1, max_tokens=50)
        assert [own.decode(ids) for ids in batch.list("prompt_ids")] == [good[:-5], bad[:-5]]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**PAIRS[0], "images": ["a.png"]}, "line 1 has images, and pairs have texts only"),
        (
            {**PAIRS[1], "tools": '[{"name": "add"}]'},
            "line 1: the prompt has tools, and the model has no chat template",
        ),
        ({**PAIRS[1], "functions": "[add]"}, "line 1 has functions, which would be left out"),
        (
            {**PAIRS[0], "chosen": [{**ANSWER, "reasoning": "why"}]},
            "line 1: chosen ends with a message with reasoning,",
        ),
    ],
)
def test_what_pairs_would_leave_out_is_named(row: dict[str, Any], says: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        preferences(write(tmp_path / "p.jsonl", row), tokenizer, padding=0, max_tokens=50)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_tools_of_a_row_are_in_its_prompt(tokenizer: Any, tmp_path: Path, as_json: bool) -> None:
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path, chat_template="{{ tools[0].name }}" + TEMPLATE)
    tools: Any = [{"name": "add", "parameters": {"type": "object"}}]
    column = {"tools": json.dumps(tools) if as_json else tools}
    rows: list[dict[str, Any]] = [
        {"prompt": "ask", "response": "good"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "good"}]},
    ]
    expected = own.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=False)
    assert own.decode(expected).startswith("add(user)ask<eos>")
    for row in rows:
        url = write(tmp_path / "a.jsonl", {**row, **column})
        batch, *_ = supervised(url, own, prompt="prompt", response="response", max_tokens=50)
        assert batch.list("prompt_ids") == [expected]
    for row in PAIRS:
        batch, _ = preferences(write(tmp_path / "p.jsonl", {**row, **column}), own, padding=0, max_tokens=50)
        read = [own.apply_chat_template([USER, one], tools=tools, return_dict=False) for one in (ANSWER, OTHER)]
        assert batch.list("prompt_ids") == read


def test_longer_pairs_are_left_out_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    rows = [PAIRS[0], {"prompt": "ask", "chosen": "good", "rejected": "b" * 20}, PAIRS[0]]
    batch, left_out = preferences(write(tmp_path / "p.parquet", *rows), tokenizer, padding=0, max_tokens=12)
    assert (len(batch), left_out) == (4, 1)


def test_the_steps_of_supervised_training_go_over_the_examples_in_epochs(tmp_path: Path, monkeypatch: Any) -> None:
    """Each example once before any comes again, in another order each time."""
    from ratchet.flows import sft as module
    from ratchet.rlhf.config import SFTConfig

    folder = tiny.model_folder(tmp_path / "model")
    data = write(tmp_path / "rows.jsonl", *({"prompt": f"say {number}", "response": "a"} for number in range(10)))
    seen: list[Any] = []
    monkeypatch.setattr(module, "fit", lambda run, what: seen.append(what) or {})
    config = SFTConfig.model_validate(
        {
            "run": {"name": "sft", "store": f"file://{tmp_path}/runs"},
            "model": {"path": str(folder), "dtype": "float32"},
            "data": data,
            "output": str(tmp_path / "out"),
            "batch_examples": 4,
        }
    )
    module.sft.fn(config)
    [what] = seen
    rows = [row for step in range(10) for row in what.rows(step)]
    epochs = [tuple(rows[start : start + 10]) for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 4
