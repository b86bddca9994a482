"""Roles whose weights follow the actor's: a reference that moves, and a moving average."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ratchet.infra.store.records import Skip
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis.plan import fork_run
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes

ITERATIONS, SYNC_EVERY, MIX, DECAY = 5, 2, 0.25, 0.75


def averaged(workspace: Path, folder: Path, **changes: object) -> RunConfig:
    defaults = {
        "run__store": f"file://{folder}/runs",
        "reward__function": "tests.rewards:letters",
        "train__iterations": ITERATIONS,
        "reference": {"sync_every": SYNC_EVERY, "mix": MIX},
        "actor__ema_decay": DECAY,
        "checkpoint__keep__last": ITERATIONS,
    }
    return tiny.config(workspace, **defaults | changes)


def exported(history: History, version: int, role: str, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(history.run.export(version, folder / f"{role}-{version}", role) / "model.safetensors")


def moved(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    return {name: old[name].double() + share * (new[name].double() - old[name].double()) for name in old}


def assert_are(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """They are stored in float32: a rounding on the way is at most 1.2e-7 of a weight below 1."""
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=3e-7, atol=3e-8)


def test_reference_and_average_follow_the_actor(workspace: Path, processes: Processes, tmp_path: Path) -> None:
    config = averaged(workspace, tmp_path)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound()
    initial = load_file(workspace / "model" / "model.safetensors")
    reference, ema = initial, initial
    for version in range(1, ITERATIONS + 1):
        actor = exported(history, version, "actor", tmp_path)
        ema = moved(ema, actor, 1 - DECAY)
        assert_are(exported(history, version, "ema", tmp_path), ema)
        if version % SYNC_EVERY == 0:
            reference = moved(reference, actor, MIX)
        assert_are(exported(history, version, "reference", tmp_path), reference)
    card = ModelCard.load(tmp_path / "ema-1" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert "This is the moving average of the policy of the run `tiny` after 1 iteration" in card.text
    assert "`ratchet export tiny DIR --iteration 1 --role ema`" in card.text
    card = ModelCard.load(tmp_path / "reference-1" / "README.md")
    assert "This is the reference of the run" in card.text
    skipped = [(skip.stage, skip.iteration) for skip in history.commits(Skip)]
    assert skipped == [("update_reference", k) for k in range(ITERATIONS) if (k + 1) % SYNC_EVERY]

    # the stage computes with what was committed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "reference-2")
    row = history.run.trajectories(iterations=[2]).iloc[0]
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(row["ref_log_probs"], log_probs[-len(row["response_ids"]) :], atol=1e-5)
    assert not np.allclose(row["ref_log_probs"], row["rollout_log_probs"], atol=1e-5), "and it is not the actor"

    replayed = processes.cli("reproduce", "tiny", "--store", config.run.store, "--iteration", 3)
    assert replayed.wait() == 0, replayed.text
    assert "update_reference" in replayed.text
    assert "update_ema" in replayed.text


@pytest.mark.parametrize(
    "deaths",
    [
        ["update_actor 1"],  # before the reference follows
        ["update_reference 1", "update_ema 3"],  # in the iterations that end with a snapshot, before it
        ["update_ema 2"],  # beyond the snapshot
    ],
    ids=" and ".join,
)
def test_a_killed_run_has_the_same_averages(
    workspace: Path, processes: Processes, tmp_path: Path, deaths: list[str]
) -> None:
    rare = {"checkpoint__every": 100}
    expected = averaged(workspace, tmp_path, run__name="whole", **rare)
    child = processes.train(expected)
    assert child.wait() == 0, child.text
    config = averaged(workspace, tmp_path, run__name="killed", **rare)
    for death in deaths:
        stage, k = death.split()
        child = processes.train(config, Fault("create", f'{{"kind":"stage","iteration":{k},"stage":"{stage}"'))
        assert child.wait() == -9, child.text
    child = processes.train(config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    history.check_sound(killed=True)
    assert set(history.results["weights"]) == {"actor", "critic", "reference", "ema"}
    whole = History.of(expected).results
    assert history.results["weights"] == whole["weights"]
    assert history.results["rows"] == whole["rows"]


def test_an_update_that_is_skipped_moves_nothing(workspace: Path, processes: Processes, tmp_path: Path) -> None:
    sizes = {"train__iterations": 2, "reference": {"sync_every": 1}, "train__on_nan": "skip"}
    config = averaged(workspace, tmp_path, actor__lr=1e30, **sizes)  # the actor's second step is not finite
    child = processes.train(config)
    assert child.wait() == 0, child.text
    history = History.of(config)
    skipped = [(skip.stage, skip.iteration) for skip in history.commits(Skip)]
    assert skipped == [(f"update_{role}", k) for k in range(2) for role in ("actor", "reference", "ema")]
    initial = load_file(workspace / "model" / "model.safetensors")
    assert_are(exported(history, 2, "reference", tmp_path), initial)
    assert_are(exported(history, 2, "ema", tmp_path), initial)


def test_an_average_begins_with_the_run(workspace: Path, processes: Processes, tmp_path: Path) -> None:
    config = averaged(workspace, tmp_path, train__iterations=1, actor__ema_decay=None)
    child = processes.train(config)
    assert child.wait() == 0, child.text
    changed = averaged(workspace, tmp_path, train__iterations=2, reference={})
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(changed.model_dump(mode="json")))
    refused = processes.cli("train", path, "--accept-changes")
    assert refused.wait() == 2, refused.text
    assert "reference.sync_every can be set or removed only before the first iteration" in refused.text
    assert "actor.ema_decay can be set or removed only before the first iteration" in refused.text
    run = History.of(config).run
    child_config = changed.with_values({"run.name": "child"})
    with pytest.raises(UserError, match=r"actor\.ema_decay can be set or removed only"):
        fork_run(run, child_config, 1, None)
    fork_run(run, child_config, 0, None)  # what the error says
    child = processes.train(child_config)
    assert child.wait() == 0, child.text
    assert "ema" in History.of(child_config).run.state.snapshots[2]
