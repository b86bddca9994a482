"""The dialects of the endpoint, asked by the vendors' own clients: answers, streams, thoughts, tools and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from ratchet.rlhf.agents.dialects.thoughts import divided, sealed, unsealed
from ratchet.rlhf.agents.sessions import Recorded
from tests.scripted import Stage, stage

CALL = '<tool_call>{"name": "look", "arguments": {"there": 1.0, "then": "the café"}}</tool_call>'
SCRIPT = [
    f"<think>\nthe other thing\n</think>\n\nLet me look there.\n{CALL}",
    "<think>\n\n</think>\n\nThe third.\n",
    "that is that",
]
SCHEMA = {"type": "object", "properties": {"there": {"type": "number"}}}


@pytest.fixture(scope="module")
def whole() -> Iterator[Stage]:
    with stage(SCRIPT) as staged:
        yield staged


def anthropic_client(base_url: str, api_key: str) -> Anthropic:
    return Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, timeout=None)


def openai_client(base_url: str, api_key: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None)


def message_of(client: Anthropic, streams: bool, **body: Any) -> Any:
    if not streams:
        return client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        return stream.get_final_message()


def response_of(client: OpenAI, streams: bool, **body: Any) -> Any:
    if not streams:
        return client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("streams", [False, True])
def test_messages(whole: Stage, streams: bool) -> None:
    heard: list[Any] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> float:
        client, messages = anthropic_client(base_url, api_key), [*task["messages"]]
        tools = [{"name": "look", "description": "looks", "input_schema": SCHEMA}]
        for number in range(3):
            told: dict[str, Any] = {
                "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
            }
            told |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "auto"}}
            counted = client.messages.count_tokens(model=model, messages=messages, tools=tools, system=told["system"])
            answer = message_of(client, streams, model=model, messages=messages, tools=tools, max_tokens=2000, **told)
            heard.append((answer, counted.input_tokens))
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "with that"}]}
                for block in answer.content
                if block.type == "tool_use"
            ]
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            more = [*results, {"type": "text", "text": f"then {number}"}]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": more}]
        return 1.0

    dialogue = whole.play(program)
    assert dialogue.error is None, dialogue.error
    [branch] = dialogue.branches
    assert whole.check_drawn(dialogue) == [f"{text}<|end|>" for text in SCRIPT]
    (called, counted), (thought, _), (said, _) = heard
    assert [block.type for block in called.content] == ["thinking", "text", "tool_use"]
    assert called.content[0].thinking == "the other thing" and called.content[1].text == "Let me look there."
    assert (called.content[2].name, called.content[2].input) == ("look", {"there": 1.0, "then": "the café"})
    assert called.stop_reason == "tool_use" and called.role == "assistant"
    assert called.usage.input_tokens == counted == len(branch.request.prompt_ids)
    assert called.usage.output_tokens == branch.turn_ends[0]
    assert [(block.type, getattr(block, "text", "")) for block in thought.content] == [
        ("thinking", ""),
        ("text", "The third.\n"),
    ]
    assert [block.text for block in said.content] == ["that is that"] and said.stop_reason == "end_turn"


@pytest.mark.parametrize("streams", [False, True])
def test_responses(whole: Stage, streams: bool) -> None:
    heard: list[Any] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> float:
        client = openai_client(base_url, api_key)
        items: list[Any] = [{"role": "user", "content": "hi"}]
        tools = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
        for number in range(3):
            answer = response_of(
                client, streams, model=model, input=items, tools=tools, instructions="be kind", store=False
            )
            heard.append(answer)
            for item in answer.output:
                dumped = item.model_dump(exclude_none=True)
                if item.type == "reasoning" and number == 0:
                    del dumped["content"]  # some clients give back only the encrypted content
                items.append({name: dumped[name] for name in dumped if not name.startswith("parsed")})
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "with that"})
            items.append({"role": "user", "content": [{"type": "input_text", "text": f"then {number}"}]})
        return 1.0

    dialogue = whole.play(program)
    assert dialogue.error is None, dialogue.error
    [branch] = dialogue.branches
    assert whole.check_drawn(dialogue) == [f"{text}<|end|>" for text in SCRIPT]
    called, thought, said = heard
    assert [item.type for item in called.output] == ["reasoning", "message", "function_call"]
    assert called.output[0].content[0].text == "the other thing" and called.output_text == "Let me look there."
    assert json.loads(called.output[2].arguments) == {"there": 1.0, "then": "the café"}
    assert called.status == "completed" and called.usage.input_tokens == len(branch.request.prompt_ids)
    assert called.usage.output_tokens == branch.turn_ends[0]
    assert thought.output_text == "The third.\n" and said.output_text == "that is that"


def test_limits_and_stops_are_told() -> None:
    told: list[Any] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> None:
        messages, url = anthropic_client(base_url, api_key).messages, openai_client(base_url, api_key)
        asked = {"model": model, "messages": task["messages"]}
        for body in ({"max_tokens": 5}, {"max_tokens": 50, "stop_sequences": ["zz", "ther"]}):
            answer = messages.create(**asked, **body)
            told.append((answer.content[0].text, answer.stop_reason, answer.stop_sequence))
        response = url.responses.create(model=model, input="hi", max_output_tokens=5)
        told.append((response.output_text, response.status, response.incomplete_details.reason))

    with stage(["say the other"]) as staged:
        dialogue = staged.play(program)
        assert dialogue.error is None, dialogue.error
        staged.check_drawn(dialogue)
    assert told == [
        ("say t", "max_tokens", None),
        ("say the o", "stop_sequence", "ther"),
        ("say t", "incomplete", "max_output_tokens"),
    ]


def test_a_thought_that_the_template_opens_or_the_limit_cuts_off() -> None:
    heard: list[Any] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> None:
        client, messages = anthropic_client(base_url, api_key), [*task["messages"]]
        for limit in (2000, 20):
            answer = client.messages.create(model=model, messages=messages, max_tokens=limit)
            heard.append([block.type for block in answer.content])
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "then"}]
        client.messages.create(model=model, messages=messages, max_tokens=2000)

    with stage(["that thing\n</think>\n\nthere", "<think>the more the more the more"]) as staged:
        dialogue = staged.play(program)
        assert dialogue.error is None and len(dialogue.branches) == 1
        staged.check_drawn(dialogue)
    assert heard == [["thinking", "text"], ["thinking"]]


def test_one_call_at_a_time() -> None:
    counts: list[int] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> None:
        client = anthropic_client(base_url, api_key)
        tools = [{"name": "look", "input_schema": SCHEMA}]
        for alone in (False, True):
            choice = {"type": "auto", "disable_parallel_tool_use": alone}
            answer = client.messages.create(
                model=model, messages=task["messages"], tools=tools, tool_choice=choice, max_tokens=2000
            )
            counts.append(sum(block.type == "tool_use" for block in answer.content))

    with stage([CALL + CALL]) as staged:
        dialogue = staged.play(program)
        assert staged.check_drawn(dialogue) == [f"{CALL}{CALL}<|end|>", CALL], "the second call is not drawn"
    assert counts == [2, 1]


TOOLS = [{"name": "look", "input_schema": SCHEMA}]
MESSAGES = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
RESPONSES = {"model": "policy", "input": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}


@pytest.mark.parametrize(
    ("path", "change", "status", "said", "is_left_out"),
    [
        ("messages", {"temperature": 0.2}, 400, "temperature 0.2 is not the run's", True),
        ("messages", {"tools": TOOLS, "tool_choice": {"type": "any"}}, 400, "tool_choice any would force", True),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format", True),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "image", False),
        ("messages", {"max_tokens": None}, 400, "max_tokens", False),
        ("messages", {"model": "opus"}, 404, "there is no model 'opus'", False),
        ("messages", {"wizardry": 1}, 400, "unrecognized parameter wizardry", True),
        ("responses", {"top_p": 0.4}, 400, "top_p 0.4 is not the run's", True),
        ("responses", {"tool_choice": "required"}, 400, "tool_choice required would force", True),
        ("responses", {"tools": [{"type": "web_search"}]}, 400, "no web_search", True),
        ("responses", {"previous_response_id": "resp_1"}, 400, "previous_response_id resp_1", True),
        ("responses", {"text": {"format": {"type": "json_object"}}}, 400, "text.format json_object", True),
        ("responses", {"input": []}, 400, "input is empty", False),
        ("responses", {"model": "o9"}, 404, "there is no model 'o9'", False),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice required would force", True),
    ],
)
def test_what_is_not_supported_is_refused_in_the_vendors_shape(
    whole: Stage, path: str, change: dict[str, Any], status: int, said: str, is_left_out: bool
) -> None:
    caught: list[httpx.Response] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> float:
        whole_body = RESPONSES if path == "responses" else MESSAGES
        body = {name: value for name, value in {**whole_body, **change}.items() if value is not None}
        headers = {"x-api-key": api_key}
        caught.append(httpx.post(f"{base_url}/{path}", json=body, headers=headers, timeout=None))
        assert httpx.post(f"{base_url}/messages", json=MESSAGES, headers=headers, timeout=None).status_code == 200
        return 1.0

    dialogue = whole.play(program)
    [answer] = caught
    assert answer.status_code == status
    error = answer.json()["error"]
    assert said in error["message"]
    if path == "messages":
        assert answer.json()["type"] == "error"
        assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    else:
        assert error["type"] == "invalid_request_error" and error.keys() == {"message", "type", "param", "code"}
    assert (dialogue.error is not None) == is_left_out, dialogue.error


def test_the_clients_raise_their_own_errors(whole: Stage) -> None:
    def program(task: Any, base_url: str, api_key: str, model: str) -> float:
        asked = {"model": model, "messages": task["messages"], "max_tokens": 9}
        with pytest.raises(anthropic.AuthenticationError):
            anthropic_client(base_url, "sk-other").messages.create(**asked)
        with pytest.raises(anthropic.BadRequestError, match="tool_choice look"):
            anthropic_client(base_url, api_key).messages.create(
                **asked, tools=TOOLS, tool_choice={"type": "tool", "name": "look"}
            )
        with pytest.raises(openai.AuthenticationError):
            openai_client(base_url, "sk-other").responses.create(model=model, input="hi")
        with pytest.raises(openai.BadRequestError, match="top_p"):
            openai_client(base_url, api_key).responses.create(model=model, input="hi", top_p=0.4)
        anthropic_client(base_url, api_key).messages.create(**asked)
        return 1.0

    assert "tool_choice look" in (whole.play(program).error or "")


class Stuck:
    """Never stores an answer, so that a stream has a beginning and no end."""

    scope = ""

    async def record(self, answer: Recorded) -> None:
        await asyncio.Event().wait()


def _chat(base_url: str, key: str) -> Any:
    asked = [{"role": "user", "content": "hi"}]
    return openai_client(base_url, key).chat.completions.create(model="policy", messages=asked, stream=True)


def _completions(base_url: str, key: str) -> Any:
    return openai_client(base_url, key).completions.create(model="policy", prompt="hi", max_tokens=99, stream=True)


def _messages(base_url: str, key: str) -> Any:
    asked = [{"role": "user", "content": "hi"}]
    return anthropic_client(base_url, key).messages.create(model="policy", messages=asked, max_tokens=99, stream=True)


def _responses(base_url: str, key: str) -> Any:
    return openai_client(base_url, key).responses.create(model="policy", input="hi", stream=True)


@pytest.mark.parametrize("begin", [_chat, _completions, _messages, _responses])
def test_an_error_in_the_middle_of_a_stream_is_an_event(whole: Stage, begin: Callable[..., Any]) -> None:
    ends: list[str] = []
    threads: list[threading.Thread] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> None:
        if not threads:
            begun = threading.Event()
            threads.append(threading.Thread(target=reads, args=(begin(base_url, api_key), begun)))
            threads[0].start()
            begun.wait()

    def reads(stream: Any, begun: threading.Event) -> None:
        try:
            for event in stream:
                begun.set()
                if getattr(event, "type", "") == "response.failed":
                    ends.append(event.response.error.message)
        except (openai.APIError, anthropic.APIError) as error:
            ends.append(str(error))
        finally:
            begun.set()

    whole.play(program, recorder=Stuck())
    threads[0].join()
    assert len(ends) == 1 and "the trajectory has ended" in ends[0], ends


class Kept:
    """Keeps answers in memory."""

    scope = ""

    def __init__(self) -> None:
        self.answers: list[Recorded] = []

    async def record(self, answer: Recorded) -> None:
        self.answers.append(answer)


def test_a_call_that_is_made_again_after_a_crash_gets_the_stored_answer_in_every_dialect(whole: Stage) -> None:
    heard: list[list[Any]] = []

    def program(task: Any, base_url: str, api_key: str, model: str) -> float:
        client = openai_client(base_url, api_key)
        message = anthropic_client(base_url, api_key).messages.create(
            model=model, messages=[{"role": "user", "content": "one"}], max_tokens=99, tools=TOOLS
        )
        response = client.responses.create(model=model, input="two")
        chat = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "three"}])
        text = client.completions.create(model=model, prompt="four", max_tokens=9)
        parts = [message.content[0].signature, response.output[0].encrypted_content]
        heard.append([*parts, chat.choices[0].message.content or "", text.choices[0].text])
        return 1.0

    kept = Kept()
    first = whole.play(program, recorder=kept)
    assert first.error is None and len(kept.answers) == 4, first.error
    drawn = len(whole.engine.drawn)
    again = whole.play(program, recorder=Kept(), recorded=kept.answers)
    assert len(whole.engine.drawn) == drawn, "nothing is drawn again"
    assert heard[0] == heard[1]
    assert [branch.ids for branch in again.branches] == [branch.ids for branch in first.branches]
    whole.check_drawn(again)


@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "thé"]), max_size=8).map("".join))
def test_a_divided_text_is_whole(text: str) -> None:
    parts = divided(text)
    if parts is None:
        assert "</think>" not in text
    else:
        assert "".join(parts) == text
        assert unsealed(sealed(*parts), 4) == [*parts]


@pytest.mark.parametrize("seal", ["", "EqQBCkYIBx", "bm90IGpzb24=", "WyJhIl0=", "é", "eyJhIjogMX0="])
def test_a_seal_from_elsewhere_is_none(seal: str) -> None:
    with suppress(AssertionError):
        assert unsealed(seal, 2)
        pytest.fail("it was taken for ours")
