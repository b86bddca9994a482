"""Generation is durable to the token: drivers die by SIGKILL while a real `vllm serve` generates."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pandas as pd
import pytest
import yaml

from ratchet.infra.store.records import Journal
from ratchet.infra.workers.log_probs_check import PROBE_TOKENS
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.rollout.canary import DRAWN, TEXTS
from ratchet.rlhf.rollout.server_engine import STREAM_INTERVAL
from tests import tiny
from tests.extras import needs
from tests.gate import Gate, gate
from tests.history import History
from tests.processes import Child, Fault, Processes, grace
from tests.served import end_servers
from tests.vllm_server import serving

pytestmark = needs("vllm")
PROMPTS, SAMPLES, LENGTH = 16, 4, 150
CHECKED = PROBE_TOKENS + TEXTS * (DRAWN + 1)
"""Tokens that a server generates before a driver trusts it, to probe its log-probs and to check its weights."""


@dataclass
class Server:
    """A `vllm serve`, which counts what it generates."""

    url: str

    def metric(self, name: str) -> int:
        lines = httpx.get(f"{self.url}/metrics", timeout=900).text.splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")))

    def tokens_once_idle(self) -> int:
        """The tokens that it has generated, once it has heard that its client is dead."""
        deadline = time.monotonic() + 900
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline, "the server still generates for a dead client"
            time.sleep(0.05)
        return self.metric("generation_tokens_total")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.workspace(tmp_path_factory.mktemp("journals"))
    tiny.model_folder(folder / "model", hidden=64, heads=2, key_value_heads=1)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    yield Server(serving(folder / "model", {"max-model-len": 400}))
    end_servers()


@pytest.fixture
def answers(server: Server) -> Iterator[Gate]:
    with gate(server.url) as answers:
        yield answers


def long_responses(folder: Path, processes: Processes, answers: Gate) -> RunConfig:
    """A run of one iteration; each response has `LENGTH` tokens."""
    return tiny.config(
        folder,
        run__store=f"file://{processes.folder}/runs",
        data__prompts_per_iteration=PROMPTS,
        rollout__engine={"type": "server", "urls": [answers.url], "weights_folder": str(folder / "weights")},
        rollout__n=SAMPLES,
        rollout__max_response_tokens=LENGTH,
        rollout__ignore_eos=True,
        rollout__prompts_per_shard=4,
        rollout__journal_s=0.2,
        actor__mini_batch_trajectories=PROMPTS * SAMPLES,
        critic__mini_batch_trajectories=PROMPTS * SAMPLES,
        train__iterations=1,
    )


def written(config: RunConfig, folder: Path) -> Path:
    """The config as a file."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def durable_tokens(history: History) -> dict[str, list[int]]:
    """What the log says of each response: the tokens of its committed shard, or of its stage's newest journal."""
    store, tokens = history.run.store, dict[str, list[int]]()
    files = [shard.data for shard in history.state.shards.get("generate", {}).values()]
    for ref in files:
        for row in store.read_shard(ref, ("trajectory_id", "response_ids")).to_pylist():
            tokens[row["trajectory_id"]] = row["response_ids"]
    journal = history.state.journals.get("generate")
    for ref in () if journal is None else journal.parts:
        for row in store.read_shard(ref).to_pylist():
            tokens.setdefault(row["trajectory_id"], row["ids"])
    return tokens


def journaled_twice(start: Callable[[], Child], config: RunConfig, answers: Gate, events: int) -> Child:
    """A driver that gets so many events before its first journal, and as many between that one and the second."""
    until(lambda: not answers.connections, "the connections of the last driver end with it")
    written = journals(config)
    answers.let(events)
    child = start()
    until(lambda: not child.process.is_alive() or journals(config) > written, "a journal")
    answers.let(events)
    until(lambda: not child.process.is_alive() or journals(config) > written + 1, "another journal")
    return child


