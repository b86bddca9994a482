"""Every command on a run that another trainer computes: it works, or says in one line why it cannot."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from starlette.testclient import TestClient

from ratchet import observe
from ratchet.flows.commands.console import console
from ratchet.flows.rescore import rescoring_config
from ratchet.flows.ui.documents import decoder
from ratchet.flows.ui.server import app
from ratchet.infra.observe.importing import import_run
from ratchet.infra.observe.sources.jsonl import JSONLines
from ratchet.infra.runs.comparison import compare
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError
from tests.browser import chromium, live, opened, visit
from tests.extras import needs
from tests.integration.test_cli import Ratchet
from tests.integration.test_cli import ratchet as recorded  # noqa: F401  (a fixture)
from tests.integration.test_sharing import hub, online  # noqa: F401  (fixtures)
from tests.rewards import letters
from tests.stored import RUN, STORED
from tests.tiers import sampled

Row = dict[str, Any]
PROMPTS, ANSWERS, STEPS = 3, 4, 3
TRAINER = "other"
REWARD = "tests.rewards:letters"


def rows(step: int, seed: int = 0) -> list[Row]:
    """Makes answers of ten characters to the same prompts in each step; later answers have more letters."""
    drawn = random.Random(f"{seed} {step}")
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"[: 36 - 9 * step]
    return [
        {"prompt": f"say {prompt}", "response": "".join(drawn.choices(alphabet, k=10)), "ground_truth": "abc"}
        for prompt in range(PROMPTS)
        for _ in range(ANSWERS)
    ]


def scored(answers: list[Row]) -> list[Row]:
    return [{"score": letters("", row["response"], "")} for row in answers]


def with_tokens(row: Row) -> Row:
    size = len(row["response"])
    return row | {
        "prompt_ids": [1, 2],
        "response_ids": list(row["response"].encode()),
        "rollout_log_probs": [-0.5] * size,
        "finish_reason": "stop",
    }


def write(store: str, name: str, seed: int = 0, *, tokens: bool = False, validates: bool = False) -> None:
    """Writes a run as a trainer does: `tokens` also advantages and a stage of its own."""
    config = {"lr": 1e-6, "optimizer": {"name": "adam"}}
    with observe.start(name, store, trainer=TRAINER, config=config) as run:
        for step in range(STEPS):
            if validates and step != 1:
                held_out = rows(step, seed + 10)
                run.validation([row | score for row, score in zip(held_out, scored(held_out), strict=True)])
            answers = rows(step, seed)
            written = run.step(10 * step).write("generate", [with_tokens(row) if tokens else row for row in answers])
            written.write("score", scored(answers))
            if tokens:
                size = len(answers[0]["response"])
                written.write("old_log_probs", [{"old_log_probs": [-0.25] * size} for _ in answers])
                written.write("advantages", [{"advantages": place - 5.5} for place in range(len(answers))])
                written.write("kindness", [{"kind": place % 2} for place in range(len(answers))])
            written.metrics({"actor/lr": 1e-6}).close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a store with the runs `texts`, `tokens`, `validated`, `other` (another seed), and `lines`, imported."""
    folder = tmp_path_factory.mktemp("observed")
    url = f"file://{folder}/runs"
    write(url, "texts")
    write(url, "tokens", tokens=True)
    write(url, "validated", validates=True)
    write(url, "other", seed=1, validates=True)
    lines = [
        {"step": step, "input": row["prompt"], "output": row["response"], "reward": score["score"], "more": 1}
        for step in range(STEPS)
        for row, score in zip(rows(step), scored(rows(step)), strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {"iteration": "step", "prompt": "input", "response": "output", "score": "reward"}
    import_run(JSONLines(folder / "rows.jsonl", names), "lines", url)
    return url


@pytest.fixture
def ratchet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], store: str, tmp_path: Path
) -> Callable[..., str]:
    """Runs a command that succeeds; gives what it printed."""
    monkeypatch.setattr(console, "_width", 160)
    monkeypatch.setenv("RATCHET_STORE", store)
    run = Ratchet(monkeypatch, capfd)

    def told(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert code == 0, err
        return out

    return told


def run_of(store: str, name: str) -> Run:
    return open_run(f"{store}/{name}")


ALL = ["texts", "tokens", "validated", "lines"]


@sampled(4)
@pytest.mark.parametrize("name", ALL)
def test_reading(ratchet: Callable[..., str], store: str, tmp_path: Path, name: str) -> None:
    run = run_of(store, name)
    assert len(run.trajectories()) == PROMPTS * ANSWERS * STEPS
    assert run.trajectories(1)["response"].tolist() == [row["response"] for row in rows(1)]
    assert f"{name}" in ratchet("ls")
    assert "say 0" in ratchet("show", name)
    assert "intact" in ratchet("verify", name)
    assert "0 files deleted" in ratchet("vacuum", name)
    assert f"│ {PROMPTS * ANSWERS}" in ratchet("query", name, "select count(*) from trajectories group by iteration")
    ratchet("dataset", name, "--kind", "kto", "--no-decontaminate", "-o", tmp_path / "rows.parquet")
    assert len(pq.read_table(tmp_path / "rows.parquet")) > PROMPTS
    ratchet("report", name, "-o", tmp_path / "report.html")
    ratchet("export", name, tmp_path / "atif", "--trajectories")
    ratchet("ingest", tmp_path / "atif", "-o", tmp_path / "again")
    again = pq.read_table(tmp_path / "again" / "trajectories.parquet")
    assert sorted(again["response"].to_pylist()) == sorted(run.trajectories()["response"])
    [first, *_] = sorted((tmp_path / "atif").iterdir())
    agent = json.loads(first.read_text())["agent"]
    assert agent == {"name": "jsonl" if name == "lines" else TRAINER, "version": "unknown"}


@pytest.mark.promise
def test_stages_are_those_that_the_run_has(ratchet: Callable[..., str], store: str) -> None:
    def columns(name: str) -> list[str]:
        return next(line for line in ratchet("status", name).splitlines() if line.split()[:1] == ["it"]).split()[1:]

    assert columns("texts") == ["gen", "score"]
    assert columns("validated") == ["valid", "gen", "score"]
    assert columns("tokens") == ["gen", "score", "old", "adv", "kindness"]
    assert f"computed by {TRAINER}" in ratchet("status", "texts")


@sampled(4)
@pytest.mark.parametrize("name", ALL)
def test_the_page(store: str, name: str) -> None:
    run = run_of(store, name)
    assert decoder(run) is None, "no model is looked for"
    with TestClient(app(store, "testserver")) as client:
        view = client.get("/api/run", params={"run": name}).json()
        assert view["trainer"] == ("jsonl" if name == "lines" else TRAINER)
        assert view["config"] == ({} if name == "lines" else {"lr": "1e-06", "optimizer.name": "adam"})
        assert view["main_keys"] == list(view["config"])
        shown = [stage["label"] for stage in view["stages"]]
        more = {"tokens": ["old", "adv", "kindness"], "lines": ["source"]}
        assert shown == ["gen", "score", *more.get(name, [])]
        for order in ("best", "longest", "shortest"):
            listed = client.get("/api/trajectories", params={"run": name, "iteration": 1, "order": order}).json()
            assert {line["length"] for line in listed["lines"]} == ({10} if name == "tokens" else {None})
        best = max(rows(1), key=lambda row: letters("", row["response"], ""))
        first = client.get("/api/trajectories", params={"run": name, "iteration": 1}).json()["lines"][0]
        assert letters("", first["response"], "") == letters("", best["response"], "")
        opened = client.get("/api/trajectory", params={"run": name, "iteration": 1, "id": first["id"]}).json()
        assert (opened["response"], opened["tokens"]) == (first["response"], None)
        known = {"advantage", "log-prob less the rollout's"} if name == "tokens" else set()
        assert set(opened["quantities"]) == known


@needs("chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(store: str, width: int, scheme: str) -> None:
    with (
        chromium() as browser,
        opened(browser, width=width, scheme=scheme) as page,
        live(page, store) as url,
    ):
        visit(page, f"{url}#run=texts&view=answers")
        page.wait_for_selector("#reader .response")
        assert f"{STEPS} of {STEPS} iterations closed, computed by {TRAINER}" in page.inner_text("#now")
        assert page.text_content("#reader .response") in {row["response"] for row in rows(STEPS - 1)}
        shown = page.inner_text("#trajectories .browser")
        assert "coloured" not in shown and "null" not in shown and "tokens" not in shown
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        page.click("[data-view=config]")
        cells = page.locator("#config td").all_inner_texts()
        assert cells == ["lr", "1e-06", "optimizer.name", "adam"]
        page.click("[data-view=curves]")
        page.wait_for_selector(".chart")
        titles = page.locator("#curves h3").all_inner_texts()
        assert titles == ["critic/score/mean: score, mean", "actor/lr: learning rate, actor"]
        assert page.is_hidden("#time"), "its times are unknown"


def test_a_run_without_prompts_scores_and_texts(ratchet: Callable[..., str], tmp_path: Path) -> None:
    """As little as a trainer may write."""
    little = f"file://{tmp_path}/little"
    with observe.start("little", little, trainer=TRAINER) as run:
        for step in range(2):
            run.step(step).write("generate", [{"response_ids": [1, 2, step]}]).close()
    for arguments in (
        ("status", "little"),
        ("show", "little"),
        ("report", "little", "-o", tmp_path / "little.html"),
        ("export", "little", tmp_path / "atif", "--trajectories"),
        ("query", "little", "select * from generate"),
    ):
        ratchet(*arguments, "--store", little)
    with TestClient(app(little, "testserver")) as client:
        listed = client.get("/api/trajectories", params={"run": "little", "iteration": 1}).json()["lines"]
        assert [(line["score"], line["length"]) for line in listed] == [(None, 3)]
        wanted = {"run": "little", "iteration": 1, "id": listed[0]["id"]}
        assert client.get("/api/trajectory", params=wanted).json()["prompt"] == ""


def test_a_run_that_goes_on(ratchet: Callable[..., str], tmp_path: Path) -> None:
    """Its number of steps is unknown, and the next step will have the stages of the last."""
    going = f"file://{tmp_path}/going"
    run = observe.start("going", going, trainer=TRAINER)
    try:
        with TestClient(app(going, "testserver")) as client:
            view = client.get("/api/run", params={"run": "going"}).json()
            assert (view["closed"], view["iterations"], view["stages"]) == (0, None, [])
        run.step(0).write("generate", rows(0)).write("score", scored(rows(0))).close()
    finally:
        run.close()
    with TestClient(app(going, "testserver")) as client:
        view = client.get("/api/run", params={"run": "going"}).json()
    assert (view["closed"], view["state"]) == (1, "stopped")
    assert [(stage["label"], stage["progress"]) for stage in view["stages"]] == [("gen", ""), ("score", "")]
    assert "going: 1 iteration" in ratchet("status", "going", "--store", going)


REFUSED = {
    "resume": [],
    "fork": ["--at", "1", "--run", "new"],
    "sweep": ["--at", "1", "--vary", "actor.lr=1e-5,1e-4"],
    "reproduce": ["--iteration", "0"],
    "plan": [],
    "explain": ["1"],
    "relabel": ["--run", "labels"],
    "evaluate": ["--data", "prompts.parquet"],
    "serve": ["--port", "0"],
    "ingest": ["-o", "ingested"],
    "export": ["exported"],
    "push": ["me/policy"],
    "stop": [],
    "vacuum": ["--take-over"],
}


@pytest.mark.promise
@pytest.mark.parametrize("command", REFUSED)
def test_what_only_its_trainer_can_do(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ratchet: Callable[..., str],
    tmp_path: Path,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = Ratchet(monkeypatch, capfd)(command, "texts", *REFUSED[command])
    assert code == 2
    assert err.startswith(f"error: {TRAINER} computes texts, so Ratchet ") and len(err.splitlines()) == 1
    assert "`ratchet " in err or "end that trainer's own process" in err
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_no_config_of_a_user_names_another_trainer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ratchet: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    tree = {"model": {"path": "m"}, "data": {"train": ["a.parquet"]}, "observed": {"trainer": TRAINER}}
    file.write_text(yaml.safe_dump(tree))
    code, _, err = Ratchet(monkeypatch, capfd)("train", file)
    assert code == 2 and "observed is set by `ratchet import` and `ratchet.observe` alone: remove it" in err


@pytest.mark.promise
def test_bisect(ratchet: Callable[..., str]) -> None:
    for name in ("texts", "tokens"):
        told = ratchet("bisect", name, "--reward", "tests.rewards:digits", "--examples", 1)
        assert "the gap opens in the generations of iteration" in told
        assert told.count("stricter 0.") == 1 and ("advantage" in told) == (name == "tokens")
        assert "ratchet fork" not in told
    assert "the rewards do not part" in ratchet("bisect", "lines", "--reward", REWARD)


def test_rescore(recorded: Ratchet, store: str, tmp_path: Path) -> None:  # noqa: F811
    """Without a model: the new run is Ratchet's own, can be continued, and is compared by what is known."""
    reward = tmp_path / "strict.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth == 'abc' and solution_str[0] in ground_truth)\n"
    )
    for name in ("texts", "other"):
        code, out, err = recorded(
            "rescore", name, "--reward", f"{reward}:score", "--run", f"{name}-2", "--store", store
        )
        assert code == 0, err
        assert f"{PROMPTS * ANSWERS * STEPS} trajectories of {name} are scored again" in out
    run = run_of(store, "texts-2")
    assert run.config.observed is None and run.trainer == TRAINER
    assert set(run.store.iteration_state(0).stages) == {"generate", "score"}
    expected = [float(row["response"][0] in "abc") for step in range(STEPS) for row in rows(step)]
    assert run.trajectories()["score"].tolist() == expected
    for arguments in (("resume", "texts-2"), ("plan", "texts-2"), ("reproduce", "texts-2", "--iteration", 1)):
        code, _, err = recorded(*arguments, "--store", store)
        assert code == 0, err
    code, out, err = recorded("status", "texts-2", "--store", store)
    assert next(line for line in out.splitlines() if line.split()[:1] == ["it"]).split()[1:] == ["gen", "score"]
    result = compare(run, run_of(store, "other-2"))
    assert (result.kind, result.same_seed, result.rewards, result.unknown) == ("train", None, None, ())
    assert result.answers == PROMPTS * ANSWERS


def test_what_rescore_refuses(store: str) -> None:
    for arguments, says in (
        ({"reward": None}, r"has no reward for it: name one with --reward"),
        ({"learn": True}, r"cannot train on it: leave --train out"),
        ({"overrides": ["train.updates=true"]}, r"data\.train is \[\]: name prompt files"),
        ({"overrides": ["validation.data=a.parquet"]}, r"data\.train is \[\]: name prompt files"),
    ):
        given: dict[str, Any] = {"reward": REWARD, "learn": False, **arguments}
        with pytest.raises(UserError, match=says) as refused:
            rescoring_config(f"{store}/texts", "again", **given)
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.promise
def test_two_runs_of_other_trainers_are_compared(ratchet: Callable[..., str], store: str) -> None:
    a, b = run_of(store, "validated"), run_of(store, "other")
    result = compare(a, b)
    assert (result.kind, result.iteration, result.prompts) == ("validation", 2, PROMPTS)
    means = [sum(score["score"] for score in scored(rows(2, seed))) / (PROMPTS * ANSWERS) for seed in (10, 11)]
    assert result.difference == pytest.approx(means[1] - means[0], abs=1e-6)
    assert result.same_seed is None and result.rewards is None and result.config == ()
    told = ratchet("compare", "validated", "other")
    assert "their seeds are not known" in told
    assert "whether both have the same reward is unknown, since other scored validated and other" in told
    assert "iteration 2 is step 20 of validated and step 20 of other" in told
    assert "flips are not shown: the reward is unknown" in told
    json.loads(ratchet("compare", "validated", "other", "--format", "json"))


def test_runs_of_different_trainers_are_paired_by_their_prompts(store: str) -> None:
    result = compare(run_of(store, "texts"), run_of(store, "lines"))
    assert result.answers == PROMPTS * ANSWERS and result.difference == 0
    assert "trainer other -> jsonl" in result.config
    assert result.unknown[-1] == "iteration 2 is step 20 of texts and step 2 of lines"


@pytest.mark.promise
def test_an_own_run_is_compared_with_one_of_another_trainer(tmp_path: Path) -> None:
    """Their numbers of prompts and data sources differ; the prompts are the same, in another order."""
    own = open_run(f"file://{STORED}/{RUN}")
    mine = own.trajectories(0)[::-1].to_dict("records")
    with observe.start("theirs", f"file://{tmp_path}", trainer=TRAINER) as run:
        answers = [{"prompt": row["prompt"], "response": row["response"]} for row in mine]
        run.step(1).write("generate", answers).write("score", [{"score": row["score"] + 1} for row in mine]).close()
    result = compare(own, open_run(f"file://{tmp_path}/theirs"))
    assert (result.kind, result.answers, result.unpaired["train"]) == ("train", len(mine), 0)
    assert result.difference == pytest.approx(1)
    assert result.rewards is None and not result.same_answers
    assert [line.split(",")[0] for line in result.unknown] == [
        "whether both have the same reward is unknown",
        "their configs are of different programs",
        "iteration 0 is step 1 of theirs",
    ]
    assert asdict(result)["config"] == ()


def test_nothing_in_common(store: str) -> None:
    with pytest.raises(UserError, match="no iteration of both has scored answers to prompts of the same text"):
        compare(open_run(f"file://{STORED}/{RUN}"), run_of(store, "texts"))


@pytest.mark.promise
def test_trajectories_on_the_hub(ratchet: Callable[..., str], online: Any) -> None:  # noqa: F811
    ratchet("push", "validated", "me/rows", "--trajectories")
    files = online.repositories["datasets/me/rows"].files
    card = files["README.md"].decode()
    assert f"learning with `{TRAINER}`" in card and "another-trainers-model" not in card
    assert "The policy started" not in card
    assert {f"data/train-{step:06d}.parquet" for step in range(STEPS)} <= set(files)
