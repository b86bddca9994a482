"""Reading a run in Python and on the command line: the small one in tests/data/stored, opened where it is."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import JsonValue
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import ratchet
from ratchet.flows.commands.tables import lineage, runs
from ratchet.flows.shown_metrics import line
from ratchet.infra.execution.driver import Driver
from ratchet.infra.execution.heartbeat import beating
from ratchet.infra.execution.stopping import Stopped, Stopping
from ratchet.infra.runs.forks import fork
from ratchet.infra.runs.listing import RunSummary
from ratchet.infra.runs.run import Run, no_run, open_run
from ratchet.infra.store.manifest import Fingerprint, Manifest
from ratchet.infra.store.records import Claim, ShardCommit, StageCommit
from ratchet.infra.store.run_store import RunStore
from ratchet.rlhf.config import parse_config, stored_config
from ratchet.rlhf.errors import UserError, counted
from ratchet.rlhf.metrics import timer
from ratchet.rlhf.named import load_named
from ratchet.tasks.analysis.explain import Origin
from ratchet.tasks.close import iteration_metrics
from ratchet.tasks.failures import told
from ratchet.tasks.pipeline import STAGES, stage_called
from ratchet.tasks.stage import Stage
from ratchet.tasks.stages.generate import GENERATE
from ratchet.tasks.stages.greedy_baseline import GREEDY_BASELINE
from ratchet.tasks.stages.reward_model import REWARD_MODEL
from ratchet.tasks.stages.score import SCORE
from ratchet.tasks.stages.validate import VALIDATE
from tests.integration.test_cli import Ratchet
from tests.stored import STORED as STORE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run() -> Run:
    return open_run(f"file://{STORE}/run")


def test_a_run_that_does_not_exist_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run at file://.*/rum: is it run\?$"):
        open_run(f"file://{STORE}/rum")
    with pytest.raises(UserError, match=r"check the name, and the store file://.*stored .*`ratchet ls`"):
        open_run(f"file://{STORE}/countdown")
    (tmp_path / "runs" / "countdown").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no run at contdown: give its folder, such as file://\./runs/countdown$"):
        open_run("contdown")
    assert "check the name" in str(no_run("nowhere://store/run"))  # the store cannot be listed


def test_a_run_tells_what_it_is(run: Run) -> None:
    assert repr(run) == f"Run('file://{STORE}/run', 1 of 3 iterations)"


def test_iterations_are_given_as_a_number_or_several(run: Run) -> None:
    one = run.trajectories(iterations=1, columns=["score"])
    assert one.equals(run.trajectories([1], ["score"]))
    assert len(run.trajectories(range(2))) == len(run.trajectories())
    for missing in (7, [0, 7], [-1]):
        with pytest.raises(UserError, match=r"no iteration -?\d: the run has iterations 0 to 1 \(1 is open\)"):
            run.trajectories(missing)


def test_a_query_names_what_is_near(run: Run) -> None:
    assert run.query("select count(*) as n from trajectories")["n"][0] == len(run.trajectories())
    for sql, says in (
        ("select scor from trajectories", 'Nearest columns: "score"'),
        ("select score from trajectorie", 'Did you mean "trajectories"?'),
        ("run", "write SQL, such as `select"),
    ):
        with pytest.raises(UserError) as refused:
            run.query(sql)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"'run' is a text, not a run: query\(open_run\(URL\), SQL\)"):
        ratchet.query("run", "select 1")


def test_the_module_lists_its_names() -> None:
    assert dir(ratchet) == sorted([*ratchet.__all__, "__version__"])
    command = [sys.executable, "-c", "import ratchet; print(ratchet.__version__)"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed.strip() == str(ratchet.__version__)
    assert printed[0].isdigit()


def test_numbers_have_their_nouns() -> None:
    assert [counted(number, "iteration") for number in (0, 1, 2)] == ["0 iterations", "1 iteration", "2 iterations"]


class Command:
    """Runs a command on a copy of the stored run, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
        shutil.copytree(STORE, folder / "stored")
        monkeypatch.chdir(folder / "stored")  # the run's config has relative paths
        self.folder, self.ratchet = folder / "stored", Ratchet(monkeypatch, capfd)

    def __call__(self, *arguments: object) -> str:
        code, out, err = self.ratchet(*arguments, "--store", f"file://{self.folder}")
        assert code == 0, err
        return out

    def error(self, *arguments: object) -> str:
        code, _, err = self.ratchet(*arguments, "--store", f"file://{self.folder}")
        assert code == 2
        return err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capfd, tmp_path)


