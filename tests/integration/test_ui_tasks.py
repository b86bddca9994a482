"""What people do on the page of a store with 300 runs, in at most four clicks or keys each, in a real Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from ratchet.infra.runs.run import Run, open_run
from tests.browser import opened, served, visit, wait_until
from tests.processes import Processes

RUNS = 300
LISTED = "[...document.querySelectorAll('#list button')].map(button => button.dataset.id)"
OPEN = "(document.querySelector('#reader h3')?.textContent ?? '')"
LUMINANCE = """colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


@pytest.fixture(scope="module")
def store(shown_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 runs: `ppo`, `grpo`, and copies of `ppo`."""
    folder = tmp_path_factory.mktemp("many")
    for name in ("ppo", "grpo", *(f"copy-{number}" for number in range(RUNS - 2))):
        shutil.copytree(
            shown_runs / name.replace("copy", "ppo").partition("-")[0], folder / name, copy_function=os.link
        )
    return folder


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    with served(f"file://{store}") as address:
        yield address


def chart(metric: str) -> str:
    """Returns the expression of the chart of a metric."""
    return f"[...document.querySelectorAll('.chart')].find(p => p.parentElement.textContent.startsWith('{metric}'))"


def click_point(page: Page, metric: str, iteration: int) -> None:
    """Click where the curve of a metric has an iteration."""
    place = chart(metric)
    page.evaluate(f"{place}.scrollIntoView()")
    x, y = page.evaluate(
        f"""() => {{
            const place = {place};
            const {{left, top}} = place.getBoundingClientRect();
            const {{plot}} = place;
            const at = plot.x.indexOf({iteration});
            return [left + plot.left(plot.x[at]), top + plot.top(plot.series[0].values[at])];
        }}"""
    )
    page.mouse.move(x, y)
    page.mouse.click(x, y)


def test_answers_behind_a_point_of_a_curve(page: Page, url: str, ppo: Run) -> None:
    lengths = list(ppo.metrics()["response_length/mean"])
    changed = max(range(1, len(lengths)), key=lambda iteration: abs(lengths[iteration] - lengths[iteration - 1]))
    visit(page, f"{url}#run=ppo")
    click_point(page, "response_length/mean", changed)
    wait_until(page, f"{LISTED}.length > 0")
    read = [page.inner_text("#reader h3")]
    for _ in range(3):
        page.keyboard.press("j")
        wait_until(page, f"before => {OPEN} !== before", read[-1])
        read.append(page.inner_text("#reader h3"))
    assert len(set(read)) == 4 and all(title.startswith(f"it{changed:06d}-") for title in read)
    fifth = page.locator("#list .clip").nth(4)
    place = fifth.bounding_box()
    assert place is not None and place["y"] + place["height"] <= 900, "and the list shows the fifth without scrolling"
    page.go_back()
    for _ in range(3):
        page.go_back()
    wait_until(page, "!document.querySelector('#curves').closest('section').hidden")


def test_one_prompts_answers_in_two_runs_and_over_the_iterations(page: Page, url: str, store: Path, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&run=grpo")
    for key in ("2", "b", "b"):
        page.keyboard.press(key)
        if key == "2":
            page.wait_for_selector("#reader .token")
        wait_until(page, "document.querySelector('#beside-what') !== null")
    wait_until(page, "document.querySelector('#beside h3')?.textContent.endsWith('of grpo')")
    shown = page.inner_text("#reader h3").split()[0]
    other = open_run(f"file://{store}/grpo").trajectories().set_index("trajectory_id").loc[shown]
    assert page.text_content("#beside .prompt") == other["prompt"]

    page.select_option("#beside-what", "its prompt over the iterations")
    frame = ppo.trajectories().set_index("trajectory_id")
    same = frame[frame["prompt"] == frame.loc[shown, "prompt"]]
    wait_until(page, f"document.querySelectorAll('#beside .group button').length === {len(same)}")
    listed = page.locator("#beside .group button").evaluate_all("all => all.map(b => b.dataset.id)")
    assert set(listed) == set(same.index)
    iterations = [int(same.loc[name, "iteration"]) for name in listed]
    assert iterations == sorted(iterations, reverse=True), "the newest first"


def test_the_failed_run_among_300_and_what_to_do(browser: Browser, store: Path, ppo: Run, processes: Processes) -> None:
    changes = {"run.store": f"file://{store}", "run.name": "worse", "actor.lr": 1e30, "train.iterations": 2}
    child = processes.train(ppo.config.with_values(changes))
    assert child.wait() == 1, child.text
    try:
        with served(f"file://{store}") as url, opened(browser) as page:
            visit(page, url)
            assert page.inner_text("#found") == f"{RUNS + 1} runs"
            page.keyboard.press("/")
            page.keyboard.type("failed")
            assert page.inner_text("#found") == f"1 of {RUNS + 1} runs"
            page.keyboard.press("Enter")
            wait_until(page, "document.querySelector('#now h3')?.textContent === 'worse'")
            told = page.inner_text("#now")
            assert "the gradient's norm is nan" in told
            assert f"ratchet resume file://{store}/worse" in told
            page.goto("about:blank")
    finally:
        shutil.rmtree(store / "worse")


def test_runs_are_found_sorted_and_walked_by_keys(page: Page, url: str) -> None:
    visit(page, f"{url}#run=copy-7")
    page.select_option("#sort", "name")
    names = page.locator("#list-of-runs li").evaluate_all("all => all.map(item => item.dataset.name)")
    assert names == [*(f"copy-{number}" for number in range(RUNS - 2)), "grpo", "ppo"]
    page.locator("body").click(position={"x": 600, "y": 5})
    page.keyboard.press("j")
    wait_until(page, "document.querySelector('#now h3')?.textContent === 'copy-8'")
    page.keyboard.press("K")
    wait_until(page, "document.querySelector('#now h3')?.textContent === 'copy-7'")
    page.keyboard.press("/")
    page.keyboard.type("grpo finished")
    assert page.locator("#list-of-runs li").count() == 1, "by name, recipe and state"
    page.keyboard.press("Escape")
    assert page.locator("#list-of-runs li").count() == RUNS


def test_curves_are_drawn_as_asked(page: Page, url: str, ppo: Run) -> None:
    metrics = ppo.metrics()
    plot = "document.querySelector('#curves .chart').plot"
    visit(page, f"{url}#run=ppo")
    page.fill("[name=metric]", "score mean")
    titles = page.locator("#curves h3").all_inner_texts()
    assert titles and all("score" in title and "mean" in title for title in titles)
    page.select_option("[name=x]", "trajectories")
    each = ppo.config.data.prompts_per_iteration * ppo.config.rollout.n
    wait_until(page, f"{plot}.x[1] === {2 * each}")
    page.select_option("[name=x]", "seconds")
    seconds = metrics["perf/time_per_step"].cumsum()
    wait_until(page, f"Math.abs({plot}.x[1] - {seconds[1]}) < 1e-3 * {seconds[1]}")
    page.select_option("[name=smooth]", "0.9")
    raw, drawn = page.evaluate(f"[{plot}.series[0].faint, {plot}.series[0].values]")
    scores = [value for value in raw if value is not None]
    assert scores == pytest.approx(list(metrics["critic/score/mean"]), rel=1e-5)
    weights = [0.9**age for age in range(len(scores))]
    for row, value in enumerate(value for value in drawn if value is not None):
        weighted = sum(weight * score for weight, score in zip(weights, reversed(scores[: row + 1]), strict=False))
        assert value == pytest.approx(weighted / sum(weights[: row + 1]), rel=1e-5)
    page.check("[name=log]")
    assert min(scores) > 0
    wait_until(page, f"{plot}.log === true")
    link = page.url
    page.goto("about:blank")
    visit(page, link)
    assert page.input_value("[name=smooth]") == "0.9" and page.is_checked("[name=log]"), "a link keeps it"


def test_a_bar_of_a_histogram_lists_its_answers(page: Page, url: str, ppo: Run) -> None:
    visit(page, f"{url}#run=ppo&view=answers&iteration=1")
    answers = ppo.trajectories([1])
    scores = answers["score"]
    drawn = page.evaluate("[...document.querySelectorAll('#histograms [aria-label*=scores] button')].map(b => b.title)")
    counts = [int(title.partition(": ")[2].split()[0]) for title in drawn]
    assert counts == list(scores.value_counts().sort_index()), "each of few values has a bar"
    page.click("#histograms [aria-label*=scores] button >> nth=-1")
    best = set(answers["trajectory_id"][scores == scores.max()])
    wait_until(page, f"{LISTED}.length === {len(best)}")
    assert set(page.evaluate(LISTED)) == best
    assert page.input_value("[name=low]") == page.input_value("[name=high]") == str(scores.max())
    page.go_back()
    wait_until(page, f"{LISTED}.length === {len(answers)}")
    page.fill("[name=longest]", str(answers["response_ids"].map(len).min() - 1))
    wait_until(page, f"{LISTED}.length === 0")


def test_what_goes_wrong_is_marked_and_leads_to_its_answers(page: Page, url: str, ppo: Run) -> None:
    """The tiny policy never ends its answers."""
    metrics = ppo.metrics()
    assert (metrics["response_length/clip_ratio"] > 0.25).all()
    plot = f"{chart('response_length/clip')}.plot"
    visit(page, f"{url}#run=ppo")
    assert page.evaluate(f"{plot}.marks.map(({{x}}) => x)") == [0]
    page.click(f"#now button:has-text('iterations 0 to {len(metrics) - 1}: more than 25 % of the responses')")
    wait_until(page, f"{LISTED}[0]?.startsWith('it000000')")


def test_a_validation_is_drawn_with_two_standard_errors(page: Page, url: str, ppo: Run) -> None:
    validation = ppo.validation()
    [first, *_] = sorted(set(validation["iteration"]))
    prompts = validation[validation["iteration"] == first].groupby("prompt_id")["score"].mean()
    plot = f"{chart('validation: countdown/reward/mean')}.plot"
    visit(page, f"{url}#run=ppo")
    low, high = page.evaluate(f"[{plot}.series[0].low[0], {plot}.series[0].high[0]]")
    assert (high - low) / 2 == pytest.approx(2 * prompts.std(ddof=1) / len(prompts) ** 0.5, rel=1e-3)
    assert (high + low) / 2 == pytest.approx(prompts.mean(), rel=1e-3)
    assert not page.locator("#curves h3:has-text('stderr')").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(browser: Browser, url: str, scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 for text (https://www.w3.org/TR/WCAG21/#contrast-minimum)."""
    with opened(browser, scheme=scheme) as page:
        visit(page, f"{url}#run=ppo&view=answers")
        page.wait_for_selector("#reader .token")
        low = page.evaluate(
            f"""() => {{
                const luminance = {LUMINANCE};
                const ground = element => {{
                    for (let at = element; at; at = at.parentElement) {{
                        const colour = getComputedStyle(at).backgroundColor;
                        if (!/^rgba.*, 0\\)$/.test(colour)) return colour;
                    }}
                    return "rgb(255, 255, 255)";
                }};
                const texts = [...document.querySelectorAll("body *")].filter(element => element.checkVisibility()
                    && !element.closest(".response, script, option, select, input")
                    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
                return texts.map(element => {{
                    const colours = [getComputedStyle(element).color, ground(element)];
                    const [a, b] = colours.map(luminance).sort((a, b) => b - a);
                    return [(a + 0.05) / (b + 0.05), element.outerHTML.slice(0, 80)];
                }}).filter(([contrast]) => contrast < 4.5);
            }}"""
        )
        assert not low
