"""Whole runs through the train flow and the command line: which stages exist, and what a change of the config means."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from safetensors.torch import load_file

from ratchet.infra.runs.listing import runs_of
from ratchet.infra.runs.run import open_run
from ratchet.infra.store.object_store import ObjectStore
from ratchet.infra.store.records import Claim, Diverged, Skip
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.algorithms.kl import AdaptiveCoefficient
from ratchet.rlhf.config import RunConfig
from ratchet.tasks.pipeline import STAGES
from ratchet.tasks.stage import RowsStage
from tests import tiny
from tests.history import History
from tests.processes import Child, Fault, Processes

ROWS = {"generate", "score", "old_log_probs", "ref_log_probs", "values", "advantages"}
UPDATES = {"update_critic", "update_actor"}


class Ratchet:
    """`ratchet train` on one config, with changes."""

    def __init__(self, workspace: Path, processes: Processes) -> None:
        self.workspace, self.processes = workspace, processes

    def __call__(self, *faults: Fault, setup: Any = None, accept_changes: bool = False, **changes: Any) -> Child:
        self.config = self.at(**changes)
        path = self.processes.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        options = ("--accept-changes",) if accept_changes else ()
        return self.processes.cli("train", path, *options, faults=faults, setup=setup)

    def at(self, **changes: Any) -> RunConfig:
        defaults = {
            "run__name": self.processes.folder.name,
            "run__store": f"file://{self.processes.folder}/runs",
            "reward__function": "tests.rewards:letters",
            "train__iterations": 2,
        }
        return tiny.config(self.workspace, **defaults | changes)

    @property
    def history(self) -> History:
        history = History.of(self.config)
        history.check_sound()
        return history


@pytest.fixture
def ratchet(workspace: Path, processes: Processes) -> Ratchet:
    return Ratchet(workspace, processes)


def done(child: Child, code: int = 0) -> str:
    """The last line of a process that ended with this code."""
    assert child.wait() == code, child.text
    return child.text.splitlines()[-1] if child.text else ""


def dies_after(kind: str, stage: str, iteration: int) -> Fault:
    """SIGKILL as soon as this is committed."""
    return Fault("create", f'{{"kind":"{kind}","iteration":{iteration},"stage":"{stage}"')


@pytest.mark.promise
def test_ppo(ratchet: Ratchet, workspace: Path, prefect_server: str) -> None:
    changes = {"validation__data": str(workspace / "held_out.parquet"), "validation__n": 2}
    # advantages read every other stage
    done(ratchet(Fault("put", "trajectories/advantages/iteration=000001", "before"), **changes), -9)
    done(ratchet(**changes))
    run = ratchet.history.run
    assert set(run.store.iteration_state(0).stages) == ROWS | UPDATES | {"validate"}
    assert set(run.store.iteration_state(1).stages) == ROWS | UPDATES
    frame = run.trajectories()
    assert len(frame) == 2 * 4 * 2
    assert frame.groupby("iteration")["prompt"].nunique().tolist() == [4, 4]
    assert frame["prompt"].nunique() == 8, "every iteration draws the next prompts"
    assert frame["policy_version"].tolist() == frame["iteration"].tolist()
    assert list(run.trajectories(columns=["score", "iteration"]).columns) == ["iteration", "score"]
    assert run.validation().groupby("iteration").size().to_dict() == {0: 3 * 2, 2: 3 * 2}

    # what a person sees in Prefect: the stages that were committed before are Cached
    flow_run = f"{ratchet.config.run.name} · it 1"
    cached = {f"{flow_run} · {stage} 2/2" for stage in ROWS - {"advantages"}}
    expected = {(name, "Cached") for name in cached}
    expected |= {(f"{flow_run} · {stage}", "Completed") for stage in UPDATES | {"advantages", "close"}}
    states = _task_states(prefect_server, flow_run, expected)
    assert expected <= states
    assert {name for name, state in states if state == "Cached"} == cached
    persisted = Path(os.environ["PREFECT_HOME"]) / "storage"
    assert not persisted.exists(), "results stay in the run's store; Prefect keeps none"


def _task_states(url: str, flow_run: str, expected: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Names and states of a flow run's tasks; they reach the server a moment later: those expected are waited for."""
    deadline = time.monotonic() + 180
    states: set[tuple[str, str]] = set()
    with SyncPrefectClient(api=url) as client:
        while not expected <= states and time.monotonic() < deadline:
            time.sleep(0.5)
            runs = client.read_task_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[flow_run])))
            states = {
                (run.name, run.state.name) for run in runs if run.state is not None and run.state.name is not None
            }
    return states


