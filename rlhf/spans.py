"""Sends OpenTelemetry spans of trajectories, model calls and tool calls, if an endpoint is set.

The names are those of the semantic conventions for generative AI. Without an endpoint nothing is imported. A trajectory
never waits for spans: a thread sends them in batches, and drops what it cannot send.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenSpan
    from opentelemetry.trace import Tracer

Attributes: TypeAlias = "Mapping[str, str | bool | int | float | Sequence[str]]"

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables with the URL of an OTLP/HTTP receiver: of spans, or of all signals."""
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Variable that lets spans hold what was said."""
WITH_CONTENT = ("true", "1", "span_only", "span_and_event")
OPERATION = "gen_ai.operation.name"
CHAT, TOOL, AGENT = "chat", "execute_tool", "invoke_agent"
"""The operations, which are also the first word of a span's name."""


class Span:
    """A span that has begun, or nothing if there is no endpoint."""

    def __init__(self, span: OpenSpan | None) -> None:
        self._span = span

    @property
    def opened(self) -> OpenSpan | None:
        """OpenTelemetry's span."""
        return self._span

    def set(self, attributes: Callable[[], Attributes]) -> None:
        """Adds attributes, which are only computed if there is an endpoint."""
        if self._span is not None:
            self._span.set_attributes(attributes())

    def failed(self, kind: str) -> None:
        """Marks an error by its kind, without its message, which may hold what was said."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", kind)
            self._span.set_status(StatusCode.ERROR)


NOTHING = Span(None)


def is_on() -> bool:
    """Returns True if spans are sent."""
    return _tracer() is not None


def has_content() -> bool:
    """Returns True if spans may hold what was said."""
    return os.environ.get(CONTENT, "").strip().lower() in WITH_CONTENT


def text_message(role: str, text: str, finish_reason: str = "") -> str:
    """Returns a message as the conventions write a list of messages: JSON."""
    message: dict[str, object] = {"role": role, "parts": [{"type": "text", "content": text}]}
    return json.dumps([message | ({"finish_reason": finish_reason} if finish_reason else {})], ensure_ascii=False)


@contextmanager
def span(
    operation: str, name: Callable[[], str], attributes: Callable[[], Attributes], parent: Span = NOTHING
) -> Iterator[Span]:
    """Opens a span, which is the parent of those that are opened inside.

    Args:
        operation: one of `CHAT`, `TOOL` and `AGENT`.
        name: the model, the tool or the agent; called only if there is an endpoint, like `attributes`.
        parent: the span that this one is a part of; by default the one that is open in this coroutine.
    """
    tracer = _tracer()
    if tracer is None:
        yield NOTHING
        return
    from opentelemetry import trace

    context = None if parent.opened is None else trace.set_span_in_context(parent.opened)
    kind = trace.SpanKind.CLIENT if operation == CHAT else trace.SpanKind.INTERNAL
    with tracer.start_as_current_span(
        f"{operation} {name()}".strip(),
        context,
        kind,
        {OPERATION: operation, **attributes()},
        record_exception=False,
        set_status_on_exception=False,
    ) as opened:
        whole = Span(opened)
        try:
            yield whole
        except BaseException as error:
            whole.failed(type(error).__name__)
            raise


def add_tool(name: str, attributes: Attributes, began: float, ended: float, parent: Span) -> None:
    """Adds the span of a tool that an agent's program has called; the times are seconds since 1970."""
    tracer = _tracer()
    if tracer is not None:
        from opentelemetry import trace

        context = None if parent.opened is None else trace.set_span_in_context(parent.opened)
        known = {OPERATION: TOOL, "gen_ai.tool.name": name, "gen_ai.tool.type": "function", **attributes}
        opened = tracer.start_span(f"{TOOL} {name}", context, attributes=known, start_time=int(began * 1e9))
        opened.end(int(ended * 1e9))


@cache
def _tracer() -> Tracer | None:
    """Returns the process's tracer; None if no endpoint is set, or spans are switched off."""
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        warnings.warn(
            f"{endpoint} is set, but no spans are sent: `pip install ratchet-rlhf[telemetry]`",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    # a provider of its own, whose spans nobody else's settings redirect; it sends the last spans when the process ends
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "ratchet"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("ratchet")
