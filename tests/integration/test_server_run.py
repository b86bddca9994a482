"""Runs whose responses come from a real `vllm serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.engine import Request, Sampling
from ratchet.rlhf.rollout.server_engine import ServerRollout
from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.integration.test_vllm_run import gap
from tests.processes import Child, Processes
from tests.served import end_servers
from tests.vllm_server import serving

pytestmark = needs("vllm")


@pytest.fixture(scope="module", autouse=True)
def _memory_is_freed() -> Iterator[None]:
    yield
    end_servers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.workspace(tmp_path_factory.mktemp("served"))
    tiny.model_folder(folder / "model", hidden=64, heads=2, key_value_heads=1)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return serving(folder / "model")


def config(folder: Path, processes: Processes, name: str, urls: list[str], **changes: Any) -> RunConfig:
    return tiny.config(
        folder,
        run__name=name,
        run__store=f"file://{processes.folder}/runs",
        reward__function="tests.rewards:letters",
        rollout__engine={"type": "server", "urls": urls, "weights_folder": str(folder / "weights"), **changes},
        actor__lr=1e-2,
    )


def train(processes: Processes, config: RunConfig) -> Child:
    path = processes.folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return processes.cli("train", path)


def test_a_server_generates_with_the_newest_weights(folder: Path, url: str, processes: Processes) -> None:
    run = config(folder, processes, "served", [url])
    child = train(processes, run)
    assert child.wait() == 0, child.text
    history = History.of(run)
    history.check_sound()
    assert max(gap(history).values()) < 1e-3
    assert not list((folder / "weights").iterdir()), "nothing is left behind"

    data = folder / "prompts.parquet"
    short = ["--max-response-tokens", "8"]
    answered = processes.cli("evaluate", folder / "model", "--data", data, "--server", url, *short)
    assert answered.wait() == 0, answered.text


@pytest.fixture(scope="module")
def unprepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A server as people start it: with vLLM's own kind of log-probs, and with the defaults that the model's publisher
    recommends for sampling."""
    folder = tiny.workspace(tmp_path_factory.mktemp("unprepared"))
    model = tiny.model_folder(folder / "model", hidden=64, heads=2, key_value_heads=1)
    recommended = {"top_k": 1, "min_p": 0.5, "repetition_penalty": 5.0, "temperature": 0.1}
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True} | recommended))
    return folder, serving(model, {"logprobs-mode": "raw_logprobs", "generation-config": "auto"})


def test_log_probs_of_another_kind_are_found_before_anything_is_generated(
    unprepared: tuple[Path, str], processes: Processes
) -> None:
    folder, url = unprepared
    hot = config(folder, processes, "hot", [url]).with_values({"rollout.temperature": 0.7})
    child = train(processes, hot)
    assert child.wait() == 2, child.text
    assert f"the log-probs of {url} differ from the trainer's on the same 8 tokens" in child.text
    assert "start `vllm serve` with --logprobs-mode processed_logprobs" in child.text
    assert "Traceback" not in child.text
    assert not child.computed_shards
    # one that was begun with the right kind of server
    prepared = serving(folder / "model")
    begun = config(folder, processes, "begun", [prepared]).with_values(
        {"rollout.temperature": 0.7, "train.iterations": 1}
    )
    child = train(processes, begun)
    assert child.wait() == 0, child.text
    child = train(processes, begun.with_values({"rollout.engine.urls": [url], "train.iterations": 2}))
    assert child.wait() == 2, child.text
    assert f"the log-probs of {url} differ from the trainer's" in child.text
    assert not child.computed_shards
    # before top_p, and at temperature 1, that kind is the right one
    for name, changes in {"nucleus": {"rollout.top_p": 0.9}, "plain": {}}.items():
        child = train(processes, config(folder, processes, name, [url]).with_values({**changes, "train.iterations": 1}))
        assert child.wait() == 0, child.text


def test_a_publishers_sampling_defaults_do_not_reach_the_policy(unprepared: tuple[Path, str]) -> None:
    """With them, every answer would be the greedy one."""
    folder, url = unprepared
    tokens = AutoTokenizer.from_pretrained(folder / "model")("3 plus 4 is")["input_ids"]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=8, seed=0)
    requests = [Request(f"it000000-p00000-s{sample:02d}", tuple(tokens)) for sample in range(8)]
    found = ServerRollout([url], eos_token_ids=(1,)).generate(requests, sampling)
    assert len({generation.response_ids for generation in found}) == 8


def test_what_a_server_cannot_do_is_said(folder: Path, url: str, processes: Processes) -> None:
    for changes, code, says in (
        ({"weights_folder": None}, 2, "rollout.engine.weights_folder is null"),
        ({"api": "sglang"}, 2, "/update_weights_from_disk answered 404"),
    ):
        child = train(processes, config(folder, processes, "cannot", [url], **changes))
        assert child.wait() == code, child.text
        assert says in child.text
        assert "Traceback" not in child.text
    with pytest.raises(
        UserError, match=r"weights_folder is null, so the servers cannot take these weights: name a folder"
    ):
        ServerRollout([url], eos_token_ids=(1,)).load_weights([])
