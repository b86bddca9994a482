"""Runs that learn from a teacher, and from the best answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ratchet.flows.train import train
from ratchet.infra.execution.driver import check_start
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.fingerprints import check_open_iteration
from tests import tiny
from tests.history import History
from tests.processes import Processes


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Another model with the same vocabulary, which prefers some tokens by far, whatever it has read."""
    folder = tiny.model_folder(tmp_path / "teacher", hidden=16, seed=5)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 30
    weights["model.embed_tokens.weight"][:] = weights["model.embed_tokens.weight"][5].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def run_of(workspace: Path, tmp_path: Path, name: str, **changes: Any) -> tuple[RunConfig, Run]:
    changes = {"algorithm__kl": {}, "rollout__n": 4, **changes}
    config = tiny.config(workspace, run__name=name, run__store=f"file://{tmp_path}/runs", **changes)
    train(config)
    return config, open_run(f"file://{tmp_path}/runs/{name}")


def test_the_policy_moves_toward_its_teacher(
    workspace: Path, tmp_path: Path, teacher: Path, prefect_server: str
) -> None:
    changes: dict[str, Any] = {
        "teacher": {"path": str(teacher), "dtype": "float32"},
        "reward": {"function": None},
        "algorithm__advantage": {"type": "none"},
        "algorithm__distillation": {"coef": 1.0},
        "actor__lr": 1e-2,
        "train__iterations": 6,
    }
    config, run = run_of(workspace, tmp_path, "alone", **changes)
    History.of(config).check_sound()
    distance = run.metrics()["actor/teacher_kl"].tolist()
    assert distance[-1] < distance[0] / 2, f"it moves by {distance}"
    rows = run.trajectories(0)
    assert not rows["score"].any()
    differences = rows["teacher_log_probs"] - rows["old_log_probs"]
    mean = np.concatenate(differences.tolist()).mean()
    assert run.metrics()["actor/teacher_kl"][0] == pytest.approx(-mean, rel=1e-4)
    for row, difference in zip(rows.to_dict("records"), differences, strict=True):
        expected = difference - mean
        np.testing.assert_allclose(row["advantages"], expected, rtol=1e-5, atol=1e-6)  # stored as float32
        assert row["loss_mask"].all()


