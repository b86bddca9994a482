"""Runs that learn from a teacher behind a real `vllm serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ratchet.infra.execution.driver import check_start
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.rollout.scoring_servers import ScoringServers
from ratchet.tasks.fingerprints import check_open_iteration
from tests import tiny
from tests.extras import needs
from tests.history import History
from tests.ports import free_port
from tests.processes import Fault, Processes
from tests.served import end_servers
from tests.vllm_server import serving

pytestmark = needs("vllm")
NAMES = ("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs", "teacher_tail_log_probs")


@pytest.fixture(scope="module", autouse=True)
def _memory_is_freed() -> Iterator[None]:
    yield
    end_servers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a teacher that prefers some tokens by far, in a size of heads that vLLM takes."""
    folder = tiny.workspace(tmp_path_factory.mktemp("served"))
    teacher = tiny.model_folder(folder / "teacher", hidden=64, heads=2, key_value_heads=1, seed=5)
    weights = load_file(teacher / "model.safetensors")
    weights["lm_head.weight"] *= 30
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return serving(folder / "teacher")


def config_of(folder: Path, processes: Processes, name: str, teacher: dict[str, Any], **changes: Any) -> RunConfig:
    settings = {
        "teacher": {"path": str(folder / "teacher"), "top_k": 5, **teacher},
        "reward": {"function": None},
        "algorithm__kl": {},
        "algorithm__advantage": {"type": "none"},
        "algorithm__distillation": {"divergence": "forward_kl"},
        "actor__lr": 1e-2,
        **changes,
    }
    return tiny.config(folder, run__name=name, run__store=f"file://{processes.folder}/runs", **settings)


def served(url: str) -> dict[str, Any]:
    return {"engine": {"type": "server", "urls": [url]}}


def test_a_server_says_what_the_teacher_says_here(folder: Path, url: str, processes: Processes) -> None:
    configs = {
        "here": config_of(folder, processes, "here", {"dtype": "float32"}),
        "there": config_of(folder, processes, "there", served(url)),
    }
    for config in configs.values():
        child = processes.train(config)
        assert child.wait() == 0, child.text
        History.of(config).check_sound()
    runs = {name: History.of(config).run for name, config in configs.items()}
    here, there = (run.trajectories(0, ["response_ids", *NAMES]) for run in runs.values())
    assert len(here) == len(there) == 8
    for ours, theirs in zip(here.to_dict("records"), there.to_dict("records"), strict=True):
        assert ours["response_ids"].tolist() == theirs["response_ids"].tolist()
        assert ours["teacher_topk_ids"].tolist() == theirs["teacher_topk_ids"].tolist()
        for name in ("teacher_log_probs", "teacher_topk_log_probs"):
            np.testing.assert_allclose(theirs[name], ours[name], atol=1e-4)
        # the rest is 1 minus probabilities: their rounding is that of 1, and the logarithm of a small rest has more
        rests = [np.exp(side["teacher_tail_log_probs"]) for side in (theirs, ours)]
        np.testing.assert_allclose(*rests, atol=1e-6)
    losses = {name: run.metrics()["actor/distillation_loss"].to_numpy() for name, run in runs.items()}
    np.testing.assert_allclose(losses["there"], losses["here"], rtol=1e-3)
    assert losses["there"][-1] < losses["there"][0]


def test_one_of_several_teachers_is_served(folder: Path, url: str, processes: Processes) -> None:
    models = {
        "countdown": {"path": str(folder / "teacher"), **served(url)},
        "*": {"path": str(folder / "model"), "dtype": "float32"},
    }
    changes = {"train__iterations": 1, "algorithm__distillation": {"divergence": "sampled"}}
    config = config_of(folder, processes, "several", {"path": "", "models": models}, **changes)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    for row in History.of(config).run.trajectories(0).to_dict("records"):
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        with torch.no_grad():
            log_probs = teacher(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        own = log_probs.gather(-1, torch.tensor(row["response_ids"]).long()[:, None])[:, 0]
        np.testing.assert_allclose(row["teacher_log_probs"], own, atol=1e-4)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("put", "trajectories/teacher_log_probs/iteration=000001/.*part-00001", "before"),
        Fault("put", "trajectories/teacher_log_probs/iteration=000001/.*part-00001"),
        Fault("create", '{"kind":"stage","iteration":1,"stage":"teacher_log_probs"'),
    ],
    ids=["before", "data", "record"],
)
def test_a_killed_run_does_not_ask_again(fault: Fault, folder: Path, url: str, processes: Processes) -> None:
    config = config_of(folder, processes, "killed", served(url))
    killed = processes.train(config, fault)
    assert killed.wait() == -9, killed.text
    then = History.of(config)
    assert ("teacher_log_probs", 1, 0) in then.shards
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text
    now = History.of(config)
    now.check_sound()
    assert set(then.shards) < set(now.shards)
    assert Counter(resumed.computed_shards) == Counter(set(now.shards) - set(then.shards))
    committed = then.run.store.read_shard(then.run.store.committed_shards("teacher_log_probs", 1)[0].data)
    rows = now.run.trajectories(1, ["teacher_topk_log_probs"])
    assert [row.tolist() for row in rows["teacher_topk_log_probs"][: len(committed)]] == committed[
        "teacher_topk_log_probs"
    ].to_pylist()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"teacher.top_k": 30}, r"teacher.engine: {url} does not give the log-probs of 30 tokens: start it with "
         r"--max-logprobs 30, or lower teacher.top_k"),
        ({"data.max_prompt_tokens": 250}, r"teacher.engine: {url} reads at most 256 tokens, and .* are 259: start it "
         r"with --max-model-len 259"),
        ({"teacher.engine.urls": ["{nobody}"]}, r"teacher.engine: {nobody} does not answer: .*: start `vllm serve` "
         r"there, or change urls"),
    ],
    ids=["top_k", "length", "nobody"],
)  # fmt: skip
def test_what_a_server_cannot_do_is_said_at_the_start(
    changes: dict[str, Any], says: str, folder: Path, url: str, processes: Processes
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    if "teacher.engine.urls" in changes:
        changes = {"teacher.engine.urls": [nobody]}
    config = config_of(folder, processes, "refused", served(url)).with_values(changes)
    with pytest.raises(UserError, match=says.format(url=url, nobody=nobody)):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)


def test_another_server_answers_for_one_that_is_away(url: str) -> None:
    texts = [[5, 6, 7, number] for number in range(10, 40)]
    alone = ScoringServers([url], timeout_s=60)
    both = ScoringServers([f"http://127.0.0.1:{free_port()}", url], timeout_s=60)
    for one, other in zip(*(servers.top_tokens(texts, [2] * 30, 4) for servers in (alone, both)), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    alone.close()
    both.close()
