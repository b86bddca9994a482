"""Forking, planning, explaining, replaying, querying and vacuuming a run, through the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from ratchet.flows.rescore import begin, rescoring_config
from ratchet.flows.train import train
from ratchet.infra.runs.query import LIMITS, tables_of
from ratchet.infra.runs.run import open_run
from ratchet.infra.runs.sql import Statement
from ratchet.infra.runs.statements import StatementFailed, ask_here
from ratchet.infra.store.records import Fork
from ratchet.rlhf.config import RunConfig
from tests import tiny
from tests.history import History
from tests.integration.test_cli import Ratchet
from tests.processes import Fault, Processes
from tests.rewards import digits

REWARD = "reward.function=tests.rewards:digits"


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], prefect_server: str) -> Ratchet:
    monkeypatch.setattr("ratchet.flows.commands.console.console._width", 200)
    return Ratchet(monkeypatch, capfd)


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> RunConfig:
    return parent_config(workspace, tmp_path)


def parent_config(workspace: Path, folder: Path) -> RunConfig:
    return tiny.config(
        workspace,
        run__name="parent",
        run__store=f"file://{folder}/runs",
        reward__function="tests.rewards:letters",
        train__iterations=3,
        checkpoint={"every": 1, "keep": {"last": 1, "every": None}},
    )


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """The folder of a run that is done."""
    folder = tmp_path_factory.mktemp("trained")
    train(parent_config(workspace, folder))
    return folder / "runs" / "parent"


@pytest.fixture
def parent(trained: Path, config: RunConfig, tmp_path: Path) -> History:
    """The run, for one test alone; a run's folder can be moved."""
    shutil.copytree(trained, tmp_path / "runs" / "parent")
    (tmp_path / "parent.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return History.of(config)


def of(config: RunConfig, name: str) -> History:
    history = History.of(config.with_values({"run.name": name}))
    history.check_sound()
    return history


def test_a_fork_shares_what_came_before_and_nothing_is_copied(
    ratchet: Ratchet, parent: History, config: RunConfig, tmp_path: Path
) -> None:
    store = ("--store", config.run.store)
    before = sorted(path for path in parent.folder.rglob("*") if path.is_file())
    code, out, err = ratchet("fork", "parent", "--at", "1:score", "--run", "child", *store, REWARD)
    assert code == 0, err
    assert "ratchet resume child" in out
    assert [type(commit) for record in of(config, "child").records for commit in record.commits] == [Fork]
    code, _, err = ratchet("resume", "child", *store)
    assert code == 0, err

    run = of(config, "child").run
    theirs, ours = parent.run.trajectories(), run.trajectories()
    assert len(ours) == len(theirs)
    first = [frame[frame["iteration"] == 0].reset_index(drop=True) for frame in (theirs, ours)]
    pd.testing.assert_frame_equal(*first)
    same = ["trajectory_id", "response", "old_log_probs", "ref_log_probs", "values"]
    second = [frame[frame["iteration"] == 1].reset_index(drop=True) for frame in (theirs, ours)]
    pd.testing.assert_frame_equal(second[0][same], second[1][same])
    assert (second[0]["score"] != second[1]["score"]).any()
    mine = {
        path.relative_to(run.store.url.removeprefix("file://")).parts[1]
        for path in _files(run.store.url)
        if "iteration=000001" in str(path) and "trajectories" in str(path)
    }
    assert mine == {"score", "advantages"}
    after = sorted(path for path in parent.folder.rglob("*") if path.is_file())
    assert [path for path in after if path not in before] in ([], [parent.folder / "forks" / "child.json"])


def test_a_fork_with_another_reward_validates_again(ratchet: Ratchet, config: RunConfig, workspace: Path) -> None:
    """As `plan` says: the iteration's validation is out of date, too, and no reason to lose its generations."""
    store = ("--store", config.run.store)
    train(config.with_values({"validation": {"data": str(workspace / "held_out.parquet"), "every": 1}}))
    path = workspace.parent / "validated.yaml"
    run = of(config, "parent").run
    path.write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    code, out, _ = ratchet("plan", path, REWARD, "--iteration", "2")
    assert code == 0
    at = re.search(r"ratchet fork parent --at (\S+) --run NEW", out)
    assert at is not None, out
    assert at[1] == "2:score"
    assert ratchet("fork", "parent", "--at", at[1], "--run", "child", *store, REWARD)[0] == 0
    shared = set(of(config, "child").run.store.iteration_state(2).stages)
    assert shared == {"generate", "old_log_probs", "ref_log_probs", "values"}
    code, _, err = ratchet("resume", "child", *store)
    assert code == 0, err
    child = of(config, "child").run
    assert "validate" in child.store.iteration_state(2).stages
    columns = ["trajectory_id", "response", "score"]
    mine, theirs = (one.trajectories(iterations=[2], columns=columns) for one in (child, run))
    assert list(mine["response"]) == list(theirs["response"])
    assert (mine["score"] != theirs["score"]).any()


def test_a_fork_that_changes_nothing_gives_the_same_weights(
    ratchet: Ratchet, parent: History, config: RunConfig
) -> None:
    """Its snapshot is gone (the parent keeps one), so that the updates before are replayed from the parent's rows."""
    store = ("--store", config.run.store)
    for at, name in (("0", "whole"), ("2", "last"), ("1:update_actor", "update")):
        assert ratchet("fork", "parent", "--at", at, "--run", name, *store)[0] == 0
        assert ratchet("resume", name, *store)[0] == 0
        assert of(config, name).state.weights == parent.state.weights
    assert ratchet("fork", "update", "--at", "3", "--run", "grandchild", *store, "train.iterations=4")[0] == 0
    assert ratchet("resume", "grandchild", *store)[0] == 0
    run = of(config, "grandchild").run
    assert len(run.trajectories()) == 4 * config.trajectories_per_iteration
    assert list(run.metrics()["iteration"]) == [0, 1, 2, 3]


def test_a_snapshot_that_a_fork_needs_is_not_retired(ratchet: Ratchet, parent: History, config: RunConfig) -> None:
    store = ("--store", config.run.store)
    assert ratchet("fork", "parent", "--at", "3", "--run", "child", *store, "train.iterations=4")[0] == 0
    assert ratchet("train", parent.folder.parent.parent / "parent.yaml", "train.iterations=5")[0] == 0
    assert set(History.of(config).state.snapshots) == {5}
    assert (parent.folder / "checkpoints" / "actor").exists()
    assert ratchet("vacuum", "parent", *store)[0] == 0
    assert ratchet("resume", "child", *store)[0] == 0
    assert of(config, "child").state.iteration == 4


def test_a_fork_may_change_the_algorithm(ratchet: Ratchet, parent: History, config: RunConfig) -> None:
    """A critic ends, and one begins late."""
    store = ("--store", config.run.store)
    grpo = ("algorithm.advantage=grpo", "algorithm.kl.in_reward=null", "train.iterations=4")
    assert ratchet("fork", "parent", "--at", "2", "--run", "grpo", *store, *grpo)[0] == 0
    assert ratchet("resume", "grpo", *store)[0] == 0
    back = ("algorithm.advantage=gae", "train.iterations=6", "checkpoint.every=3")
    assert ratchet("fork", "grpo", "--at", "4", "--run", "ppo", *store, *back)[0] == 0
    code, _, err = ratchet("resume", "ppo", *store)
    assert code == 0, err
    state = of(config, "ppo").state
    assert state.starting["critic"].version == state.weights["actor"].version == 6
    assert state.weights["critic"].digest != parent.state.weights["critic"].digest


def test_a_critic_may_begin_late(ratchet: Ratchet, config: RunConfig, tmp_path: Path) -> None:
    store, path = ("--store", config.run.store), tmp_path / "parent.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert ratchet("train", path, "algorithm.advantage=rloo", "train.iterations=2")[0] == 0
    back = ("algorithm.advantage=gae", "train.iterations=4", "checkpoint.every=3")
    assert ratchet("fork", "parent", "--at", "2", "--run", "late", *store, *back)[0] == 0
    assert ratchet("resume", "late", *store)[0] == 0
    state = of(config, "late").state
    assert (state.initial["critic"].version, state.weights["critic"].version) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--at", "9"), "--at 9: the run has iterations 0 to 3 (the open one)"),
        (("--at", "one"), "--at one: write an iteration, such as 7"),
        (("--at", "1:scores"), "--at 1:scores: stages are validate, generate, reward_model, score"),
        (("--at", "3:score"), "--at 3:score: iteration 3 has not committed generate yet"),
        (("--at", "1:update_actor", REWARD), "score of iteration 1 is committed, but what it depends on has changed"),
    ],
)
def test_forks_that_cannot_be(
    ratchet: Ratchet, parent: History, config: RunConfig, arguments: tuple[str, ...], says: str
) -> None:
    code, _, err = ratchet("fork", "parent", "--run", "child", "--store", config.run.store, *arguments)
    assert code == 2
    assert says in err
    assert not (parent.folder.parent / "child").exists()


