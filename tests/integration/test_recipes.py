"""Every recipe in `examples/` runs, on a tiny model: the stages that its algorithms need, and no others."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from ratchet.flows.train import train
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.config import RunConfig, load_config
from ratchet.rlhf.metrics import BY_NAME
from ratchet.rlhf.rewards.registry import load_reward
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes
from tests.tiers import sampled

EXAMPLES = Path(__file__).parents[2] / "examples"
ALWAYS = {"generate", "score", "advantages", "update_actor"}
MORE = {
    "countdown": {"values", "update_critic"},
    "ppo": {"old_log_probs", "values", "update_critic"},
    "grpo": {"old_log_probs", "ref_log_probs"},
    "dr_grpo": {"old_log_probs"},
    "rloo": {"old_log_probs", "ref_log_probs"},
    "reinforce_plus_plus": {"old_log_probs", "ref_log_probs"},
    "remax": {"greedy_baseline", "old_log_probs", "ref_log_probs"},
    "gpg": {"ref_log_probs"},
    "gspo": {"old_log_probs"},
    "dapo": {"select", "old_log_probs"},
    "egpo": {"old_log_probs"},
    "sentences/grpo": set(),
    "distill/distill": {"teacher_log_probs"},
    "word_problems/grpo": set(),
    "reward_model/ppo": {"reward_model", "old_log_probs", "ref_log_probs", "values", "update_critic"},
}
"""What each recipe runs besides."""
ELSEWHERE = {"vision/grpo", "ask/ask", "guess/guess", "agent_guess/guess", "agent_calculator/calculator"}
"""Recipes that other tests run."""


def recipe(name: str, workspace: Path, store: Path) -> RunConfig:
    """The shipped file, with a tiny model, tiny batches, and the algorithm as it is."""
    config = load_config(EXAMPLES / f"{name}.yaml")
    algorithm = config.algorithm.model_dump(mode="json")
    if config.algorithm.dynamic_sampling is not None:
        algorithm["dynamic_sampling"] = {"max_prompts": 12}
    rewards: dict[str, Any] = {"reward.function": "tests.rewards:mostly_flat", "reward.options": {}}
    if config.reward.model is not None:
        judge = str(tiny.reward_model_folder(store.parent / "judge", workspace / "model"))
        rewards = {"reward.model.path": judge, "critic.model.path": judge}
    trainer = {"mini_batch_trajectories": 4, "micro_batch_tokens": 512, "lr": 1e-3}
    changes: dict[str, Any] = {
        "run.store": f"file://{store}",
        "model.path": str(workspace / "model"),
        "data.train": [str(workspace / "prompts.parquet")],
        "data.prompts_per_iteration": 4,
        "data.max_prompt_tokens": 256,
        "rollout.n": min(config.rollout.n, 2),
        "rollout.max_response_tokens": 8,
        "rollout.prompts_per_shard": 2,
        **rewards,
        **({} if config.teacher is None else {"teacher.path": str(workspace / "model")}),
        "algorithm": algorithm,
        "validation": {},
        "train.iterations": 2,
        **{f"actor.{key}": value for key, value in trainer.items()},
        **({f"critic.{key}": value for key, value in trainer.items()} if config.needs_critic else {}),
        **({"critic.warmup_iterations": 0} if config.needs_critic else {}),
    }
    return config.with_values(changes)


def run_of(config: RunConfig) -> Run:
    return open_run(f"{config.run.store}/{config.run.name}")


def test_every_recipe_is_tested() -> None:
    there = {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in EXAMPLES.rglob("*.yaml")}
    assert there == MORE.keys() | ELSEWHERE


@sampled(40)
@pytest.mark.parametrize("name", sorted(MORE))
def test_recipe(name: str, workspace: Path, tmp_path: Path, prefect_server: str) -> None:
    config = recipe(name, workspace, tmp_path / "runs")
    train(config)
    run = run_of(config)
    for iteration in range(2):
        assert set(run.store.iteration_state(iteration).stages) == ALWAYS | MORE[name]
    frame, metrics = run.trajectories(), run.metrics()
    assert len(frame) == 2 * config.trajectories_per_iteration
    assert np.isfinite(metrics.to_numpy(dtype=float)).all()
    assert (metrics["actor/grad_norm"] > 0).all()
    of_parts = {name for name in metrics if re.fullmatch(r"reward/.+/mean", name)}
    assert set(metrics) - {"iteration"} - of_parts <= set(BY_NAME), (
        "each is in the catalogue, and so in every metrics file"
    )
    roles = {"actor", "critic"} if config.needs_critic else {"actor"}
    assert set(run.state.snapshots[2]) == roles
    digests = {run.state.initial["actor"].digest, run.state.weights["actor"].digest}
    assert len(digests) == 2
    if name == "remax":
        same_prompt = frame.groupby("prompt_id")[["greedy_response", "greedy_score"]].nunique()
        assert (same_prompt == 1).all(axis=None)
        reward = load_reward("tests.rewards:mostly_flat")
        expected = [reward("", text, "", None) for text in frame["greedy_response"]]
        assert frame["greedy_score"].to_numpy() == pytest.approx(expected, rel=1e-6)
    if name == "egpo":
        assert frame["advantages"].map(np.ptp).max() == 0  # one for each response


BYPASS = {
    "bypass": True,
    "weights": {"level": "sequence", "upper": 1.5},
    "rejection": [{"statistic": "seq_mean_k1", "upper": 2.0}],
}


@pytest.mark.parametrize(
    ("name", "algorithm", "more"),
    [
        ("dr_grpo", {"advantage": "optimal_token_baseline", "loss": "vespo"}, {"old_log_probs"}),
        ("dr_grpo", {"advantage": {"type": "gfpo", "keep": 2}}, {"old_log_probs"}),
        ("ppo", {"advantage": {"type": "vapo", "alpha": 0.5}}, {"old_log_probs", "values", "update_critic"}),
        ("gpg", {"advantage": "max_rl", "rollout_correction": BYPASS}, {"ref_log_probs"}),
    ],
    ids=["optimal_token_baseline", "gfpo", "vapo", "max_rl"],
)
def test_algorithms_without_a_recipe(
    name: str, algorithm: dict[str, Any], more: set[str], workspace: Path, tmp_path: Path, prefect_server: str
) -> None:
    changes = {"rollout.n": 4, **{f"algorithm.{key}": value for key, value in algorithm.items()}}
    config = recipe(name, workspace, tmp_path / "runs").with_values(changes)
    train(config)
    run = run_of(config)
    assert set(run.store.iteration_state(1).stages) == ALWAYS | more
    frame, metrics = run.trajectories(), run.metrics()
    assert set(metrics) - {"iteration"} <= set(BY_NAME), "each is in the catalogue, and so in every metrics file"
    assert np.isfinite(metrics.to_numpy(dtype=float)).all()
    assert (metrics["actor/grad_norm"] > 0).any()
    if "sum_pi_squared" in config.algorithm.advantage.needs:
        squares, own = frame["sum_pi_squared"].explode(), np.exp(frame["old_log_probs"].explode().astype(float))
        assert ((squares >= own**2 - 1e-6) & (squares <= 1 + 1e-6)).all()
        assert (metrics["actor/vespo_weight"] > 0).all()
    else:
        assert "sum_pi_squared" not in frame or frame["sum_pi_squared"].isna().all()
    if "keep" in type(config.algorithm.advantage).model_fields:
        learned = frame["loss_mask"].map(max).groupby([frame["iteration"], frame["prompt_id"]]).sum()
        assert (learned == 2).all()
    if config.bypass:
        assert (metrics["rollout_corr/rollout_rs_seq_mean_k1_masked_fraction"] < 1).all()
        assert (metrics["rollout_corr/rollout_is_mean"] > 0).all()


def test_a_run_leaves_no_model_in_memory(workspace: Path, tmp_path: Path, prefect_server: str) -> None:
    """A process may do one run after the other."""

    def models() -> set[int]:
        gc.collect()
        return {id(alive) for alive in gc.get_objects() if type(alive).__mro__.count(PreTrainedModel)}

    before = models()
    train(recipe("countdown", workspace, tmp_path / "runs"))
    assert models() <= before


def test_dynamic_sampling_draws_until_enough_prompts_differ(
    workspace: Path, tmp_path: Path, prefect_server: str
) -> None:
    config = recipe("dapo", workspace, tmp_path / "runs")
    train(config)
    run = run_of(config)
    drawn = run.trajectories(columns=["prompt_id", "score"])
    kept = run.trajectories(columns=["prompt_id", "score", "group_spread", "advantages"])
    assert set(run.metrics()["perf/generated_tokens"] / run.metrics()["perf/response_tokens"] > 1) == {True}
    cursor = 0
    for iteration, metrics in run.metrics().iterrows():
        spread = drawn[drawn["iteration"] == iteration].groupby("prompt_id")["score"].agg(np.ptp)
        chosen = kept[kept["iteration"] == iteration]
        useful = list(spread[spread > 0].index)
        flat = list(spread[spread == 0].index)
        assert flat, "the reward is made to leave some prompts without a difference"
        # two prompts a shard: no more shards than it takes, and at most twelve prompts
        enough = len(useful) >= 4
        assert len(spread) == 12 or enough
        assert sum(spread.iloc[:-2] > 0) < 4
        assert set(chosen["prompt_id"]) == set((useful + flat)[:4])
        assert chosen["group_spread"].to_numpy() == pytest.approx(spread[chosen["prompt_id"]].to_numpy())
        assert metrics["sampling/prompts_drawn"] == len(spread)
        assert metrics["sampling/prompts_that_differ"] == len(useful)
        assert metrics["sampling/prompts_filled_up"] == max(4 - len(useful), 0)
        cursor += len(spread)
    assert run.state.cursor == cursor


def test_a_greedy_baseline_of_what_dynamic_sampling_keeps(workspace: Path, tmp_path: Path, prefect_server: str) -> None:
    """Some shards have nothing left to answer."""
    config = recipe("dapo", workspace, tmp_path / "runs").with_values({"algorithm.advantage": "remax"})
    train(config)
    frame = run_of(config).trajectories()
    assert len(frame) == 2 * config.trajectories_per_iteration
    assert frame["greedy_score"].notna().all()


def test_a_crash_after_the_last_score_draws_no_less(workspace: Path, processes: Processes) -> None:
    """Scores that a driver left of later shards do not make earlier ones enough."""
    config = recipe("dapo", workspace, processes.folder / "runs").with_values(
        {"reward.function": "tests.rewards:letters"}
    )
    fault = Fault("create", '{"kind":"stage","iteration":1,"stage":"generate"', "before")
    assert processes.train(config, fault).wait() == -9
    whole = config.with_values({"run.store": f"file://{processes.folder}/whole"})
    for each in (config, whole):
        child = processes.train(each)
        assert child.wait() == 0, child.text
    expected = History.of(whole)
    drawn = len(expected.run.trajectories([1], ["prompt_id"])["prompt_id"].unique())
    assert 4 < drawn < 12, "or the case is not met"
    assert History.of(config).results == expected.results


@pytest.mark.parametrize(
    "fault",
    [
        Fault("put", "trajectories/generate/iteration=000001/.*part-00002"),
        Fault("create", '{"kind":"shard","iteration":1,"stage":"generate","shard":2'),
        Fault("put", "trajectories/score/iteration=000001/.*part-00001"),
        Fault("create", '{"kind":"stage","iteration":1,"stage":"generate"'),
        Fault("put", "manifests/iteration=000001/select"),
        Fault("put", "trajectories/old_log_probs/iteration=000001/.*part-00001"),
        Fault("put", "manifests/iteration=000001/update_actor", "before"),
    ],
    ids=lambda fault: fault.match,
)
def test_a_resumed_run_draws_the_same(fault: Fault, workspace: Path, processes: Processes) -> None:
    config = recipe("dapo", workspace, processes.folder / "runs")
    whole = recipe("dapo", workspace, processes.folder / "whole")
    killed = processes.train(config, fault)
    assert killed.wait() == -9, killed.text
    then = History.of(config)
    for each in (config, whole):
        child = processes.train(each)
        assert child.wait() == 0, child.text
    now, expected = History.of(config), History.of(whole)
    now.check_sound()
    assert now.results == expected.results
    assert now.shards == expected.shards
    assert set(then.shards) <= set(now.shards)