def test_grpo_on_policy_has_no_critic_no_reference_and_no_old_log_probs(ratchet: Ratchet) -> None:
    done(
        ratchet(
            algorithm={"advantage": {"type": "grpo"}},
            critic=None,
            actor__mini_batch_trajectories=8,
        )
    )
    history = ratchet.history
    assert set(history.stages) == {
        (stage, k) for stage in ("generate", "score", "advantages", "update_actor") for k in (0, 1)
    }
    assert set(history.state.weights) == {"actor"}
    assert history.state.weights["actor"].version == 2
    frame = history.run.trajectories()
    assert not {"values", "old_log_probs", "ref_log_probs"} & set(frame.columns)
    by_group = frame.assign(first=frame["advantages"].str[0]).groupby("prompt_id")["first"].sum()
    assert by_group.abs().max() < 1e-5
    assert frame["advantages"].str[0].abs().max() > 0.1, "scores vary, and so do advantages"


def test_the_critic_warms_up(ratchet: Ratchet, workspace: Path) -> None:
    """Metrics that only later iterations have are columns of every metrics file, for every reader."""
    warm: dict[str, Any] = {"critic__warmup_iterations": 1, "actor__lr_schedule": {"warmup_iterations": 4}}
    held_out = str(workspace / "held_out.parquet")
    warm |= {"validation": {"data": held_out, "n": 2, "every": 1, "before_train": False}}
    done(ratchet(dies_after("skip", "update_actor", 0), **warm), -9)
    refused = done(ratchet(critic__warmup_iterations=0), 2)
    assert "critic warms up" in refused
    assert "ratchet fork" in refused
    done(ratchet(**warm))
    history = ratchet.history
    assert [(skip.iteration, skip.weights.version) for skip in history.commits(Skip)] == [(0, 1)]
    folder = str(history.folder / "metrics")
    plain = pd.read_parquet(folder)
    for frame in (pl.read_parquet(folder).to_pandas(), duckdb.sql(f"from read_parquet('{folder}/*.parquet')").df()):
        pd.testing.assert_frame_equal(frame, plain, check_dtype=False)
    assert plain["actor/pg_loss"].isna().tolist() == [True, False], "the first iteration has the column, too"
    assert plain["val-core/countdown/reward/mean@2"].isna().tolist() == [True, False]
    metrics = history.run.metrics()
    assert set(metrics) == set(plain.dropna(axis=1, how="all"))
    pd.testing.assert_frame_equal(metrics, plain[list(metrics)])
    for stage in (stage for stage in STAGES if isinstance(stage, RowsStage) and stage.name in ROWS):
        rows = pd.read_parquet(history.folder / "trajectories" / stage.name)
        never = [column.name for column in stage.writes if not column.null]
        assert rows[never].notna().all(axis=None), "docs/columns.md says so"
    rates = metrics["actor/lr"].dropna().tolist()
    assert rates[:1] == pytest.approx([1e-3 / 4]), "the actor's own warm-up begins with its own first update"
    initial = load_file(workspace / "model" / "model.safetensors")
    for version, same in ((1, True), (2, False)):
        exported = load_file(history.run.export(version, ratchet.processes.folder / str(version)) / "model.safetensors")
        assert exported.keys() == initial.keys()
        assert all((exported[name] == tensor).all() for name, tensor in initial.items()) == same


