"""`ratchet ui` in a real Chromium: runs, live curves, trajectories by SQL and clicks, links, keys, phones, S3."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import s3fs
from playwright.sync_api import Browser, Page

from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError
from ratchet.tasks.analysis.plan import fork_run
from tests.browser import live, opened, served, visit, wait_until
from tests.processes import Processes

LISTED = "[...document.querySelectorAll('#list button')].map(button => button.dataset.id)"
OPEN = "document.querySelector('#reader h3')?.textContent"
SCORES = "document.querySelector('.chart').plot.series[0].values"


@pytest.fixture(scope="module")
def url(shown_runs: Path) -> Iterator[str]:
    with served(f"file://{shown_runs}") as address:
        yield address


def wait_for_list(page: Page, expected: pd.DataFrame) -> None:
    ids = list(expected["trajectory_id"])
    wait_until(page, f"ids => JSON.stringify({LISTED}) === JSON.stringify(ids)", ids)


def wait_for_open(page: Page, text: str) -> None:
    wait_until(page, f"text => ({OPEN} ?? '').includes(text)", text)


def best_first(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(["score", "iteration", "trajectory_id"], ascending=[False, False, True])


def find(page: Page, words: str) -> None:
    page.fill("#find", words)


def test_runs_and_their_state(page: Page, url: str) -> None:
    visit(page, url)
    for fold in page.locator(".fold[aria-expanded=false]").all():
        fold.click()
    rows = {row.get_attribute("data-name"): row.inner_text() for row in page.locator("#list-of-runs li").all()}
    assert set(rows) == {"ppo", "grpo", "hostile", "open", "new"}
    assert "finished" in rows["ppo"] and "3 of 3" in rows["ppo"]
    assert "not started" in rows["open"] and "2 of 3" in rows["open"]
    page.click("li[data-name=open] .name")
    wait_until(page, "document.querySelector('#now h3')?.textContent === 'open'")
    stages = page.locator("#now .stages li").all_inner_texts()
    assert [stage.split()[:2] for stage in stages][:3] == [["valid", "✓"], ["gen", "✓"], ["score", "·"]]
    assert "2 of 3 iterations closed, not started" in page.inner_text("#now")


def test_a_run_without_a_closed_iteration_says_so(page: Page, url: str) -> None:
    visit(page, f"{url}#run=new")
    assert page.inner_text("#seconds") == "no metrics of a closed iteration"
    page.keyboard.press("2")
    wait_until(page, "document.querySelector('#count').textContent !== ''")


def test_trajectories_by_sql_and_clicks(page: Page, url: str, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&view=answers")
    newest = best_first(ppo.trajectories([2]))
    wait_for_list(page, newest)
    assert page.inner_text("#count") == "8 of 8 trajectories of iteration 2"
    page.fill("[name=where]", "len(response_ids) < 8 or score > 0.3")
    some = newest[(newest["response_ids"].map(len) < 8) | (newest["score"] > 0.3)]
    assert 0 < len(some) < 8
    wait_for_list(page, some)
    page.select_option("[name=iteration]", "all")
    page.fill("[name=where]", "")
    everything = best_first(ppo.trajectories())
    wait_for_list(page, everything)
    middle = float(everything["score"].median())
    page.fill("[name=low]", str(middle + 1e-6))
    wait_for_list(page, everything[everything["score"] > middle])
    page.fill("[name=low]", "")
    page.fill("[name=text]", "USING THE NUMBERS")
    page.select_option("[name=order]", "worst")
    wait_for_list(page, everything.sort_values(["score", "iteration", "trajectory_id"], ascending=[True, False, True]))


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("scor > 1", "where 'scor > 1': Binder Error: Referenced column \"scor\" not found"),
        ("score >", "where 'score >': Parser Error"),
        ("true) ; drop table x; select (1", "the query has 3 statements"),
        ("exists (select * from read_text('/etc/passwd'))", "file system operations are disabled"),
    ],
)
def test_a_wrong_condition_gives_one_line(page: Page, url: str, condition: str, message: str) -> None:
    visit(page, f"{url}#run=ppo&view=answers")
    page.fill("[name=where]", condition)
    page.wait_for_selector("#filter-error:not([hidden])")
    text = page.inner_text("#filter-error")
    assert message in text and "\n" not in text
    assert page.locator("#list button").count() == 0 and page.inner_text("#count") == "", "nothing of the query before"
    page.fill("[name=where]", "score is not null")
    page.wait_for_selector("#filter-error", state="hidden")


def test_a_group_beside_a_trajectory(page: Page, url: str, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&id=it000001-p00002-s01&iteration=1")
    frame = ppo.trajectories([1]).set_index("trajectory_id")
    wait_for_open(page, "it000001-p00002-s01 of ppo")
    group = frame[frame["prompt_id"] == frame.loc["it000001-p00002-s01", "prompt_id"]]
    buttons = page.locator("#beside .group button")
    assert sorted(buttons.evaluate_all("all => all.map(b => b.dataset.id)")) == sorted(group.index)
    assert f"2 answers to the same prompt, mean score {group['score'].mean():.4g}" in page.inner_text("#beside")
    page.click("#beside [aria-pressed=false]")
    wait_for_open(page, "it000001-p00002-s00 of ppo")
    page.go_back()
    wait_for_open(page, "it000001-p00002-s01 of ppo")


def test_tokens_are_coloured(page: Page, url: str, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&id=it000002-p00000-s00")
    row = ppo.trajectories([2]).set_index("trajectory_id").loc["it000002-p00000-s00"]
    page.wait_for_selector("#reader .token")
    page.select_option("#quantity", "entropy")
    titles = page.locator("#reader .token").evaluate_all("all => all.map(token => token.title)")
    assert [float(title.split()[-1]) for title in titles] == pytest.approx(list(row["entropy"]), rel=1e-3)
    colours = page.locator("#reader .token").evaluate_all("all => all.map(t => getComputedStyle(t).backgroundColor)")
    assert all(colour.startswith(("rgba(138, 99, 201", "rgb(138, 99, 201")) for colour in colours)
    darkest = max(range(len(colours)), key=lambda token: _opacity(colours[token]))
    assert row["entropy"][darkest] == pytest.approx(max(row["entropy"]), rel=1e-3)


def _opacity(colour: str) -> float:
    return float(re.findall(r"[\d.]+", colour)[3])


def test_two_runs_side_by_side(page: Page, url: str, shown_runs: Path, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&view=answers")
    find(page, "grpo")
    page.check("[data-run=grpo]")
    wait_until(page, "document.querySelector('.chart').plot.series.length === 2")
    assert page.evaluate("document.querySelector('.chart').plot.series.map(s => s.label)") == ["ppo", "grpo"]
    assert page.locator("#now h3").all_inner_texts() == ["ppo", "grpo"]
    assert page.locator("#config th").all_inner_texts() == ["key", "ppo", "grpo"]
    page.select_option("#beside-what", "grpo")
    wait_until(page, "document.querySelector('#beside h3')?.textContent.endsWith('of grpo')")
    shown = (page.inner_text("#reader h3") or "").split()[0]
    assert page.inner_text("#beside h3") == f"{shown} of grpo"
    other = open_run(f"file://{shown_runs}/grpo").trajectories().set_index("trajectory_id").loc[shown]
    assert page.locator("#beside .token").count() == len(other["response_ids"])
    assert page.text_content("#beside .prompt") == other["prompt"]


def test_a_link_gives_the_same_view(browser: Browser, page: Page, url: str, ppo: Run) -> None:
    visit(page, url)
    find(page, "grpo")
    page.click("li[data-name=grpo] .name")
    wait_until(page, "document.querySelector('#now h3')?.textContent === 'grpo'")
    find(page, "ppo")
    page.check("[data-run=ppo]")
    wait_until(page, "document.querySelectorAll('#now h3').length === 2")
    page.click("[data-view=answers]")
    page.select_option("[name=of]", "ppo")
    page.select_option("[name=iteration]", "1")
    page.fill("[name=where]", "sample = 1 and prompt <> 'a&b=#'")
    expected = best_first(ppo.trajectories([1]).query("sample == 1"))
    wait_for_list(page, expected)
    page.locator("#list button").nth(2).click()
    wait_for_open(page, expected["trajectory_id"].iloc[2])
    page.select_option("#quantity", "log-prob less the reference's")
    with opened(browser) as second:
        visit(second, page.url)
        wait_for_list(second, expected)
        wait_for_open(second, f"{expected['trajectory_id'].iloc[2]} of ppo")
        for selector in ("#now", "#reader", "#beside", "#config", "#count"):
            assert second.inner_text(selector) == page.inner_text(selector), selector
        colours = "[...document.querySelectorAll('#reader .token')].map(token => [token.title, token.style.background])"
        assert second.evaluate(colours) == page.evaluate(colours)
        assert second.input_value("#quantity") == "log-prob less the reference's"


def test_the_keyboard_is_enough(page: Page, url: str, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&view=answers")
    newest = list(best_first(ppo.trajectories([2]))["trajectory_id"])
    page.focus("[data-view=config]")
    reached = []
    for _ in range(13):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("(element => element.name || element.dataset.id || element.title)(document.activeElement)")
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{reached[-1]} has the focus, and it is not seen"
    filters = ["of", "iteration", "order", "low", "high", "shortest", "longest", "text", "where"]
    assert reached[:9] == filters
    assert [text.partition(" ")[0] for text in reached[9:11]] == ["score", "tokens"], "one bar of each histogram"
    assert reached[11] == newest[0]
    page.focus(f"#list [data-id={newest[0]}]")
    page.keyboard.press("ArrowDown")
    wait_for_open(page, newest[1])
    page.keyboard.press("End")
    wait_for_open(page, newest[-1])
    page.keyboard.press("ArrowUp")
    wait_for_open(page, newest[-2])
    assert page.evaluate("document.activeElement.dataset.id") == newest[-2]
    page.focus("#reader .response")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#reader .told").startswith("token 1 ")
    page.keyboard.press("1")
    page.focus(".chart")
    page.keyboard.press("ArrowLeft")
    assert "it 3" in page.inner_text("#curves .values >> nth=0")
    page.keyboard.press("ArrowLeft")
    assert "it 2" in page.inner_text("#curves .values >> nth=0")


def test_phones_and_the_dark(browser: Browser, url: str) -> None:
    for width in (390, 1280):
        with opened(browser, width=width, height=844, scheme="dark") as page:
            visit(page, f"{url}#run=ppo&run=grpo&id=it000002-p00000-s00")
            page.wait_for_selector("#reader .token")
            wait_until(page, "document.querySelector('#reader').getBoundingClientRect().top < innerHeight / 2")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"


def test_what_a_model_writes_stays_text(page: Page, url: str, shown_runs: Path) -> None:
    visit(page, f"{url}#run=hostile&view=answers")
    page.wait_for_selector("#reader .token")
    frame = open_run(f"file://{shown_runs}/hostile").trajectories([2]).set_index("trajectory_id")
    row = frame.loc[page.inner_text("#reader h3").split()[0]]
    assert "<script>" in row["prompt"]
    assert page.text_content("#reader .prompt") == row["prompt"]
    assert page.locator("#list .clip").all_text_contents() == [
        text[:600] for text in best_first(frame.reset_index())["response"]
    ]
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_curves_grow_while_a_run_trains(
    page: Page, shown_runs: Path, ppo: Run, tmp_path: Path, processes: Processes
) -> None:
    config = ppo.config.with_values({"run.store": f"file://{tmp_path}/runs", "run.name": "live"})
    fork_run(ppo, config, 2, "score")
    with live(page, config.run.store) as url:
        visit(page, url)
        assert len(page.evaluate(SCORES)) == 3
        assert page.evaluate(SCORES)[2] is None
        driver = processes.train(config)
        wait_until(page, f"{SCORES}[2] !== null")
        assert driver.wait() == 0, driver.text
        wait_until(page, "document.querySelector('#now').textContent.includes('3 of 3 iterations closed')")
        page.click("[data-view=answers]")
        wait_until(page, "document.querySelector('#count').textContent.endsWith('of iteration 2')")
        scores = open_run(f"{config.run.store}/live").metrics()["critic/score/mean"]
        assert page.evaluate(SCORES)[:3] == pytest.approx(list(scores), rel=1e-5)


def test_a_run_in_a_bucket(page: Page, shown_runs: Path, s3: str, ppo: Run) -> None:
    store = f"{s3}/shown-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().put(f"{shown_runs}/ppo", f"{store}/ppo", recursive=True)
    with live(page, store) as url:
        visit(page, url)
        assert "3 of 3" in page.inner_text("li[data-name=ppo]")
        page.click("[data-view=answers]")
        page.fill("[name=where]", "score >= 0")
        wait_for_list(page, best_first(ppo.trajectories([2])))
        page.wait_for_selector("#reader .token")


def ask(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.promise
def test_only_the_page_is_answered(ppo_runs: Path) -> None:
    with served(f"file://{ppo_runs}") as url:
        assert ask(f"{url}api/runs")[0] == 200
        assert ask(f"{url}api/runs", Host="rebound.example")[0] == 400
        assert ask(f"{url}api/runs", Sec_Fetch_Site="cross-site")[0] == 403
        assert ask(url, Sec_Fetch_Site="cross-site")[0] == 200, "a link to the page may be anywhere"
        (ppo_runs.parent / "beside").mkdir(exist_ok=True)
        for name in ("../beside", "..", ".", "", "ppo/../ppo", str(ppo_runs / "ppo"), "ppo::file:///etc", "ppo/log"):
            status, text = ask(f"{url}api/run?run={urllib.parse.quote(name)}")
            assert status == 400 and "there is no run" in text, name
        assert ask(f"{url}static/../server.py")[0] == 404
        assert ask(f"{url}static/%2e%2e/server.py")[0] == 404


def test_an_unchanged_run_is_not_sent_again(url: str) -> None:
    with urllib.request.urlopen(f"{url}api/run?run=ppo") as answer:
        tag = answer.headers["ETag"]
    assert ask(f"{url}api/run?run=ppo", If_None_Match=tag) == (304, "")


def test_the_command(processes: Processes, shown_runs: Path) -> None:
    child = processes.cli("ui", "--store", f"file://{shown_runs}", "--port", 0)
    while (found := re.search(r"http://127\.0\.0\.1:\d+/", child.text)) is None:
        assert child.process.is_alive(), child.text
        child.process.join(0.1)
    assert "<title>ratchet</title>" in ask(found[0])[1]
    taken = processes.cli("ui", "--port", found[0].rpartition(":")[2].strip("/"))
    assert taken.wait() == UserError.exit_code
    assert "Address already in use; choose another port with --port" in taken.text
    child.signal(signal.SIGINT)
    assert child.wait() == 0, child.text
