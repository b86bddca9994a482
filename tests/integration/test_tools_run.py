"""A run whose prompts have tools: everything that reads a prompt sees them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ratchet.rlhf.config import ModelConfig
from ratchet.rlhf.data.examples import supervised
from ratchet.rlhf.models.tokenizers import load_tokenizer
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny.CHAT_TEMPLATE
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 8, "tools": len(extra_info["tools"])}
"""


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def rows() -> list[dict[str, Any]]:
    """Prompts with one tool, two tools and none."""
    offered: tuple[object, ...] = ([tool("add")], json.dumps([tool("add"), tool("now")]), [])
    return [
        {"prompt": [{"role": "user", "content": f"{number}?"}], "tools": offered[number % 3]} for number in range(6)
    ]


def test_tools_of_rows(workspace: Path, processes: Processes) -> None:
    folder = processes.folder
    data, template, reward = folder / "data.jsonl", folder / "template.jinja", folder / "tools_reward.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    template.write_text(TEMPLATE)
    reward.write_text(REWARD)
    judge = tiny.reward_model_folder(folder / "judge", workspace / "model")
    own = {"path": str(workspace / "model"), "chat_template": str(template), "dtype": "float32"}
    config = tiny.config(
        workspace,
        run__name="tools",
        run__store=f"file://{folder}/runs",
        data__train=[str(data)],
        data__max_prompt_tokens=400,
        data__prompts_per_iteration=6,
        model=own,
        reward={"function": f"{reward}:compute_score", "model": {**own, "path": str(judge)}},
        algorithm__advantage="remax",
        rollout__n=4,
        rollout__stop=[*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"],  # most answers are whole, and can be learned
        validation={"data": str(data), "before_train": False},
        actor__micro_batch_tokens=2048,
        critic__micro_batch_tokens=2048,
        train__iterations=1,
    )
    killed = processes.train(config, Fault("create", '{"kind":"stage","iteration":0,"stage":"generate"'))
    assert killed.wait() == -signal.SIGKILL, killed.text
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text
    history = History.of(config)
    history.check_sound()
    frame = history.run.trajectories()
    tokenizer = load_tokenizer(ModelConfig.model_validate(own))
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    seen = set[int]()
    for row in frame.itertuples():
        tools = json.loads(row.tools) if isinstance(row.tools, str) else []
        messages = json.loads(row.messages)
        prompt = {"tools": tools or None, "add_generation_prompt": True}
        assert row.prompt == tokenizer.apply_chat_template(messages, tokenize=False, **prompt)
        assert row.prompt_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False, **prompt)
        assert row.reward_parts["tools"] == len(tools) == row.prompt.count('"function"') / 2
        answered = [*messages, {"role": "assistant", "content": row.response}]
        ids = tokenizer.apply_chat_template(answered, tools=tools or None, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            assert row.model_score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-4)
        seen.add(len(tools))
    assert seen == {0, 1, 2}
    held_out = history.run.validation()
    assert set(held_out["prompt"]) == set(frame["prompt"])

    store = ("--store", config.run.store)
    shown = processes.cli("show", "tools", *store, "--full")
    assert shown.wait() == 0 and '"name": "now"' in shown.text, shown.text
    made = processes.cli(
        "dataset", "tools", *store, "--kind", "sft", "--no-decontaminate", "-o", folder / "sft.parquet"
    )
    assert made.wait() == 0, made.text
    examples, *_ = supervised(
        str(folder / "sft.parquet"), tokenizer, prompt="prompt", response="response", max_tokens=900
    )
    known = set(map(tuple, frame["prompt_ids"]))
    assert set(map(tuple, examples.list("prompt_ids"))) <= known and len(examples) >= 3

    written = folder / "written"
    exported = processes.cli("export", "tools", written, *store, "--trajectories")
    assert exported.wait() == 0, exported.text
    for row in frame.itertuples():
        offered = json.loads((written / f"{row.trajectory_id}.json").read_text())["agent"].get("tool_definitions")
        assert offered == (json.loads(row.tools) if isinstance(row.tools, str) else None)

    data.write_text(data.read_text().replace("now", "new"))
    refused = processes.train(config.with_values({"train.iterations": 2}))
    assert refused.wait() != 0 and "data.jsonl) changed" in refused.text, refused.text
