"""A server on loopback that speaks the part of the Hugging Face hub's protocol that creates, fills and reads a
repository, as huggingface_hub 2.4 and datasets 5.2 use it without xet. It checks tokens, metadata of cards, and digests
of large files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

OWNER = "me"
WRITES, READS = "hf_may_write", "hf_may_read"
"""Tokens."""


@dataclass
class Repository:
    """A repository of a model or a dataset, whose files have one revision."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """The messages of its commits."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def entry(self, path: str) -> dict[str, object]:
        """What the hub tells about a file or a folder."""
        if path not in self.files:
            return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
        data = self.files[path]
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
        if _is_large(path, len(data)):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def tree(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        """The entries of a folder, as the hub lists them."""
        prefix = f"{folder}/" if folder else ""
        below = [path.removeprefix(prefix) for path in sorted(self.files) if path.startswith(prefix)]
        folders = {"/".join(path.split("/")[:depth]) for path in below for depth in range(1, path.count("/") + 1)}
        paths = [path for path in [*sorted(folders), *below] if recursive or "/" not in path]
        return [self.entry(prefix + path) for path in paths]


class Hub(ThreadingHTTPServer):
    """The server: its repositories, by name (``datasets/`` precedes those of datasets), and what it was asked, as
    ``METHOD path``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Uploaded large files, by sha256; a commit puts them into a repository."""
        self.requests: list[str] = []
        self.is_full = False
        """True if it has no room for a commit."""
        self.most_commits = sys.maxsize
        """Number of commits after which it has no room."""

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

    def __init__(self, status: int, message: str, code: str = "", **more: object) -> None:
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **more}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        path = unquote(path)
        self.server.requests.append(f"{self.command} {path}")
        headers: dict[str, str] = {}
        try:
            status, answer = 200, self._dispatch(path, body, dict(parse_qsl(query)), headers)
        except Refused as refused:
            status, answer = refused.status, refused.body
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if isinstance(answer, bytes) and (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _dispatch(self, path: str, body: bytes, query: Mapping[str, str], headers: dict[str, str]) -> Any:
        """Answers a request with JSON, or with a file and its `headers`."""
        if self.command == "PUT":  # as on S3, where the address itself is the permission
            return self._store(path.removeprefix("/large/"), body)
        if (token := self.headers.get("Authorization")) not in (f"Bearer {WRITES}", f"Bearer {READS}"):
            raise Refused(401, "Invalid username or password.")
        is_reading = self.command in ("GET", "HEAD") or path == "/api/validate-yaml" or "/paths-info/" in path
        if token == f"Bearer {READS}" and not is_reading:
            raise Refused(403, "You don't have the rights to write")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return validated(json.loads(body)["content"])
        path = path.removeprefix("/api").removeprefix("/models")
        parts = re.fullmatch(r"/((?:datasets/)?[\w.-]+/[\w-]+)(?:\.git)?(?:/(.*))?", path)
        if parts is None or (repository := self.server.repositories.get(parts[1])) is None:
            raise Refused(404, "Repository not found", "RepoNotFound")
        action = f"{self.command} {parts[2] or ''}"
        revision = re.fullmatch(r"(?:revision|tree|resolve|paths-info)/([^/]+)/?(.*)", parts[2] or "")
        if revision is not None and revision[1] not in ("main", repository.commit):
            raise Refused(404, "Invalid rev id", "RevisionNotFound")
        if action in ("GET ", "GET revision/main", f"GET revision/{repository.commit}"):
            name = parts[1].removeprefix("datasets/")
            return {"id": name, "private": repository.private, "sha": repository.commit, "siblings": []}
        if revision is not None and parts[2].startswith("tree/"):
            return repository.tree(revision[2], recursive=query.get("recursive", "").lower() == "true")
        if revision is not None and parts[2].startswith("paths-info/"):
            paths = json.loads(body)["paths"]
            return [repository.entry(path) for path in paths if path in repository.files]
        if revision is not None and parts[2].startswith("resolve/"):
            headers["X-Repo-Commit"] = repository.commit
            if (data := repository.files.get(revision[2])) is None:
                raise Refused(404, "Entry not found", "EntryNotFound")
            headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
            return data
        if action == "POST preupload/main":
            return {"files": [_mode(file) for file in json.loads(body)["files"]]}
        if action == "POST info/lfs/objects/batch":
            return {"objects": [self._upload(wanted) for wanted in json.loads(body)["objects"]]}
        if action == "POST commit/main":
            return self._commit(parts[1], repository, [json.loads(line) for line in body.splitlines()])
        raise Refused(404, f"no such endpoint: {action}")

    def _create(self, wanted: dict[str, Any]) -> object:
        owner, kind = wanted.get("organization") or OWNER, wanted.get("type", "model")
        name = f"{'datasets/' if kind == 'dataset' else ''}{owner}/{wanted['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            raise Refused(409, f"You already created this {kind} repo", url=url)
        if owner != OWNER:
            raise Refused(403, f"You don't have the rights to create a {kind} under this namespace")
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
        if self.server.is_full or len(repository.messages) >= self.server.most_commits:
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
        oid = repository.commit
        return {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}


def _mode(file: dict[str, Any]) -> object:
    """Returns the hub's mode for a file."""
    mode = "lfs" if _is_large(file["path"], file["size"]) else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


def _is_large(path: str, size: int) -> bool:
    """True if the hub keeps a file out of git: weights, Parquet, and files of more than 10 MB."""
    return path.endswith((".safetensors", ".parquet")) or size > 10_000_000


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()


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
