"""Programs that call the policy, for tests."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None)
"""Making a client takes long; its copies with other keys share its connections."""
ANTHROPIC = Anthropic(base_url="http://127.0.0.1", api_key="none", timeout=None)


def twice(task: Any, base_url: str, api_key: str, model: str, worth: float = 0.5) -> dict[str, float]:
    """Takes two turns with the official client; the reward counts the letters."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["messages"]]
    letters = 0
    for _ in range(2):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=6).choices[0].message
        letters += sum(map(str.isalpha, answer.content or ""))
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
    return {"reward": worth * letters, "letters": letters}


async def forgets(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Edits its history before the second call, and extends the edited one with the third."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    first = await client.chat.completions.create(model=model, messages=task["messages"], max_tokens=6)
    messages: list[Any] = [*task["messages"], {"role": "assistant", "content": "abc"}]
    messages += [{"role": "user", "content": "and"}]
    second = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
    messages += [{"role": "assistant", "content": second.choices[0].message.content}, {"role": "user", "content": "?"}]
    third = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
    texts = [answer.choices[0].message.content or "" for answer in (first, second, third)]
    return float(sum(map(len, texts)))


def broken(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Asks at another temperature, and ignores the answer."""
    body = {"model": model, "messages": task["messages"], "temperature": 0.3}
    httpx.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"})
    return 1.0


def remembers(task: Any, base_url: str, api_key: str, model: str, diary: str = "") -> float:
    """Takes three turns; edits its history before the third, and writes each answer and the key into a file."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["messages"], {"role": "user", "content": str(task["ground_truth"])}]
    letters = 0
    for turn in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=6).choices[0].message
        with Path(diary).open("a") as file:
            file.write(json.dumps([messages, answer.content, task["key"]]) + "\n")
        letters += sum(map(str.isalpha, answer.content or ""))
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
        if turn == 1:
            messages = [messages[0], messages[-2], {"role": "user", "content": "so"}]
    return float(letters)


STUMBLES = count()


def stumbles(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Takes two turns, the first without a limit of its own; every fourth program raises."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    if next(STUMBLES) % 4 == 3:
        raise ValueError("it stumbled")
    messages: list[Any] = [*task["messages"]]
    for _ in range(2):
        answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
    return 1.0


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
TOOL_CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
"""A call of `TOOL`, which may be one token of a model."""


def calls_tools(task: Any, base_url: str, api_key: str, model: str) -> dict[str, float]:
    """Takes three turns with a tool, then sums up in a conversation of its own; the reward counts the calls."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    tools: list[Any] = [TOOL]
    messages: list[Any] = [*task["messages"]]
    calls = 0
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=6)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or ()]
        messages += results or [{"role": "user", "content": "more"}]
        calls += len(results)
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "sum up"}], max_tokens=4)
    return {"reward": calls / 3, "calls": calls}


LONG = "<img src=x onerror=hacked=1> " * 10
"""What a tool answers, which would be markup."""
LOSES = count()


def loses_its_way(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Takes three turns with a tool whose answers are long, then sums up; the fourth program raises after a turn."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["messages"]]
    fails, tools = next(LOSES) == 3, [TOOL]
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=12)  # type: ignore[arg-type]
        if fails:
            raise ValueError("it lost its way \x1b[31m")
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        results = [{"role": "tool", "tool_call_id": call.id, "content": LONG} for call in message.tool_calls or ()]
        messages += results[:1] or [{"role": "user", "content": "more"}]
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "sum up"}], max_tokens=4)
    return 1.0


def speaks(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Takes two turns in each dialect, the second of some as a stream; the reward counts the letters."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    other = ANTHROPIC.with_options(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    letters = 0
    chat: list[Any] = [*task["messages"], {"role": "user", "content": "chat"}]
    messages: list[Any] = [*task["messages"], {"role": "user", "content": "messages"}]
    items: list[Any] = [{"role": "user", "content": "responses"}]
    prompt = "text"
    for turn in range(2):
        said = client.chat.completions.create(model=model, messages=chat, max_tokens=6).choices[0].message
        chat += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "more"}]
        written = client.completions.create(model=model, prompt=prompt, max_tokens=6).choices[0].text
        prompt += f"{written} more"
        if turn:
            with other.messages.stream(model=model, messages=messages, max_tokens=6) as stream:
                message = stream.get_final_message()
            # not `responses.stream`, which raises if an answer was cut off
            *_, last = client.responses.create(model=model, input=items, max_output_tokens=6, stream=True)
            response = last.response
        else:
            message = other.messages.create(model=model, messages=messages, max_tokens=6)
            response = client.responses.create(model=model, input=items, max_output_tokens=6)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
        items += [*(item.model_dump(exclude_none=True) for item in response.output)]
        items += [{"role": "user", "content": "more"}]
        texts = [said.content or "", written, response.output_text, *(block.text for block in message.content)]
        letters += sum(map(str.isalpha, "".join(texts)))
    return letters / 8