def test_explain_is_whole_in_a_pipe_and_read_by_programs(command: Command) -> None:
    run = open_run(f"file://{command.folder}/run")
    values = run.store.manifests(0)["update_actor"].config
    tree = command("explain", "run", 1)
    assert f"config.algorithm.loss = {values['algorithm.loss']}\n" in tree
    document = json.loads(command("explain", "run", 1, "--format", "json"))
    assert document["what"] == "actor after 1 iteration"
    assert document["made_from"][0]["what"] == "iteration 0: update_actor"
    assert f"config.algorithm.loss = {values['algorithm.loss']}" in document["made_from"][0]["details"]


def test_explain_wraps_on_a_terminal() -> None:
    origin = Origin("actor", ("x" * 50 + " " + "y" * 50,))
    console = Console(file=io.StringIO(), force_terminal=True, width=40, soft_wrap=True)
    lineage(console, origin, "tree")
    shown = Text.from_ansi(console.file.getvalue()).plain  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 40
    assert (shown.count("x"), shown.count("y")) == (50, 50)


def test_the_list_of_commands_has_whole_sentences(command: Command) -> None:
    _, out, _ = command.ratchet("--help")
    assert "..." not in out.split("Commands:")[1]
    assert "which stores and engines work" in " ".join(out.split())


def test_plan_takes_a_run_and_says_in_words_what_changed(command: Command) -> None:
    out = command("plan", "run", "reward.function=constant")
    assert "reward.function: null -> constant" in out
    assert "of the reward" not in out, "the name says it"
    assert "`ratchet fork run --at 1:score --run NEW" in out
    out = " ".join(command("plan", "run", "data.train=[held_out.parquet]").split())
    assert "the prompts in data.train (held_out.parquet) changed" in out
    assert not re.search("[0-9a-f]{16}", out)
    assert "nothing that is committed would run again" in command("plan", "run")
    assert "--run goes with a CONFIG.yaml" in command.error("plan", "run", "--run", "other")
    assert "is it run?" in command.error("plan", "rum")


def test_a_name_that_a_file_lacks_is_named_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(): ...")
    with pytest.raises(UserError, match=r"mine.py:compute: .*mine.py has no compute: name a function") as refused:
        load_named(
            f"{tmp_path}/mine.py:compute", "reward.function", "ratchet.rlhf.rewards", ["compute_score"], ["math"]
        )
    assert "mine_" not in str(refused.value), "the name of the module is of no use to people"


def test_a_store_that_does_not_exist_has_no_list(command: Command) -> None:
    code, _, said = command.ratchet("ls", "--store", "nothere")
    assert (code, said.strip()) == (
        2,
        "error: --store nothere: there is no such folder: name the folder of your runs",
    )
    (command.folder / "empty").mkdir()
    code, out, _ = command.ratchet("ls", "--store", command.folder / "empty")
    assert code == 0
    assert "there are no runs" in out


def test_the_list_tells_runs_that_failed_from_those_that_never_started(command: Command) -> None:
    command("fork", "run", "--at", "1", "--run", "child")
    rows = {row["run"]: row for row in map(json.loads, command("ls", "--format", "json").splitlines())}
    assert rows["child"]["state"] == "not started"
    assert rows["child"]["problem"] == "a fork; `ratchet resume` starts it"
    log = RunStore.at(f"file://{command.folder}/run").log
    log.read()
    ended = (
        (UserError("reward.function mine:\nrow 3 is\x1b[2J wrong"), "failed"),
        (Stopped.as_asked("the same command"), "stopped"),
    )
    for error, state in ended:
        with pytest.raises(type(error)), beating(log, Stopping("")):
            raise error
        [row] = [row for row in map(json.loads, command("ls", "--format", "json").splitlines()) if row["run"] == "run"]
        assert row["state"] == state
        why = "reward.function mine: row 3 is\\x1b[2J wrong"
        assert (f"run: failed: {why}" in command("ls")) == (state == "failed")
        assert (f"no driver is at work; the last one failed: {why}" in command("status", "run")) == (state == "failed")


