"""`ratchet serve` and `ratchet ingest`: real clients, a real model, a real store."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import openai
import pyarrow.parquet as pq
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerBase

from ratchet.infra.runs import served as log
from ratchet.infra.runs.ingest import ingest
from ratchet.infra.runs.run import Run
from ratchet.infra.runs.served import ServedLog, served
from ratchet.infra.store.log import Corrupt
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.run_store import RunStore
from ratchet.infra.workers.call_log import CallLog
from ratchet.rlhf.agents import serving
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.serving import Served
from ratchet.rlhf.data.examples import supervised
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Request, Sampling
from tests import tiny

KEY = "sk-of-all-clients"


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    with tiny.chat_generator(tmp_path_factory.mktemp("model"), version=7, interruptible=True) as generator:
        yield generator


@pytest.fixture(scope="module")
def tokenizer(generator: Generator) -> PreTrainedTokenizerBase:
    return generator.tokenizer


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(ObjectStore(f"file://{tmp_path}/runs/chat"))


@pytest.fixture
def client(generator: Generator, store: RunStore) -> Iterator[OpenAI]:
    """A client of a policy that is served with `store`."""
    urls: Queue[str] = Queue()
    clients = Served("server", Gateway("127.0.0.1"), KEY, context=200, listening=urls.put)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=200, seed=3)
    rules = Rules(sampling, agents=clients, recorder=CallLog(ServedLog(store, "server").write))
    serving = Dialogue(Request("server", ()))
    generator.submit([(serving, rules)])
    yield OpenAI(base_url=urls.get(timeout=600), api_key=KEY, max_retries=0, timeout=600)
    generator.cancel([serving])


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **({"max_tokens": 6} | options))


WHOLE: Any = {"stop": [*"abcdefghijklmnopqrstuvwxyz"], "max_tokens": 100}
"""Options with which an answer ends by itself: every third token is a stop text."""


def said(content: str | None, then: str = "more") -> list[Any]:
    return [{"role": "assistant", "content": content}, {"role": "user", "content": then}]


def rows_of(store: RunStore) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = served(store).to_pylist()
    return rows


def test_what_was_answered_is_stored_with_its_tokens(
    client: OpenAI, store: RunStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = ask(client, messages)
    messages += said(first.choices[0].message.content)
    second = ask(client, messages)
    one, two = rows_of(store)
    assert [one["call_id"], two["call_id"]] == [first.id, second.id]
    assert one["branch"] == two["branch"] == "server-000001"
    assert tokenizer.decode(one["heard_ids"]) == "(user)hi(assistant)"
    assert tokenizer.decode(two["heard_ids"]).endswith("(user)more(assistant)")
    assert json.loads(two["asked"]) == {"messages": [{"role": "user", "content": "more"}]}
    for row, answer in ((one, first), (two, second)):
        assert json.loads(row["answer"])["content"] == answer.choices[0].message.content
        assert len(row["ids"]) == len(row["log_probs"]) == answer.usage.completion_tokens
        assert set(row["versions"]) == {7}


def test_conversations_of_many_clients_do_not_mix(client: OpenAI, store: RunStore) -> None:
    def talk(number: int) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
        ids = []
        for _ in range(3):
            answer = ask(client, messages)
            ids.append(answer.id)
            messages += said(answer.choices[0].message.content)
        return ids

    with ThreadPoolExecutor(16) as pool:
        talks = list(pool.map(talk, range(16)))
    by_call = {row["call_id"]: row for row in rows_of(store)}
    assert len(by_call) == 48
    for number, ids in enumerate(talks):
        rows = [by_call[call] for call in ids]
        assert len({row["branch"] for row in rows}) == 1, "a conversation goes on where it was"
        assert json.loads(rows[0]["asked"])["messages"] == [{"role": "user", "content": f"I am {number}"}]
        assert "I am" not in rows[1]["asked"] + rows[2]["asked"]


def test_an_edited_history_and_further_choices_are_branches(client: OpenAI, store: RunStore) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    messages += said(ask(client, messages).choices[0].message.content)
    choices = ask(client, messages, n=3)
    ask(client, [*messages[:2], {"role": "user", "content": "or"}])
    rows = rows_of(store)
    assert sorted(row["call_id"] for row in rows[1:4]) == [choices.id, f"{choices.id}-1", f"{choices.id}-2"]
    assert len({row["branch"] for row in rows}) == 4 and {row["trajectory_id"] for row in rows} == {"server-000001"}
    assert rows[4]["heard_ids"][: len(rows[0]["heard_ids"] + rows[0]["ids"])] == rows[0]["heard_ids"] + rows[0]["ids"]


def test_old_conversations_are_forgotten_and_answered(
    client: OpenAI, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KEPT_TOKENS", 60)
    old: list[Any] = [{"role": "user", "content": "the first"}]
    old += said(ask(client, old).choices[0].message.content)
    for number in range(4):
        new: list[Any] = [{"role": "user", "content": f"another {number}"}]
        ask(client, new)
    ask(client, old)
    *_, last = rows_of(store)
    assert last["branch"] == "server-000006"
    assert json.loads(last["asked"])["messages"] == old, "it begins with everything that the call has"


def test_calls_that_do_not_fit_are_refused(client: OpenAI, store: RunStore) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-other").models.list()
    assert httpx.get(f"{client.base_url}models").status_code == 401
    hi: list[Any] = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match=r"temperature 0\.3"):
        ask(client, hi, temperature=0.3)
    with pytest.raises(openai.BadRequestError, match="context length is 200 tokens"):
        ask(client, [{"role": "user", "content": "x" * 300}])
    assert ask(client, hi).choices, "the others are answered"
    assert len(rows_of(store)) == 1


def test_no_answer_without_its_record(client: OpenAI, store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ObjectStore, key: str, data: bytes) -> None:
        raise OSError("the disk is full")

    hi: list[Any] = [{"role": "user", "content": "hi"}]
    with monkeypatch.context() as broken:
        broken.setattr(ObjectStore, "put", refuse)
        with pytest.raises(openai.InternalServerError, match="cannot answer now"):
            ask(client, hi)
    assert not rows_of(store)
    assert ask(client, hi).id == rows_of(store)[0]["call_id"], "it answers when the store does"


def test_a_port_that_is_taken(generator: Generator, store: RunStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        clients = Served("server", Gateway("127.0.0.1", port), KEY, context=200, listening=lambda url: None)
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=200, seed=3)
        generator.submit([(Dialogue(Request("server", ())), Rules(sampling, agents=clients))])
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            generator.wait(600)


def test_small_files_are_merged(store: RunStore, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MERGED", 4)
    ids = [ask(client, [{"role": "user", "content": str(number)}]).id for number in range(6)]
    assert len(store.served_keys()) == 3
    merged = store.served_keys()[0]
    assert [row["call_id"] for row in rows_of(store)] == ids
    store.write_served("again", store.read_served(merged))
    assert [row["call_id"] for row in rows_of(store)] == ids, "a crash leaves answers in two files"


def test_damage_is_named(store: RunStore, client: OpenAI, tmp_path: Path) -> None:
    ask(client, [{"role": "user", "content": "hi"}])
    [key] = store.served_keys()
    path = tmp_path / "runs" / "chat" / key
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Corrupt, match=key):
        served(store)
    damages: list[Corrupt] = []
    assert len(served(store, damages.append)) == 0 and len(damages) == 1


def test_logs_become_prompts_and_trajectories(
    client: OpenAI, store: RunStore, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = ask(client, messages, **WHOLE)
    messages += said(first.choices[0].message.content)
    second = ask(client, messages, **WHOLE)
    ask(client, [{"role": "user", "content": "cut off"}], max_tokens=1, logprobs=True)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    offered = ask(client, [{"role": "user", "content": "a tool"}], tools=[tool], **WHOLE)
    client.completions.create(model="policy", prompt="text", max_tokens=4)
    ratings = tmp_path / "ratings.csv"
    ratings.write_text(f"id,rating,score\n{second.id},True,\nown,,0.25\nof nothing,,1\n")
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        json.dumps({"id": "own", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
        + "\n"
        + json.dumps({"prompt": "c", "response": "d", "rating": 0.5, "data_source": "forum"})
        + "\n"
        + json.dumps({"prompt": [{"role": "user", "content": "a"}, called], "response": "e"})
        + "\n"
    )
    ingested = ingest([Run(store), str(chats)], str(ratings))
    rows = ingested.trajectories.to_pylist()
    assert [(row["id"], row["score"], row["data_source"]) for row in rows] == [
        (first.id, None, "chat"),
        (second.id, 1.0, "chat"),
        (offered.id, None, "chat"),
        ("own", 0.25, "chats"),
        ("chats-000001", 0.5, "forum"),
    ]
    assert rows[1]["prompt"] == messages and rows[1]["response"] == second.choices[0].message.content
    stored = rows_of(store)
    assert rows[1]["prompt_ids"] == stored[0]["heard_ids"] + stored[0]["ids"] + stored[1]["heard_ids"]
    assert rows[1]["response_ids"] == stored[1]["ids"] and rows[1]["policy_version"] == 7
    assert rows[1]["rollout_log_probs"] == stored[1]["log_probs"]
    assert [json.loads(row["tools"] or "[]") for row in rows] == [[], [], [tool], [], []]
    assert rows[3]["response_ids"] is None, "a text has no tokens yet"
    assert ingested.left_out == {"calls of tools, or /v1/completions": 2, "cut off at the token limit": 1}
    assert ingested.unknown == 1
    liked = ingest([Run(store), str(chats)], str(ratings), min_score=0.5)
    assert [row["id"] for row in liked.trajectories.to_pylist()] == [second.id, "chats-000001"]
    assert len(liked.prompts) == 6, "prompts need no rating, and no whole answer"
    for name, table in (("prompts", ingested.prompts), ("trajectories", ingested.trajectories)):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    dataset = PromptDataset([str(tmp_path / "prompts.parquet")])
    cut_off = [{"role": "user", "content": "cut off"}]
    assert [prompt.messages for prompt in dataset] == [
        *(row["prompt"] for row in rows[:2]),
        cut_off,
        *(row["prompt"] for row in rows[2:]),
    ]
    assert [list(prompt.tools) for prompt in dataset] == [[], [], [], [tool], [], []]
    examples, left_out, _ = supervised(
        str(tmp_path / "trajectories.parquet"), tokenizer, prompt="prompt", response="response", max_tokens=500
    )
    assert (len(examples), left_out) == (5, 0)


def test_a_run_that_was_never_served(store: RunStore) -> None:
    with pytest.raises(UserError, match="chat was never served: `ratchet serve chat` stores answers"):
        ingest([Run(store)])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "a"}, "rows of messages or conversations .*there are question"),
        ({"prompt": "a", "response": "b", "rating": "good"}, "rating is 'good': write a number"),
        ({"messages": [{"role": "user", "content": "a"}]}, "end with a message of the assistant"),
    ],
)
def test_malformed_logs(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"chats.jsonl.*1.*{says}") as refused:
        ingest([str(path)])
    assert "\n" not in str(refused.value)


def test_malformed_ratings(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text('{"id": 3, "score": 1}\n')
    with pytest.raises(UserError, match="ratings are rows of id and score"):
        ingest([], str(path))
