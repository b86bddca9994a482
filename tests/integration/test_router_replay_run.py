"""Runs that compute with the experts that the rollout chose (`rollout.router_replay`)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.infra.execution.preflight.models import check_models
from ratchet.infra.runs.run import open_run
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.routes import Routers
from ratchet.rlhf.schema import ROUTES
from tests import tiny
from tests.history import History
from tests.processes import Fault, Processes

SLOTS = 2 * 2
"""Two layers, two experts each."""


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.moe_folder(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def config_of(workspace: Path, folder: Path, mixture: Path, name: str = "routes", **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "run__store": f"file://{folder}/runs",
        "model__path": str(mixture),
        "reward__function": "tests.rewards:letters",
        "rollout__router_replay": True,
        "algorithm__advantage": {"type": "grpo"},
        "algorithm__kl": {"in_loss": 0.01},
        "critic": None,
        "actor__lr": 1e-2,
        "train__iterations": 2,
    }
    return tiny.config(workspace, run__name=name, **settings | changes)


def in_bfloat16(**changes: Any) -> dict[str, Any]:
    """The rollout and the trainer then round in other places, and choose other experts for some tokens."""
    return {"model__dtype": "bfloat16", **changes}


def test_a_kill_between_generation_and_update_changes_no_bit(
    workspace: Path, processes: Processes, mixture: Path
) -> None:
    """Also if updates after the snapshot are computed again."""
    changes = in_bfloat16(checkpoint__every=2, train__iterations=3)
    plain, killed = (config_of(workspace, processes.folder, mixture, name, **changes) for name in ("plain", "killed"))
    child = processes.train(plain)
    assert child.wait() == 0, child.text
    for stage in ("old_log_probs", "advantages"):
        fault = Fault("put", f"trajectories/{stage}/iteration=00000{1 if stage == 'advantages' else 0}", "before")
        assert processes.train(killed, fault).wait() == -signal.SIGKILL
    resumed = processes.train(killed)
    assert resumed.wait() == 0, resumed.text
    assert ("update_actor", 0) in resumed.engine_calls, "replayed from the stored trajectories"
    histories = [History.of(config) for config in (plain, killed)]
    for history in histories:
        history.check_sound()
    assert histories[0].results == histories[1].results
    verified = processes.cli("verify", "plain", "--store", plain.run.store)
    assert verified.wait() == 0, verified.text
    again = processes.cli("reproduce", "plain", "--iteration", 1, "--store", plain.run.store)
    assert again.wait() == 0, again.text
    rows = histories[0].run.trajectories(0)
    assert [len(cell) for cell in rows[ROUTES]] == [
        SLOTS * (len(prompt) + len(response) - 1)
        for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True)
    ]
    assert set(np.concatenate(rows[ROUTES].tolist())) == {0, 1, 2, 3}


def differences(rows: Any) -> np.ndarray:
    return np.abs(np.concatenate((rows["old_log_probs"] - rows["rollout_log_probs"]).tolist()))


def test_routes_bring_the_trainer_closer_to_the_rollout(workspace: Path, processes: Processes) -> None:
    """The model is wide enough for its products to be added in another order for a token than for a sequence."""
    wide = tiny.moe_folder(
        processes.folder / "wide",
        "qwen3_moe",
        scale=5,
        num_experts=16,
        hidden_size=128,
        head_dim=32,
        moe_intermediate_size=64,
        num_hidden_layers=4,
    )
    found = {}
    for name, replays in (("with", True), ("without", False)):
        config = config_of(
            workspace,
            processes.folder,
            wide,
            name,
            **in_bfloat16(rollout__router_replay=replays),
            rollout__max_response_tokens=40,
            train__iterations=1,
        )
        child = processes.train(config)
        assert child.wait() == 0, child.text
        found[name] = History.of(config).run.trajectories(0)
    assert found["without"][ROUTES].isna().all()
    assert found["with"]["response"].tolist() == found["without"]["response"].tolist()
    means = {name: differences(rows).mean() for name, rows in found.items()}
    assert 0 < means["with"] < means["without"], means


def test_stored_routes_are_those_of_a_plain_pass(workspace: Path, processes: Processes, mixture: Path) -> None:
    exact = config_of(workspace, processes.folder, mixture, "exact", train__iterations=1)
    child = processes.train(exact)
    assert child.wait() == 0, child.text
    rows = History.of(exact).run.trajectories(0)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    routers = Routers.of(model)
    for row in rows.to_dict("records"):
        with torch.no_grad(), routers.recording() as recorded:
            model(input_ids=torch.tensor([[*row["prompt_ids"], *row["response_ids"][:-1]]]), use_cache=False)
        assert row[ROUTES].tolist() == torch.cat([choice for [choice] in recorded], dim=-1).flatten().tolist()


def test_turns_of_an_environment_keep_the_experts_that_wrote_them(
    workspace: Path, processes: Processes, mixture: Path
) -> None:
    config = config_of(
        workspace,
        processes.folder,
        mixture,
        rollout__environment={"name": "tests.environments:Chatty", "max_turns": 3},
        rollout__max_response_tokens=60,
        actor__micro_batch_tokens=1024,
    )
    child = processes.train(config)
    assert child.wait() == 0, child.text
    rows = History.of(config).run.trajectories()
    assert rows["turns"].map(len).max() > 1
    for row in rows.to_dict("records"):
        cell = row[ROUTES].reshape(-1, SLOTS)
        assert len(cell) == len(row["prompt_ids"]) + len(row["response_ids"]) - 1
        assert cell.min() >= 0


def test_forks_replays_and_other_runs_read_the_routes(workspace: Path, processes: Processes, mixture: Path) -> None:
    base = config_of(workspace, processes.folder, mixture, "base")
    child = processes.train(base)
    assert child.wait() == 0, child.text
    forked = processes.cli(
        "fork", "base", "--at", "1:old_log_probs", "--run", "fork", "--store", base.run.store, "actor.lr=0.02"
    )
    assert forked.wait() == 0, forked.text
    resumed = processes.cli("resume", "fork", "--store", base.run.store)
    assert resumed.wait() == 0, resumed.text
    assert not [key for key in resumed.computed_shards if key[0] == "generate"]
    store = f"file://{processes.folder}/runs"
    theirs = open_run(f"{store}/base").trajectories(1, ["prompt", "sample", ROUTES])
    assert open_run(f"{store}/fork").trajectories(1, ["prompt", "sample", ROUTES]).equals(theirs)

    replays = config_of(workspace, processes.folder, mixture, "replays", data__replay={"share": 0.5})
    child = processes.train(replays)
    assert child.wait() == 0, child.text
    rows = History.of(replays).run.trajectories()
    originals = {(row["iteration"], row["trajectory_id"]): row for row in rows.to_dict("records")}
    again = rows[rows["replayed_from"].notna()].to_dict("records")
    assert len(again) == 4
    for row in again:
        _, iteration, trajectory = row["replayed_from"].split()
        assert row[ROUTES].tolist() == originals[int(iteration), trajectory][ROUTES].tolist()


def test_answers_without_routes_are_refused(workspace: Path, processes: Processes, mixture: Path) -> None:
    folder, store = processes.folder, f"file://{processes.folder}/runs"
    plain = config_of(workspace, folder, mixture, "plain", rollout__router_replay=False, train__iterations=1)
    child = processes.train(plain)
    assert child.wait() == 0, child.text
    reads = config_of(workspace, folder, mixture, "reads", data__generations=f"{store}/plain", train__iterations=1)
    child = processes.train(reads)
    assert child.wait() == 1, child.text  # as an exception of the flow
    assert "it000000-p00000-s00 has no routed_experts: it was generated without rollout.router_replay" in child.text
    draws = config_of(
        workspace,
        folder,
        mixture,
        "draws",
        data__replay={"share": 0.5, "runs": [f"{store}/plain"]},
        train__iterations=1,
    )
    child = processes.train(draws)
    assert child.wait() == 1, child.text  # as an exception of the flow
    assert (
        "was generated without rollout.router_replay and has no routed_experts: set rollout.router_replay" in child.text
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rollout__engine": {"type": "server", "urls": ["http://127.0.0.1:1"], "weights_folder": "/tmp/weights"}},
            "rollout.engine server does not return: use hf or vllm",
        ),
        ({"rollout__engine": {"type": "vllm", "prefix_caching": False}}, "remove rollout.engine.prefix_caching: false"),
        ({"model__kernels": "compile"}, "does not work with model.kernels compile: set model.kernels to torch"),
        (
            {"rollout__engine": {"type": "vllm", "args": {"enable_return_routed_experts": True}}},
            "args.enable_return_routed_experts cannot be set: set rollout.router_replay",
        ),
    ],
    ids=str,
)
def test_what_cannot_tell_or_follow_routes_is_refused(
    changes: dict[str, Any], says: str, workspace: Path, tmp_path: Path, mixture: Path
) -> None:
    with pytest.raises(UserError, match=says):
        config_of(workspace, tmp_path, mixture, **changes)


def test_vllm_is_refused_without_a_gpu(workspace: Path, tmp_path: Path, mixture: Path) -> None:
    config = config_of(workspace, tmp_path, mixture, rollout__engine="vllm")
    with pytest.raises(UserError, match=r"vLLM tells them on a GPU only: set rollout.engine: hf"):
        check_models(config)


def test_a_model_without_experts_is_refused_before_the_start(workspace: Path, tmp_path: Path) -> None:
    config = config_of(workspace, tmp_path, workspace / "model")
    with pytest.raises(UserError, match=r"model.path is a llama, whose config names no number of experts"):
        check_models(config)