def test_the_kl_coefficient_goes_from_iteration_to_iteration(ratchet: Ratchet) -> None:
    controller = {"type": "adaptive", "target": 0.01, "horizon": 16}
    changes = {"algorithm__kl": {"in_reward": 0.1, "controller": controller}, "train__iterations": 3}
    done(ratchet(dies_after("stage", "advantages", 1), **changes), -9)
    done(ratchet(**changes))
    metrics = ratchet.history.run.metrics()
    steer = AdaptiveCoefficient(target=0.01, horizon=16)
    expected = [0.1]
    for kl in metrics["actor/ref_kl"]:
        expected.append(steer(expected[-1], kl, 8))
    assert metrics["actor/reward_kl_penalty_coeff"].tolist() == pytest.approx(expected[:-1])
    assert len(set(expected)) > 2
    assert ratchet.history.state.controllers == pytest.approx({"kl_in_reward": expected[-1]})


def test_a_changed_learning_rate_keeps_the_rollouts(ratchet: Ratchet) -> None:
    done(ratchet(dies_after("stage", "advantages", 1), checkpoint__every=3), -9)
    resumed = ratchet(actor__lr=5e-4, checkpoint__every=3)
    done(resumed)
    assert resumed.computed_shards == []
    assert ("update_actor", 0) in resumed.engine_calls, "replayed, with the learning rate it had"
    metrics = ratchet.history.run.metrics()
    assert metrics["actor/lr"].tolist() == [1e-3, 5e-4]
    assert metrics["critic/lr"].tolist() == [1e-3, 1e-3]


def test_a_changed_reward_keeps_the_generations_and_never_the_scores(ratchet: Ratchet) -> None:
    other: dict[str, Any] = {"reward__function": "tests.rewards:digits", "accept_changes": True}
    done(ratchet(Fault("put", "trajectories/score/iteration=000001/.*part-00000", "before")), -9)
    # of generations alone there is something: accepted; killed again with one of two shards of the new scores
    changed = ratchet(Fault("put", "trajectories/score/iteration=000001/.*part-00001"), **other)
    done(changed, -9)
    assert ("generate", 1, 0) not in changed.computed_shards
    before = History.of(ratchet.config)
    refused = done(ratchet(accept_changes=True), 2)
    assert "reward.function: tests.rewards:digits -> tests.rewards:letters" in refused
    assert "ratchet fork" in refused
    done(ratchet(dies_after("stage", "score", 1), **other), -9)
    refused = done(ratchet(accept_changes=True), 2)
    assert "reward.function: tests.rewards:digits -> tests.rewards:letters" in refused
    then = History.of(ratchet.config)
    then.check_sound(killed=True)
    scored = {one: times for one, times in (then.shards - before.shards).items() if one[0] == "score"}
    assert scored == {("score", 1, 1): 1}
    done(ratchet(**other))
    frame = ratchet.history.run.trajectories()
    digits = frame["response"].map(lambda text: sum(letter.isdigit() for letter in text) / max(len(text), 1))
    assert (frame["score"] == digits.astype("float32"))[frame["iteration"] == 1].all()
    assert not (frame["score"] == digits.astype("float32"))[frame["iteration"] == 0].all()


def test_shards_are_scored_while_others_are_generated(ratchet: Ratchet) -> None:
    first = r'"kind":"shard","iteration":\1,"stage":"score","shard":0'
    done(ratchet(Fault("put", r"trajectories/generate/iteration=0*(\d+)/.*part-00001", "before", count=0, until=first)))
    generated, scored = (ratchet.history.run.store.manifests(1)[name] for name in ("generate", "score"))
    assert generated.began < scored.began < generated.ended
    assert generated.ended < scored.ended, "the last shard waits for its generation"


def test_a_finished_run_goes_on_and_is_left_alone(ratchet: Ratchet, workspace: Path) -> None:
    # the training draws from all tokens, the validation only the likeliest one
    validated = {"validation": {"data": str(workspace / "held_out.parquet"), "n": 3, "top_k": 1}}
    done(ratchet(train__iterations=1))
    done(ratchet(train__iterations=2, **validated))
    then = ratchet.history
    assert then.state.iteration == 2
    validation = then.run.validation()
    assert validation["iteration"].unique().tolist() == [2]
    assert validation.groupby("prompt")["response"].agg(["size", "nunique"]).drop_duplicates().values.tolist() == [
        [3, 1]
    ]
    again = ratchet(train__iterations=2, **validated)
    done(again)
    fewer = ratchet(train__iterations=1, **validated)
    assert fewer.wait() == 2
    assert "has 2 iterations, more than train.iterations 1" in fewer.text
    assert again.engine_calls == fewer.engine_calls == []
    now = ratchet.history
    assert now.stages == then.stages
    assert now.results == then.results
    pd.testing.assert_frame_equal(now.run.trajectories(), then.run.trajectories())