def test_plan_says_what_would_run_again_and_why(ratchet: Ratchet, parent: History, config: RunConfig) -> None:
    path = parent.folder.parent.parent / "parent.yaml"
    code, out, err = ratchet("plan", path, REWARD, "actor.lr=0.5")
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip() and "─" not in line}
    assert "stays" in lines["generate"]
    assert "reward.function: tests.rewards:letters -> tests.rewards:digits" in lines["score"]
    assert "stays" in lines["values"]
    assert "reads score" in lines["advantages"]
    assert "actor.lr: 0.001 -> 0.5" in lines["update_actor"]
    assert "ratchet fork parent --at 2:score" in out
    code, out, _ = ratchet("plan", path, "train.iterations=9", "checkpoint.every=2")
    assert "nothing that is committed would run again" in out
    code, out, _ = ratchet("plan", path, "algorithm.advantage=grpo")
    assert "the config has no such stage" in out


def test_explain_goes_down_to_data_seed_and_code(ratchet: Ratchet, parent: History, config: RunConfig) -> None:
    code, out, err = ratchet("explain", "parent", 2, "--store", config.run.store)
    assert code == 0, err
    manifest = parent.run.store.manifests(1)["generate"].fingerprint.parts
    for wanted in (
        "actor after 2 iterations",
        "iteration 1: update_actor",
        "iteration 1: generate",
        "iteration 0: update_actor",
        f"dataset = {manifest['dataset']}",
        "config.run.seed = 0",
        "config.actor.lr = 0.001",
        parent.state.initial["actor"].digest,
        f"code {parent.state.claim.code[:16]}",  # type: ignore[union-attr]
    ):
        assert wanted in out, wanted
    assert ratchet("explain", "parent", 7, "--store", config.run.store)[0] == 2


