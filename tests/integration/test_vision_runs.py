"""Runs of a policy that sees: what else reads their trajectories finds the pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import ModelConfig, RunConfig
from ratchet.rlhf.data.images import digest_of
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.models.families import VLLM_CLOSE
from ratchet.rlhf.models.image_processor import ImageProcessor
from ratchet.rlhf.models.tokenizers import load_tokenizer
from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.integration.test_vllm_run import gap
from tests.processes import Processes
from tests.served import end_servers
from tests.vision_models import picture, tiny_vision_model
from tests.vision_partners import SHOWN
from tests.vllm_server import serving

PICTURES = [picture(number, 60 + 8 * number, 70) for number in range(4)]


def prompts(folder: Path) -> Path:
    rows = []
    for number, image in enumerate(PICTURES):
        (folder / f"{number}.png").write_bytes(image)
        rows.append({"prompt": f"<image>w{number} w9 ?", "images": [f"{number}.png"], "answer": "w1"})
    path = folder / "pictures.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(workspace: Path, folder: Path, name: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "run__store": f"file://{folder}/runs",
        "model__path": str(folder / "model"),
        "data__train": [str(folder / "pictures.jsonl")],
        "data__prompts_per_iteration": 4,
        "data__max_prompt_tokens": 64,
        "reward__function": "tests.rewards:letters",
        "algorithm__advantage": {"type": "grpo"},
        "critic": None,
        "train__iterations": 1,
    }
    return tiny.config(workspace, run__name=name, **settings | changes)


@needs("vllm")
@pytest.mark.parametrize("where", ["vllm", "server"])
def test_a_run_generates_with_vllm(workspace: Path, processes: Processes, where: str) -> None:
    """What vLLM sees is what is trained, after each update, also of the tower."""
    folder = processes.folder
    tiny_vision_model(folder / "model", "idefics3")
    prompts(folder)
    engine: dict[str, Any] = {"type": "vllm", "max_model_len": 256}
    if where == "server":
        options = {"enable-scale-out": True, "mm-processor-kwargs": '{"backend": "pil"}'}
        url = serving(folder / "model", options)
        engine = {"type": "server", "urls": [url], "weights_folder": str(folder / "weights")}
    changes = {"model__freeze_vision": False, "actor__lr": 1e-2, "train__iterations": 3, "rollout__engine": engine}
    run = config_of(workspace, folder, where, **changes)
    child = processes.train(run)
    assert child.wait() == 0, child.text
    history = History.of(run)
    history.check_sound()
    gaps = gap(history)
    assert len(gaps) == 3 and max(gaps.values()) < VLLM_CLOSE, gaps
    end_servers()


@pytest.mark.promise
def test_a_run_that_reuses_generations_keeps_their_pictures(workspace: Path, processes: Processes) -> None:
    """Also when the other run has none any more; its tokens are those of the model's processor."""
    folder = processes.folder
    model = tiny_vision_model(folder / "model", "qwen2_5_vl")
    dataset = PromptDataset([prompts(folder)])
    plain = config_of(workspace, folder, "plain")
    child = processes.train(plain)
    assert child.wait() == 0, child.text
    processor = ImageProcessor(model, load_tokenizer(model))
    for row in open_run(f"{folder}/runs/plain").trajectories().to_dict("records"):
        [digest] = row["images"]
        image = dataset[row["dataset_row"]].images[0]
        assert digest == digest_of(image)
        count = len(processor(image).tokens)
        assert sum(token == processor.token_id for token in row["prompt_ids"]) == count
    reads = config_of(workspace, folder, "reads", data__generations=f"{folder}/runs/plain", actor__ppo_epochs=2)
    child = processes.train(reads)
    assert child.wait() == 0, child.text
    shutil.rmtree(folder / "runs/plain/images")
    again = open_run(f"{folder}/runs/reads")
    assert {digest: again.image(digest) for digests in again.trajectories()["images"] for digest in digests} == {
        digest_of(image): image for image in PICTURES
    }


def shown(folder: Path, name: str, model: ModelConfig) -> pd.DataFrame:
    """Returns the trajectories of a run, whose images are among its tokens in their order."""
    run = open_run(f"{folder}/runs/{name}")
    processor, rows = ImageProcessor(model, load_tokenizer(model)), run.trajectories()
    for row in rows.to_dict("records"):
        read = [*row["prompt_ids"], *(np.array(row["response_ids"])[np.array(row["response_mask"]) == 0])]
        tokens = [token for digest in row["images"] for token in processor(run.image(digest)).tokens]
        among = [token for token in read if token == processor.token_id]
        assert len(among) == tokens.count(processor.token_id)
    return rows


def test_an_environment_shows_pictures_and_a_fork_continues_after_them(workspace: Path, processes: Processes) -> None:
    folder = processes.folder
    model = tiny_vision_model(folder / "model", "qwen2_5_vl")
    prompts(folder)
    partner = {"name": "tests.vision_partners:Pointing", "max_turns": 5}
    talks: dict[str, Any] = {
        "rollout__environment": partner,
        "rollout__max_response_tokens": 160,
        "reward": {"function": None},
    }
    child = processes.train(config_of(workspace, folder, "points", **talks))
    assert child.wait() == 0, child.text
    rows = shown(folder, "points", model)
    pictures = [digest_of(image) for images in SHOWN.values() for image in images]
    whole = rows[rows["turn_ends"].map(len) == 4]
    assert len(whole) > len(rows) / 2
    for row in whole.to_dict("records"):
        assert (list(row["turn_images"]), list(row["images"][1:])) == ([2, 0, 1, 0], pictures)
    trajectory = whole["trajectory_id"].iloc[0]
    store = f"{folder}/runs"
    forking = ("fork", "points", "--run", "on", "--store", store, "--trajectory", trajectory, "--turn", 2)
    child = processes.cli(*forking, "--samples", 3)
    assert child.wait() == 0, child.text
    child = processes.train(open_run(f"{store}/on").config)
    assert child.wait() == 0, child.text
    continued = shown(folder, "on", model)
    assert len(continued) == 3
    begun = whole[whole["trajectory_id"] == trajectory].iloc[0]
    for row in continued.to_dict("records"):
        start = begun["turn_starts"][2]
        assert list(row["response_ids"][:start]) == list(begun["response_ids"][:start])
        assert list(row["images"][:3]) == list(begun["images"][:3])
        assert list(row["turn_images"][:2]) == [2, 0]


def test_an_agent_shows_pictures(workspace: Path, processes: Processes) -> None:
    """Those of its prompt and its own, in two branches."""
    folder = processes.folder
    model = tiny_vision_model(folder / "model", "qwen2_5_vl")
    prompts(folder)
    calls = {
        "rollout__agent": {"name": "tests.vision_partners:looks", "on_error": "fail"},
        "rollout__max_response_tokens": 160,
    }
    child = processes.train(config_of(workspace, folder, "looks", reward={"function": None}, **calls))
    assert child.wait() == 0, child.text
    rows = shown(folder, "looks", model)
    pictures = [digest_of(image) for images in SHOWN.values() for image in images]
    for branch, images in {0: pictures, 1: pictures[:2]}.items():
        of_branch = rows[rows["branch"] == branch]
        assert len(of_branch) == len(rows) / 2
        assert all(list(row[1:]) == images for row in of_branch["images"])
        own = {digest_of(PICTURES[number]) for number in range(4)}
        assert {row[0] for row in of_branch["images"]} == own
    said = json.loads(rows[rows["branch"] == 0]["calls"].iloc[0][1]["asked"])["messages"][-1]
    assert said == {"role": "user", "content": "<image>w5<image>", "images": pictures[:2]}
