"""The live page in a real Chromium, of runs unlike others: dialogues, fits, runs that ended early, damaged ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from ratchet.infra.runs.run import open_run
from tests.agents import LONG
from tests.browser import live, opened, visit, wait_until
from tests.integration.test_listing import validated

CURVES = """Object.fromEntries([...document.querySelectorAll("#curves .chart")].map(place =>
    [place.parentElement.querySelector("h3").textContent,
     [place.plot.x, ...place.plot.series.map(series => series.values)]]))"""
SCALES = """[...document.querySelectorAll(".chart")].map(place =>
    [place.plot.x.length, ...place.plot.xs])"""
TURNS = "all => all.map(li => [...li.querySelectorAll('pre')].map(pre => pre.textContent))"
LISTED = "[...document.querySelectorAll('#list button')].map(button => button.dataset.id)"
LEFT_OUT = "Left out, because it could not be read: "


@pytest.fixture(scope="module", autouse=True)
def made(shown_runs: Path, other_runs: Path) -> None:
    """All runs are made before Chromium starts."""


@pytest.fixture
def damaged(shown_runs: Path, tmp_path: Path) -> Path:
    """A copy of the run `ppo`, to be damaged, beside a whole one."""
    for name in ("ppo", "whole"):
        shutil.copytree(shown_runs / "ppo", tmp_path / name)
    return tmp_path / "ppo"


def row_of(page: Page, name: str) -> str:
    """What the list says of a run, and, when asked, of its problem."""
    problem = page.get_attribute(f"li[data-name={name}] .state", "title") or ""
    return f"{page.inner_text(f'#list-of-runs li[data-name={name}]')} {problem}"


def test_a_dialogue_shows_who_wrote_what(page: Page, other_runs: Path) -> None:
    frame = open_run(f"file://{other_runs}/dialogue").trajectories().set_index("trajectory_id")
    row = max((row for _, row in frame.iterrows()), key=lambda row: len(row["turns"]))
    assert {turn["role"] for turn in row["turns"]} == {"policy", "environment"}
    with live(page, f"file://{other_runs}") as url:
        visit(page, f"{url}#run=dialogue&id={row.name}")
        page.wait_for_selector("#reader .token")
        turns = page.locator("#reader .turns li").evaluate_all(TURNS)
        said = [turn["content"] for turn in row["turns"]]
        assert turns == [[said[place], *said[place + 1 : place + 2]] for place in range(0, len(said), 2)]
        facts = page.locator("#reader .turns .facts").all_inner_texts()
        for number, (fact, reward) in enumerate(zip(facts, row["turn_rewards"], strict=True), 1):
            assert fact.startswith(f"turn {number} · ") and fact.endswith(f" · reward {reward:g}")
            assert all(f" · {kind} " in fact for kind in ("model", "tool", "waiting"))
        assert page.locator("#reader .track .kind").count() == 3 * len(facts)
        assert f"environment {row['score']:g}" in page.inner_text("#reader dl")
        page.select_option("#quantity", "written by the policy")
        tokens = page.locator("#reader .token")
        assert tokens.count() == len(row["response_mask"])
        titles = tokens.evaluate_all("all => all.map(token => token.title)")
        assert titles == [f"written by the policy {written}" for written in row["response_mask"]]
        colours = tokens.evaluate_all("all => all.map(token => getComputedStyle(token).backgroundColor)")
        coloured = [colour != "rgba(50, 120, 220, 0)" for colour in colours]
        assert coloured == [bool(written) for written in row["response_mask"]], "what it was told has no colour"
        curves = page.evaluate(CURVES)
        assert curves["num_turns/mean: turns of a dialogue, the prompt included, mean (turns)"][1] == [
            pytest.approx(frame["turns"].map(len).mean() + 1, rel=1e-3)
        ]
        assert page.evaluate(SCALES), "there are charts"
        for length, low, high in page.evaluate(SCALES):
            assert length == 1 and -1 <= low < 0 < high <= 1, "the only iteration is in the middle"


def test_an_agent_shows_its_conversations_and_the_error_that_ended_it(page: Page, other_runs: Path) -> None:
    run = open_run(f"file://{other_runs}/agent")
    frame = run.trajectories(0, ["trajectory_id", "calls", "turn_seconds", "rollout_error"])
    [failed, *more] = frame[frame["rollout_error"].notna()].to_dict("records")
    assert not more and len(failed["calls"]) == 1, "what it said before it failed is stored"
    answered = frame[frame["calls"].map(lambda calls: any('"role": "tool"' in call["asked"] for call in calls))]
    main = answered.iloc[0]
    other = f"{main['trajectory_id']}-b01"
    with live(page, f"file://{other_runs}") as url:
        visit(page, f"{url}#run=agent&id={main['trajectory_id']}")
        page.wait_for_selector("#reader .timeline")
        called = page.locator("#reader .turns").first.locator(".call")
        made = [call for one in main["calls"] for call in json.loads(one["answer"]).get("tool_calls") or ()]
        assert made and called.count() == len(made)
        for place, call in enumerate(made):
            assert called.nth(place).locator(".name").inner_text() == call["function"]["name"]
            assert call["function"]["arguments"] in called.nth(place).locator("summary").inner_text()
        assert not called.first.evaluate("details => details.open"), "its answer is long"
        assert called.first.locator("pre").last.text_content() == LONG
        headings = page.locator("#reader .conversation").all_inner_texts()
        assert [text.split()[0] for text in headings] == [main["trajectory_id"], other]
        page.click("#reader .conversation button")
        wait_until(page, f"document.querySelector('#reader h3').textContent.startsWith('{other} ')")
        visit(page, f"{url}#run=agent&id={failed['trajectory_id']}")
        page.wait_for_selector("#reader .timeline [role=alert]")
        assert "ValueError: it lost its way" in page.inner_text("#reader .timeline [role=alert]")
        assert page.locator("#reader .turns li").count() == 1


@pytest.mark.parametrize(("name", "loss"), [("sft", "sft/loss"), ("judge", "reward/loss")])
def test_a_fit_shows_its_metrics(page: Page, other_runs: Path, name: str, loss: str) -> None:
    run = open_run(f"file://{other_runs}/{name}")
    metrics = run.metrics()
    with live(page, f"file://{other_runs}") as url:
        visit(page, f"{url}#run={name}")
        assert "fit" in row_of(page, name)
        assert "a fit, 2 rounds" in page.inner_text("#now")
        curves = page.evaluate(CURVES)
        assert loss in curves
        assert curves == {
            metric: [[0, 1], pytest.approx(list(metrics[metric]), rel=1e-6)]
            for metric in metrics.columns
            if metric != "iteration"
        }
        page.keyboard.press("3")
        assert ["lr", "0.01"] in page.locator("#config tr").evaluate_all(
            "all => all.map(r => r.innerText.split('\\t'))"
        )
        page.keyboard.press("2")
        assert page.inner_text("#no-answers") == "these runs have no answers: they are fits"
        page.keyboard.press("1")
        assert page.is_hidden("#time"), "it has no stages"
        page.check("[data-run=dialogue]")
        wait_until(page, "document.querySelectorAll('#now h3').length === 2")
        page.click("[data-view=answers]")
        page.wait_for_selector("#reader .token")
        assert page.locator("[name=of] option").all_inner_texts() == ["dialogue"]
        assert page.locator("#seconds h3").all_inner_texts() == ["dialogue: seconds by stage"]


def test_a_run_that_lost_patience_has_ended_early(page: Page, tmp_path: Path) -> None:
    validated(tmp_path, [{"val-core/a/reward/mean@1": score} for score in (0.5, 0.4, 0.3)], patience=1)
    with live(page, f"file://{tmp_path}") as url:
        visit(page, url)
        assert "ended early" in row_of(page, "validated") and "2 of 9" in row_of(page, "validated")
        assert "0.5" in row_of(page, "validated"), "the best validation"
        assert "2 of 9 iterations closed, ended early" in page.inner_text("#now")
        assert page.locator("#now .stages").count() == 0, "nothing will happen in iteration 2"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("key", "damage", "says", "listed", "scored"),
    [
        ("trajectories/score/iteration=000002/1-0-part-00000.parquet", truncate, "is damaged", 8, 4),
        ("trajectories/generate/iteration=000002/1-0-part-00000.parquet", Path.unlink, "is gone", 4, 4),
        ("manifests/iteration=000002/score.1-0.json", Path.unlink, "is gone", 8, 0),
        ("manifests/iteration=000002/generate.1-0.json", truncate, "is damaged", 0, 0),
    ],
)
def test_what_can_be_read_of_trajectories_is_shown(
    page: Page, damaged: Path, key: str, damage: Callable[[Path], object], says: str, listed: int, scored: int
) -> None:
    damage(damaged / key)
    with live(page, f"file://{damaged.parent}") as url:
        visit(page, f"{url}#run=ppo&view=answers")
        wait_until(page, "document.querySelector('#count').textContent !== ''")
        wait_until(page, f"{LISTED}.length === {listed}")
        told = page.inner_text("#left-out")
        assert told.startswith(LEFT_OUT) and f"{key} {says}" in told
        assert page.inner_text("#count") == f"{listed} of {listed} trajectories of iteration 2"
        lines = page.locator("#list button .dim").all_inner_texts()
        assert sum("score –" not in line for line in lines) == scored
        if listed:
            page.wait_for_selector("#reader .token")
            page.locator("#list button").last.click()
            wait_until(
                page,
                "document.querySelector('#reader h3').textContent.startsWith("
                "document.querySelector('#list button:last-child').dataset.id)",
            )
        page.select_option("[name=iteration]", "all")
        wait_until(page, f"{LISTED}.length === {16 + listed}")
        assert f"{key} {says}" in page.inner_text("#left-out")
        page.select_option("[name=iteration]", "1")
        wait_until(page, f"{LISTED}.length === 8 && document.querySelector('#left-out').textContent === ''")
        assert len(page.evaluate(CURVES)["critic/score/mean: score, mean"][0]) == 4, "no metric is missing"


def test_a_trajectory_that_cannot_be_read_says_why(page: Page, damaged: Path) -> None:
    key = "trajectories/generate/iteration=000002/1-0-part-00000.parquet"
    (damaged / key).unlink()
    with live(page, f"file://{damaged.parent}") as url:
        visit(page, f"{url}#run=ppo&id=it000002-p00000-s00")
        page.wait_for_selector("#reader [role=alert]")
        told = page.inner_text("#reader")
        assert "has no trajectory it000002-p00000-s00" in told and f"{key} is gone" in told


def test_an_iteration_without_its_index_is_missing_from_the_curves(page: Page, damaged: Path) -> None:
    key = "index/000001.1-0.json"
    (damaged / key).unlink()
    with live(page, f"file://{damaged.parent}") as url:
        visit(page, f"{url}#run=ppo")
        assert f"{LEFT_OUT}file://{damaged}/{key} is gone" in page.inner_text("#damages")
        assert page.evaluate(CURVES)["critic/score/mean: score, mean"][0] == [0, 2, 3]
        page.click("[data-view=answers]")
        page.select_option("[name=iteration]", "all")
        wait_until(page, f"{LISTED}.length === 16")
        assert {trajectory[:8] for trajectory in page.evaluate(LISTED)} == {"it000000", "it000002"}
        assert f"{key} is gone" in page.inner_text("#left-out")


def test_a_log_that_cannot_be_read_is_named_and_hides_no_other_run(browser: Browser, damaged: Path) -> None:
    newest = max((damaged / "log").glob("[0-9]*.json"))
    truncate(newest)
    with opened(browser, refused="status of 502") as page, live(page, f"file://{damaged.parent}") as url:
        visit(page, f"{url}#run=ppo&view=answers")
        assert f"{newest.name} is damaged" in page.inner_text("#error")
        page.check("[data-run=whole]")
        wait_until(page, "document.querySelector('#now h3')?.textContent === 'whole'")
        wait_until(page, f"{LISTED}.length === 8")