def learns_from(teacher: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that learns from a teacher's five most likely tokens alone."""
    return {
        "teacher": {"path": str(teacher), "dtype": "float32", "top_k": 5},
        "reward": {"function": None},
        "algorithm__kl": {},
        "algorithm__advantage": {"type": "none"},
        "algorithm__distillation": {"divergence": "forward_kl"},
        "rollout__n": 4,
        **changes,
    }


def top_tokens(folder: Path, rows: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields ids, log-probs and the log of the rest's probability of each row, by transformers' model in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1)
        top = log_probs.topk(5)
        rest = log_probs.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
        yield top.indices.numpy(), top.values.numpy(), rest.numpy()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_policy_moves_toward_its_teachers_most_likely_tokens(
    workspace: Path, tmp_path: Path, teacher: Path, prefect_server: str, divergence: str
) -> None:
    changes = learns_from(teacher, algorithm__distillation={"divergence": divergence}, actor__lr=1e-2)
    config, run = run_of(workspace, tmp_path, divergence, **changes, train__iterations=6)
    History.of(config).check_sound()
    distances = run.metrics()[["actor/distillation_loss", "actor/teacher_kl"]]
    for name in distances:
        assert distances[name].iloc[-1] < distances[name].iloc[0] / 2, distances[name].tolist()
    rows = run.trajectories(0)
    for row, (ids, log_probs, rest) in zip(rows.to_dict("records"), top_tokens(teacher, rows), strict=True):
        assert row["teacher_topk_ids"].reshape(-1, 5).tolist() == ids.tolist()
        np.testing.assert_allclose(row["teacher_topk_log_probs"].reshape(-1, 5), log_probs, atol=1e-4)
        np.testing.assert_allclose(row["teacher_tail_log_probs"], rest, atol=1e-4)
        assert not row["advantages"].any(), "the teacher is in the loss"


def test_forks_and_sweeps_do_not_ask_the_teacher_again(workspace: Path, processes: Processes, teacher: Path) -> None:
    """Only for tokens that nobody has drawn before: those of iterations after the one at which they part."""
    store = f"file://{processes.folder}/runs"
    held_out = {"data": str(workspace / "held_out.parquet"), "every": 2, "n": 1}
    changes = learns_from(teacher, reward={"function": "tests.rewards:letters"}, validation=held_out)
    config = tiny.config(workspace, run__name="base", run__store=store, train__iterations=2, **changes)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    shards = History.of(config).shards
    assert sum(shards["teacher_log_probs", iteration, shard] for iteration in (0, 1) for shard in (0, 1)) == 4

    vary = "algorithm.distillation.divergence=forward_kl,reverse_kl,jsd,sampled"
    words = ("sweep", "base", "--at", 1, "--vary", vary, "--iterations", 2, "--store", store, "--pruner", "none")
    swept = processes.cli(*words)
    assert swept.wait() == 0, swept.text
    computed = {stage for stage, _, _ in swept.computed_shards} - {"validate"}
    assert computed == {"advantages"}, "neither the policy nor the teacher is asked again"
    folders = sorted(processes.folder.glob("runs/base-sweep-0*"))
    arms = [History.at(folder) for folder in folders]
    assert len(arms) == 4
    for arm in arms:
        assert not [key for key in arm.shards if key[0] in ("generate", "teacher_log_probs")]
        assert arm.run.trajectories(1, ["teacher_topk_ids"]).equals(
            open_run(f"{store}/base").trajectories(1, ["teacher_topk_ids"])
        )
    digests = {arm.state.weights["actor"].digest for arm in arms}
    assert len(digests) == 4 and History.of(config).state.weights["actor"].digest in digests

    other = processes.cli(
        "fork", "base", "--at", "1:teacher_log_probs", "--run", "more", "--store", store, "teacher.top_k=9"
    )
    assert other.wait() == 0, other.text
    resumed = processes.cli("resume", "more", "--store", store)
    assert resumed.wait() == 0, resumed.text
    assert ("teacher_log_probs", 1, 0) in resumed.computed_shards, "another number of tokens was never asked for"
    assert len(open_run(f"{store}/more").trajectories(1)["teacher_topk_ids"][0]) % 9 == 0


def test_another_student_reads_what_the_teacher_said(workspace: Path, processes: Processes, teacher: Path) -> None:
    """Of the same answers: a student of another size, and a teacher that says more, which is asked."""
    store = f"file://{processes.folder}/runs"
    settings: dict[str, Any] = {"run__store": store, "train__iterations": 2, **learns_from(teacher)}
    child = processes.train(config := tiny.config(workspace, run__name="base", **settings))
    assert child.wait() == 0, child.text
    small = tiny.model_folder(processes.folder / "small", hidden=16, layers=1, seed=3)
    again: dict[str, Any] = {**settings, "data__generations": f"{store}/base", "model__path": str(small)}
    more = {"path": str(teacher), "dtype": "float32", "top_k": 9}
    asked = {}
    for name, of_run in (("small", again), ("more", {**again, "teacher": more})):
        student = processes.train(own := tiny.config(workspace, run__name=name, **of_run))
        assert student.wait() == 0, student.text
        asked[name] = [key for key in student.computed_shards if key[0] == "teacher_log_probs"]
        History.of(own).check_sound()
        assert History.of(own).state.weights["actor"].digest != History.of(config).state.weights["actor"].digest
        assert set(open_run(f"{store}/{name}").metrics()["actor/distillation_loss"] > 0) == {True}
    assert not asked["small"] and len(asked["more"]) == 4
    names = ["teacher_topk_ids", "teacher_topk_log_probs"]
    ours, theirs = (open_run(f"{store}/{name}").trajectories(1, names) for name in ("small", "base"))
    assert ours.equals(theirs)


def test_a_teacher_beside_a_reward(workspace: Path, tmp_path: Path, teacher: Path, prefect_server: str) -> None:
    changes: dict[str, Any] = {
        "teacher": {"path": str(teacher), "dtype": "float32"},
        "reward__function": "tests.rewards:letters",
        "algorithm__advantage": {"type": "grpo"},
        "train__iterations": 1,
    }
    frames = {}
    for name, distillation in (("without", None), ("with", {"coef": 0.25})):
        more = changes if distillation else {key: value for key, value in changes.items() if key != "teacher"}
        _, run = run_of(workspace, tmp_path, name, algorithm__distillation=distillation, **more)
        frames[name] = run.trajectories(0)
    differences = frames["with"]["teacher_log_probs"] - frames["with"]["old_log_probs"]
    mean = np.concatenate(differences.tolist()).mean()
    both = zip(frames["with"].to_dict("records"), frames["without"].to_dict("records"), strict=True)
    for row, plain in both:
        assert row["response"] == plain["response"], "the same tokens are drawn"
        added = 0.25 * (row["teacher_log_probs"] - row["old_log_probs"] - mean)
        np.testing.assert_allclose(row["advantages"], plain["advantages"] + added, rtol=1e-5, atol=1e-6)


def test_only_the_best_answers_are_learned_from(workspace: Path, tmp_path: Path, prefect_server: str) -> None:
    changes: dict[str, Any] = {"reward__function": "tests.rewards:letters", "algorithm__advantage": {"type": "raft"}}
    config, run = run_of(workspace, tmp_path, "best", actor__lr=1e-2, train__iterations=2, **changes)
    History.of(config).check_sound()
    for (_, _), group in run.trajectories().groupby(["iteration", "prompt_id"]):
        learned = group[[mask.any() for mask in group["loss_mask"]]]
        assert len(learned) == 1 and learned["score"].iloc[0] == group["score"].max()
        assert set(np.concatenate(learned["advantages"].tolist())) == {1.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm__distillation": {}}, "algorithm.distillation is set without a teacher: set teacher.path"),
        ({"teacher": {"path": "model"}}, r"nothing learns from it: set algorithm.distillation=\{\}"),
        (
            {"teacher": {"path": "model"}, "algorithm__distillation": {"divergence": "jsd"}},
            "divergence jsd sums over the teacher's most likely tokens, and teacher.top_k is 0: set teacher.top_k=64",
        ),
        (
            {
                "teacher": {"path": "model", "top_k": 8},
                "algorithm__distillation": {},
                "actor__engine": {"type": "fsdp", "tensor_parallel": 2},
            },
            "teacher.top_k is not supported yet by actor.engine.tensor_parallel, whose processes have a part",
        ),
        (
            {"teacher": {"path": "model", "top_k": 8}, "algorithm__distillation": {}, "actor__engine": "megatron"},
            "teacher.top_k is not supported yet by actor.engine megatron",
        ),
        ({"algorithm__advantage": {"type": "none"}}, "leaves nothing to learn from: set algorithm.distillation"),
        ({"algorithm__advantage": {"type": "raft"}, "rollout__n": 1}, "rollout.n is 1: raise rollout.n"),
    ],
)
def test_what_does_not_fit_is_said(workspace: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tiny.config(workspace, **changes)


def test_a_teacher_of_another_vocabulary_is_refused_at_the_start(workspace: Path, tmp_path: Path) -> None:
    other = tiny.model_folder(tmp_path / "other", letters=tiny.LETTERS[::-1])
    config = tiny.config(
        workspace,
        run__store=f"file://{tmp_path}/runs",
        teacher={"path": str(other), "dtype": "float32"},
        algorithm__distillation={},
    )
    with pytest.raises(UserError, match=r"has another vocabulary .* choose a teacher of the same family"):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)


def test_more_tokens_than_there_are_cannot_be_asked_for(workspace: Path, tmp_path: Path) -> None:
    config = tiny.config(
        workspace,
        run__store=f"file://{tmp_path}/runs",
        teacher={"path": str(workspace / "model"), "dtype": "float32", "top_k": 100},
        algorithm__distillation={},
    )
    with pytest.raises(UserError, match=r"teacher.top_k is 100, more than the 78 tokens of its vocabulary: lower it"):
        check_start(config, take_over=True, accept_changes=False, check=check_open_iteration)
