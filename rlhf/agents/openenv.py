"""`rollout.environment: openenv:URL`: environments that a server of OpenEnv plays.

The first observation follows the prompt of the dataset's row, the policy's answer is the action, and the reward is the
sum over the episode. `extra_info.reset` holds the arguments of the environment's reset, such as its seed.
https://github.com/meta-pytorch/OpenEnv describes the protocol: messages of JSON over a WebSocket, one for an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratchet.rlhf.errors import RatchetError, UserError, in_one_line

if TYPE_CHECKING:
    from websockets.sync.connection import Connection

KEY = "rollout.environment"
PREFIX = "openenv:"
CONNECT_S = 30.0
"""Seconds for a connection to the server."""
LARGEST = 100 << 20
"""Size of a message, in bytes."""


def identity(environment: str, arguments: Mapping[str, Any]) -> str:
    """Returns the program's dependencies beyond its own code: what the server says of the environment's actions and
    observations. A change of the server's code goes unnoticed."""
    return json.dumps([environment, arguments, _asked(environment, "schema")], sort_keys=True)


def run(
    task: Mapping[str, Any], base_url: str, api_key: str, model: str, environment: str, arguments: Mapping[str, Any]
) -> float:
    """Plays one episode; returns the sum of its rewards.

    Args:
        environment: URL of the server.
        arguments: `action` and `observation` name the fields that hold the texts, if there are several; without such a
            field, actions and observations are JSON. `seconds` is the time limit of an answer of the server.
    """
    import httpx
    from websockets.sync.client import connect

    headers = {"Authorization": f"Bearer {api_key}"}
    action_field = arguments.get("action") or _text_field(_asked(environment, "schema").get("action", {}))
    seconds = float(arguments.get("seconds", 60.0))
    url = environment.rstrip("/").replace("http", "ws", 1) + "/ws"
    with connect(url, open_timeout=CONNECT_S, max_size=LARGEST) as connection:
        answer = _answered(connection, "reset", task["extra_info"].get("reset") or {}, seconds)
        *before, last = task["messages"]
        first = _text_of(answer, arguments.get("observation"))
        messages: list[dict[str, Any]] = [*before, {**last, "content": f"{last['content']}\n{first}"}]
        total, ended = 0.0, bool(answer.get("done"))
        while not ended:
            body = {"model": model, "messages": messages}
            response = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=None)
            response.raise_for_status()
            message = response.json()["choices"][0]["message"]
            action = _action(message["content"] or "", action_field)
            try:
                answer = _answered(connection, "step", action, seconds)
            except _NoAction as error:
                said = str(error)
            else:
                total, ended = total + float(answer.get("reward") or 0.0), bool(answer.get("done"))
                said = _text_of(answer, arguments.get("observation"))
            messages += [message, {"role": "user", "content": said}]
        connection.send(json.dumps({"type": "close"}))
        return total


class _NoAction(Exception):
    """The policy's answer is no action of the environment."""


def _answered(connection: Connection, kind: str, data: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    """Returns the server's answer to a message.

    Raises:
        _NoAction: `data` is None, or no action of the environment.
        RatchetError: the server answers with another error.
    """
    if data is None:
        raise _NoAction("error: the answer has to be a JSON object, the action")
    connection.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(connection.recv(seconds))
    found: dict[str, Any] = answer.get("data") or {}
    if answer.get("type") == "error":
        if kind == "step" and found.get("code") == "VALIDATION_ERROR":
            reasons = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found.get("errors") or ())
            raise _NoAction(f"error: this is no action: {'; '.join(reasons)[:1000]}")
        raise RatchetError(f"{KEY} {PREFIX[:-1]}: the server refused {kind}: {in_one_line(str(found.get('message')))}")
    return found


def _action(text: str, field: str | None) -> dict[str, Any] | None:
    """Returns the action that a text is; None if it should be JSON and is not."""
    if field is not None:
        return {field: text}
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _text_of(answer: Mapping[str, Any], field: str | None) -> str:
    """Returns what the policy reads of an observation: its field, its only text, or all of it as JSON."""
    observation = answer.get("observation") or {}
    if field is not None:
        return str(observation.get(field, ""))
    texts = [value for value in observation.values() if value is not None]
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(observation, ensure_ascii=False)


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Returns the only field of an action if that is a text."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    texts = [name for name, field in fields.items() if field.get("type") == "string"]
    needed = [name for name in schema.get("required", fields) if name != "metadata"]
    return texts[0] if len(texts) == 1 and needed == texts else None


def _asked(environment: str, page: str) -> dict[str, Any]:
    """Reads a page of the server. Raises UserError if it does not answer."""
    import httpx

    try:
        response = httpx.get(f"{environment.rstrip('/')}/{page}", timeout=CONNECT_S)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(
            f"{KEY} {PREFIX}{environment}: no server of OpenEnv answers there: {in_one_line(error)}; start it first"
        ) from None
    return found
