"""A server that speaks OpenAI's protocol and judges by the letters of an answer, so that a test knows every score."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.rewards import letters

Fault = int | str | Literal["hang"]
"""The fault of a request: a status, `hang`, or a text that the model answers."""
PART = re.compile(r"\[([0-9a-f]{16}) ([^\]\n]*)\]\n(.*?)\n\[\1 end of \2\]", re.DOTALL)


@dataclass
class Question:
    """A question that was answered, as the server read it."""

    system: str
    parts: dict[str, str]
    """The texts between the marks, by name."""
    text: str
    body: dict[str, Any]

    @property
    def answers(self) -> list[str]:
        """The answers that are judged."""
        return [text for name, text in self.parts.items() if name.startswith("answer")]

    @property
    def is_trial(self) -> bool:
        """True if the answers are the ground truth, on which rewards are tried before a run starts."""
        return all(answer == self.parts.get("reference answer") for answer in self.answers)


@dataclass
class JudgeServer:
    """Judges until the test ends."""

    url: str = ""
    key: str | None = None
    """The key that it requires."""
    knows_json_mode: bool = True
    faults: deque[Fault] = field(default_factory=deque)
    """Faults of the next requests."""
    never_usable: str | None = None
    """A text; the model's answers to questions about it are not usable."""
    at_once: threading.Barrier | None = None
    """Every request waits until as many are there."""
    answered: list[Question] = field(default_factory=list)
    requests: int = 0
    most: int = 0
    """Largest number of concurrent requests."""
    headers: list[dict[str, str]] = field(default_factory=list)
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    @property
    def asked(self) -> list[str]:
        """The answered questions about a policy's answers."""
        return [question.system + question.text for question in self.answered if not question.is_trial]

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
        """Returns the status and the model's answer."""
        with self._lock:
            self.requests += 1
            self.headers.append(headers)
            self._running += 1
            self.most = max(self.most, self._running)
            fault = self.faults.popleft() if self.faults else None
        try:
            if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
                return 401, f"wrong key {headers.get('authorization')}"
            if self.at_once is not None:
                self.at_once.wait()
            if fault == "hang":
                self._closed.wait()
                return 500, "too late"
            if isinstance(fault, int):
                return fault, "not now"
            if "response_format" in body and not self.knows_json_mode:
                return 400, "unknown field response_format"
            system, text = (message["content"] for message in body["messages"])
            question = Question(system, {name: part for _, name, part in PART.findall(text)}, text, body)
            if fault is not None:
                return 200, fault
            if self.never_usable is not None and self.never_usable in question.answers:
                return 200, '{"score": "high"}'
            with self._lock:
                self.answered.append(question)
            return 200, json.dumps(judged(question))
        finally:
            with self._lock:
                self._running -= 1


def judged(question: Question) -> dict[str, Any]:
    """Returns the model's judgment: an answer is as good as its share of the letters a to m."""
    scores = [letters("", answer, "") for answer in question.answers]
    if question.system.startswith("You compare"):
        better = "tie" if scores[0] == scores[1] else "A" if scores[0] > scores[1] else "B"
        return {"reason": "the letters", "better": better}
    if question.system.startswith("You score several"):
        entries = [{"answer": number, "reason": "", "score": score} for number, score in enumerate(scores, 1)]
        return {"scores": entries[::-1]}
    return {"reason": "the letters", "score": scores[0]}


@contextmanager
def judge_server(**settings: Any) -> Iterator[JudgeServer]:
    judge = JudgeServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/chat/completions":
                status, text = 404, "no such page"
            else:
                status, text = judge.answer(body, {name.lower(): value for name, value in self.headers.items()})
            message = {"choices": [{"message": {"role": "assistant", "content": text}}]}
            data = (json.dumps(message) if status == 200 else text).encode()
            try:
                self.send_response(status)
                if status != 200:
                    self.send_header("retry-after", "0")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # who asked has gone

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.request_queue_size = 128
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge._closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
