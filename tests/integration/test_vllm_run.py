"""Runs that generate with vLLM: what it generates with is what was trained, and it may die."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.data.responses import response_text
from ratchet.rlhf.rollout.engine import Chunk, Request, Sampling
from tests import cards, tiny
from tests.extras import needs
from tests.history import History
from tests.processes import Child, Processes
from tests.served import end_servers

pytestmark = needs("vllm")
INTERRUPTED_AT = 20


@pytest.fixture
def config(tmp_path: Path, processes: Processes) -> RunConfig:
    """Eight letters are answered by a model of a size of heads that vLLM takes."""
    tiny.workspace(tmp_path)
    tiny.model_folder(tmp_path / "model", hidden=64, heads=2, key_value_heads=1)
    return tiny.config(
        tmp_path,
        reward__function="tests.rewards:letters",
        rollout__engine={"type": "vllm", "timeout_s": 60, "max_model_len": 256},
        actor__lr=1e-2,
        train__iterations=3,
    )


def test_vllm_takes_turns(config: RunConfig, processes: Processes, workspace: Path) -> None:
    """With an environment that ends turns by texts of its own, and a limit for each request."""
    changes = {
        "rollout.environment": {"name": "tests.environments:Chatty", "max_turns": 6},
        "rollout.max_response_tokens": 40,
        "train.iterations": 1,
    }
    changed = config.with_values(changes)
    child = train(processes, changed)
    assert child.wait() == 0, child.text
    history = History.of(changed)
    frame = history.run.trajectories()
    assert frame["response"].str.contains("XY").any()
    for row in frame.itertuples():
        mine = row.response_mask == 1
        assert len(mine) <= 40
        assert mine[0]
        assert mine[-1]
        np.testing.assert_allclose(row.rollout_log_probs[mine], row.old_log_probs[mine], atol=1e-3)
    assert max((np.diff(mask) == -1).sum() for mask in frame["response_mask"]) > 1


def train(processes: Processes, config: RunConfig, setup: Callable[[], None] | None = None) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path, setup=setup)


def gap(history: History) -> dict[int, float]:
    """By iteration, between what vLLM says of its tokens and what the actor finds."""
    frame = history.run.trajectories(columns=["rollout_log_probs", "old_log_probs"])
    gaps = (frame["rollout_log_probs"] - frame["old_log_probs"]).map(lambda row: np.abs(row).max())
    return {int(k): float(each.max()) for k, each in gaps.groupby(frame["iteration"])}


def generating(child: Child) -> psutil.Process | None:
    """The process in which vLLM is."""
    for process in psutil.Process(child.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ratchet.rlhf.rollout.vllm_process" in process.cmdline():
                return process
    return None


def responses_ahead_wait() -> None:
    """In the driver: a response of an iteration that is not open stays at `INTERRUPTED_AT` tokens until new weights
    interrupt it, whatever the paces of vLLM and the trainer."""
    from ratchet.infra.store.object_store import LocalBackend
    from ratchet.rlhf.rollout.vllm_engine import VLLMRollout

    create, stream = LocalBackend.create, VLLMRollout.stream
    updates = 0

    def counted(self: LocalBackend, key: str, data: bytes) -> None:
        nonlocal updates
        create(self, key, data)
        updates += b'"stage":"update_actor"' in data

    async def held(self: VLLMRollout, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        iteration = re.match(r"it(\d+)-", request.trajectory_id)  # None: a check of the weights
        is_ahead, tokens = iteration is not None and int(iteration[1]) > updates, 0
        async with aclosing(stream(self, request, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk
                tokens += len(chunk.response_ids)
                if is_ahead and not request.generated_tokens and tokens >= INTERRUPTED_AT:
                    await asyncio.Event().wait()

    LocalBackend.create, VLLMRollout.stream = counted, held  # type: ignore[method-assign]


def until(true: Any, seconds: float = 900.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"model.lora": {"r": 4}}, {"actor.offload_when_idle": True}],
    ids=["all weights", "adapters", "taking turns"],
)
def test_vllm_generates_with_the_newest_weights(
    changes: dict[str, Any], config: RunConfig, processes: Processes
) -> None:
    config = config.with_values(changes)
    child = train(processes, config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    gaps = gap(history)
    assert gaps.keys() == {0, 1, 2}
    assert max(gaps.values()) < 1e-3, gaps
    frame = history.run.trajectories(columns=["policy_version", "ref_log_probs", "old_log_probs"])
    assert frame["policy_version"].tolist() == frame["iteration"].tolist()
    moved = (frame["old_log_probs"] - frame["ref_log_probs"]).map(lambda row: np.abs(row).max())
    assert moved[frame["iteration"] == 2].max() > 0.05, "or stale weights would not be noticed"


def test_the_code_in_cards_runs_and_serves_the_policy(config: RunConfig, processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(tiny.CHAT_TEMPLATE)
    changes = {"rollout.engine": "hf", "train.iterations": 1, "actor.lr": 0.1}
    config = config.with_values(changes | {"model.lora": {"r": 4}, "model.chat_template": str(tmp_path / "chat.jinja")})
    child = train(processes, config)
    assert child.wait() == 0, child.text
    run = History.of(config).run
    messages, answers = [{"role": "user", "content": "Say abc."}], {}
    for name in ("merged", "adapter"):
        folder = run.export(1, tmp_path / name, adapter=name == "adapter")
        assert cards.printed(folder).strip()
        options = {"dtype": "float32", "gpu-memory-utilization": 0.1, "max-model-len": 256, "enforce-eager": None}
        url = cards.serving(folder, options)
        asked = {"model": config.run.name, "messages": messages, "temperature": 0, "max_tokens": 16}
        reply = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=300).raise_for_status()
        answers[name] = reply.json()["choices"][0]["message"]["content"]
        end_servers()

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    greedy = {}
    for name in ("merged", "model"):
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        ids = policy.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
        greedy[name] = response_text(ids, tokenizer)
    assert greedy["merged"] != greedy["model"]
    assert answers == {"merged": greedy["merged"], "adapter": greedy["merged"]}


def test_new_weights_come_in_the_middle_of_responses(config: RunConfig, processes: Processes) -> None:
    """Ahead of its iteration vLLM generates while the actor trains, and goes on from its tokens with new weights: each
    token has the log-prob that the version recorded for it gives it."""
    config = config.with_values(
        {
            "rollout.mode": "async",
            "rollout.max_staleness": 2,
            "rollout.partial": True,
            "rollout.max_response_tokens": 240,
            "rollout.engine.max_model_len": 440,
            "rollout.ignore_eos": True,
            "rollout.prompts_per_shard": 4,
            "train.iterations": 6,
        }
    )
    child = train(processes, config, responses_ahead_wait)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    store, frame = history.run.store, history.run.trajectories()
    overlaps = [store.manifests(k + 1)["generate"].began < store.manifests(k)["update_actor"].ended for k in range(5)]
    assert any(overlaps)
    spans = frame["token_versions"].notna()
    assert spans[frame["iteration"] > 0].all(), "they wait for new weights"
    fresh, stale = [], []
    for row in frame.itertuples():
        versions = np.full(240, row.policy_version) if row.token_versions is None else np.array(row.token_versions)
        assert versions[0] == row.policy_version
        assert (np.diff(versions) >= 0).all()
        assert versions.max() <= row.iteration
        assert row.iteration - versions.min() <= 2
        gaps = np.abs(row.rollout_log_probs - row.old_log_probs)
        fresh += gaps[versions == row.iteration].tolist()
        stale += gaps[versions < row.iteration].tolist()
    assert max(fresh, default=0.0) < 1e-3
    assert max(stale) > 1e-2


def test_vllm_may_die_hang_and_outlives_no_driver(config: RunConfig, processes: Processes) -> None:
    config = config.with_values({"train.iterations": 200, "rollout.engine.timeout_s": 45})
    child = train(processes, config)
    log = Path(config.run.store.removeprefix("file://")) / config.run.name / "log"
    until(lambda: log.exists() and History.of(config).state.iteration >= 1)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        first = until(lambda: generating(child))
        first.send_signal(number)
        before = History.of(config).state.iteration
        until(lambda done=before + 2: History.of(config).state.iteration >= done)
        assert generating(child) != first
    assert "vLLM's process died: exit code -9" in child.text
    assert "vLLM made no progress for 45 s" in child.text

    last = until(lambda: generating(child))
    child.signal(signal.SIGKILL)
    until(lambda: not last.is_running() or last.status() == psutil.STATUS_ZOMBIE)
    assert not list(Path("/dev/shm").glob(f"ratchet-vllm-{child.process.pid}-*")), "nothing of it stays in memory"
    history = History.of(config)
    history.check_sound(killed=True)
    assert history.state.term == 1, "one driver, all along"
    assert max(gap(history).values()) < 1e-3, "a new one is brought to the newest weights"