def test_replay_comes_out_the_same_or_names_what_does_not(
    ratchet: Ratchet, parent: History, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ("--store", config.run.store)
    records = len(parent.records)
    code, out, err = ratchet("reproduce", "parent", "--iteration", 1, *store)
    assert code == 0, err
    assert out.count("the same") == 8
    monkeypatch.setenv("REWARD_OF_LETTERS", "0.25")  # a reward that depends on more than its code
    code, out, err = ratchet("reproduce", "parent", "--iteration", 1, *store)
    assert code == 1
    assert "score: column score of it000001-p0000" in out
    assert "now 0.25" in out
    assert "first in score;" in err
    assert len(History.of(config).records) == records, "nothing is written"


def test_query_reads_in_place(ratchet: Ratchet, parent: History, config: RunConfig) -> None:
    store = ("--store", config.run.store, "--format", "json")
    sql = "select iteration, count(*) as n, avg(score) as mean from trajectories group by 1 order by 1"
    code, out, err = ratchet("query", "parent", sql, *store)
    assert code == 0, err
    frame = parent.run.trajectories()
    expected = frame.groupby("iteration")["score"].mean()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["n"] for row in rows] == [8, 8, 8]
    assert [row["mean"] for row in rows] == pytest.approx(list(expected), rel=1e-6)
    code, out, _ = ratchet("query", "parent", 'select max("critic/score/mean") as best from metrics', *store)
    assert json.loads(out)["best"] == pytest.approx(parent.run.metrics()["critic/score/mean"].max())
    code, _, err = ratchet("query", "parent", "select nothing from nowhere", *store)
    assert code == 2
    assert "tables are " in err
    code, _, err = ratchet("query", "parent", "select * from read_text('/etc/hostname')", *store)
    assert code == 2