def test_a_reward_that_is_not_a_number_commits_nothing(ratchet: Ratchet) -> None:
    refused = done(ratchet(reward__function="tests.rewards_of_responses:not_a_number"), 1)
    assert "nan" in refused
    without = ROWS - {"score", "advantages"}
    assert set(ratchet.history.stages) == {(stage, 0) for stage in without}, "what does not depend on it is kept"
    resumed = ratchet()
    done(resumed)
    assert not {(stage, 0, 0) for stage in without} & set(resumed.computed_shards)


def test_a_reward_that_is_not_a_number_can_be_passed_over(ratchet: Ratchet, workspace: Path) -> None:
    bad: dict[str, Any] = {"reward__function": "tests.rewards_of_responses:not_a_number", "train__on_nan": "skip"}
    bad |= {"accept_changes": True}
    killed = ratchet(dies_after("skip", "update_actor", 0), **bad)
    assert killed.wait() == -9
    # a good reward now, but the actor has been told to wait
    done(ratchet(train__on_nan="skip", train__iterations=1, accept_changes=True))
    done(ratchet(**bad))
    history = ratchet.history
    others = UPDATES | ROWS - {"score", "advantages"}
    assert set(history.stages) == {(stage, k) for k in (0, 1) for stage in others}
    assert all("nan" in skip.reason for skip in history.commits(Skip))
    roles = history.state.weights
    assert {role: (roles[role].version, roles[role].digest) for role in ("actor", "critic")} == {
        role: (2, history.state.initial[role].digest) for role in ("actor", "critic")
    }
    done(ratchet(train__iterations=3, accept_changes=True))
    frame = ratchet.history.run.trajectories()
    assert frame.groupby("iteration")["score"].count().to_dict() == {0: 0, 1: 0, 2: 8}
    assert frame["prompt"].nunique() == 12, "every iteration draws the next prompts"


def test_prompts_of_a_generation_that_was_given_up_are_passed_over_once(ratchet: Ratchet) -> None:
    bad: dict[str, Any] = {
        "reward__function": "tests.rewards_of_responses:not_a_number",
        "train__on_nan": "skip",
        "train__iterations": 1,
        "algorithm__dynamic_sampling": {"max_prompts": 8},
    }
    done(ratchet(dies_after("skip", "update_actor", 0), **bad), -9)
    done(ratchet(**bad))
    assert set(ratchet.history.stages) == {("update_actor", 0), ("update_critic", 0)}
    assert ratchet.history.state.cursor == 8


def test_an_update_that_is_not_finite_can_be_passed_over(ratchet: Ratchet) -> None:
    """The actor's second step is; its first, which was taken, must leave no trace."""
    bad: dict[str, Any] = {"actor__lr": 1e30, "train__iterations": 3}
    assert "is nan" in done(ratchet(**bad), 1)
    killed = ratchet(dies_after("skip", "update_actor", 1), train__on_nan="skip", **bad)
    assert killed.wait() == -9
    done(ratchet(train__on_nan="skip", **bad))
    history = ratchet.history
    skipped = [(skip.stage, skip.iteration) for skip in history.commits(Skip)]
    assert skipped == [("update_actor", k) for k in range(3)]
    assert history.state.weights["critic"].digest != history.state.initial["critic"].digest
    actor = load_file(
        history.folder / history.state.snapshots[3]["actor"].key.replace("manifest.json", "model.safetensors")
    )
    initial = load_file(Path(ratchet.config.model.path) / "model.safetensors")
    assert all(actor[name].equal(initial[name]) for name in initial)


