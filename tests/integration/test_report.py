"""A report of runs, opened in a real Chromium: what it shows, and that nothing in it is ever more than text."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import Browser, Page

from ratchet.flows import report
from ratchet.flows.shown_metrics import CATALOGUE
from ratchet.flows.ui import documents
from ratchet.infra.runs.run import Run, open_run
from ratchet.rlhf.errors import UserError
from ratchet.tasks import failures
from tests.browser import opened, wait_until
from tests.integration.conftest import HOSTILE
from tests.integration.test_cli import Ratchet

CHARTS = """[...document.querySelectorAll(".chart")].map(place => ({
    title: place.parentElement.querySelector("h3").textContent,
    names: place.plot.series.map(series => series.label),
    y: place.plot.series.map(series => [...series.values]),
    range: place.plot.ys,
}))"""
LISTED = "[...document.querySelectorAll('#list .clip')].map(row => row.textContent)"
TOKENS = """[...document.querySelectorAll("#reader .token")].map(token =>
    [token.textContent, getComputedStyle(token).backgroundColor, token.title])"""
PAINTED = """[...document.querySelectorAll("#curves canvas")].map(canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let blue = 0;
    for (let place = 0; place < pixels.length; place += 4) {
        if (pixels[place] === 0x3b && pixels[place + 1] === 0x76 && pixels[place + 2] === 0xd0) blue += 1;
    }
    return blue;
})"""


def plain(text: str) -> str:
    """Without the end, as trajectories have responses."""
    for token in ("<eos>", "<pad>"):
        text = text.replace(token, "")
    return text


def runs(store: Path, *names: str) -> list[Run]:
    return [open_run(f"file://{store}/{name}") for name in names]


def show(page: Page, path: Path, *reported: Run, view: str = "curves") -> None:
    report.write(reported, path)
    page.goto("about:blank")  # an address that differs after the # alone would not load the file again
    page.goto(f"{path.as_uri()}#view={view}")
    page.wait_for_selector("body[data-ready]")


def chosen(page: Page, frame: pd.DataFrame) -> pd.Series:
    """The row of the trajectory that is shown."""
    return frame.loc[page.inner_text("#reader h3").split()[0]]


def test_runs_are_overlaid(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    both = runs(shown_runs, "ppo", "grpo")
    show(page, tmp_path / "report.html", *both)
    charts = {chart["title"]: dict(zip(chart["names"], chart["y"], strict=True)) for chart in page.evaluate(CHARTS)}
    metrics = dict(zip(("ppo", "grpo"), (run.metrics() for run in both), strict=True))
    reported = {name for frame in metrics.values() for name in frame}
    # here the rollout shares the actor's tensors
    elsewhere = {"timing_s/update_weights", "perf/weight_sync_bytes", "canary/difference"}
    elsewhere |= {
        "perf/mfu/actor",
        "perf/max_memory_allocated_gb",
        "num_turns/mean",
        "actor/kl_loss",
        *failures.METRICS,
    }
    assert {display.name for display in CATALOGUE} - elsewhere <= reported, "stages report all that is shown"
    for key, title in documents.CURVES.items():
        expected = {name: pytest.approx(list(frame[key]), rel=1e-5) for name, frame in metrics.items() if key in frame}
        lines = {name: values[:3] for name, values in charts.get(title, {}).items()}  # then comes the last validation
        assert lines == expected, key
    assert list(charts["critic/score/mean: score, mean"]) == ["ppo", "grpo"]
    assert list(charts["critic/vf_loss: value loss"]) == ["ppo"]
    rates = both[0].validation().groupby("iteration")["score"].mean()
    validated = charts["validation: countdown/reward/mean@1"]["ppo"]
    assert validated == [pytest.approx(rates[at], rel=1e-3) if at in rates else None for at in range(4)]
    assert list(charts["grpo: seconds by stage"])[:3] == ["gen", "reward", "old_log_prob"]
    assert sum(pixels > 20 for pixels in page.evaluate(PAINTED)) >= 8
    keys = [row.locator("td, th").all_inner_texts() for row in page.locator("#config tr").all()]
    assert ["actor.lr", "0.001", "0.002"] in keys
    assert "train.iterations" not in [key for key, *_ in keys]

    page.click("#legend button")
    assert page.evaluate(CHARTS)[0]["names"] == ["grpo"]


def test_a_constant_is_drawn_at_its_scale(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    show(page, tmp_path / "report.html", *runs(shown_runs, "ppo"))
    ranges = {chart["title"]: chart["range"] for chart in page.evaluate(CHARTS)}
    assert ranges["actor/lr: learning rate, actor"] == [pytest.approx(0.0009), pytest.approx(0.0011)]


def test_trajectories_are_filtered_and_sorted(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    (run,) = runs(shown_runs, "ppo")
    show(page, tmp_path / "report.html", run, view="answers")
    frame = run.trajectories()
    assert len(page.evaluate(LISTED)) == len(frame) == 24
    best = frame.sort_values(["score", "iteration", "trajectory_id"], ascending=[False, False, True])

    def listed(expected: pd.DataFrame) -> None:
        texts = [text or "(empty)" for text in expected["response"]]
        wait_until(page, f"expected => JSON.stringify({LISTED}) === JSON.stringify(expected)", texts)

    listed(best)
    page.select_option("[name=iteration]", "1")
    listed(best[best["iteration"] == 1])
    middle = float(np.median(frame["score"])) + 1e-3
    page.fill("[name=low]", str(middle))
    listed(best[(best["iteration"] == 1) & (best["score"] >= middle)])
    page.fill("[name=low]", "")
    page.fill("[name=high]", str(middle))
    page.select_option("[name=iteration]", "")
    page.select_option("[name=order]", "worst")
    worst = frame.sort_values(["score", "iteration", "trajectory_id"], ascending=[True, False, True])
    listed(worst[worst["score"] <= middle])
    page.fill("[name=high]", "")
    wanted = next(text[at : at + 2] for text in frame["response"] for at in range(6) if text[at : at + 2].isupper())
    page.fill("[name=text]", wanted.lower())
    has_text = worst[["response", "prompt", "ground_truth"]].apply(
        lambda row: any(wanted.lower() in text.lower() for text in row), axis=1
    )
    listed(worst[has_text])
    assert page.is_hidden("#sql"), "only a server filters by SQL"


def test_tokens_are_coloured_by_what_is_chosen(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    both = runs(shown_runs, "ppo", "grpo")
    show(page, tmp_path / "report.html", *both, view="answers")
    frame = both[0].trajectories().set_index("trajectory_id")
    third = page.locator("#list button").nth(2)
    third.click()
    page.wait_for_selector("#list button:nth-child(3)[aria-pressed=true]")
    wait_until(
        page,
        "document.querySelector('#reader h3').textContent.startsWith("
        "document.querySelector('#list [aria-pressed=true]').dataset.id)",
    )
    row = chosen(page, frame)
    assert page.text_content("#reader .prompt") == row["prompt"]
    facts = page.inner_text("#reader dl")
    assert row["ground_truth"] in facts and f"{row['score']:.4g}" in facts and row["finish_reason"] in facts
    quantities = {
        "advantage": row["advantages"],
        "log-prob less the reference's": row["old_log_probs"] - row["ref_log_probs"],
        "log-prob less the rollout's": row["old_log_probs"] - row["rollout_log_probs"],
        "entropy": row["entropy"],
    }
    assert page.locator("#quantity option").all_inner_texts() == list(quantities)
    colourings = []
    for name, values in quantities.items():
        page.select_option("#quantity", name)
        tokens = page.evaluate(TOKENS)
        assert len(tokens) == len(row["response_ids"])
        assert plain("".join(text for text, *_ in tokens)) == row["response"]
        assert [float(title.rsplit(" ", 1)[1]) for *_, title in tokens] == pytest.approx(list(values), rel=1e-3)
        for value, (_, colour, _) in zip(values, tokens, strict=True):
            assert colour.startswith(("rgba(", "rgb("))
            if name == "advantage" and abs(value) > 1e-2:
                assert colour.startswith("rgba(50, 120, 220" if value > 0 else "rgba(230, 120, 40"), value
        colourings.append(tuple(colour for _, colour, _ in tokens))
    assert len(set(colourings)) == 4
    page.click("#reader .token:nth-child(2)")
    told = page.inner_text("#reader .told")
    assert told.startswith("token 1 ") and f"entropy {row['entropy'][1]:.4g}" in told

    page.select_option("[name=of]", "grpo")
    wait_until(page, "document.querySelector('#reader h3').textContent.endsWith('of grpo')")
    assert "log-prob less the reference's" not in page.locator("#quantity option").all_inner_texts()


def test_what_a_model_writes_stays_text(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    (run,) = runs(shown_runs, "hostile")
    frame = run.trajectories().set_index("trajectory_id")
    assert frame["response"].str.contains("<script>", regex=False).sum() > 5
    show(page, tmp_path / "report.html", run, view="answers")
    for button in page.locator("#list button").all():
        button.click()
        trajectory_id = button.get_attribute("data-id")
        wait_until(page, "id => document.querySelector('#reader h3').textContent.startsWith(id)", trajectory_id)
        row = frame.loc[trajectory_id]
        assert plain(page.text_content("#reader .response") or "") == row["response"]
        assert page.text_content("#reader .prompt") == row["prompt"]
    assert HOSTILE in (page.text_content("#reader dl") or "")
    page.click("#reader .token")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3


def test_a_run_that_goes_on(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    """Its closed iterations are shown; where there is none, so is what it will be."""
    path = tmp_path / "report.html"
    show(page, path, *runs(shown_runs, "open"))
    summary = page.inner_text("#now")
    assert "2 of 3 iterations closed" in summary and "forked from" in summary and "2:score" in summary
    assert page.evaluate("document.querySelector('.chart').plot.x") == [0, 1, 2]
    assert page.evaluate("document.querySelector('.chart').plot.series[0].values[2]") is None, (
        "only the validation is committed"
    )
    page.keyboard.press("2")
    wait_until(page, "document.querySelectorAll('[name=iteration] option').length > 0")
    assert page.locator("[name=iteration] option").all_inner_texts() == ["all in this report", "1", "0"]
    show(page, path, *runs(shown_runs, "new"), view="answers")
    assert "no iteration is closed yet" in page.inner_text("#count")
    assert page.locator(".token").count() == 0
    assert list(tmp_path.iterdir()) == [path]


def test_damage_is_named_and_left_out(page: Page, shown_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(shown_runs / "ppo", tmp_path / "ppo")
    (tmp_path / "ppo" / "trajectories" / "score" / "iteration=000001" / "1-0-part-00000.parquet").write_bytes(b"short")
    show(page, tmp_path / "report.html", *runs(tmp_path, "ppo"), view="answers")
    damage = page.inner_text("#damages")
    assert damage.startswith("Left out, because it could not be read: ")
    assert "score/iteration=000001/1-0-part-00000.parquet is damaged" in damage
    assert page.locator("[name=iteration] option").all_inner_texts() == ["all in this report", "2", "0"]


def test_a_report_needs_no_model(page: Page, shown_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise UserError("the model is on another machine")

    monkeypatch.setattr(documents, "reading_tokenizer", missing)
    (run,) = runs(shown_runs, "ppo")
    show(page, tmp_path / "report.html", run, view="answers")
    assert page.text_content("#reader .response") in set(run.trajectories()["response"])
    assert page.locator(".token").count() == 0


def test_phones_and_the_dark(browser: Browser, shown_runs: Path, tmp_path: Path) -> None:
    grounds = []
    for width, scheme in ((1280, "light"), (390, "dark")):
        with opened(browser, width=width, scheme=scheme) as page:
            show(page, tmp_path / "report.html", *runs(shown_runs, "ppo", "grpo"))
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            assert (
                page.evaluate("Math.max(...[...document.querySelectorAll('canvas')].map(c => c.clientWidth))") <= width
            )
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 246, 244)", "rgb(19, 20, 23)"]


def test_a_sample_is_bounded_and_holds_best_and_worst() -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "trajectory_id": [f"it{number // 100}-{number}" for number in range(300)],
            "iteration": np.arange(300) // 100,
            "score": generator.normal(size=300),
            "response": ["a response"] * 300,
            "response_ids": [np.zeros(10)] * 300,
        }
    )
    sample = report._sample(frame, report.SAMPLED_TOKENS)
    assert len(sample) == report.SAMPLED_TRAJECTORIES
    pd.testing.assert_frame_equal(
        sample, report._sample(frame.sample(frac=1, random_state=1), report.SAMPLED_TOKENS), check_like=True
    )
    sample = report._sample(frame, 120)
    assert list(sample.groupby("iteration").size()) == [4, 4, 4]
    for edge in ("min", "max"):
        assert list(sample.groupby("iteration")["score"].agg(edge)) == list(
            frame.groupby("iteration")["score"].agg(edge)
        )


def test_tokens_that_are_parts_of_characters() -> None:
    """Every byte is a token here: a character stands with the last of its bytes, and nothing is lost."""

    def decode(ids: tuple[int, ...]) -> str:
        return bytes(ids).decode(errors="replace")

    text = "a é 日本 🙂\n"
    texts = documents.token_texts(tuple(text.encode()), decode)
    assert texts == ["a", " ", "", "é", " ", "", "", "日", "", "", "本", " ", "", "", "", "🙂", "\n"]
    cut = documents.token_texts(tuple("é🙂".encode()[:-1]), decode)
    assert "".join(cut) == "é\ufffd"


def test_mistakes(shown_runs: Path, tmp_path: Path) -> None:
    both = runs(shown_runs, "ppo", "ppo")
    with pytest.raises(UserError, match="is named twice"):
        report.write(both, tmp_path / "report.html")
    with pytest.raises(UserError, match="cannot write there: No such file or directory"):
        report.write(both[:1], tmp_path / "nowhere" / "report.html")


def test_the_command(
    shown_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ratchet = Ratchet(monkeypatch, capfd)
    path = tmp_path / "report.html"
    code, out, err = ratchet("report", "ppo", "grpo", "--store", f"file://{shown_runs}", "-o", path)
    assert code == 0, err
    assert str(path) in out.replace("\n", "")
    assert "<title>ppo, grpo</title>" in path.read_text()
    assert ratchet("report", "nowhere", "--store", f"file://{shown_runs}", "-o", path)[0] == 2
