"""A run whose policy is served, killed while it answers, and trained further on what its clients asked."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pandas as pd
import pytest
import yaml
from openai import OpenAI

from ratchet.infra.runs.run import open_run
from tests import tiny
from tests.processes import Child, Fault, Processes


@pytest.fixture
def runs(shown_runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(shown_runs / "ppo", tmp_path / "runs" / "ppo")
    return tmp_path / "runs"


def serving(processes: Processes, runs: Path, *faults: Fault) -> tuple[Child, OpenAI]:
    """Serve the newest snapshot, and wait until it listens."""
    child = processes.cli("serve", "ppo", "--store", f"file://{runs}", "--port", 0, faults=faults)
    deadline = time.monotonic() + 600
    while (printed := re.search(r"answers at (\S+) \(model: policy, key: (\S+)\)", child.text)) is None:
        assert child.process.is_alive() and time.monotonic() < deadline, child.text
        time.sleep(0.05)
    return child, OpenAI(base_url=printed[1], api_key=printed[2], max_retries=0, timeout=600)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_loses_no_answer(when: str, runs: Path, workspace: Path, processes: Processes) -> None:
    child, client = serving(processes, runs, Fault("put", "^served/", when, count=6))
    answered: dict[str, str | None] = {}

    def talk(number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"{number}?"}]
        while True:
            try:
                answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            except openai.APIConnectionError:
                return
            answered[answer.id] = answer.choices[0].message.content
            messages = [messages[0], {"role": "assistant", "content": answered[answer.id]}, messages[0]]

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert child.wait() == -signal.SIGKILL
    kept = open_run(f"file://{runs}/ppo").served()
    assert answered and set(answered) <= set(kept["call_id"])
    assert kept["call_id"].is_unique and (len(kept) > len(answered) or when == "before")

    child, client = serving(processes, runs)
    hi: list[Any] = [{"role": "user", "content": "hi"}]
    last = client.chat.completions.create(model="policy", messages=hi, max_tokens=4)
    child.signal(signal.SIGINT)
    assert child.wait() == 0, child.text
    assert "Traceback" not in child.text
    run = open_run(f"file://{runs}/ppo")
    assert set(run.served()["call_id"]) == {*kept["call_id"], last.id}
    counted = run.query("select count(*) as calls, sum(len(ids)) as tokens from served")
    assert counted["calls"][0] == len(kept) + 1 and counted["tokens"][0] == sum(map(len, run.served()["ids"]))
    if when == "before":
        return

    def done(*arguments: object) -> str:
        command = processes.cli(*arguments)
        assert command.wait() == 0, command.text
        return command.text

    store = ("--store", f"file://{runs}")
    served = run.store.served_keys()
    done("vacuum", "ppo", *store)
    assert run.store.served_keys() == served
    assert "ppo is intact" in done("verify", "ppo", *store)
    folder = runs.parent / "night"
    printed = done("ingest", "ppo", "-o", folder, *store)
    whole = int((run.served()["finish_reason"] != "length").sum())
    assert f"{whole} trajectories in {folder}/trajectories.parquet" in printed
    asked = pd.read_parquet(folder / "prompts.parquet")["prompt"]
    assert [{"role": "user", "content": "hi"}] in [list(messages) for messages in asked]
    prompts = [str(folder / "prompts.parquet")]
    config = tiny.config(
        workspace,
        run__name="night",
        run__store=f"file://{runs}",
        data__train=prompts,
        data__max_prompt_tokens=400,
        reward__function="tests.rewards:letters",
        train__iterations=1,
    )
    path = runs.parent / "night.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done("train", path)
    assert open_run(f"file://{runs}/night").state.iteration == 1


def test_what_cannot_be_served_is_said(runs: Path, processes: Processes) -> None:
    store = ("--store", f"file://{runs}")
    for arguments, says in (
        (("nothing",), "there is no run at"),
        (("ppo", "--iteration", 99), "there is no snapshot after 99 iterations"),
        (("ppo", "--best", "--iteration", 1), "give only one"),
        (("ppo", "rollout.temprature=0.5"), "rollout.temperature"),
    ):
        child = processes.cli("serve", *arguments, *store)
        assert child.wait() == 2 and says in child.text, child.text
        assert "Traceback" not in child.text and len(child.text.splitlines()) == 1
