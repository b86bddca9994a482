"""A proxy before an object store, or Prefect's server, that breaks chosen requests on the wire."""

from __future__ import annotations

import http.client
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Action = Literal["503", "429", "409", "slow", "never", "dropped before", "dropped after", "garbled", "racy"]
SLOW_S, NEVER_S = 1.0, 6.0
RACE_S = 10.0
"""A "racy" store looks for an object before it writes, and waits so long between the two for another writer of the same
object."""
ANSWERS = {"503": (503, "SlowDown"), "429": (429, "TooManyRequests"), "409": (409, "ConditionalRequestConflict")}


@dataclass
class Rule:
    """A fault of the next `times` requests whose method and path match, of each of them with probability `share`."""

    method: str
    path: str
    action: Action
    times: int = 1
    share: float = 1.0
    struck: int = 0


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, rules: list[Rule]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.rules, self.lock, self.random = port, rules, threading.Lock(), random.Random(0)
        self.racing, self.race = Counter[str](), threading.Condition()

    def rule_for(self, method: str, path: str) -> Rule | None:
        with self.lock:
            for rule in self.rules:
                matches = re.fullmatch(rule.method, method) and re.search(rule.path, path)
                if rule.struck < rule.times and matches and self.random.random() < rule.share:
                    rule.struck += 1
                    return rule
        return None


@contextmanager
def proxy(port: int, *rules: Rule) -> Iterator[str]:
    """Yields the URL to use in place of the server on loopback that listens on `port`."""
    server = Proxy(port, list(rules))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        rule = self.server.rule_for(self.command, self.path)
        action = None if rule is None else rule.action
        if action in ANSWERS:
            status, code = ANSWERS[action]
            headers = {"Content-Type": "application/xml", **({"Retry-After": "1"} if status == 429 else {})}
            self._send(status, headers, f"<Error><Code>{code}</Code></Error>".encode())
        elif action == "garbled":
            self._send(200, {"Content-Type": "text/html"}, b"<html>back in a moment</html>")
        elif action == "dropped before":
            self.close_connection = True
            self.connection.close()
        else:
            if action in ("slow", "never"):
                time.sleep(SLOW_S if action == "slow" else NEVER_S)
            elif action == "racy" and self._is_free():
                del self.headers["If-None-Match"]
            status, headers, data = self._forward(body)
            if action in ("dropped after", "never"):
                self.close_connection = True
                self.connection.close()
            else:
                self._send(status, headers, data)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = _answer

    def _is_free(self) -> bool:
        """True if the object was not there when this writer looked; answers when another writer has looked, too."""
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        upstream.request("HEAD", self.path)
        free = upstream.getresponse().status == 404
        upstream.close()
        with self.server.race:
            self.server.racing[self.path] += free
            self.server.race.notify_all()
            self.server.race.wait_for(lambda: not free or self.server.racing[self.path] > 1, RACE_S)
        return free

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        return answer.status, dict(answer.headers), data

    def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "server", "date"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