@pytest.mark.parametrize(("width", "lines"), [(80, 2), (120, 1), (None, 1)])
def test_a_run_is_a_line_or_two_that_break_at_words(width: int | None, lines: int) -> None:
    best = ("val-core/a_dataset_whose_name_is_long/reward/mean@16", 0.5)
    long_name = "a-run-whose-name-is-so-long-that-no-other-column-fits-beside-it-on-a-terminal"
    listed = [
        RunSummary("countdown", "", "ended early", 12, 100, best, 7300.0),
        RunSummary("日本語", "", "running", 1, 2, ("val-core/a/reward/mean@1", 0.25), 1.0),
        RunSummary(long_name, "", "finished", 2, 2, None, 1.0),
    ]
    console = Console(file=io.StringIO(), force_terminal=width is not None, width=width or 80, soft_wrap=True)
    runs(console, listed[:2], "", "table")
    text = Text.from_ansi(console.file.getvalue()).plain  # type: ignore[attr-defined]
    first, second = ["countdown", "ended early", "12/100", "2 h"], [f"0.500 {best[0]}"]
    shown = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    assert shown[0] == ["run", "state", "iterations", "age", "best validation"]
    assert shown[1 : 1 + lines] == ([[*first, *second]] if lines == 1 else [first, second])
    assert shown[-1] == ["日本語", "running", "1/2", "1 s", "0.250 val-core/a/reward/mean@1"]
    assert len(shown) == 2 + lines
    console.file = io.StringIO()
    runs(console, listed, "", "table")
    text = Text.from_ansi(console.file.getvalue()).plain
    assert max(map(cell_len, text.splitlines())) <= (width or 200)
    shown = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    cells = [[long_name], ["finished", "2/2", "1 s"]]
    assert shown[-lines:] == (cells if lines == 2 else [[*cells[0], *cells[1]]])


@pytest.mark.parametrize("stage", ["advantages", "adv"])
def test_a_stage_is_known_by_each_of_its_names(command: Command, stage: str) -> None:
    command("fork", "run", "--at", f"1:{stage}", "--run", "child")
    shared = open_run(f"file://{command.folder}/child").state.stages
    assert "score" in shared and "advantages" not in shared


def test_the_names_of_stages_are_not_ambiguous() -> None:
    config = parse_config({"model": {"path": "model"}, "data": {"train": "prompts"}}, "here")
    for stage in STAGES:
        for name in (stage.name, stage.label, timer(stage.name).removeprefix("timing_s/")):
            assert stage_called(name, config) is stage


def test_show_says_how_many_it_shows(command: Command) -> None:
    assert "iteration 0: the first 3 of 8 trajectories" in command("show", "run", "--limit", 3)
    assert "iteration 0: 8 trajectories" in command("show", "run")
    half = "trajectory_id like '%s00'"
    assert "iteration 0: the first 2 of 4 that match, of 8" in command("show", "run", "--limit", 2, "--where", half)
    assert 'Nearest columns: "score"' in command.error("show", "run", "--where", "scor > 0")
    nothing = ("show", "run", "--where", "score > 100")
    assert "iteration 0: 0 that match, of 8 trajectories" in " ".join(command(*nothing).split())
    assert command(*nothing, "--format", "json") == ""


def test_show_says_what_it_leaves_out(command: Command) -> None:
    store = RunStore.at(f"file://{command.folder}/new")
    claimed = open_run(f"file://{command.folder}/run").state.claim
    assert claimed is not None
    store.log.claim(claimed)
    generated = {
        "trajectory_id": ["a", "b", "c", "d"],
        "prompt": ["Who?"] * 4,
        "messages": [json.dumps([{"role": "user", "content": "Who?"}])] * 4,
        "response": ["Me."] * 4,
        "rollout_error": [None, "it fell", None, "it fell"],
    }

    def commit(stage: Stage, number: int, rows: Mapping[str, object]) -> None:
        shard = store.write_shard(0, stage.name, number, 0, pa.table(rows))
        store.commit(ShardCommit(iteration=0, stage=stage.name, shard=number, data=shard, term=1, seconds=0.0))

    commit(GENERATE, 0, generated)
    out = command("show", "new")
    assert "iteration 0: 4 trajectories" in out and out.count("it fell") == 2 and "left out" not in out
    assert "rollout_error" not in command("show", "run"), "which is null in all rows"
    commit(SCORE, 0, {"trajectory_id": ["a"], "score": pa.array([1.0], pa.float32())})
    out = command("show", "new")
    assert "iteration 0: 1 trajectories" in out
    begin = "\n2 that failed and 1 that a stage has no row of are left out: `ratchet query "
    *_, listing = out[out.index(begin) :].rstrip("`\n").split("`ratchet ")
    assert command(*shlex.split(listing)).count("it fell") == 2
    assert "left out" not in command("show", "new", "--format", "json")