def test_the_best_snapshot_is_kept_and_exported(ratchet: Ratchet, workspace: Path) -> None:
    validation = {"data": str(workspace / "held_out.parquet"), "every": 1}
    keep = {"last": 1, "every": None, "best": 1}
    done(ratchet(train__iterations=4, validation=validation, checkpoint={"max_replay": 9, "keep": keep}))
    run = ratchet.history.run
    scores = run.validation().groupby("iteration")["score"].mean()
    best = max(range(1, 5), key=lambda version: (scores[version], version))
    # what is the best of the versions that are kept is decided when the next one is committed
    assert run.best_snapshot() == best
    assert set(run.state.snapshots) <= {best, 3, 4}
    folder = ratchet.processes.folder / "best"
    store = f"file://{ratchet.processes.folder}/runs"
    exported = ratchet.processes.cli("export", run.config.run.name, folder, "--best", "--store", store)
    assert f"the actor after {best} iterations" in done(exported)


def test_the_best_weights_without_a_snapshot_can_be_computed_again(ratchet: Ratchet, workspace: Path) -> None:
    reward = ratchet.processes.folder / "peak.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, metadata=None):\n"
        "    return float(metadata['iteration'] == 2)\n"
    )
    changes: dict[str, Any] = {
        "reward__function": str(reward),
        "validation": {"data": str(workspace / "held_out.parquet"), "every": 1},
        "checkpoint": {"every": 1, "background": False, "keep": {"last": 1, "every": None}},
        "critic__warmup_iterations": 1,
        "train__iterations": 3,
    }
    done(ratchet(**changes))
    run, store = ratchet.history.run, ["--store", f"file://{ratchet.processes.folder}/runs"]
    snapshots = sorted(run.state.snapshots)
    assert 2 not in snapshots
    folder = ratchet.processes.folder / "best"
    export = ratchet.processes.cli("export", run.config.run.name, folder, "--best", *store)
    assert export.wait() == 0, export.text
    told = " ".join(export.text.split())
    near = " and ".join(str(version) for version in snapshots)
    assert f"after 2 iterations, which have no snapshot (the nearest: {near});" in told
    assert "the one after 3 iterations is the best (0 instead of 1)" in told
    fork, resume = [part.split()[1:] for part in told.split("`")[1:4:2]]
    done(ratchet.processes.cli(*fork, *store))
    done(ratchet.processes.cli(*resume, *store))
    export = ratchet.processes.cli("export", "NEW", folder, "--best", *store)
    assert "the actor after 2 iterations is in" in done(export)
    assert "no snapshot" not in export.text
    assert "| updates of the policy | 1 in 2 iterations |" in (folder / "README.md").read_text()
    first, again = (url.store.iteration_state(1).stages["update_actor"] for url in (run, open_run(f"{store[1]}/NEW")))
    assert first.weights == again.weights, "on a CPU they are the same"


def test_a_run_ends_early_if_validations_do_not_get_better(ratchet: Ratchet, workspace: Path) -> None:
    stuck = {"data": str(workspace / "held_out.parquet"), "every": 1, "patience": 2}
    changes: dict[str, Any] = {"train__iterations": 9, "validation": stuck, "reward__function": "constant"}
    child = ratchet(**changes)
    assert child.wait() == 0
    assert "ends after 3 iterations: the last 2 validations were no better" in child.text
    assert "has 3 of 9 iterations" in child.text
    assert ratchet.history.state.iteration == 3
    assert [summary.state for summary in runs_of(ratchet.config.run.store)] == ["ended early"]
    assert ratchet(**changes).wait() == 0
    assert ratchet.history.state.iteration == 3, "it stays ended"


def test_taking_turns_changes_nothing(ratchet: Ratchet) -> None:
    done(ratchet())
    expected = ratchet.history.results
    done(ratchet(run__name="by-turns", actor__offload_when_idle=True, critic__offload_when_idle=True))
    assert ratchet.history.results == expected


def test_another_model_is_refused(ratchet: Ratchet, tmp_path: Path) -> None:
    done(ratchet(train__iterations=1))
    records = ratchet.history.records
    other = tiny.model_folder(tmp_path / "other", seed=1)
    refused = done(ratchet(model__path=str(other)), 2)
    assert "model.path" in refused
    assert ratchet.history.records == records, "not even a claim"


