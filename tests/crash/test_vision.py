"""A driver dies by SIGKILL while it trains on pictures; the next one goes on, and ends with the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from ratchet.rlhf.config import RunConfig, load_config
from tests.history import History
from tests.processes import Fault, Processes
from tests.vision import EXAMPLE, make_model, make_pictures

ITERATIONS = 3
POINTS = {
    "image": Fault("put", "images/[0-9a-f]{64}", count=6),
    "generate": Fault("put", "trajectories/generate/iteration=000001/.*part-00001", "before"),
    "generate_data": Fault("put", "trajectories/generate/iteration=000001/.*part-00001"),
    "generate_record": Fault("create", '{"kind":"stage","iteration":1,"stage":"generate"'),
    "score": Fault("put", "trajectories/score/iteration=000001/.*part-00001", "before"),
    "old_log_probs": Fault("put", "trajectories/old_log_probs/iteration=000001/.*part-00001"),
    "ref_log_probs": Fault("put", "trajectories/ref_log_probs/iteration=000001/.*part-00001"),
    "values": Fault("put", "trajectories/values/iteration=000001/.*part-00001"),
    "advantages": Fault("put", r"manifests/iteration=000001/advantages\."),
    "update_critic": Fault("step", count=5),
    "update_actor": Fault("step", count=7),
    "close": Fault("put", "checkpoints/actor/000002.*/model.safetensors"),
    "index": Fault("put", "index/000001"),
}
"""The second image of the second iteration, and the second shards; a step is one of an optimizer."""


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a tiny vision-language model and pictures."""
    folder = tmp_path_factory.mktemp("pictured")
    make_pictures(folder / "data", train=16, test=4, sft=4)
    make_model(folder / "model")
    return folder


def config_of(folder: Path, store: Path) -> RunConfig:
    """The demo's config in small, with the stages that it does without: those of a critic and of a reference."""
    return load_config(EXAMPLE / "grpo.yaml").with_values(
        {
            "run.store": f"file://{store}",
            "model.path": str(folder / "model"),
            "data.train": [str(folder / "data/train.parquet")],
            "data.prompts_per_iteration": 4,
            "rollout.n": 2,
            "rollout.prompts_per_shard": 2,
            "reward.function": "tests.rewards:letters",  # scores that differ, of a model that reads nothing yet
            "algorithm.advantage": {"type": "gae"},
            "algorithm.kl": {"in_reward": 0.01},
            "algorithm.rollout_correction": {},
            "actor.lr_schedule": {},
            "actor.mini_batch_trajectories": 4,
            "critic": {"lr": 1e-3, "mini_batch_trajectories": 4},
            "checkpoint": {"every": 1, "background": False},
            "validation": {},
            "train.iterations": ITERATIONS,
        }
    )


@pytest.fixture(scope="module")
def alone(pictured: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> History:
    """The history of the run that tests kill, left alone."""
    folder = tmp_path_factory.mktemp("alone")
    processes = Processes(folder)
    child = processes.train(config_of(pictured, folder / "runs"))
    assert child.wait() == 0, child.text
    history = History.of(config_of(pictured, folder / "runs"))
    history.check_sound()
    assert history.state.weights["actor"].digest != history.state.initial["actor"].digest
    return history


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(point: str, pictured: Path, alone: History, processes: Processes) -> None:
    config = config_of(pictured, processes.folder / "runs")
    killed = processes.train(config, POINTS[point])
    assert killed.wait() == -9, killed.text
    then = History.of(config)
    assert then.state.iteration in (1, 2)
    images = {name for (name,) in then.run.trajectories(columns=["images"])["images"]}
    assert images <= {path.name for path in (then.folder / "images").iterdir()}, "an image is there before its rows"
    resumed = processes.train(config)
    assert resumed.wait() == 0, resumed.text

    now = History.of(config)
    now.check_sound()
    assert now.results == alone.results
    pd.testing.assert_frame_equal(now.run.trajectories(), alone.run.trajectories())
    missing = set(alone.shards) - set(then.shards)
    assert Counter(resumed.computed_shards) == Counter(missing), "no committed shard is computed again"
    stored, expected = ({p.name: p.read_bytes() for p in (h.folder / "images").iterdir()} for h in (now, alone))
    assert stored == expected


@pytest.mark.slow
def test_a_killed_fit_ends_with_the_same_weights(pictured: Path, processes: Processes) -> None:
    fit = ("sft", "--model", pictured / "model", "--data", pictured / "data/sft.parquet", "--steps", 4)
    options = ("--batch-examples", 2, "--lr", 1e-3, "model.freeze_vision=false", "checkpoint_steps=1")
    outputs = [processes.folder / name for name in ("alone", "killed")]
    commands = [(*fit, "--output", at, "--store", f"file://{processes.folder}/runs", *options) for at in outputs]
    child = processes.cli(*commands[0])
    assert child.wait() == 0, child.text
    killed = processes.cli(*commands[1], faults=(Fault("step", count=3),))
    assert killed.wait() == -9, killed.text
    assert not (outputs[1] / "model.safetensors").exists()
    resumed = processes.cli(*commands[1])
    assert resumed.wait() == 0, resumed.text
    weights, same = ((folder / "model.safetensors").read_bytes() for folder in outputs)
    assert weights == same
    assert weights != (pictured / "model/model.safetensors").read_bytes()
