"""Prompt files, which prompts an iteration draws, and how a prompt becomes tokens."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ratchet.flows.commands.app import app
from ratchet.rlhf.data.prompts import Prompt, PromptDataset, check_length, encode
from ratchet.rlhf.errors import UserError
from tests import tiny
from tests.padded import properties

ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3},
}
USER = {"role": "user", "content": "1 + 1?"}
PROMPT = Prompt("gsm8k", [{"role": "user", "content": "1 + 1?"}], "2", False, json.dumps({"index": 3}))


def json_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_json_lines_and_parquet_hold_the_same_prompts(tmp_path: Path) -> None:
    lines = json_lines(tmp_path / "a.jsonl", ROW)
    table = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([ROW]), table)
    assert list(PromptDataset([lines])) == list(PromptDataset([table])) == [PROMPT]
    assert list(PromptDataset([lines, table])) == [PROMPT, PROMPT]


def test_what_a_row_may_leave_out_or_put_differently(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"data_source": "x", "prompt": "1 + 1?"},
        {**ROW, "reward_model": {"ground_truth": {"target": 24, "numbers": [1, 2]}}},
        {**ROW, "reward_model": None, "extra_info": None},
    ]
    found = list(PromptDataset([json_lines(tmp_path / "a.jsonl", *rows)]))
    assert found[0] == Prompt("x", PROMPT.messages, None, False, "{}")
    assert json.loads(found[1].ground_truth or "") == {"target": 24, "numbers": [1, 2]}
    assert found[1].ground_truth_is_json
    assert (found[2].ground_truth, found[2].extra_info) == (None, "{}")


CALLS = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- if 'name' in m %} ({{ m.name }}){% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template like Qwen's."""


def conversation(arguments: Any, **absent: Any) -> list[dict[str, Any]]:
    """A conversation with a call of a tool; a Parquet file has each key in all messages."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "1 + 1?", **absent},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "user", "content": "And twice that?"},
    ]


def asking(*messages: Any) -> dict[str, Any]:
    """A row whose prompt has these messages after the user's."""
    return {**ROW, "prompt": [USER, *messages]}


def calling(calls: Any) -> dict[str, Any]:
    return asking({"role": "assistant", "tool_calls": calls})