def test_vacuum_deletes_what_nothing_reaches(ratchet: Ratchet, config: RunConfig, processes: Processes) -> None:
    """A driver that died left files; a snapshot that was retired is gone already."""
    for fault in (
        Fault("put", "manifests/iteration=000001/values"),
        Fault("put", "checkpoints/critic/000002.*/model.safetensors"),
    ):
        assert processes.train(config, fault).wait() == -9
    assert processes.train(config).wait() == 0
    history, store = History.of(config), ("--store", config.run.store)
    before = {path for path in history.folder.rglob("*") if path.is_file()}
    code, dry, _ = ratchet("vacuum", "parent", "--dry-run", *store)
    assert {path for path in history.folder.rglob("*") if path.is_file()} == before
    code, out, err = ratchet("vacuum", "parent", *store)
    assert code == 0, err
    gone = {path.relative_to(history.folder).as_posix() for path in before if not path.exists()}
    assert gone == set(dry.split()[:-4]) == set(out.split()[:-3])
    assert any(name.startswith("manifests/iteration=000001/values") for name in gone)
    assert any(name.startswith("checkpoints/critic/000002") for name in gone)
    assert not any(name.startswith(("log/", "run.json")) for name in gone)
    pd.testing.assert_frame_equal(open_run(history.run.store.url).trajectories(), history.run.trajectories())
    assert processes.train(config.with_values({"train.iterations": 4})).wait() == 0
    code, out, _ = ratchet("vacuum", "parent", *store)
    assert "0 files deleted" in out


def test_runs_are_listed_completed_and_queried_together(
    ratchet: Ratchet, parent: History, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tmp_path / "runs" / "parent", tmp_path / "runs" / "copy")
    (tmp_path / "runs" / "notes").mkdir()
    store = ("--store", config.run.store)
    code, out, err = ratchet("ls", *store, "--format", "json")
    assert code == 0, err
    listed = {row["run"]: row for row in map(json.loads, out.splitlines())}
    assert listed.keys() == {"parent", "copy"}
    assert {(row["state"], row["iterations"]) for row in listed.values()} == {("finished", "3/3")}

    sql = "select run, iteration, count(*) as n, avg(score) as score from trajectories group by all order by all"
    code, out, err = ratchet("query", "parent", "copy", sql, *store, "--format", "json")
    assert code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [(row["run"], row["iteration"], row["n"]) for row in answers] == [
        (run, iteration, 8) for run in ("copy", "parent") for iteration in range(3)
    ]
    assert [row["score"] for row in answers[:3]] == [row["score"] for row in answers[3:]]
    code, out, err = ratchet("query", "parent", "copy", "select * from nowhere", *store)
    assert code == 2
    assert "tables are advantages, generate, metrics" in err
    tables = tables_of([parent.run, open_run(f"{config.run.store}/copy")], [1])
    [frame] = ask_here(LIMITS, tables, Statement(sql))
    assert frame.to_dict("list") == {
        "run": ["copy", "parent"],
        "iteration": [1, 1],
        "n": [8, 8],
        "score": [pytest.approx(answers[1]["score"])] * 2,
    }
    with pytest.raises(StatementFailed, match="metrics does not exist"):
        ask_here(LIMITS, tables, Statement("select * from metrics"))

    monkeypatch.setenv("RATCHET_STORE", config.run.store)
    monkeypatch.setenv("_RATCHET_COMPLETE", "complete_bash")
    monkeypatch.setattr("__main__.__package__", "pytest")  # as `python -m pytest` starts it
    for command in ("status", "query", "report", "evaluate"):
        monkeypatch.setenv("COMP_WORDS", f"ratchet {command} p")
        monkeypatch.setenv("COMP_CWORD", "2")
        assert ratchet()[1].split() == ["parent"]


def _files(url: str) -> list[Path]:
    return [path for path in Path(url.removeprefix("file://")).rglob("*") if path.is_file()]