def _loads_something_else() -> None:
    """A checkpoint that is whole and valid, but not the state that the next update was computed from."""
    import torch

    from ratchet.rlhf.train.torch_engine import TorchEngine

    original = TorchEngine.load_state

    def load_state(self: TorchEngine, stored: Any) -> None:
        original(self, stored)
        if self.head == "policy":
            with torch.no_grad():
                next(iter(self.parameters.values()))[0, 0] += 1e-3

    TorchEngine.load_state = load_state  # type: ignore[method-assign]


def test_a_replay_that_differs(ratchet: Ratchet) -> None:
    changes = {"train__iterations": 3, "checkpoint__every": 2}
    done(ratchet(Fault("put", "index/000002"), **changes), -9)
    committed = History.of(ratchet.config).state.weights["actor"]
    assert committed.version == 3
    done(ratchet(**changes | {"train__iterations": 4}, setup=_loads_something_else), 1)
    (diverged,) = ratchet.history.commits(Diverged)
    assert (diverged.role, diverged.stage, diverged.iteration) == ("actor", "update_actor", 2)
    assert diverged.committed == committed.digest
    assert diverged.replayed != committed.digest
    then = ratchet.history.stages

    go_on = {"train__iterations": 4, "checkpoint__every": 2, "checkpoint__on_replay_mismatch": "continue"}
    done(ratchet(**go_on, setup=_loads_something_else))
    history = ratchet.history
    assert history.state.iteration == 4
    assert set(then) < set(history.stages)
    assert len(history.commits(Diverged)) == 2
    assert len(history.commits(Claim)) == 3


def _computes_on_a_gpu_that_rounds() -> None:
    """As far as the driver can tell: a replay gives slightly different weights."""
    from dataclasses import replace

    from ratchet.infra.workers.worker import Worker

    _loads_something_else()
    original = Worker.update

    def update(self: Worker, request: Any) -> Any:
        return replace(original(self, request), device="cuda")

    Worker.update = update  # type: ignore[method-assign]


def test_replays_that_need_not_repeat_their_bits_are_mentioned_once(ratchet: Ratchet) -> None:
    """The updates of iterations 3 and 4 are replayed, and give other weights."""
    changes = {"train__iterations": 6, "checkpoint__every": 3}
    done(ratchet(Fault("put", "index/000004"), **changes, setup=_computes_on_a_gpu_that_rounds), -9)
    resumed = ratchet(**changes, setup=_computes_on_a_gpu_that_rounds)
    assert resumed.wait() == 0, resumed.text
    assert [diverged.iteration for diverged in ratchet.history.commits(Diverged)] == [3, 4]
    assert resumed.text.count("need not give the same bits twice, except with run.deterministic") == 1


def test_what_is_committed_during_the_check_is_checked_too(ratchet: Ratchet) -> None:
    from ratchet.infra.execution.claims import claim
    from ratchet.infra.execution.driver import Driver, driving
    from ratchet.tasks.pipeline import dependencies

    config = ratchet.at(run__name="contested")
    with driving(config, dependencies(config)):
        pass
    slots: list[int] = []

    def check(driver: Driver) -> None:
        slots.append(driver.state.slot)
        if len(slots) == 1:  # another driver takes the run over while this one looks at it
            other = RunStore(ObjectStore(driver.store.url))
            other.log.read()
            claim(other, config, initial=driver.outside.initial_weights)

    with driving(config, dependencies(config), take_over=True, check=check):
        assert slots == [0, 2]


def test_two_runs_in_one_process_one_inside_the_other(ratchet: Ratchet, prefect_server: str) -> None:
    from ratchet.flows.iteration import iteration
    from ratchet.infra.execution.driver import driving
    from ratchet.tasks.pipeline import dependencies

    done(ratchet(train__iterations=3))
    alone = ratchet.history
    outer, inner = (ratchet.at(run__name=name, train__iterations=3) for name in ("outer", "inner"))
    with driving(outer, dependencies(outer)) as first:
        iteration(outer, 0)
        with driving(inner, dependencies(inner)) as second:
            assert second is not first
            iteration(inner, 0)
            iteration(outer, 1)
            with driving(outer, dependencies(outer)) as again:
                assert again is first
            iteration(inner, 1)
            iteration(inner, 2)
        iteration(outer, 2)
    for config in (outer, inner):
        history = History.of(config)
        history.check_sound()
        assert history.results == alone.results
