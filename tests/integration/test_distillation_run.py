"""Runs that learn from a teacher, and from the best answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ratchet.flows.train import train
from ratchet.infra.execution.driver import check_start
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.fingerprints import check_open_iteration
from tests import tiny
from tests.history import History


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
