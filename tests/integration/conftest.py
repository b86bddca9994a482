"""Fixtures of the tests of pages and tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from playwright.sync_api import Browser, Page

from ratchet.flows.sft import sft
from ratchet.flows.train import train
from ratchet.flows.train_reward_model import train_reward_model
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.config import RewardTraining, SFTConfig
from ratchet.tasks.analysis.plan import fork_run
from tests import agents, tiny
from tests.browser import chromium, opened
from tests.extras import needs
from tests.prefect_server import locked

HOSTILE = '</script><img src=x onerror="hacked=1"><script>hacked=1</script>'


@pytest.fixture(scope="session")
def ppo_runs(common: Path, workspace: Path, prefect_server: str) -> Path:
    """Returns a folder with the run `ppo` and open forks of it."""
    folder = common / "shown"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / "ppo.done").exists():
            _make_ppo(folder / "runs", workspace)
            (folder / "ppo.done").touch()
    return folder / "runs"


@pytest.fixture(scope="session")
def shown_runs(ppo_runs: Path, workspace: Path) -> Path:
    """Returns this folder with more runs: `grpo` without reference and validation, and a hostile one."""
    folder = ppo_runs.parent
    with locked(folder):
        if not (folder / "done").exists():
            _make_shown(folder / "runs", workspace, _hostile(folder / "hostile", workspace))
            (folder / "done").touch()
    return ppo_runs


@pytest.fixture(scope="module")
def ppo(shown_runs: Path) -> Run:
    """Opens the run `ppo`."""
    return open_run(f"file://{shown_runs}/ppo")


@pytest.fixture(scope="session")
def other_runs(common: Path, workspace: Path, prefect_server: str) -> Path:
    """Returns a folder with runs of other kinds: `dialogue`, in which an environment says something; the fits `sft` and
    `judge`, a reward model."""
    folder = common / "other"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not (folder / "done").exists():
            _make_others(folder / "runs", folder, workspace)
            (folder / "done").touch()
    return folder / "runs"


def _make_others(store: Path, folder: Path, workspace: Path) -> None:
    environment = {"name": "tests.environments:Chatty", "max_turns": 6}
    dialogue = {"rollout__environment": environment, "rollout__max_response_tokens": 48, "reward": {"function": None}}
    changes = {"algorithm__advantage": "grpo", "train__iterations": 1}
    train(tiny.config(workspace, run__name="dialogue", run__store=f"file://{store}", **dialogue, **changes))
    # the policy calls a tool by chance: one of its tokens is a whole call
    tiny.model_folder(folder / "caller", letters=["numbers", *"aeinorst ,.", agents.TOOL_CALL])
    (folder / "template.jinja").write_text(tiny.CHAT_TEMPLATE)
    template = str(folder / "template.jinja")
    caller = {"path": str(folder / "caller"), "dtype": "float32", "chat_template": template}
    agent = {
        "model": caller,
        "rollout__agent": {"name": "tests.agents:loses_its_way", "on_error": "drop"},
        "rollout__max_response_tokens": 600,
        "data__max_prompt_tokens": 400,
        "actor__micro_batch_tokens": 4096,
        "reward": {"function": None},
    }
    train(tiny.config(workspace, run__name="agent", run__store=f"file://{store}", **agent, **changes, critic=None))
    rows = [
        {"prompt": f"say {number}", "response": "abc"[number % 3] * 4, "chosen": "abc", "rejected": "123"}
        for number in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"path": str(workspace / "model"), "dtype": "float32"}
    for name, kind, flow, size in (
        ("sft", SFTConfig, sft, {"steps": 4, "batch_examples": 4}),
        ("judge", RewardTraining, train_reward_model, {"epochs": 2, "batch_pairs": 4}),
    ):
        (folder / name).mkdir()
        files = {"data": str(folder / "rows.jsonl"), "output": str(folder / name)}
        run = {"name": name, "store": f"file://{store}"}
        flow(kind.model_validate({"run": run, "model": model, "lr": 0.01, "checkpoint_steps": 2, **files, **size}))


def _make_ppo(folder: Path, workspace: Path) -> None:
    validation = {"data": str(workspace / "held_out.parquet"), "every": 2}
    ppo = tiny.config(workspace, run__name="ppo", validation=validation, **_changes(folder))
    train(ppo)
    for name, iteration in (("open", 2), ("new", 0)):
        fork_run(open_run(f"file://{folder}/ppo"), ppo.with_values({"run.name": name}), iteration, "score")


def _make_shown(folder: Path, workspace: Path, hostile: Path) -> None:
    grpo = {"algorithm__advantage": "grpo", "algorithm__kl__in_reward": None, "actor__lr": 0.002}
    train(tiny.config(workspace, run__name="grpo", **_changes(folder) | grpo))
    train(tiny.config(hostile, run__name="hostile", data__max_prompt_tokens=400, **_changes(folder)))


def _changes(folder: Path) -> dict[str, Any]:
    return {"run__store": f"file://{folder}", "reward__function": "tests.rewards:letters"}


def _hostile(folder: Path, workspace: Path) -> Path:
    """Returns a model whose tokens are markup, so that its responses are, too, like the prompts and ground truths."""
    shutil.copytree(workspace, folder)
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        f"{HOSTILE}{token}\n" if token.isupper() and len(token) == 1 else token: number
        for token, number in vocabulary.items()
    }
    path.write_text(json.dumps(tokenizer))
    prompts = pd.read_parquet(folder / "prompts.parquet")
    prompts["prompt"] = [
        [{"role": "user", "content": f"{HOSTILE} {messages[0]['content']}"}] for messages in prompts["prompt"]
    ]
    prompts["reward_model"] = [asked | {"ground_truth": HOSTILE} for asked in prompts["reward_model"]]
    prompts.to_parquet(folder / "prompts.parquet")
    return folder


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests that open pages."""
    if "browser" in getattr(item, "fixturenames", ()):
        item.add_marker(needs("chromium"))


@pytest.fixture(scope="module")
def browser(shown_runs: Path) -> Iterator[Browser]:
    """Yields a Chromium, which starts after the runs are made."""
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Yields an empty page of 1280 pixels. Requests elsewhere and errors fail the test that uses it."""
    with opened(browser) as empty:
        yield empty