SYSTEM = "<|im_start|>system\n" + "You may call a tool.\n" * 11 + "<|im_end|>\n"
QUESTIONS = ("Who?\nAnd why?", "Who?\nAnd when?")


@pytest.mark.parametrize("asked", [QUESTIONS, QUESTIONS[:1] * 2])
def test_show_folds_what_all_prompts_begin_with(command: Command, asked: Sequence[str]) -> None:
    store = RunStore.at(f"file://{command.folder}/new")
    claimed = open_run(f"file://{command.folder}/run").state.claim
    assert claimed is not None
    rows = {
        "trajectory_id": ["a", "b"],
        "messages": [json.dumps([{"role": "user", "content": question}]) for question in asked],
        "prompt": [f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n" for question in asked],
        "response": ["Me.", "You."],
    }
    store.log.claim(claimed)
    shard = store.write_shard(0, GENERATE.name, 0, 0, pa.table(rows))
    store.commit(ShardCommit(iteration=0, stage=GENERATE.name, shard=0, data=shard, term=1, seconds=0.0))
    out = command("show", "new")
    begin = f"{SYSTEM}<|im_start|>user\n"
    assert out.count(f"[14 lines, {len(begin)} characters: --full]") == 2
    assert "You may call a tool." not in out and out.count("Who?") == 2, "nothing of the question is folded"
    for whole in (command("show", "new", "--full"), command("show", "new", "--format", "json")):
        assert whole.count("You may call a tool.") == 2 * 11 and "[14 lines" not in whole


def test_a_dataset_says_what_it_left_out(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "new" / "labelled.parquet"
    out = command("dataset", "run", "--kind", "kto", "--min-score", 9, "--output", path)
    table = pq.read_table(path)
    assert f"{counted(len(table), 'row')} in {path}: countdown {len(table)}" in out
    assert f"{len(open_run(f'file://{command.folder}/run').trajectories(0))}   trajectories" in out
    assert table["label"].to_pylist() == [False] * len(table) != []
    assert "--margin is the difference of a pair, and --kind kto makes none" in command.error(
        "dataset", "run", "--kind", "kto", "--margin", 1, "-o", path
    )
    lacking = command.error("dataset", "run", "--kind", "sft", "--min-score", 9, "-o", tmp_path / "none.parquet")
    assert "groups: no whole answer has the smallest score" in lacking or "every answer is cut off" in lacking
    assert not (tmp_path / "none.parquet").exists()
    for output, says in ((path / "in_a_file.parquet", "cannot write a folder at"), (tmp_path / "a", "with .parquet")):
        assert says in command.error("dataset", "run", "--kind", "sft", "-o", output)


def test_status_explains_what_it_shows(command: Command) -> None:
    assert "13/?" not in command("status", "run")
    store = RunStore.at(f"file://{command.folder}/new")
    claimed = open_run(f"file://{command.folder}/run").state.claim
    assert claimed is not None
    store.log.claim(claimed)
    shard = store.write_shard(0, VALIDATE.name, 0, 0, pa.table({"trajectory_id": ["a"]}))
    store.commit(ShardCommit(iteration=0, stage=VALIDATE.name, shard=0, data=shard, term=1, seconds=0.0))
    assert "13/?: the number of shards depends on the prompts of validation.data" in command("status", "new")


def test_each_kind_of_failure_is_told_with_the_first(command: Command) -> None:
    store, claimed = RunStore.at(f"file://{command.folder}/new"), open_run(f"file://{command.folder}/run").state.claim
    assert claimed is not None
    config = stored_config(claimed.config, "test")
    store.log.claim(claimed)
    ids = ["it000000-p00000-s00", "it000000-p00001-s00"]

    def told_of(stage: Stage, columns: Mapping[str, list[str | None]], metrics: Mapping[str, float]) -> list[str]:
        rows = pa.table({"trajectory_id": ids, **{name: pa.array(column) for name, column in columns.items()}})
        place = {"iteration": 0, "stage": stage.name, "term": 1}
        shard = store.write_shard(0, stage.name, 0, 0, rows)
        known = {"attempt": 0, "fingerprint": Fingerprint(parts={}), "config": {}, "shards": (shard,)}
        manifest = Manifest(**place, **known, metrics=dict(metrics))
        committed = ShardCommit(**place, shard=0, data=shard, seconds=0.0)
        digest = manifest.fingerprint.digest
        commit = StageCommit(iteration=0, stage=stage.name, manifest=store.write_manifest(manifest), fingerprint=digest)
        store.commit(committed, commit)
        return list(told(store, config, manifest))

    assert told_of(VALIDATE, {"reward_error": ["no number", None]}, {"val/reward_errors": 1.0}) == [
        f"the validation before iteration 0: the reward failed for 1 trajectory; the first: {ids[0]}: no number"
    ]
    of_rollouts = {"rollout_error": [None, f"left ({ids[1]})"], "tool_error": [None, "f raised KeyError: 1 at f.py:3"]}
    counts = {"rollout/errors": 1.0, "rollout/tool_errors": 1.0, "rollout/first_turn_clip_ratio": 0.1}
    of_rollout = told_of(GENERATE, of_rollouts, counts)
    assert of_rollout == [
        f"iteration 0: the environment failed for 1 trajectory; the first: left ({ids[1]})",
        f"iteration 0: a tool failed for 1 trajectory; the first: {ids[1]}: f raised KeyError: 1 at f.py:3",
    ]
    assert told_of(SCORE, {"reward_error": [None, "no number"]}, {}) == [], "nothing is counted"
    assert told_of(GREEDY_BASELINE, {"greedy_error": ["a", "b"]}, {"reward/greedy_errors": 2.0}) == [
        f"iteration 0: the reward failed for 2 trajectories; the first: {ids[0]}: a"
    ]
    store.close(counts)
    out = command("status", "new")
    for text in (*of_rollout, "the validation before iteration 0: the reward failed for 1 trajectory"):
        assert text in out
    assert "rollout/tool_errors" in " ".join(out.split())
    assert line(counts) == "rollout/errors 1  rollout/tool_errors 1"


def commit_stages(store: RunStore, claimed: Claim, began: float, *stages: Stage, **metrics: float) -> None:
    """Claim the run, and commit stages of iteration 0 that take 10 seconds each, with pauses of 10."""
    store.log.claim(claimed)
    for stage in stages:
        place, parts = {"iteration": 0, "stage": stage.name}, Fingerprint(parts={})
        times = {"began": began, "ended": began + 10, "seconds": 9.0}
        known = {"term": store.log.term, "attempt": 0, "fingerprint": parts, "config": {}, "metrics": metrics}
        manifest = store.write_manifest(Manifest(**place, **known, **times))
        store.commit(StageCommit(**place, manifest=manifest, fingerprint=parts.digest))
        began += 20


def test_time_that_this_run_did_not_spend_is_no_time_of_the_iteration(command: Command) -> None:
    store, claimed = RunStore.at(f"file://{command.folder}/new"), open_run(f"file://{command.folder}/run").state.claim
    assert claimed is not None
    config = stored_config(claimed.config, "test")
    commit_stages(store, claimed, 100.0, GENERATE, REWARD_MODEL)
    commit_stages(store, claimed, 90_000.0, SCORE)
    metrics = iteration_metrics(Driver(config, store), 0)
    assert metrics["perf/time_per_step"] == metrics["timing_s/step"] == 30.0 + 10.0, "without the pause between them"
    assert metrics["timing_s/stages"] == 27.0

    child = RunStore.at(f"file://{command.folder}/child")
    fork(store, child.objects, claimed.config, 0, [GENERATE.name], "0:score")
    commit_stages(child, claimed, 95_000.0, SCORE, **{"perf/prompt_tokens": 6.0, "perf/response_tokens": 4.0})
    metrics = iteration_metrics(Driver(config, child), 0)
    assert metrics["timing_s/step"] == 10.0 and metrics["timing_s/stages"] == 9.0, "without the parent's generation"
    assert "timing_s/gen" not in metrics
    assert metrics["perf/total_num_tokens"] == 10.0 and "perf/throughput" not in metrics, "half of the work is no speed"


def test_scores_have_the_metrics_of_learning_where_nothing_is_learned() -> None:
    shards: list[dict[str, JsonValue]] = [
        {"sum_of_scores": 1.5, "scored": 2, "extremes": [0.5, 1.0]},
        {"sum_of_scores": 0.0, "scored": 0},
    ]
    mean = {"reward/mean": 0.75, "critic/score/mean": 0.75}
    assert SCORE.metrics_of(shards) == mean | {"critic/score/min": 0.5, "critic/score/max": 1.0}


def test_nothing_is_shown_as_minus_zero() -> None:
    assert line({"critic/vf_explained_var": -0.001}) == "critic/vf_explained_var 0.00"
    assert line({"critic/vf_explained_var": -0.01}) == "critic/vf_explained_var -0.01"
