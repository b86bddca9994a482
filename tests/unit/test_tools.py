"""Tools: how the chat template describes them, which calls are recognized, and what the policy reads in answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.config import ModelConfig, parse_config
from ratchet.rlhf.config.sections import EnvironmentConfig
from ratchet.rlhf.data.formats import Chat
from ratchet.rlhf.environments.dialogues import content_ids, is_prefix_stable
from ratchet.rlhf.environments.environment import Observation, environment_digest
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.environments.policy_tokenizer import policy_tokenizer
from ratchet.rlhf.environments.tools import Environment, MalformedCall, ToolCall, tool_calls
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.tokenizers import copy_tokenizer, load_tokenizer
from tests import tiny
from tests.extras import needs
from tests.ports import free_port
from tests.unit.test_environments import SAMPLING, ScriptedEngine, dialogues_for, wait_for

FUNCTIONS = ("tests.tool_functions:weather", "tests.tool_functions:shout", "tests.tool_functions:fails")
STDIO = f"{sys.executable} -m tests.mcp_server"

# Templates of the three families: how they mark messages, calls and results, and what they insist on.
HERMES = """\
{%- if tools %}{{ '<im_start>system.' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<eos>' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content if loop.index0 > ns.last else m.content.split('</think>')[-1] %}
{{- '<im_start>assistant.' + content }}
{%- for c in m.tool_calls %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}{{ '<eos>.' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<im_start>user.' }}{% endif %}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<eos>.' }}{% endif %}
{%- else %}{{ '<im_start>' + m.role + '.' + m.content + '<eos>.' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<im_start>assistant.' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"""
LLAMA = """\
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '(ipython)' + ({'output': m.content} | tojson) + '<eos>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '(assistant){"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<eos>' }}
{%- else %}{{ '(' + m.role + ')' }}{% if loop.first and tools is not none %}{{ tools | tojson }}{% endif %}
{{- m.content | trim + '<eos>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '(assistant)' }}{% endif %}"""
MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
{%- if messages[loop.index0 - 1].role not in ('assistant', 'tool') or
       (messages[loop.index0 - 1].role == 'assistant' and not messages[loop.index0 - 1].tool_calls) %}
{{- raise_exception('a result follows a call') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] ' + (m.tool_calls | map(attribute='function') | list | tojson) + '<eos>' }}
{%- else %}{{ m.content + '<eos>' }}{% endif %}
{%- endfor %}"""
FAMILIES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model"), letters=string.printable)


def model_of(folder: Path, family: str, **changes: Any) -> ModelConfig:
    template = folder / f"{family}.jinja"
    template.write_text(FAMILIES[family])
    return ModelConfig(path=str(folder), chat_template=str(template), **changes)


def environment_of(*functions: str, mcp: tuple[str, ...] = ()) -> EnvironmentConfig:
    return EnvironmentConfig(name="tools", options={"functions": list(functions), "mcp": list(mcp)})


def answer(environment: Environment, turn: str) -> Observation:
    return asyncio.run(environment.step(turn, "key"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_tells_the_policy_about_the_tools(folder: Path, family: str) -> None:
    model = model_of(folder, family)
    question = [{"role": "user", "content": "how is the weather?"}]
    tokenizer, plain = policy_tokenizer(model, environment_of(*FUNCTIONS)), load_tokenizer(model)
    schemas = Environment.schemas(FUNCTIONS)
    assert [schema["function"]["name"] for schema in schemas] == ["weather", "shout", "fails"]
    assert schemas[0]["function"]["parameters"]["required"] == ["city"]
    expected = plain.apply_chat_template(question, tools=schemas, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == expected
    assert "for how many days" in expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_has_the_tokens_of_the_whole_conversation(folder: Path, family: str) -> None:
    tokenizer = policy_tokenizer(model_of(folder, family), environment_of(*FUNCTIONS))
    call = {"name": "weather", "arguments": {"city": "Bern", "days": 1}}
    question = [{"role": "user", "content": "how is the weather?"}]
    calls = [{"type": "function", "id": "000000000", "function": call}]
    called = [*question, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    before = tokenizer.apply_chat_template(called, return_dict=False)
    turn = before[len(prompt) : len(before) - before[::-1].index(tokenizer.eos_token_id)]
    observation = answer(Environment(FUNCTIONS), tokenizer.decode(turn))
    messages: Any = observation.content
    assert json.loads(messages[0]["content"]) == [{"day": 0, "city": "Bern", "sun": True}]
    added = content_ids(Chat(messages), turn[-1], tokenizer)
    results = [{**message, "tool_call_id": "000000000"} for message in messages]
    whole = tokenizer.apply_chat_template([*called, *results], add_generation_prompt=True, return_dict=False)
    assert [*prompt, *turn, *added] == whole


def test_a_tool_returns_a_picture() -> None:
    call = {"name": "photograph", "arguments": {"city": "Bern"}}
    observation = answer(Environment(["tests.tool_functions:photograph"]), f"<tool_call>{json.dumps(call)}</tool_call>")
    messages: Any = observation.content
    [message] = messages
    assert message["role"] == "tool"
    [part] = message["content"]
    assert (part["type"], part["image"].getpixel((1, 1))) == ("image", (255, 0, 0))


def test_a_template_that_drops_reasoning_is_told_apart(folder: Path) -> None:
    hermes, llama = (load_tokenizer(model_of(folder, family)) for family in ("hermes", "llama"))
    assert not is_prefix_stable(hermes)
    assert is_prefix_stable(llama)
    more = content_ids(Chat([{"role": "user", "content": "more"}]), hermes.eos_token_id, hermes)
    assert hermes.decode(more) == ".<im_start>user.more<eos>.<im_start>assistant."


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        ("no call", []),
        ('{"answer": 3}', []),
        ('{"name": "other", "parameters": {}}', []),
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call><eos>',
            [("weather", {"city": "a"})],
        ),
        (
            'text <tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"a\\"}"}</tool_call>\n'
            '<tool_call>{"name": "x", "arguments": {}}</tool_call>',
            [("weather", {"city": "a"}), ("x", {})],
        ),
        ('{"name": "weather", "parameters": {"city": "a"}}<|eot_id|>', [("weather", {"city": "a"})]),
        ('<|python_tag|>{"name": "other", "parameters": {}}', [("other", {})]),
        (
            '[TOOL_CALLS] [{"name": "x", "arguments": {"a": 1}}, {"name": "y", "arguments": {}}]</s>',
            [("x", {"a": 1}), ("y", {})],
        ),
    ],
)
def test_calls_of_each_family(turn: str, calls: list[tuple[str, Any]]) -> None:
    assert tool_calls(turn, ["weather"]) == [ToolCall(*call) for call in calls]


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ('<tool_call>{"name": "x"', "has no </tool_call>"),
        ("<tool_call>x</tool_call>", "the call is not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a JSON object with "name"'),
        ('<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "the arguments of x are not a JSON object"),
        ('<tool_call>{"name": "x"}</tool_call>', "the arguments of x are not a JSON object"),
        ("[TOOL_CALLS] x", "the call is not JSON"),
        ("<|python_tag|>{x", "the call is not JSON"),
    ],
)
def test_a_malformed_call_is_answered(turn: str, says: str) -> None:
    with pytest.raises(MalformedCall, match=says):
        tool_calls(turn, ["weather"])
    observation = answer(Environment(FUNCTIONS), turn)
    assert isinstance(observation.content, list)
    [message] = observation.content
    assert message["role"] == "tool"
    assert message["content"].startswith("error: ")
    assert says in message["content"]


@given(st.text(st.characters(codec="utf-8")))
def test_no_text_of_a_policy_is_anything_but_calls_or_an_answer(text: str) -> None:
    for turn in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"<|python_tag|>{text}", f"{{{text}"):
        with contextlib.suppress(MalformedCall):
            assert all(isinstance(call, ToolCall) for call in tool_calls(turn, ["weather"]))


@needs("vllm")
@pytest.mark.parametrize(
    ("parser", "turn"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich", "days": 2}}\n</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "b", "arguments": {"c": [1]}}</tool_call>',
        ),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "a}b", "days": 2}}'),
        ("llama3_json", '{"name": "weather", "parameters": {}}; {"name": "x", "parameters": {"a": null}}'),
    ],
)
def test_vllms_parsers_find_the_same_calls(folder: Path, parser: str, turn: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|python_tag|>"])
    theirs = ToolParserManager.get_tool_parser(parser)(tokenizer)
    extracted = theirs.extract_tool_calls(turn, request).tool_calls
    expected = [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in extracted]
    assert expected
    assert tool_calls(turn, ["weather"]) == expected


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        (call_text("shout", text="hey"), "HEY"),
        (call_text("weather"), "error: weather: missing a required argument: 'city'"),
        (call_text("nothing"), "error: there is no tool nothing; there are weather, shout, fails"),
        (
            call_text("fails", reason="because"),
            "error: fails raised RuntimeError: because at tool_functions.py:34 in fails",
        ),
    ],
)
def test_what_a_tool_answers(turn: str, content: str) -> None:
    observation = answer(Environment(FUNCTIONS), turn)
    assert isinstance(observation.content, list)
    assert [message["content"] for message in observation.content] == [content]
    assert observation.error == (content.removeprefix("error: ") if " raised " in content else None), "of the tool"
    assert answer(Environment(FUNCTIONS), "done").content is None


RAISED = "fails raised RuntimeError: because at tool_functions.py:34 in fails"


@pytest.mark.parametrize(
    ("call", "result", "error"),
    [
        (call_text("shout", text="hey"), "HEY", None),
        (call_text("fails", reason="because"), f"error: {RAISED}", RAISED),
    ],
)
def test_a_policy_reads_what_its_tool_answers(folder: Path, call: str, result: str, error: str | None) -> None:
    tokenizer = policy_tokenizer(model_of(folder, "hermes"), environment_of(*FUNCTIONS))
    turns = ["let me see " + call + "<eos>", "it says so<eos>"]
    engine = ScriptedEngine(tokenizer, [turns])
    calls = EnvironmentCalls(Environment, {"functions": FUNCTIONS})
    generator, [dialogue] = Generator(engine, tokenizer, interruptible=True), dialogues_for("truth")
    generator.resume(0)
    generator.submit([(dialogue, Rules(replace(SAMPLING, max_tokens=400), calls, max_turns=5))])
    wait_for(generator, [dialogue])
    assert (dialogue.finish_reason, dialogue.error, dialogue.tool_error) == ("stop", None, error)
    assert dialogue.journaled()["tool_error"] == error
    heard = f".<im_start>user.<tool_response>{result}</tool_response><eos>.<im_start>assistant."
    assert tokenizer.decode(dialogue.ids) == turns[0] + heard + turns[1]
    by_policy = [token for token, wrote in zip(dialogue.ids, dialogue.mask, strict=True) if wrote]
    assert tokenizer.decode(by_policy) == "".join(turns), "and learns only what it wrote"


@contextmanager
def mcp_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server over HTTP: its URL, and its process."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.mcp_server", str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def over_http() -> Iterator[str]:
    with mcp_server() as (url, _):
        yield url


def test_a_server_that_is_lost_is_no_fault_of_the_policy(folder: Path) -> None:
    """The policy must not learn from it: the trajectory gets a rollout_error."""
    tokenizer = policy_tokenizer(model_of(folder, "hermes"), environment_of(*FUNCTIONS))
    engine = ScriptedEngine(tokenizer, [[call_text("add", a=1, b=2) + "<eos>"]])
    with mcp_server() as (url, process):
        calls = EnvironmentCalls(Environment, {"mcp": (url,)}, on_error="drop")
        assert Environment.schemas((), (url,))
        process.kill()
        process.wait()
        generator, [dialogue] = Generator(engine, tokenizer, interruptible=True), dialogues_for("truth")
        generator.resume(0)
        generator.submit([(dialogue, Rules(replace(SAMPLING, max_tokens=400), calls, max_turns=5))])
        wait_for(generator, [dialogue])
    assert dialogue.finish_reason == "error"
    assert dialogue.error is not None
    assert f"rollout.mcp {url}: MCPError: Connection closed: start it again, and resume" in dialogue.error


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_tools_of_an_mcp_server(transport: str, over_http: str) -> None:
    environment = Environment(mcp=(STDIO if transport == "stdio" else over_http,))
    turn = call_text("add", a=2, b=3) + call_text("divide", a=1, b=0) + call_text("add", a="x")
    observation = answer(environment, turn)
    assert isinstance(observation.content, list)
    good, failed, malformed = (message["content"] for message in observation.content)
    assert good == "5"
    assert failed.startswith("error: divide: Error executing tool divide"), "what the server tells"
    assert malformed.startswith("error: add: ")
    names = [schema["function"]["name"] for schema in Environment.schemas((), (over_http,))]
    assert names == ["add", "divide", "order"]
    ordered = answer(environment, call_text("order", item="tea")).content
    assert ordered == [{"role": "tool", "name": "order", "content": "tea as key/0"}]
    assert environment.is_repeatable(turn) and not environment.is_repeatable(call_text("order", item="tea"))


def test_a_function_gets_the_key_of_its_call_and_the_policy_does_not_see_it() -> None:
    names = ("tests.tool_functions:book", "tests.tool_functions:pay")
    booking = Environment.schemas(names)[0]["function"]["parameters"]
    assert booking["properties"].keys() == {"item"} and booking["required"] == ["item"]
    environment = Environment(names)
    turn = call_text("book", item="tea") + call_text("pay", sum=3) + call_text("book", item="a", idempotency_key="mine")
    first, second, third = (message["content"] for message in answer(environment, turn).content or [])  # type: ignore[union-attr,index]
    assert (first, second) == ("tea as key/0", "paid 3")
    assert third == "error: book: got an unexpected keyword argument 'idempotency_key'"
    assert not environment.is_repeatable(turn), "pay says so"
    assert environment.is_repeatable(call_text("book", item="tea")) and environment.is_repeatable("<tool_call>x")


@pytest.mark.parametrize(
    ("functions", "mcp", "says"),
    [
        (["tests.tool_functions:untyped"], (), "tests.tool_functions:untyped: Argument text is missing a type hint"),
        (["tests.tool_functions:missing"], (), "has no missing: name a function"),
        (["weather"], (), "name it as package.module:function or file.py:function"),
        (["tests.tool_functions:weather"] * 2, (), "have several tools named weather: rename one"),
        ([], ("no-such-command-at-all",), "rollout.mcp no-such-command-at-all: "),
        ([], ("http://127.0.0.1:9/mcp",), "start the server, or correct the address"),
        ([], ("a 'b",), "is neither a URL nor a command"),
    ],
)
def test_a_tool_that_cannot_be_loaded_is_named(functions: list[str], mcp: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as refused:
        Environment(functions, mcp)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_tools_are_known_by_their_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    source = 'def f(a: int) -> int:\n    """\n    F.\n\n    Args:\n        a: a\n    """\n    return a\n'
    path.write_text(source)
    before = environment_digest("tools", {"functions": [f"{path}:f"]})
    assert environment_digest("tools", {"functions": [f"{path}:f"]}) == before
    other = tmp_path / "other.py"
    other.write_text(source + "# more\n")
    assert environment_digest("tools", {"functions": [f"{other}:f"]}) != before


def test_the_config_of_tools() -> None:
    tree = {"model": "m", "data": {"train": "p"}, "rollout": {"tools": FUNCTIONS[0], "mcp": ["http://a/mcp"]}}
    config = parse_config(tree, "tests")
    environment = config.rollout.environment
    assert environment is not None
    assert environment.name == "tools"
    assert environment.options == {"functions": [FUNCTIONS[0]], "mcp": ["http://a/mcp"]}
    fewer = config.with_values({"rollout.mcp": []})
    assert fewer.rollout.environment is not None
    assert fewer.rollout.environment.options == {"functions": [FUNCTIONS[0]], "mcp": []}
    turns = config.with_values({}, ["rollout.environment.max_turns=3"]).rollout.environment
    assert turns is not None
    assert turns.max_turns == 3
    with pytest.raises(UserError, match=r"rollout\.tools is set, but rollout.environment is calculator"):
        config.with_values({"rollout.environment": {"name": "calculator"}})
    with pytest.raises(UserError, match=r"set rollout\.tools or rollout.mcp"):
        config.with_values({"rollout.tools": [], "rollout.mcp": []})


def test_variables_of_the_template(folder: Path, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "?"}]
    plain = load_tokenizer(model_of(folder, "hermes"))
    quiet = load_tokenizer(model_of(folder, "hermes", chat_template_kwargs={"enable_thinking": False}))
    rendered = quiet.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert rendered == plain.apply_chat_template(
        question, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert rendered.endswith("<think></think>")
    copy_tokenizer(model_of(folder, "hermes", chat_template_kwargs={"enable_thinking": False}), tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == plain.chat_template, "as the model's users know it"
    with pytest.raises(UserError, match="chat_template_kwargs has enable_thinking, which the chat template of"):
        load_tokenizer(model_of(folder, "llama", chat_template_kwargs={"enable_thinking": False}))


def test_a_template_without_tools_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"does not describe tools: set model\.chat_template, or choose a model"):
        policy_tokenizer(ModelConfig(path=str(folder)), environment_of(*FUNCTIONS))
