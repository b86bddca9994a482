"""Runs of a policy that sees: what else reads their trajectories finds the pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
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
