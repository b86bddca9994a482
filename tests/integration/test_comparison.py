"""Comparing real runs of one seed: forks, and runs without a validation in common."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from ratchet.infra.runs.comparison import compare
from ratchet.infra.runs.run import open_run
from tests.integration.test_cli import Ratchet, ratchet  # noqa: F401  (a fixture)


def test_runs_of_one_seed_are_paired_in_training(shown_runs: Path) -> None:
    ppo, grpo = (open_run(f"file://{shown_runs}/{name}") for name in ("ppo", "grpo"))
    result = compare(ppo, grpo)
    assert (result.kind, result.same_seed, result.fork) == ("train", True, None)
    assert [entry.iteration for entry in result.differences] == [0, 1, 2]
    assert result.differences[0].difference == 0, "the same model, prompts and random numbers: the same answers"
    assert result.unpaired == {"validation": 0, "train": 0}
    for entry in result.differences:
        metric = "critic/score/mean"
        rows = [run.metrics().set_index("iteration").loc[entry.iteration, metric] for run in (ppo, grpo)]
        assert (entry.a, entry.b) == pytest.approx(rows, abs=1e-6)  # the metric is a mean of float32
    assert any(change.startswith("algorithm.advantage.type") for change in result.config)
    assert any(entry.kl[0] is not None and entry.kl[1] is None for entry in result.beside), "only PPO has a reference"


def test_a_fork_that_has_not_trained_differs_in_nothing(shown_runs: Path) -> None:
    result = compare(*(open_run(f"file://{shown_runs}/{name}") for name in ("ppo", "open")))
    assert (result.fork, result.kind, result.iteration) == ("2:score", "validation", 2)
    assert (result.low, result.high, result.verdict) == (0, 0, "no difference")


def test_what_to_do_about_different_rewards_works(
    ratchet: Ratchet,  # noqa: F811
    shown_runs: Path,
    tmp_path: Path,
) -> None:
    for name in ("ppo", "grpo"):
        shutil.copytree(shown_runs / name, tmp_path / name)
    store = f"file://{tmp_path}"
    assert ratchet("rescore", "grpo", "--reward", "tests.rewards:digits", "--run", "b", "--store", store)[0] == 0
    code, out, err = ratchet("compare", "ppo", "b", "--store", store)
    assert code == 0, err
    assert "A is scored by tests.rewards:letters" in out
    assert "B is scored by tests.rewards:digits" in out
    assert "the same answers" not in out
    *prepare, compared = re.findall("`ratchet ([^`]*)`", out)
    for command in prepare:
        code, _, err = ratchet(*shlex.split(command))
        assert code == 0, err
    code, out, err = ratchet(*shlex.split(compared))
    assert code == 0, err
    assert "is scored by" not in out, "both are scored by one reward"
    code, out, err = ratchet("compare", "grpo", "b", "--store", store)
    assert code == 0, err
    assert "both score the same answers: the difference is one of the rewards, not of the policies" in out
    assert "`ratchet" not in out, "there is nothing to score again"
