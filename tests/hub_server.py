"""A server on loopback that speaks the part of the Hugging Face hub's protocol that creates and fills a repository, as
huggingface_hub 2.4 uses it without xet. It checks tokens, metadata of cards, and digests of large files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

OWNER = "me"
WRITES, READS = "hf_may_write", "hf_may_read"
"""Tokens."""


@dataclass
class Repository:
    """A model repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """The messages of its commits."""


class Hub(ThreadingHTTPServer):
    """The server: its repositories, by name, and what it was asked, as ``METHOD path``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Uploaded large files, by sha256; a commit puts them into a repository."""
        self.requests: list[str] = []
        self.is_full = False
        """True if it has no room for a commit."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def hub_server() -> Iterator[Hub]:
    """An empty hub."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))  # looks so often whether it is to end
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, **more: object) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": message, **more}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        try:
            status, answer = 200, self._dispatch(path, body)
        except Refused as refused:
            status, answer = refused.status, refused.body
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _dispatch(self, path: str, body: bytes) -> Any:
        if self.command == "PUT":  # as on S3, where the address itself is the permission
            return self._store(path.removeprefix("/large/"), body)
        if (token := self.headers.get("Authorization")) not in (f"Bearer {WRITES}", f"Bearer {READS}"):
            raise Refused(401, "Invalid username or password.")
        is_reading = self.command == "GET" or path == "/api/validate-yaml"
        if token == f"Bearer {READS}" and not is_reading:
            raise Refused(403, "You don't have the rights to write")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return validated(json.loads(body)["content"])
        parts = re.fullmatch(r"/(?:api/models/)?([\w.-]+/[\w-]+)(?:\.git)?(?:/(.*))?", path)
        if parts is None or (repository := self.server.repositories.get(parts[1])) is None:
            raise Refused(404, "Repository not found")
        action = f"{self.command} {parts[2] or ''}"
        if action == "GET ":
            return {"id": parts[1], "private": repository.private}
        if action == "GET tree/main":
            return [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repository.files.items()
            ]
        if action == "POST preupload/main":
            return {"files": [_mode(file) for file in json.loads(body)["files"]]}
        if action == "POST info/lfs/objects/batch":
            return {"objects": [self._upload(wanted) for wanted in json.loads(body)["objects"]]}
        if action == "POST commit/main":
            return self._commit(parts[1], repository, [json.loads(line) for line in body.splitlines()])
        raise Refused(404, f"no such endpoint: {action}")

    def _create(self, wanted: dict[str, Any]) -> object:
        name = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            raise Refused(409, "You already created this model repo", url=url)
        if not name.startswith(f"{OWNER}/"):
            raise Refused(403, "You don't have the rights to create a model under this namespace")
        self.server.repositories[name] = Repository(wanted["visibility"] == "private")
        return {"url": url, "name": name}

    def _upload(self, wanted: dict[str, Any]) -> object:
        href = f"{self.server.url}/large/{wanted['oid']}"
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": {"href": href}}}

    def _store(self, oid: str, body: bytes) -> object:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content does not have the announced digest")
        self.server.large[oid] = body
        return {}

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> object:
        if self.server.is_full:
            raise Refused(403, "Private repository storage limit reached")
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, f"no such operation: {line['key']}")
        repository.files = files
        oid = hashlib.sha1(repr(files).encode()).hexdigest()
        return {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}


def _mode(file: dict[str, Any]) -> object:
    """Returns the hub's mode for a file: it keeps weights, and files of more than 10 MB, out of git."""
    is_large = file["path"].endswith(".safetensors") or file["size"] > 10_000_000
    return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}


def validated(card: str) -> object:
    """Returns the hub's answer about the metadata of a model card, as far as its documentation defines them."""
    block = REGEX_YAML_BLOCK.search(card)
    if block is None:
        return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]}
    metadata = yaml.safe_load(block[2])
    texts, lists = ("library_name", "pipeline_tag", "license"), ("tags", "datasets", "base_model")
    wrong = [name for name in texts if name in metadata and not isinstance(metadata[name], str)]
    for name in lists:
        values = metadata.get(name, [])
        values = values if isinstance(values, list) else [values]
        if not all(isinstance(value, str) and 0 < len(value) <= 100 for value in values):
            wrong.append(name)
    if wrong:
        errors = [{"message": f'"{name}" is not valid'} for name in wrong]
        raise Refused(400, "Invalid metadata", errors=errors)
    return {"errors": [], "warnings": []}