CALL = {"function": {"name": "add", "arguments": {}}}
EMPTY = "of this row is empty: fill it in, or remove the row"
SHAPE = 'tool_calls should be a list of {"function": {"name": ..., "arguments": {...}}}, and '
MALFORMED: list[tuple[Any, str]] = [
    (["a list"], "is not a JSON object"),
    ({**ROW, "prompt": 7}, "prompt should be a list of messages {role, content}, and is 7"),
    ({**ROW, "prompt": []}, "prompt is an empty list: give it at least one message"),
    ({**ROW, "prompt": ""}, "the prompt is empty"),
    ({**ROW, "prompt": [{"role": "user", "content": " \n"}]}, "the prompt is empty"),
    ({**ROW, "prompt": None}, f"prompt {EMPTY}"),
    ({"prompt": None, "messages": None}, f"prompt and messages {EMPTY}"),
    ({"asked\n\t": "1 + 1?", "answer": "2"}, "prompt is missing; there are asked , answer. Rows have"),
    ({**ROW, "reward_model": '{"ground_truth": "2"}'}, "reward_model should be an object"),
    (asking({"role": "user"}), "prompt[1] (user) has no content: write its text"),
    (asking({"role": "user", "content": 1}), "prompt[1] (user) has content 1: write its text"),
    (asking({"content": "2"}), "prompt[1] has no role: say whose message it is"),
    (asking({"role": None, "content": "2"}), "prompt[1] has role null: say whose message it is"),
    (asking("a\tb"), 'prompt[1] should be a message {role, content}, and is "a\\tb"'),
    (
        asking({"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}),
        "(user) has content with input_audio, and models see texts and images only: leave out",
    ),
    (
        {**ROW, "images": [{"bytes": None, "path": "a.png"}]},
        ": image 1 does not exist (",
    ),
    (
        {**ROW, "video": "a.mp4"},
        "has video, and models see texts and images only: leave out such rows, or remove video if the",
    ),
    (asking({"role": "user", "content": "<audio>", "audios": ["a.wav"]}), "prompt[1] has audios, and models see texts"),
    (asking({"role": "assistant", "content": None}), "prompt[1] (assistant) has content null and no tool_calls"),
    (
        asking({"role": "assistant", "content": None, "tool_calls": []}),
        "prompt[1] (assistant) has content null and tool_calls []: give it a text or calls of tools",
    ),
    (asking({"role": "tool", "content": None}), '(tool) has content null: write its text, or "" if it has none'),
    (
        asking({"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}),
        "prompt[1] (assistant) has function_call, of an old API: write it as tool_calls, a list of",
    ),
    (calling(["add"]), f'prompt[1] (assistant): {SHAPE}tool_calls[0] is "add"'),
    (calling([CALL, {"function": {}}]), f'prompt[1] (assistant): {SHAPE}tool_calls[1] is {{"function": {{}}}}'),
    (calling(CALL), f'prompt[1] (assistant): {SHAPE}is {{"function": {{"name": "add"'),
    ({**ROW, "prompt": conversation("{1")}, 'prompt[1] (assistant) calls "add" with arguments that are not JSON'),
    ({**ROW, "prompt": conversation([1])}, 'calls "add" with arguments [1]: write an object that names each argument'),
    ({**ROW, "prompt": conversation([])}, 'calls "add" with arguments []: write an object'),
    ({**ROW, "prompt": conversation("[1]")}, 'calls "add" with arguments [1]: write an object'),
    ({**ROW, "tools": "add"}, "tools is a text that is not JSON (Expecting value: line 1"),
    ({**ROW, "tools": '{"name": "add"}'}, 'tools should be a list of {"type": "function", '),
    ({**ROW, "tools": ["add"]}, 'perhaps as JSON text, and tools[0] is "add"'),
    ({**ROW, "tools": [CALL, {"function": {}}]}, 'perhaps as JSON text, and tools[1] is {"function": {}}'),
    ({**ROW, "completion": [{"role": "assistant"}]}, "completion[0] (assistant) has no content and no tool_calls"),
    ({"messages": [{"role": "assistant", "content": "2"}]}, "the prompt is empty"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, 'conversations[0] is from "narrator": from should be'),
    ({"conversations": [{"from": ["human"], "value": "x"}]}, 'conversations[0] has from ["human"]: say whose'),
    ({"conversations": [{"from": "human", "text": "x"}]}, "conversations[0] (user) has no value: write its text"),
]


@pytest.mark.parametrize(("row", "says"), MALFORMED)
def test_a_malformed_line_is_named(tmp_path: Path, row: Any, says: str) -> None:
    """By its line in the file; empty lines are passed over, but count."""
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(row)}\n")
    with pytest.raises(UserError) as refused:
        list(PromptDataset([path]))
    assert str(refused.value).startswith(f"{path}, line 3")
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


MEDIA = ("images", "image", "videos", "video", "audios", "audio")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_empty_media_are_none(tmp_path: Path, ending: str) -> None:
    """Files of texts and images have the column in every row."""
    empty: list[Any] = [None, [], "", [None], {"bytes": None, "path": ""}, [{"bytes": None, "path": None}]]
    rows = [{**ROW, name: value} for name, value in zip(MEDIA, empty, strict=True)]
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        json_lines(path, *rows)
    else:
        pq.write_table(pa.Table.from_pylist([{**rows[0], "images": None}, {**ROW, "images": []}]), path)
    assert [prompt.messages for prompt in PromptDataset([path])] == [PROMPT.messages] * (6 if ending == "jsonl" else 2)


def test_an_image_is_found_in_any_row_of_a_table(tmp_path: Path) -> None:
    """As the package datasets stores images."""
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    images = [None] * 3000 + [[{"bytes": b"\x89PNG", "path": None}], None]
    table = pa.table({"prompt": ["What is in <image>?"] * 3002, "images": pa.array(images, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    prompts = PromptDataset([tmp_path / "a.parquet"])
    assert [len(prompt.images) for prompt in prompts] == [0] * 3000 + [1, 0]
    assert prompts[3000].images == (b"\x89PNG",)


def test_the_command_that_an_error_names_writes_the_prompts(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"asked": "1 + 1?", "answer": "2"})
    with pytest.raises(UserError, match="prompt is missing; there are asked, answer") as refused:
        list(PromptDataset([path]))
    [command] = re.findall("`ratchet (.*)`", str(refused.value))
    for placeholder, value in (
        ("OUT", tmp_path),
        ("FILE", path),
        ("NAME", "sums"),
        ("prompt COLUMN", "prompt asked"),
        ("truth COLUMN", "truth answer"),
    ):
        command = command.replace(placeholder, str(value))
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    [prompt] = PromptDataset([tmp_path / "train.parquet"])
    assert (prompt.data_source, prompt.messages, prompt.ground_truth) == ("sums", [USER], "2")


def test_a_malformed_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([ROW, {**ROW, "prompt": None}]), path)
    with pytest.raises(UserError, match=f"row 2: prompt {EMPTY}"):
        list(PromptDataset([json_lines(tmp_path / "a.jsonl", ROW, ROW, ROW), path]))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"a": 1', "line 1 is not JSON"),
        ("a.jsonl", b"{}\n\xff\xfe\x00", "line 1: prompt is missing"),
        ("a.jsonl", b"\n\xff\xfe\x00\n", "line 2 is not JSON"),
        ("a.parquet", b"PAR1 no PAR1", "cannot read"),
        ("a.jsonl", b"\n \n", "no prompts"),
        ("a.jsonl", None, "does not exist"),
    ],
)
def test_what_is_no_prompt_file(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says) as refused:
        list(PromptDataset([path]))
    assert str(path) in str(refused.value)


def with_template(template: str | dict[str, str] | None) -> Any:
    tokenizer = tiny.character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": [1]}', {"a": 1, "b": [1]}])
def test_calls_of_tools_are_rendered_as_transformers_does(tmp_path: Path, ending: str, arguments: Any) -> None:
    path, row = tmp_path / f"a.{ending}", {**ROW, "prompt": conversation(arguments, tool_calls=None, name=None)}
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        json_lines(path, row)
    [prompt] = PromptDataset([path])
    tokenizer = with_template(CALLS)
    text, _ = encode(prompt, tokenizer, max_tokens=1000, truncation="error")
    expected = [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [1]}}}],
        },
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "user", "content": "And twice that?"},
    ]
    assert text == tokenizer.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert '{"name": "add", "arguments": {"a": 1, "b": [1]}}' in text
    assert prompt.original == prompt.messages
    assert set(prompt.messages[0]) == {"role", "content"}


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_nulls_among_arguments_are_kept_unless_the_file_added_them(tmp_path: Path, ending: str) -> None:
    path, given = tmp_path / f"a.{ending}", {"a": None, "b": {"c": None}}
    rows = [{**ROW, "prompt": conversation(arguments)} for arguments in (given, json.dumps(given))]
    if ending == "parquet":  # whose struct has the keys of both rows
        rows = [{**ROW, "prompt": conversation(arguments)} for arguments in ({"a": 1}, {"b": 2})]
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    else:
        json_lines(path, *rows)
    prompts = PromptDataset([path])
    expected = [{"a": 1}, {"b": 2}] if ending == "parquet" else [given, given]
    for found in (list(prompts), [prompts[index] for index in range(2)]):
        calls = [prompt.messages[1]["tool_calls"][0] for prompt in found]
        assert [call["function"]["arguments"] for call in calls] == expected


ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "default": None}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": ADD}, {"type": "function", "function": NOW}]
DESCRIBES = "{% if tools is not none %}[{{ tools | tojson }}]{% endif %}"


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?"},
        {"prompt": [USER]},
        {"messages": [USER, {"role": "assistant", "content": "2"}]},
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
    ],
    ids=["text", "prompt", "messages", "sharegpt"],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_of_a_row_are_rendered_with_its_prompt(
    tmp_path: Path, row: dict[str, Any], ending: str, as_json: bool
) -> None:
    path, tools = tmp_path / f"a.{ending}", json.dumps(TOOLS) if as_json else TOOLS
    written = [{**row, "tools": tools}, {**row, "tools": "[]" if as_json else []}, {**row, "tools": None}]
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(written), path)
    elif ending == "csv":
        cells = (
            {name: json.dumps(cell) if isinstance(cell, list) else cell for name, cell in one.items()}
            for one in written
        )
        pd.DataFrame(cells).to_csv(path, index=False)
    else:
        json_lines(path, *written)
    tokenizer = with_template(DESCRIBES + CALLS)
    # a table of objects has each key in all of them, as nulls
    known = TOOLS
    if ending == "parquet" and not as_json:
        known = [
            TOOLS[0],
            {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
        ]
    dataset = PromptDataset([path])
    for found in (list(dataset), [dataset[index] for index in range(3)]):
        for prompt, expected in zip(found, (known, [], []), strict=True):
            text, ids = encode(prompt, tokenizer, max_tokens=1000, truncation="error")
            settings = {"tools": expected or None, "add_generation_prompt": True}
            assert text == tokenizer.apply_chat_template([USER], tokenize=False, **settings)
            assert ids == tokenizer.apply_chat_template([USER], return_dict=False, **settings)
    first, *others = list(dataset)
    assert json.loads(first.extra_info)["tools"] == known, "for rewards and environments"
    assert [json.loads(prompt.extra_info)["tools"] for prompt in others] == [[], []]
    assert not first.unseen
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens, more than data.max_prompt_tokens 60"):
        check_length(first, tokenizer, 60, None)
    check_length(others[0], tokenizer, 60, None)
    kept = dataset.without_overlong(tokenizer, 60, None)
    assert [kept.row(index) for index in range(len(kept))] == [1, 2]


def test_a_template_that_leaves_out_the_tools_is_refused(tmp_path: Path) -> None:
    [prompt] = PromptDataset([json_lines(tmp_path / "a.jsonl", {**ROW, "tools": TOOLS})])
    fix = "set model.chat_template, choose a model that was trained to call tools, or rename the column"
    for template, says in (
        (None, "the prompt has tools, and the model has no chat template"),
        (CALLS, "the prompt has tools, and the model has a chat template that does not render tools"),
        (CALLS + "{# tools #}", "the chat template leaves out the tool add"),
        ("{{ tools[0].function.name }}" + CALLS, "the chat template leaves out the tool now"),
    ):
        with pytest.raises(UserError) as refused:
            check_length(prompt, with_template(template), 1000, None)
        assert str(refused.value) == f"{tmp_path / 'a.jsonl'}, line 1: {says}: {fix}"
    with pytest.raises(UserError, match="the chat template refuses the messages and tools: can only concatenate"):
        check_length(prompt, with_template("{{ tools + 1 }}"), 1000, None)


def test_named_templates_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    rows = [{**ROW, "tools": TOOLS}, ROW]
    with_tools, without = PromptDataset([json_lines(tmp_path / "a.jsonl", *rows)])
    tokenizer = with_template({"default": CALLS, "tool_use": DESCRIBES + CALLS})
    assert '"add"' in encode(with_tools, tokenizer, max_tokens=1000, truncation="error")[0]
    assert encode(without, tokenizer, max_tokens=1000, truncation="error")[0].startswith("<|im_start|>user")


def test_what_cannot_render_calls_says_so(tmp_path: Path) -> None:
    [prompt] = PromptDataset([json_lines(tmp_path / "a.jsonl", {**ROW, "prompt": conversation({})})])
    for template, says in (
        (None, "the prompt calls tools, and the model has no chat template: set model.chat_template"),
        ("{{ messages[0].content }}", "a chat template that does not render tool_calls: set model.chat_template"),
        (
            "{{ raise_exception('no role tool') }}{# tool_calls #}",
            "the chat template refuses the messages: no role tool",
        ),
        ("{{ messages[1].tool_calls + 1 }}", "the chat template refuses the messages: can only concatenate list"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            check_length(prompt, with_template(template), 1000, None)
        assert str(refused.value).startswith(f"{tmp_path / 'a.jsonl'}, line 1: ")


def test_a_call_of_a_tool_may_be_the_answer(tmp_path: Path) -> None:
    asked, answered, *_ = conversation('{"a": 1}')
    [prompt] = PromptDataset([json_lines(tmp_path / "a.jsonl", {"messages": [asked, answered]})])
    assert [call["function"] for call in json.loads(prompt.ground_truth or "")] == [
        {"name": "add", "arguments": {"a": 1}}
    ]


THINKING = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"


def test_thoughts_are_rendered_or_refused(tmp_path: Path) -> None:
    assistant = {"role": "assistant", "content": "2", "reasoning_content": "one more than 1"}
    [prompt] = PromptDataset([json_lines(tmp_path / "a.jsonl", asking(assistant, USER))])
    tokenizer = tiny.character_tokenizer()
    for template, what in (
        (None, "no chat template"),
        (CALLS, "a chat template that does not render reasoning_content"),
    ):
        tokenizer.chat_template = template
        says = (
            f"line 1: the prompt has a message with reasoning_content, and the model has {what}: remove it, write it "
        )
        with pytest.raises(UserError, match=says):
            check_length(prompt, tokenizer, 1000, None)
    tokenizer.chat_template = THINKING
    assert "<assistant>one more than 1|2" in encode(prompt, tokenizer, max_tokens=1000, truncation="error")[0]


def test_the_digest_is_of_the_bytes_in_order(tmp_path: Path) -> None:
    one, other = json_lines(tmp_path / "a.jsonl", ROW), json_lines(tmp_path / "b.jsonl", ROW, ROW)
    digests = {PromptDataset(paths).digest for paths in ([one], [other], [one, other], [other, one])}
    assert len(digests) == 4
    again = json_lines(tmp_path / "c.jsonl", ROW)
    assert PromptDataset([again]).digest == PromptDataset([one]).digest


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> PromptDataset:
    return PromptDataset([json_lines(tmp_path_factory.mktemp("prompts") / "a.jsonl", *[ROW] * 10)])


@properties
@given(st.integers(0, 5), st.integers(0, 60), st.lists(st.integers(0, 25), max_size=4))
def test_draws_are_windows_of_one_endless_sequence(
    ten: PromptDataset, seed: int, cursor: int, counts: list[int]
) -> None:
    """However an iteration cuts it, and wherever a resumed run begins."""
    whole, start = ten.draw(seed, 0, 200), cursor
    for count in counts:
        assert ten.draw(seed, start, count) == whole[start : start + count]
        start += count


def test_each_epoch_is_another_permutation(ten: PromptDataset) -> None:
    whole = ten.draw(0, 0, 100)
    epochs = [tuple(whole[start : start + 10]) for start in range(0, 100, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 10
    assert ten.draw(1, 0, 100) != whole


NO_SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token": None,
    "bos_token_id": None,
    "added_tokens_decoder": {},
    "all_special_tokens": [],
    "is_fast": False,
}


def tokenizer(chat_template: bool = False) -> Any:
    """One token a character; a template shows roles."""

    def template(messages: list[dict[str, str]], tools: None, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and tools is None
        assert add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    class Tokenizer(SimpleNamespace):
        __hash__ = object.__hash__

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            assert not (add_special_tokens and chat_template), "the template brings them"
            return {"input_ids": [ord(character) for character in text]}

    chat = {"chat_template": "..." if chat_template else None, "apply_chat_template": template}
    return Tokenizer(**NO_SPECIAL_TOKENS, **chat)


@pytest.mark.parametrize(
    ("chat_template", "text"), [(True, "<system>Add.<user>1 + 1?<assistant>"), (False, "Add.\n1 + 1?")]
)
def test_encode_with_and_without_a_chat_template(chat_template: bool, text: str) -> None:
    prompt = Prompt("x", [{"role": "system", "content": "Add."}, *PROMPT.messages], "", False, "{}")
    found = encode(prompt, tokenizer(chat_template), max_tokens=len(text), truncation="error")
    assert found == (text, [ord(character) for character in text])


def test_truncation() -> None:
    ids = [ord(character) for character in "1 + 1?"]
    assert encode(PROMPT, tokenizer(), max_tokens=4, truncation="left")[1] == ids[-4:]
    assert encode(PROMPT, tokenizer(), max_tokens=4, truncation="right")[1] == ids[:4]
    with pytest.raises(UserError, match=r"6 tokens, more than data.max_prompt_tokens 4 .*1 \+ 1\?.*data.truncation"):
        encode(PROMPT, tokenizer(), max_tokens=4, truncation="error")
    with pytest.raises(UserError, match="the prompt is empty"):
        encode(
            Prompt("x", [{"role": "user", "content": ""}], "", False, "{}"),
            tokenizer(),
            max_tokens=4,
            truncation="left",
        )


def test_a_prompt_that_is_too_long_is_found_early(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "prompt": "x" * 300}, {**ROW, "prompt": "y" * 301}]
    dataset = PromptDataset([json_lines(tmp_path / "a.jsonl", *rows)])
    for prompt in dataset:
        check_length(prompt, tokenizer(), 301, None)
    _, second, third = dataset
    with pytest.raises(UserError, match=r"line 3: the prompt has 301 tokens, more than data.max_prompt_tokens"):
        check_length(third, tokenizer(), 300, None)
    with pytest.raises(UserError, match="line 2"):
        check_length(second, tokenizer(), 301, "Short.")


@pytest.mark.parametrize("truncation", ["error", "drop"])
def test_a_prompt_of_millions_of_characters_is_not_tokenized(tmp_path: Path, truncation: str) -> None:
    """That would take a minute, only to find what its size says at once."""

    class Untouched(SimpleNamespace):
        __hash__ = object.__hash__

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            assert len(text) < 1_000_000
            return {"input_ids": [1] * len(text)}

    rows = [{**ROW, "prompt": "short"}, {**ROW, "prompt": "x" * 10_000_000}]
    dataset = PromptDataset([json_lines(tmp_path / "a.jsonl", *rows)])
    untouched: Any = Untouched(chat_template=None, **NO_SPECIAL_TOKENS)
    if truncation == "drop":
        assert [prompt.where for prompt in dataset.without_overlong(untouched, 512, None)] == [dataset[0].where]
        return
    with pytest.raises(
        UserError, match=r"line 2: the prompt has 10,000,000 bytes, far more than data.max_prompt_tokens"
    ):
        check_length(list(dataset)[1], untouched, 512, None)