def test_rescore_compares_new_scores_with_the_old(ratchet: Ratchet, parent: History, config: RunConfig) -> None:
    store = ("--store", config.run.store)
    reward = ("--reward", "tests.rewards:digits")
    code, out, err = ratchet("rescore", "parent", *reward, "--run", "other", *store)
    assert code == 0, err
    run, old = of(config, "other").run, parent.run.trajectories(columns=["response", "score"])
    new = run.trajectories(columns=["response", "score"])
    assert list(new["response"]) == list(old["response"])
    assert list(new["score"]) == pytest.approx([digits("", text, "") for text in new["response"]])
    written = {path.parts[-3] for path in _files(run.store.url) if "trajectories" in path.parts}
    assert written == {"score"}
    assert run.state.weights["actor"].digest == parent.state.initial["actor"].digest
    summary = [line.split() for line in out.splitlines() if line.strip().startswith("all")]
    assert summary[0][1:4] == ["24", f"{old['score'].mean():.3f}", f"{new['score'].mean():.3f}"]
    means = (old["score"].mean(), new["score"].mean())
    assert "24 trajectories of parent are scored again: mean {:.3f} -> {:.3f}".format(*means) in out
    assert f"the new scores are in the run other, {run.store.url}/trajectories/score" in out
    metrics, scores = run.metrics(), new.groupby("iteration")["score"]
    for statistic in ("mean", "min", "max"):
        assert metrics[f"critic/score/{statistic}"].tolist() == pytest.approx(scores.agg(statistic).tolist())
    assert "timing_s/gen" in parent.run.metrics() and "timing_s/gen" not in metrics, "nothing is generated"
    assert ratchet("resume", "other", *store)[0] == 0  # it is done
    as_in_the_demo = "algorithm.rollout_correction={bypass: true}"  # which matters only if somebody learns
    assert ratchet("rescore", "parent", *reward, "--run", "bypass", *store, as_in_the_demo)[0] == 0
    code, _, err = ratchet("rescore", "parent", *reward, "--train", "--run", "learns", *store, as_in_the_demo)
    assert code == 2
    remedy = re.search(r"set (algorithm\.rollout_correction\.bypass): false", err)
    assert remedy is not None
    arguments = (*reward, "--train", "--run", "learns", *store, as_in_the_demo, f"{remedy[1]}=false")
    assert ratchet("rescore", "parent", *arguments)[0] == 0
    assert ratchet("rescore", "parent", *reward, "--run", "other", *store)[0] == 0


def test_trackers_are_for_training(
    parent: History, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(config.with_values({"tracking": "tensorboard"}))  # the run is done: this only claims it
    url = parent.run.store.url
    assert rescoring_config(url, "other", None, learn=False).tracking == ()
    assert rescoring_config(url, "other", None, learn=True).tracking == ("tensorboard",)


def test_rescore_can_learn_from_old_generations(
    ratchet: Ratchet, parent: History, config: RunConfig, processes: Processes
) -> None:
    """Killed and resumed, it uses the parent's generations; the weights are those of an undisturbed run."""
    store = ("--store", config.run.store)
    reward = ("--reward", "tests.rewards:digits", "--train")
    assert ratchet("rescore", "parent", *reward, "--run", "whole", *store)[0] == 0
    whole = of(config, "whole")
    begin(whole.run.config.with_values({"run.name": "killed"}))
    fault = Fault("put", "manifests/iteration=000001/values")
    assert processes.train(whole.run.config.with_values({"run.name": "killed"}), fault).wait() == -9
    assert ratchet("resume", "killed", *store)[0] == 0
    killed = of(config, "killed")
    assert killed.state.weights == whole.state.weights
    assert whole.state.weights["actor"].digest not in (
        parent.state.weights["actor"].digest,
        parent.state.initial["actor"].digest,
    )
    frame = whole.run.trajectories()
    assert list(frame["response"]) == list(parent.run.trajectories()["response"])
    assert frame["rollout_is_weights"].notna().all()
    later = frame[frame["iteration"] == 2]
    theirs, ours = later["rollout_log_probs"].explode(), later["old_log_probs"].explode()
    assert (theirs.astype(float) - ours.astype(float)).abs().max() > 1e-4, "another policy generated"
    assert (whole.run.metrics()["rollout_corr/k3_kl"].iloc[2]) > 0
