"""Spans: what a real receiver gets, that nothing is sent or imported without one, and that no text is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ratchet.rlhf import spans
from tests.span_receiver import Receiver, attributes, receiving
from tests.traced import SECRET

OFF = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def play(*kinds: str, **variables: str) -> list[str]:
    """Plays trajectories in another process, with these variables; returns the lines of its output, the last of which
    are its own."""
    command = [sys.executable, "-m", "tests.traced", *kinds]
    done = subprocess.run(command, env={**OFF, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def received() -> Receiver:
    """Plays a trajectory of each kind; their process sends its last spans before it ends."""
    with receiving() as receiver:
        play("tools", "environment", "agent", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
    return receiver


def below(receiver: Receiver, whole: Span) -> list[Span]:
    """The spans in that of a trajectory, in order."""
    parts = [span for span in receiver.spans if span.parent_span_id == whole.span_id]
    assert {span.trace_id for span in parts} == {whole.trace_id}
    return sorted(parts, key=lambda span: span.start_time_unix_nano)


def said(receiver: Receiver) -> str:
    return json.dumps([[span.name, attributes(span), span.status.message, len(span.events)] for span in receiver.spans])


def test_model_calls_and_tool_calls_are_spans_of_their_trajectory(received: Receiver) -> None:
    assert set(received.asked_for) == {"/v1/traces"} and received.services == {"ratchet"}
    [whole] = received.named("invoke_agent tools")
    known = attributes(whole)
    assert known["gen_ai.operation.name"] == "invoke_agent" and known["gen_ai.agent.name"] == "tools"
    assert known["gen_ai.conversation.id"] == "it000000-p00000-s00"
    model = known["gen_ai.request.model"]
    first, tool, second = below(received, whole)
    assert [span.name for span in (first, tool, second)] == [f"chat {model}", "execute_tool shout", f"chat {model}"]
    assert first.kind == first.SPAN_KIND_CLIENT
    asked = attributes(first)
    assert asked["gen_ai.operation.name"] == "chat" and asked["gen_ai.provider.name"] == "ratchet"
    assert asked["gen_ai.usage.input_tokens"] == 2 and asked["gen_ai.usage.output_tokens"] > 9
    assert (asked["gen_ai.request.temperature"], asked["gen_ai.response.finish_reasons"]) == (0.5, ["stop"])
    assert asked["ratchet.policy_version"] == 7
    assert attributes(second)["gen_ai.usage.input_tokens"] > 2 + asked["gen_ai.usage.output_tokens"], (
        "with what the tool said"
    )
    assert tool.kind == tool.SPAN_KIND_INTERNAL
    assert attributes(tool)["gen_ai.operation.name"] == "execute_tool"
    assert attributes(tool)["gen_ai.tool.name"] == "shout"
    assert first.end_time_unix_nano <= tool.start_time_unix_nano <= tool.end_time_unix_nano
    assert tool.end_time_unix_nano <= second.start_time_unix_nano
    assert len(received.spans) == 4 + 5 + 5
    assert SECRET not in said(received) and SECRET.upper() not in said(received)


@pytest.mark.slow
def test_the_standard_variable_adds_what_was_said() -> None:
    with receiving() as receiver:
        play("tools", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, **{CONTENT: "true"})
    [tool] = receiver.named("execute_tool shout")
    assert json.loads(attributes(tool)["gen_ai.tool.call.arguments"]) == {"text": SECRET}
    assert attributes(tool)["gen_ai.tool.call.result"] == SECRET.upper()
    *_, last = (span for span in receiver.spans if span.name.startswith("chat "))
    [answer] = json.loads(attributes(last)["gen_ai.output.messages"])
    assert answer == {
        "role": "assistant",
        "parts": [{"type": "text", "content": SECRET}],
        "finish_reason": "stop",
    }
    [question] = json.loads(attributes(last)["gen_ai.input.messages"])
    assert SECRET.upper() in question["parts"][0]["content"]


def test_an_environment_that_fails_is_marked_without_its_message(received: Receiver) -> None:
    [whole] = received.named("invoke_agent tests.environments:Script")
    _, answered, _, failed = below(received, whole)
    assert [span.name for span in (answered, failed)] == ["execute_tool Script"] * 2
    assert answered.status.code == answered.status.STATUS_CODE_UNSET
    for span in (whole, failed):
        assert attributes(span)["error.type"] == "EnvironmentFailed"
        assert span.status.code == span.status.STATUS_CODE_ERROR


def test_tools_of_a_program_are_spans_between_its_calls(received: Receiver) -> None:
    [whole] = received.named("invoke_agent tests.traced:asks")
    [tool] = [span for span in below(received, whole) if span.name == "execute_tool f"]
    chats = [span for span in below(received, whole) if span.name.startswith("chat ")]
    assert len(chats) == 3
    assert attributes(tool)["gen_ai.tool.call.id"]
    assert chats[0].end_time_unix_nano <= tool.start_time_unix_nano <= tool.end_time_unix_nano
    conversations = [attributes(span)["gen_ai.conversation.id"] for span in chats]
    assert conversations == ["it000000-p00000-s00"] * 2 + ["it000000-p00000-s00-b01"]


@pytest.mark.slow
def test_nothing_is_imported_if_it_is_off_and_a_receiver_that_is_gone_loses_only_spans() -> None:
    output = play("tools")
    assert output[-2:] == ["stop None", "not imported"]
    with receiving() as receiver:
        url = receiver.url
    gone = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    output = play("tools", **gone)
    assert output[-2:] == ["stop None", "imported"]


@pytest.mark.parametrize("variable", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_standard_switches(monkeypatch: pytest.MonkeyPatch, variable: dict[str, str]) -> None:
    for name in os.environ.keys() - OFF.keys():
        monkeypatch.delenv(name)
    spans._tracer.cache_clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    try:
        assert not spans.is_on()
    finally:
        spans._tracer.cache_clear()