def until(happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 900
    while not happens():
        assert time.monotonic() < deadline, f"not seen: {what}"
        time.sleep(0.02)


def journals(config: RunConfig) -> int:
    """The number of journals of a run."""
    log = Path(config.run.store.removeprefix("file://")) / config.run.name / "log"
    return len(History.of(config).commits(Journal)) if log.exists() else 0


def signal_at(child: Child, number: int, answers: Gate, events: int) -> None:
    """Let a driver get so many events, and no more; send it a signal then."""
    so_far = answers.passed
    answers.let(events)
    until(lambda: answers.passed >= so_far + events or not child.process.is_alive(), "what the driver gets")
    child.signal(number)


def test_no_journaled_token_is_generated_twice(
    folder: Path, processes: Processes, server: Server, answers: Gate
) -> None:
    config, draw = long_responses(folder, processes, answers), random.Random(0)
    total = PROMPTS * SAMPLES * LENGTH
    kills = [
        [Fault("put", "journals/", "before", count=2)],
        [Fault("put", "journals/", "after", count=2)],
        [Fault("create", '{"kind":"journal"', "after", count=2)],
        [],
        [],
    ]
    durable: dict[str, list[int]] = {}
    for faults in kills:
        left = (total - sum(map(len, durable.values()))) // STREAM_INTERVAL  # in events
        start = partial(processes.train, config, *faults)
        child = journaled_twice(start, config, answers, draw.randrange(left // 8, left // 4))
        if not faults:
            child.signal(signal.SIGKILL)
        assert child.wait() == -9, child.text
        server.tokens_once_idle()
        history = History.of(config)
        now = durable_tokens(history)
        for name, tokens in durable.items():
            assert now[name][: len(tokens)] == tokens, f"{name} lost tokens that were journaled"
        durable = now
    assert sum(map(len, durable.values())) > 0, "something was journaled"
    assert any(0 < len(tokens) < LENGTH for tokens in durable.values()), "a response was interrupted"

    before = server.tokens_once_idle()
    answers.let(total)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    rows = pd.read_parquet(history.folder / "trajectories" / "generate")
    assert len(rows) == PROMPTS * SAMPLES
    for name, ids in zip(rows["trajectory_id"], rows["response_ids"], strict=True):
        assert len(ids) == LENGTH
        assert list(ids[: len(durable.get(name, []))]) == durable.get(name, [])
    # nothing that is durable is generated again: the server generated what was missing, and what is checked
    generated = server.tokens_once_idle() - before
    assert generated == total - sum(map(len, durable.values())) + CHECKED
    assert not list(history.folder.glob("journals/*/*")), "a committed stage needs no journal"


def test_a_journal_of_another_config_or_with_damage_is_left_out(
    folder: Path, processes: Processes, server: Server, answers: Gate
) -> None:
    # one shard, which is not complete before the end: what is committed under another config would be refused
    config = long_responses(folder, processes, answers).with_values({"rollout.prompts_per_shard": PROMPTS})
    killed, some = Fault("create", '{"kind":"journal"', "after", count=2), 2 * PROMPTS * SAMPLES
    assert journaled_twice(partial(processes.train, config, killed), config, answers, some).wait() == -9
    history = History.of(config)
    [part] = history.state.journals["generate"].parts
    path = history.folder / part.key
    path.write_bytes(path.read_bytes()[:-40])
    again = partial(processes.cli, "train", written(config, processes.folder), faults=(killed,))
    child = journaled_twice(again, config, answers, some)
    assert child.wait() == -9, child.text
    assert "generation restarts without a journal" in child.text

    server.tokens_once_idle()
    before = server.metric("generation_tokens_total")
    answers.let(PROMPTS * SAMPLES * LENGTH)
    cooler = config.with_values({"rollout.temperature": 0.5})
    child = processes.cli("train", written(cooler, processes.folder))
    assert child.wait() == 0, child.text
    assert "starts without its journal: rollout.temperature: 1.0 -> 0.5" in child.text.replace("\n", " ")
    assert server.tokens_once_idle() - before == PROMPTS * SAMPLES * LENGTH + CHECKED
    history = History.of(config)
    history.check_sound()
    assert len(history.commits(Journal)) >= 4
    assert not list(history.folder.glob("journals/*/*"))


@pytest.mark.promise
def test_a_stop_writes_a_journal_and_vacuum_keeps_it(
    folder: Path, processes: Processes, server: Server, answers: Gate
) -> None:
    config = long_responses(folder, processes, answers).with_values({"rollout.journal_s": 1e6})
    child = processes.train(config, setup=partial(grace, 120.0))
    signal_at(child, signal.SIGTERM, answers, 2 * PROMPTS * SAMPLES)
    assert child.wait() == 1, child.text
    before = server.tokens_once_idle()
    history = History.of(config)
    assert len(history.commits(Journal)) == 1
    tokens = durable_tokens(history)
    assert sum(map(len, tokens.values())) > 0
    vacuum = processes.cli("vacuum", history.folder.name, "--store", f"file://{history.folder.parent}")
    assert vacuum.wait() == 0, vacuum.text
    assert durable_tokens(History.of(config)) == tokens

    answers.let(PROMPTS * SAMPLES * LENGTH)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    generated = server.tokens_once_idle() - before
    assert generated == PROMPTS * SAMPLES * LENGTH - sum(map(len, tokens.values())) + CHECKED
    History.of(config).check_sound()
