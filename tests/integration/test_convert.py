"""verl's example scripts, converted: each runs two iterations on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet.flows.train import train
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig, load_config
from tests.integration.test_cli import Ratchet, ratchet  # noqa: F401  (a fixture)

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
ALWAYS = {"generate", "score", "advantages", "update_actor"}
MORE = {
    "verl_ppo_gsm8k_math": {"old_log_probs", "values", "update_critic"},
    "verl_grpo_gsm8k_math": {"old_log_probs", "ref_log_probs"},
    "verl_grpo_qwen2_7b_math": {"old_log_probs", "ref_log_probs"},
    "verl_dapo": {"select", "old_log_probs"},
    "verl_dapo_7b_math": {"old_log_probs"},
    "verl_gpg_gsm8k_math": set[str](),
}
"""What each script runs besides."""
SETTINGS = {"verl_dapo": ("trainer.total_training_steps=100",)}
"""What a script needs besides, because its data cannot be read."""


def tiny_version(converted: RunConfig, workspace: Path, store: Path) -> RunConfig:
    """The converted config with another model, other data, smaller sizes, and the devices that there are.

    Algorithm, optimizer, schedules, reward, validation and snapshots stay as converted.
    """
    values: dict[str, Any] = {
        # the model and the data
        "run.store": f"file://{store}",
        "model.path": str(workspace / "model"),
        "data.train": [str(workspace / "prompts.parquet")],
        "validation.data": str(workspace / "held_out.parquet"),
        # sizes
        "data.prompts_per_iteration": 4,
        "data.max_prompt_tokens": 200,
        "rollout.n": min(converted.rollout.n, 2),
        "rollout.max_response_tokens": 8,
        "train.iterations": 2,
        "train.epochs": None,
        # devices: no GPUs, no Ray, and no service on the network
        "rollout.engine": "hf",
        "pools": {},
        "tracking": [],
    }
    for role in converted.trainers:
        sizes = {"mini_batch_trajectories": 2, "micro_batch_tokens": 512}
        devices = {"engine": "torch"}
        values |= {f"{role}.{key}": value for key, value in (sizes | devices).items()}
    if converted.needs_critic:
        values["critic.model.path"] = str(workspace / "model")
    if converted.algorithm.dynamic_sampling is not None:
        values["algorithm.dynamic_sampling.max_prompts"] = 12
    if converted.algorithm.overlong_penalty is not None:
        values["algorithm.overlong_penalty.buffer_tokens"] = 4
    return converted.with_values(values)


@pytest.mark.promise
def test_every_script_of_verl_is_tested() -> None:
    assert {path.stem for path in SCRIPTS.glob("verl_*.sh")} == MORE.keys()


@pytest.mark.parametrize("name", sorted(MORE))
def test_a_converted_script_runs(name: str, workspace: Path, tmp_path: Path, ratchet: Ratchet) -> None:  # noqa: F811
    code, out, _ = ratchet("convert", SCRIPTS / f"{name}.sh", *SETTINGS.get(name, ()), "-o", tmp_path / "run.yaml")
    assert code == 0
    assert "settings have no counterpart" in out
    config = tiny_version(load_config(tmp_path / "run.yaml"), workspace, tmp_path / "runs")
    train(config)
    run = open_run(f"{config.run.store}/{config.run.name}")
    for iteration in range(2):
        stages = set(run.store.iteration_state(iteration).stages)
        assert stages - {"validate"} == ALWAYS | MORE[name]
    assert len(run.trajectories()) == 2 * config.trajectories_per_iteration
    assert np.isfinite(run.metrics()[["actor/pg_loss", "actor/grad_norm", "critic/score/mean"]].to_numpy()).all()
    assert run.state.weights["actor"].version == 2


@pytest.mark.promise
def test_the_command_prints_a_config_and_names_what_to_fix(tmp_path: Path, ratchet: Ratchet) -> None:  # noqa: F811
    path = tmp_path / "grpo.yaml"
    path.write_text("num_generations: 8\nbeta: 0.04\n")
    code, out, err = ratchet("convert", path, "--from", "trl", "--num_processes", "2")
    assert code == 2
    assert "in_loss: 0.04  # beta" in out
    assert "prompts_per_iteration: 2  # " in out
    assert [line.partition(": ")[2] for line in err.splitlines()] == [
        f"{path}: model.path is missing: set it",
        f"{path}: data.train is missing: set it",
        "the config is converted, but cannot be used until these lines are fixed",
    ]
    arguments = ("model_name_or_path=m", "--dataset_name", "p.parquet")
    code, out, err = ratchet("convert", path, "--from", "trl", *(f"--{arguments[0]}", *arguments[1:]))
    assert (code, err) == (0, "")
